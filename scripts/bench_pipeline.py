#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the path around the engine costs: fake engine -> actor -> broker -> gateway -> HTTP client, on this machine.

Starts real processes with a fake engine that takes a chosen time per step, streams completions over HTTP and prints one
JSON line per test:

    latency     one stream: from the engine's send of a token to the client's read of its event (median, p99, ms)
    throughput  many paced streams: events per second in total, one event per token, and each process's CPU share
    routing     CPU time of the broker per forwarded message with 1 and with 16 groups, in alternating rounds

Times of different processes are comparable because CLOCK_MONOTONIC is one clock per machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mii_zmq.client import AsyncClient
from mii_zmq.process import Child, spawn
from mii_zmq.protocol import GenerateBody

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Stack:
    """The running processes."""

    broker: Child
    workers: list[Child]
    gateway: Child
    url: str
    client_endpoint: str

    def cpu_seconds(self) -> dict[str, float]:
        engines = [pid for worker in self.workers for pid in _children(worker.pid)]
        named = [("broker", [self.broker.pid]), ("gateway", [self.gateway.pid])]
        named += [("actors", [worker.pid for worker in self.workers]), ("engines", engines)]
        return {name: sum(_cpu_seconds(pid) for pid in pids) for name, pids in named}


@contextmanager
def running_stack(groups: int, model: str, trace: str | None = None) -> Iterator[Stack]:
    """Broker, `groups` worker groups and a gateway, ended in reverse order."""
    with ExitStack() as stack:
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="mzq"))
        os.chmod(run_dir, 0o700)
        os.environ["MII_ZMQ_RUN_DIR"] = run_dir

        def start(module: str, arguments: list[str], name: str) -> tuple[Child, dict[str, Any]]:
            child = spawn(module, arguments, name)
            stack.callback(child.stop)
            return child, child.wait_ready(60)

        endpoints = ["--client-endpoint", "tcp://127.0.0.1:0", "--worker-endpoint", "tcp://127.0.0.1:0"]
        broker, facts = start("mii_zmq.broker", endpoints, "broker")
        options = ["--model", model, "--deployment", "bench", "--brokers", facts["worker_endpoint"]]
        if trace:
            options += ["--step-trace", trace]
        workers = [start("mii_zmq.worker", [*options, "--group", f"g{i}"], f"group {i}")[0] for i in range(groups)]
        gateway, gateway_facts = start(
            "mii_zmq.gateway", ["--port", "0", "--brokers", facts["client_endpoint"]], "gateway"
        )
        _wait_ready(gateway_facts["url"])
        yield Stack(broker, workers, gateway, gateway_facts["url"], facts["client_endpoint"])


