# SPDX-License-Identifier: Apache-2.0
"""`python -m mii_zmq`: serve a model, chat with it, look at what runs, end it. Errors are one line and a code."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mii_zmq import config_reference
from mii_zmq.bench_command import add_bench as _add_bench
from mii_zmq.command_line import add_arguments, from_arguments, parse_arguments
from mii_zmq.config import EngineConfig, LaunchConfig
from mii_zmq.config_reference import read_settings
from mii_zmq.errors import MiiError, ServiceError
from mii_zmq.launcher import add_group_command, resolve_engine
from mii_zmq.logs import is_json, setup_logging
from mii_zmq.mii_settings import default_deployment_name
from mii_zmq.progress import Progress
from mii_zmq.registry import DeploymentNotFoundError, DeploymentRecord, Registry, end_deployment, restart_deployment
from mii_zmq.supervisor import Supervisor
from mii_zmq.telemetry_config import log_level
from mii_zmq.top import add_top as _add_top
from mii_zmq.worker.models import catalogue

PROGRAM = "python -m mii_zmq"
FIRST_PROMPT = "The capital of France is"
FIRST_TOKENS = 32
MODEL_HELP = "local directory or hub id of a Hugging Face checkpoint, or 'demo' (SmolLM2-135M, fetched once)"

DESCRIPTION = f"""Serve language models: ZeroMQ between the processes, HTTP and Python at the doors.

  {PROGRAM} serve demo                  serve a small model and print a curl command that works
  {PROGRAM} serve DIR --replicas 2      two copies of a model behind one address
  {PROGRAM} chat                        talk to what is being served here
  {PROGRAM} bench                       measure what is being served here or elsewhere
  {PROGRAM} models                      which families of models can be served, and how
  {PROGRAM} config                      every setting with its default
  {PROGRAM} status                      what runs on this host
  {PROGRAM} top                         watch its load, redrawn every second
  {PROGRAM} restart NAME                restart its processes, one after the other, while it serves
  {PROGRAM} stop NAME                   end a deployment with all its processes"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parse_arguments(_parser(), argv)
    try:
        code: int = options.run(options)
        return code
    except MiiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_chat(commands)
    _add_bench(commands)
    _add_config(commands)
    models = commands.add_parser(
        "models", help="which models can be served", description="Show the families of models."
    )
    models.add_argument(
        "--write", type=Path, metavar="FILE", help="write the table between the markers of a Markdown file"
    )
    models.set_defaults(run=_models)
    status = commands.add_parser("status", help="what runs on this host", description="Show running deployments.")
    status.add_argument("name", nargs="?", help="deployment or model (default: all)")
    status.add_argument("--json", action="store_true", help="print one JSON object per deployment")
    status.set_defaults(run=_status)
    _add_top(commands)
    restart = commands.add_parser(
        "restart",
        help="restart a deployment's processes while it serves",
        description="Restart worker groups, brokers and gateways, one after the other, each finishing what it has.",
    )
    restart.add_argument("name", help="deployment or model")
    restart.set_defaults(run=_restart)
    stop = commands.add_parser("stop", help="end a deployment", description="End a deployment and all its processes.")
    stop.add_argument("name", help="deployment or model")
    stop.add_argument(
        "--timeout-s", type=float, default=60.0, metavar="S", help="seconds that running requests get (default: 60)"
    )
    stop.set_defaults(run=_stop)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model on this host",
        description="Start broker, worker groups and HTTP gateway here, and keep them running. Ctrl-C finishes the "
        "running requests and ends everything; a second one ends at once.",
    )
    serve.add_argument("model", nargs="?", help=f"{MODEL_HELP} (default: demo)")
    serve.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file of settings; what is given here as well wins over it"
    )
    serve.add_argument("--deployment-name", dest="deployment", metavar="NAME", help="default: MODEL-mii-deployment")
    serve.add_argument(
        "--first-request", action="store_true", help="when ready, send the request that is shown and print the answer"
    )
    add_arguments(serve.add_argument_group("deployment"), LaunchConfig, skip=("deployment", "rest"))
    add_arguments(serve.add_argument_group("engine"), EngineConfig, skip=("model",))
    serve.set_defaults(run=_serve)


def _add_config(commands: Any) -> None:
    config = commands.add_parser(
        "config", help="every setting with its default", description="Show the configuration reference."
    )
    config.add_argument("--write", type=Path, metavar="FILE", help="write it to a Markdown file")
    config.set_defaults(run=_config)


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Chat with a deployment of this host, with an HTTP address, or with a model loaded for the "
        "purpose. Reads standard input line by line when that is no terminal.",
    )
    chat.add_argument(
        "model", nargs="?", help="deployment or model; one that is not being served here is loaded into this process"
    )
    chat.add_argument("--url", help="address of a gateway (or any server with OpenAI's API), as http://HOST:PORT")
    chat.add_argument("--deployment", metavar="NAME", help="a deployment of this host, or the model's name at --url")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="per answer (default: 512)")
    chat.add_argument("--temperature", type=float, metavar="T", help="0: greedy (default: the model door's own)")
    chat.set_defaults(run=_chat)


