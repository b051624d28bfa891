#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills ranks of a group under load: through launcher, broker, gateway and worker group, with clients of every kind.

    python scripts/ranks_kill.py [--kills 3]

A random checkpoint is written (8 layers of the 8B shape) and served on two ranks; under a steady load of streams and
whole answers rank 1, then rank 0, in turns, gets SIGKILL. Exit code 0 says: the group's processes were gone within 2 s
each time, every request ended exactly once, all errors may be retried, and the group was ready again by itself within
its first start-up time. One JSON line per kill, one at the end. `--dry-run` does it with the fake engine, anywhere; its
times are shown and do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mii_zmq as mii
from mii_zmq.api import find_deployment
from mii_zmq.client import BackgroundLoop
from mii_zmq.errors import MiiError
from tests.faults.harness.fleet import ask_status, is_running, wait_until
from tests.faults.harness.history import History, Kind
from tests.faults.harness.load import WORDS, Case, Load

DEPLOYMENT = "ranks"
FAKE = "fake:step_ms=5"
CLIENTS = {"zmq_stream": 16, "zmq_whole": 8, "http_stream": 8}
END_S = 2.0
RESTART_DELAY_S = 1.5
"""Before a dead group is started again, and until its death and readiness are noticed."""
PATIENCE_S = 240.0
POLL_S = 0.005
UNDISTURBED_S = 2.0
"""Of load behind each recovery."""
GATEWAY_CODES = frozenset({"unavailable"})
"""The gateway's name for a status that says: try again."""


def retryable_codes(cls: type[MiiError] = MiiError) -> set[str]:
    found = {cls.code} if cls.retryable else set()
    return found.union(*(retryable_codes(child) for child in cls.__subclasses__()))


def make_case(rng: random.Random, max_tokens: int) -> Case:
    """Whose answer nobody knows: only its ends are counted."""
    prompt = f"{' '.join(rng.choices(WORDS, k=rng.randint(2, 60)))} {rng.getrandbits(48):x}"
    params = {"max_new_tokens": rng.randint(20, max_tokens), "do_sample": False, "ignore_eos": True}
    return Case(prompt, params, None)