async def stream_events(url: str, num_tokens: int, seed: int) -> list[float]:
    """Stream one completion and return the monotonic time at which each event with text was read."""
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
    body = json.dumps(
        {"model": "bench", "prompt": f"stream {seed}", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    ).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    times: list[float] = []
    tail = b""
    while True:
        data = await reader.read(65536)
        now = time.monotonic()
        if not data:
            raise RuntimeError(f"the stream ended after {len(times)} events: {tail[-300:]!r}")
        tail = tail[-8:] + data
        events = data.count(b"data: {")
        times.extend([now] * events)
        if b"data: [DONE]" in tail:
            writer.close()
            return times


async def latency(stack: Stack, trace: str, num_tokens: int) -> dict[str, Any]:
    """One stream; the engine's send times come from its step trace."""
    await stream_events(stack.url, 50, 0)
    mark = time.monotonic()
    read_times = await stream_events(stack.url, num_tokens, 1)
    sent_lines = _read_json_lines(trace)
    sent = [line["at"] for line in sent_lines if line["event"] == "sent" and line["at"] > mark]
    pairs = list(zip(sent[:num_tokens], read_times, strict=False))
    delays = sorted((read - at) * 1000 for at, read in pairs)
    return {
        "test": "latency",
        "tokens": len(pairs),
        "median_ms": round(statistics.median(delays), 3),
        "p99_ms": round(delays[int(len(delays) * 0.99) - 1], 3),
    }


async def throughput(stack: Stack, streams: int, num_tokens: int, step_ms: float) -> dict[str, Any]:
    """`streams` concurrent streams of `num_tokens` each."""
    await asyncio.gather(*(stream_events(stack.url, 20, seed) for seed in range(streams)))
    before, own, start = stack.cpu_seconds(), time.process_time(), time.monotonic()
    results = await asyncio.gather(*(stream_events(stack.url, num_tokens, seed) for seed in range(streams)))
    elapsed = time.monotonic() - start
    events = sum(len(times) for times in results)
    first = max(times[0] for times in results)
    last = min(times[-1] for times in results)
    steady = sum(sum(first <= at <= last for at in times) for times in results)
    after = stack.cpu_seconds()
    return {
        "test": "throughput",
        "streams": streams,
        "step_ms": step_ms,
        "events": events,
        "events_per_token": round(events / (streams * num_tokens), 3),
        "events_per_s": round(events / elapsed),
        "events_per_s_while_all_stream": round(steady / (last - first)),
        "cpu_share": {name: round((after[name] - before[name]) / elapsed, 2) for name in after}
        | {"load_client": round((time.process_time() - own) / elapsed, 2)},
    }


async def routing(
    stacks: dict[int, Stack], rounds: int = 8, requests: int = 48, num_tokens: int = 32
) -> dict[str, Any]:
    """CPU time of the broker per forwarded message, with few and with many groups, in alternating rounds.

    One stream at a time, so that every message carries one row whatever the number of groups: GENERATE, ACCEPTED,
    TOKENS per token, FINAL. What the broker uses while idle (heartbeats) is measured first and taken off.
    """
    body = GenerateBody(prompt="x", params={"max_new_tokens": num_tokens, "ignore_eos": True})
    clients = {groups: AsyncClient([stack.client_endpoint]) for groups, stack in stacks.items()}
    messages = requests * (num_tokens + 3)

    async def run(groups: int, count: int) -> None:
        for _ in range(count):
            await clients[groups].generate("bench", body, stream=True).result()

    idle: dict[int, float] = {}
    costs: dict[int, list[float]] = {groups: [] for groups in stacks}
    for groups, stack in stacks.items():
        await clients[groups].connect()
        await run(groups, 16)
        before = _cpu_nanoseconds(stack.broker.pid)
        await asyncio.sleep(3)
        idle[groups] = (_cpu_nanoseconds(stack.broker.pid) - before) / 3
    for _ in range(rounds):
        for groups, stack in stacks.items():
            before, start = _cpu_nanoseconds(stack.broker.pid), time.monotonic()
            await run(groups, requests)
            used = _cpu_nanoseconds(stack.broker.pid) - before - idle[groups] * (time.monotonic() - start)
            costs[groups].append(used / messages / 1000)
    for client in clients.values():
        await client.close()
    medians = {groups: round(statistics.median(found), 2) for groups, found in costs.items()}
    few, many = min(medians), max(medians)
    return {
        "test": "routing",
        "broker_us_per_message": medians,
        "ratio": round(medians[many] / medians[few], 3),
        "idle_us_per_s": {groups: round(value / 1000) for groups, value in idle.items()},
    }


def _wait_ready(url: str) -> None:
    for _ in range(500):
        try:
            urllib.request.urlopen(url.rstrip("/") + "/health/ready").close()
            return
        except urllib.error.HTTPError as error:
            error.close()
            time.sleep(0.02)
    raise SystemExit("the gateway did not become ready within 10 s")


def _read_json_lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _cpu_nanoseconds(pid: int) -> int:
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=["latency", "throughput", "routing"])
    parser.add_argument("--step-ms", type=float, default=3.5, help="time per step of the fake engine (throughput)")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    for _ in range(options.repeat):
        if "latency" in options.tests:
            with tempfile.NamedTemporaryFile() as trace, running_stack(1, "fake:step_ms=10", trace.name) as stack:
                print(json.dumps(uvloop.run(latency(stack, trace.name, 400))), flush=True)
        if "throughput" in options.tests:
            with running_stack(1, f"fake:step_ms={options.step_ms}") as stack:
                result = uvloop.run(throughput(stack, options.streams, options.tokens, options.step_ms))
                print(json.dumps(result), flush=True)
        if "routing" in options.tests:
            with running_stack(1, "fake:step_ms=1") as few, running_stack(16, "fake:step_ms=1") as many:
                print(json.dumps(uvloop.run(routing({1: few, 16: many}))), flush=True)


if __name__ == "__main__":
    main()
