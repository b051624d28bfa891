# SPDX-License-Identifier: Apache-2.0
"""Starts deployments: `start_detached` for `serve()`, `python -m mii_zmq.launcher` for the process it leaves behind.

The detached supervisor is in a session of its own, writes its log to a file, and outlives the process that asked for
it; until it is ready it ends when that process goes away. The command line runs the same supervisor in the foreground.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mii_zmq.command_line import add_arguments, from_arguments, to_arguments
from mii_zmq.config import EngineConfig, LaunchConfig, WorkerConfig, cache_dir
from mii_zmq.errors import MiiError, StartupError, from_wire
from mii_zmq.logs import setup_logging
from mii_zmq.process import ChildLink
from mii_zmq.registry import DeploymentRecord, Registry
from mii_zmq.supervisor import Supervisor

log = logging.getLogger(__name__)


def start_detached(
    launch: LaunchConfig, engine: EngineConfig, report: Callable[[dict[str, Any]], None]
) -> DeploymentRecord:
    """Start a supervisor that outlives this process, and wait until the deployment is ready.

    Raises:
        MiiError: why it could not start; nothing of it is left. KeyboardInterrupt also ends it.
    """
    path = _log_path(launch.deployment)
    announce_read, announce_write = os.pipe()
    command = [sys.executable, "-m", "mii_zmq.launcher", *to_arguments(launch), *to_arguments(engine)]
    command += [f"--log-path={path}", f"--announce-fd={announce_write}"]
    try:
        with path.open("wb") as log_file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(announce_write,),
                start_new_session=True,
                env=_child_environment(),
            )
    except BaseException:
        os.close(announce_read)
        raise
    finally:
        os.close(announce_write)
    try:
        # Our end of the pipe is what keeps a supervisor alive that is not ready yet.
        with open(announce_read, encoding="utf-8") as lines:
            _follow(lines, report, path)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        process.wait()
        raise
    # Collects the supervisor at its end, whoever ends it, so that no zombie stays while this process runs.
    threading.Thread(target=process.wait, name="deployment-reaper", daemon=True).start()
    record = Registry().find(launch.deployment)
    if record is None:
        raise StartupError(f"deployment {launch.deployment!r} ended right after its start; see {path}")
    return record


def _follow(lines: Any, report: Callable[[dict[str, Any]], None], log_path: Path) -> None:
    """Pass on progress until the deployment is ready; raises the error that the supervisor announces."""
    for line in lines:
        facts = json.loads(line)
        if "error" in facts:
            raise from_wire(facts["error"])
        report(facts)
        if facts.get("ready"):
            return
    raise StartupError(f"the supervisor ended while starting; see {log_path}")


def _child_environment() -> dict[str, str]:
    """Ours, plus the place that this package was imported from, which need not be on the child's path."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _log_path(deployment: str) -> Path:
    """One file per deployment name, begun anew at every start; it stays behind for the post-mortem."""
    directory = cache_dir() / "logs"
    directory.mkdir(mode=0o700, exist_ok=True)
    digest = hashlib.sha256(deployment.encode()).hexdigest()[:8]
    return directory / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', deployment)[:80]}-{digest}.log"


def resolve_engine(engine: EngineConfig, report: Callable[[dict[str, Any]], None]) -> EngineConfig:
    """`engine` with the model's directory in place of its name; fetches what has to be fetched, once for all groups.

    Raises:
        CheckpointError: there is no such model, or it cannot be fetched.
    """
    # Imported here: it brings in numpy, which the supervisor of a local model can do without.
    from mii_zmq.worker.models.demo_model import resolve_model

    return replace(engine, model=resolve_model(engine.model, lambda text: report({"progress": text, "name": "model"})))


def add_group_command(launch: LaunchConfig, engine: EngineConfig, worker_endpoints: Sequence[str]) -> str:
    """What to type to add a worker group to a running deployment."""
    worker = WorkerConfig(deployment=launch.deployment, brokers=tuple(worker_endpoints), **launch.telemetry)
    return shlex.join(["python", "-m", "mii_zmq.worker", *to_arguments(engine), *to_arguments(worker)])


def main(argv: Sequence[str] | None = None) -> int:
    """The detached supervisor: announces progress, readiness or one error line, and logs to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m mii_zmq.launcher", description="The supervisor of a detached deployment; serve() starts it."
    )
    add_arguments(parser, LaunchConfig)
    add_arguments(parser, EngineConfig)
    parser.add_argument("--announce-fd", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--log-path", default=None, help=argparse.SUPPRESS)
    namespace = parser.parse_args(argv)
    link = ChildLink(namespace.announce_fd)

    def report(facts: dict[str, Any]) -> None:
        link.announce(**facts)

    try:
        setup_logging("launcher", getattr(namespace, "log_format", None))
        launch = from_arguments(namespace, LaunchConfig)
        engine = resolve_engine(from_arguments(namespace, EngineConfig), report)
        supervisor = Supervisor(
            launch,
            engine,
            report,
            starter_fd=namespace.announce_fd,
            log_path=namespace.log_path,
        )
        return supervisor.run()
    except MiiError as error:
        log.error("%s", error)
        link.announce(error=error.to_wire())
        return 1


if __name__ == "__main__":
    sys.exit(main())