def _serve(options: argparse.Namespace) -> int:
    # The terminal shows progress and the ready block; of the processes' logs only what is out of the ordinary.
    os.environ.setdefault("MII_ZMQ_LOG_LEVEL", "WARNING")
    launch, engine = _settings_of(options)
    setup_logging("serve", launch.log_format)
    # Standard error is for JSON alone then.
    progress = Progress(sys.stdout if is_json() else None)
    started = time.monotonic()
    try:
        engine = resolve_engine(engine, progress)
        console = _Console(launch, engine, progress, started, options.first_request)
        return Supervisor(launch, engine, console).run()
    finally:
        progress.close()


def _settings_of(options: argparse.Namespace) -> tuple[LaunchConfig, EngineConfig]:
    """From the file that --config names and the command line, which wins."""
    merged = argparse.Namespace(model="demo")
    if options.config is not None:
        vars(merged).update(read_settings(options.config, LaunchConfig, EngineConfig, skip=("rest",)))
    vars(merged).update({name: value for name, value in vars(options).items() if value is not None})
    engine = from_arguments(merged, EngineConfig)
    if not hasattr(merged, "deployment"):
        merged.deployment = default_deployment_name(engine.model)
    return from_arguments(merged, LaunchConfig, rest=True), engine


def _config(options: argparse.Namespace) -> int:
    if options.write is None:
        print(config_reference.markdown(), end="")
    elif not config_reference.write(options.write):
        print(f"{options.write} is up to date")
    return 0


def _models(options: argparse.Namespace) -> int:
    if options.write is None:
        print(catalogue.text_table())
    elif not catalogue.write_table(options.write):
        print(f"{options.write} is up to date")
    return 0


class _Console:
    """What the terminal shows of a deployment: progress, then one block when it is ready."""

    def __init__(
        self, launch: LaunchConfig, engine: EngineConfig, progress: Progress, started: float, sends_first: bool
    ) -> None:
        self._launch = launch
        self._engine = engine
        self._progress = progress
        self._started = started
        self._sends_first = sends_first

    def __call__(self, facts: dict[str, Any]) -> None:
        if "ending" in facts:
            text = f"Ending; running requests get up to {facts['ending']:g} s. Ctrl-C again ends at once."
            print(f"\n{text}", file=sys.stdout if is_json() else sys.stderr, flush=True)
            return
        if not facts.get("ready"):
            self._progress(facts)
            return
        self._progress.close()
        url = f"{facts['rest_url']}/mii/{self._launch.deployment}"
        body = json.dumps({"prompts": [FIRST_PROMPT], "max_new_tokens": FIRST_TOKENS, "do_sample": False})
        curl = f"curl -s {shlex.quote(url)} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        name = self._launch.deployment
        lines = [
            "",
            f"READY after {time.monotonic() - self._started:.1f} s: {self._engine.model}",
            *_bill(facts["workers"]),
            f"  HTTP    {facts['rest_url']}  (POST /mii/{name}, and OpenAI's API below /v1 with model {name!r})",
            f'  Python  mii_zmq.client("{name}")',
            f"  ZeroMQ  {', '.join(facts['client_endpoints'])}",
            f"  more    {add_group_command(self._launch, self._engine, facts['worker_endpoints'])}",
            "Try it:",
            f"  {curl}",
            f"  {PROGRAM} chat {shlex.quote(name)}",
            "End it: Ctrl-C",
        ]
        print("\n".join(lines), flush=True)
        if self._sends_first:
            # In a thread: the supervisor has to go on watching its children.
            threading.Thread(target=_send_first, args=(url, body), name="first-request", daemon=True).start()


def _bill(workers: Sequence[dict[str, Any]]) -> list[str]:
    """One line per worker group: where the memory went and what that holds."""
    lines = []
    for index, facts in enumerate(workers, 1):
        limits, info = facts.get("limits", {}), facts.get("info", {})
        lines.append(
            f"  group {index}: memory: {info.get('memory', 'unknown')}; up to {limits.get('max_sequences')} sequences "
            f"of {limits.get('max_model_len')} tokens at a time, {limits.get('token_budget')} tokens per step"
        )
    return lines


def _send_first(url: str, body: str) -> None:
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer = reply.read().decode().strip()
    except (OSError, ValueError) as error:
        print(f"The first request failed: {error}", flush=True)
        return
    print(f"\nFirst request, answered in {time.monotonic() - started:.2f} s:\n  {answer}", flush=True)


