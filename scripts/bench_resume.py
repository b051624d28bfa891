#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What it costs to be able to go on with interrupted streams, and not to overrun slow readers: CPU time per token.

    scripts/bench_resume.py --streams 1,16,64 --tokens 512 --pairs 11

One fake worker group registers with several brokers: half of them keep what they have sent, the others do not
(`--no-resume`). In pairs of rounds, the first of which takes turns, streams run through both kinds, undisturbed: with a
client that grants credit and keeps what it has got, or with one that does neither. CPU time is user and system time of
all threads of a process, by the kernel's clock of that process. Prints one JSON line per number of streams: for broker,
client, worker group (actor and engine) and the whole path through them the median microseconds per token, on and off,
and the ratios' median and quartiles.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mii_zmq.client import AsyncClient
from mii_zmq.protocol import GenerateBody
from mii_zmq.resume import Delivered, Place
from tests.faults.harness.fleet import Fleet

PLACES = ("on", "off", "off", "on")
"""In the order of the group's list of brokers, so that neither mode is favoured by its place there."""
Cpu = dict[str, float]
"""Microseconds per token by process."""


class Unkept(Delivered):
    """A client's record of a stream that keeps nothing."""

    def take(self, token_offset: int, token_ids: bytes, finish_reason: str | None) -> Place:
        return Place.NEXT


@dataclass
class Way:
    """One broker, and the client that streams through it."""

    mode: str
    broker_pid: int
    group_pids: Sequence[int]
    client: AsyncClient

    async def measure(self, num_streams: int, num_tokens: int) -> Cpu:
        """One round of so many streams at once."""
        before = self._cpu_s()
        await asyncio.gather(*(self._stream(f"stream {index}", num_tokens) for index in range(num_streams)))
        scale = 1e6 / (num_streams * num_tokens)
        spent = {name: scale * (after - before[name]) for name, after in self._cpu_s().items()}
        return {**spent, "path": sum(spent.values())}

    def _cpu_s(self) -> dict[str, float]:
        group = sum(process_cpu_s(pid) for pid in self.group_pids)
        return {"broker": process_cpu_s(self.broker_pid), "client": time.process_time(), "group": group}

    async def _stream(self, prompt: str, num_tokens: int) -> None:
        params = {"max_new_tokens": num_tokens, "do_sample": False, "ignore_eos": True}
        generation = self.client.generate("m", GenerateBody(prompt=prompt, params=params), stream=True)
        if self.mode == "off":
            generation._delivered = Unkept()
        num_read = 0
        async for deltas in generation:
            for delta in deltas:
                num_read += len(delta.token_ids) // 4
        assert num_read == num_tokens, f"{num_read} of {num_tokens} tokens came"


def process_cpu_s(pid: int) -> float:
    """User and system time of a process, all its threads included."""
    # What clock_getcpuclockid(3) returns; /proc counts ticks of 10 ms only.
    return time.clock_gettime((~pid << 3) | 2)


async def measure_pairs(ways: Sequence[Way], num_streams: int, num_tokens: int, num_pairs: int) -> list[dict[str, Cpu]]:
    """Rounds of both modes, side by side in time; the first ones warm up and do not count."""
    by_mode = {mode: [way for way in ways if way.mode == mode] for mode in ("on", "off")}
    for way in ways:
        await way.measure(num_streams, num_tokens)
    pairs = []
    for index in range(num_pairs):
        order = ("on", "off") if index % 2 else ("off", "on")
        turn = index // 2 % len(by_mode["on"])
        pairs.append({mode: await by_mode[mode][turn].measure(num_streams, num_tokens) for mode in order})
    return pairs


def summary(pairs: Sequence[dict[str, Cpu]]) -> dict[str, dict[str, Any]]:
    """By process: medians in microseconds, and the pairs' ratios on / off (median and quartiles)."""
    found = {}
    for process in pairs[0]["on"]:
        ratios = [pair["on"][process] / pair["off"][process] for pair in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        medians = {f"{mode}_us": round(statistics.median(p[mode][process] for p in pairs), 3) for mode in ("on", "off")}
        found[process] = {**medians, "ratio": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}
    return found


async def run(fleet: Fleet, options: argparse.Namespace) -> None:
    ways: list[Way] = []
    try:
        pids = fleet.pids()
        group_pids = [pid for name, pid in pids.items() if name.startswith("group")]
        for mode, name in zip(PLACES, fleet.brokers, strict=True):
            endpoint = fleet.members[name].facts["client_endpoint"]
            client = AsyncClient([endpoint]) if mode == "on" else AsyncClient([endpoint], credit=0)
            ways.append(Way(mode, pids[name], group_pids, client))
            await client.connect(30)
        for num_streams in options.streams:
            pairs = await measure_pairs(ways, num_streams, options.tokens, options.pairs)
            merged = sum([(await way.client.status())["counters"]["merged_rows"] for way in ways])
            facts = {"streams": num_streams, "tokens": options.tokens, "pairs": options.pairs, "merged_rows": merged}
            print(json.dumps({**facts, **summary(pairs)}), flush=True)
    finally:
        for way in ways:
            await way.client.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=lambda text: [int(word) for word in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=512, help="per stream")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the fake engine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mz-", dir="/tmp") as directory, tempfile.TemporaryDirectory() as logs:
        os.environ["MII_ZMQ_RUN_DIR"] = directory
        fleet = Fleet(Path(logs))
        try:
            for index, mode in enumerate(PLACES):
                fleet.add_broker(f"broker {index + 1}", *(["--no-resume"] if mode == "off" else []))
            limits = f"max_sequences={max(options.streams)},num_blocks={64 * max(options.streams)}"
            fleet.add_group("group 1", f"fake:step_ms={options.step_ms:g},{limits}")
            asyncio.run(run(fleet, options))
        finally:
            fleet.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