def write_checkpoint(directory: Path) -> str:
    """8 layers of the 8B shape, with a small byte-level tokenizer."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.auto import AutoModelForCausalLM

    from tests import tiny_tokenizers

    tokenizer = tiny_tokenizers.byte_level()
    vocab_size = -(-tokenizer.vocab_size // 128) * 128
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=4096, intermediate_size=14336, num_hidden_layers=8,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_ids[0],
    )  # fmt: skip
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer._backend.save(str(directory / "tokenizer.json"))
    settings = {**tiny_tokenizers.SETTINGS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    del model
    torch.cuda.empty_cache()
    return str(directory)


class Deployment:
    """A served model, and what its broker says of its one group."""

    def __init__(self, model: str, **settings: Any) -> None:
        begin = time.monotonic()
        settings |= {"tensor_parallel": 2, "enable_restful_api": True, "restful_api_port": 0}
        self.client = mii.serve(model, deployment_name=DEPLOYMENT, **settings)
        self.start_s = time.monotonic() - begin
        record = find_deployment(DEPLOYMENT)
        self.endpoints, self.urls = record.client_endpoints, [str(record.rest_url).rstrip("/")]

    def group(self) -> dict[str, Any] | None:
        """Pids and load of the group that is ready; None while there is none."""
        try:
            groups = ask_status(self.endpoints[0])["deployments"][DEPLOYMENT]["groups"]
        except (MiiError, KeyError):
            return None
        ready = [group for group in groups if group["state"] == "ready"]
        return {**ready[0]["info"], "load": ready[0]["load"]} if ready else None

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def is_so() -> bool:
            group = self.group()
            if group is not None and condition(group):
                found.append(group)
            return bool(found)

        wait_until(is_so, what, PATIENCE_S)
        return found[0]


def kill(deployment: Deployment, victim: int) -> dict[str, Any]:
    """Kill that rank under load; what came of it."""
    before = deployment.wait_for(lambda group: group["load"].get("running", 0) > 0, "requests run")
    pids = [before["engine_pid"], *before["rank_pids"]]
    os.kill(pids[victim], signal.SIGKILL)
    begin = time.monotonic()
    wait_until(lambda: not any(map(is_running, pids)), "the group has ended", PATIENCE_S, POLL_S)
    end_s = time.monotonic() - begin
    after = deployment.wait_for(lambda group: group["engine_pid"] != before["engine_pid"], "the group is back")
    back_s = time.monotonic() - begin
    deployment.wait_for(lambda group: group["load"].get("running", 0) > 0, "requests run again")
    running_s = time.monotonic() - begin
    return {
        "test": "kill", "rank": victim, "running": before["load"]["running"], "end_s": round(end_s, 3),
        "ready_s": round(back_s, 2), "running_again_s": round(running_s, 2),
        "is_new": not set(pids) & {after["engine_pid"], *after["rank_pids"]},
    }  # fmt: skip


def strike_under_load(deployment: Deployment, args: argparse.Namespace) -> tuple[list[dict[str, Any]], History]:
    """Every kill in turn while the clients go on."""
    history = History()
    load = Load(
        history, DEPLOYMENT, deployment.urls, deployment.endpoints, seed=1, max_tokens=300, case=make_case, think_s=0.05
    )
    kills: list[dict[str, Any]] = []
    loop, threads = BackgroundLoop("load"), ThreadPoolExecutor(1)
    driving = threads.submit(loop.run, load.run(CLIENTS))
    try:
        for index in range(args.kills):
            kills.append(kill(deployment, (index + 1) % 2))
            print(json.dumps(kills[-1]), flush=True)
            time.sleep(UNDISTURBED_S)
        load.is_stopping = True
        driving.result(PATIENCE_S)
    finally:
        load.is_stopping = True
        loop.close()
        threads.shutdown(wait=False)
    return kills, history


def judge(kills: list[dict[str, Any]], history: History, start_s: float, counts_times: bool) -> dict[str, Any]:
    """The last line."""
    verdict = history.check()
    ends = [record.events[-1] for record in history.records() if record.events]
    allowed = retryable_codes() | GATEWAY_CODES
    final = {str(event.facts.get("code")) for event in ends if event.kind in (Kind.FAIL, Kind.BROKEN)} - allowed
    in_time = all(k["end_s"] <= END_S and k["ready_s"] <= start_s + RESTART_DELAY_S for k in kills)
    is_right = not verdict.violations and not history.unfinished() and not final and all(k["is_new"] for k in kills)
    return {
        "test": "kills", "start_s": round(start_s, 2), "kills": len(kills),
        "end_s": max(k["end_s"] for k in kills), "ready_s": max(k["ready_s"] for k in kills),
        **verdict.as_dict(), "unfinished": len(history.unfinished()), "not_retryable": sorted(final),
        "examples": verdict.violations[:5], "is_in_time": in_time,
        "passed": is_right and (in_time or not counts_times),
    }  # fmt: skip


@contextlib.contextmanager
def served(args: argparse.Namespace) -> Iterator[Deployment]:
    # Socket names must be short.
    with (
        tempfile.TemporaryDirectory(prefix="mz-", dir="/tmp") as run_directory,
        tempfile.TemporaryDirectory() as scratch,
    ):
        os.environ["MII_ZMQ_RUN_DIR"] = run_directory
        model = FAKE if args.dry_run else write_checkpoint(Path(scratch) / "llama")
        settings = {} if args.dry_run else {"kv_cache_gb": 8.0, "max_sequences": 64}
        deployment = Deployment(model, **settings)
        print(json.dumps({"test": "start", "seconds": round(deployment.start_s, 2)}), flush=True)
        try:
            yield deployment
        finally:
            deployment.client.terminate_server()


def give_up(number: int, frame: object) -> None:
    raise SystemExit("the kills took too long; the deployment is ended")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--limit-s", type=int, default=220, help="end after this time; the deployment ends with it")
    parser.add_argument("--dry-run", action="store_true", help="with the fake engine")
    args = parser.parse_args()
    # Whoever kills this process instead leaves the deployment running, which is one of its own.
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(args.limit_s)
    with served(args) as deployment:
        kills, history = strike_under_load(deployment, args)
    result = judge(kills, history, deployment.start_s, counts_times=not args.dry_run)
    print(json.dumps(result), flush=True)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