def _chat(options: argparse.Namespace) -> int:
    from mii_zmq.chat import answer_by, answer_over_http, run_chat

    if log_level() == "INFO":
        logging.getLogger().setLevel(logging.WARNING)
    generate: dict[str, Any] = {"max_new_tokens": options.max_new_tokens}
    if options.temperature is not None:
        generate["temperature"] = options.temperature
    if options.url:
        return run_chat(answer_over_http(options.url, options.deployment or options.model, generate), options.system)
    from mii_zmq import api

    generate["skip_special_tokens"] = True
    record = _find_for_chat(options)
    if record is not None:
        print(f"chatting with deployment {record.deployment!r}", file=sys.stderr)
        with api.MIIClient(record) as client:
            return run_chat(answer_by(client, generate), options.system)
    model = options.model or "demo"
    print(f"nothing serves {model!r} here; loading it into this process", file=sys.stderr)
    with api.pipeline(model) as pipe:
        return run_chat(answer_by(pipe, generate), options.system)


def _find_for_chat(options: argparse.Namespace) -> DeploymentRecord | None:
    from mii_zmq.api import find_deployment

    if options.deployment:
        return find_deployment(options.deployment)
    if options.model:
        try:
            return find_deployment(options.model)
        except DeploymentNotFoundError:
            return None
    records = [record for record in Registry().list_all() if record.ready]
    if len(records) > 1:
        names = ", ".join(record.deployment for record in records)
        raise DeploymentNotFoundError(f"several deployments run here; name one of them: {names}")
    return records[0] if records else None


def _status(options: argparse.Namespace) -> int:
    from mii_zmq.api import find_deployment

    records = [find_deployment(options.name)] if options.name else Registry().list_all()
    if not records and not options.json:
        print(f"no deployment runs on this host; start one with `{PROGRAM} serve`")
    for record in records:
        if not record.ready:
            print(json.dumps({"deployment": record.deployment, "ready": False}) if options.json else
                  f"{record.deployment}: still loading {record.model}")  # fmt: skip
            continue
        status = _read_status(record)
        print(json.dumps(status, default=_plain) if options.json else _show_status(record, status))
    return 0


def _read_status(record: DeploymentRecord) -> dict[str, Any]:
    """What is known even when the broker is just being started again."""
    from mii_zmq.mii_client import MIIClient, describe

    try:
        with MIIClient(record) as client:
            return client.status()
    except ServiceError as error:
        return {**describe(record), "broker": {"error": error.message}}


def _show_status(record: DeploymentRecord, status: dict[str, Any]) -> str:
    up_s = max(0, int(time.time() - record.started_at))
    processes = ", ".join(f"{name} {pid}" for name, pid in status["processes"].items())
    lines = [
        f"{record.deployment}: {record.model}",
        f"  up {up_s // 3600} h {up_s % 3600 // 60} min {up_s % 60} s, {record.replicas} worker group(s) started here",
        f"  HTTP    {record.rest_url or 'no gateway'}",
        f"  ZeroMQ  clients {', '.join(record.client_endpoints)}; workers {', '.join(record.worker_endpoints)}",
        f"  process {processes}",
    ]
    if record.log_path:
        lines.append(f"  log     {record.log_path}")
    lines += [f"  {line}".rstrip() for line in _show_broker(status["broker"])]
    return "\n".join(lines)


def _show_broker(status: dict[str, Any]) -> list[str]:
    """For people; `--json` has everything."""
    from mii_zmq.top_frame import Counters, clip, describe_broker

    width = shutil.get_terminal_size((120, 1)).columns - 2
    if "error" in status:
        return [clip(f"broker  {status['error']}", width)]
    return [clip(line.text, width) for line in describe_broker(status, Counters(), width)]


def _plain(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _find(name: str) -> DeploymentRecord:
    registry = Registry()
    record = registry.find(name) or registry.find(default_deployment_name(name))
    if record is None:
        names = ", ".join(other.deployment for other in registry.list_all()) or "none"
        raise DeploymentNotFoundError(f"no deployment {name!r} runs on this host; running: {names}")
    return record


def _restart(options: argparse.Namespace) -> int:
    record = _find(options.name)
    if not record.ready:
        raise ServiceError(f"deployment {record.deployment!r} is still starting")
    for name in restart_deployment(record):
        print(f"restarting {name}", flush=True)
    print(f"restarted {record.deployment}")
    return 0


def _stop(options: argparse.Namespace) -> int:
    record = _find(options.name)
    end_deployment(record, options.timeout_s)
    print(f"ended {record.deployment}")
    return 0
