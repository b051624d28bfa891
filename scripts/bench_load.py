#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""How long weights take to load, against reading the same files once, both from page cache.

Writes a checkpoint of a llama shape (bf16, random bytes, several shards) into a temporary directory, then measures in
turns, each in a process of its own: plain reading of all files into one buffer that is used again and again, and
`load_weights` in the checkpoint's own dtype on the CPU. Prints times, their ratio, and the loading process's peak of
memory of its own (RssAnon, the weights are part of it) and of mapped file pages (RssFile, which belong to the page
cache). The second load of a process counts: in a virtual machine the host may have to find the memory behind the first
one, which can take longer than everything else; that time is printed too.

    python scripts/bench_load.py [--gb 4] [--rounds 3] [--threads N] [--keep DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from mii_zmq.worker.models.checkpoint_files import find_safetensors
from mii_zmq.worker.models.claim_table import ClaimTable
from mii_zmq.worker.models.random_weights import SHAPES
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.spec import ModelConfig, Role
from mii_zmq.worker.models.weights import load_weights
from mii_zmq.worker.parallel import RankInfo

DTYPE = torch.bfloat16
SHARD_BYTES = 2**30
BUFFER_BYTES = 16 * 2**20
GB = 10**9


def llama_config(num_bytes: int) -> ModelConfig:
    """The 8B shape's layers at half width, as many as fill `num_bytes`."""
    config = replace(SHAPES["8B"], vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_heads=16)
    hidden = config.hidden_size
    heads = config.num_heads + 2 * config.num_kv_heads + config.num_heads
    layer = (heads * config.head_dim * hidden + 3 * config.intermediate_size * hidden) * DTYPE.itemsize
    num_layers = max(1, (num_bytes - 2 * config.vocab_size * hidden * DTYPE.itemsize) // layer)
    rope = config.ropes[0]
    return replace(config, num_layers=num_layers, windows=(None,) * num_layers, ropes=(rope,) * num_layers)


def write_checkpoint(config: ModelConfig, directory: Path) -> int:
    """Shards of random bytes with an index; returns their size."""
    table = ClaimTable(
        config, Shard.of(config, RankInfo()), DTYPE, lambda shape, kind: torch.empty(shape, dtype=kind, device="meta")
    )
    head = f"{config.spec.names[Role.HEAD]}.weight"
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())):05d}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for key, claim in table.claims.items():
        name = key if key == head else f"{config.spec.prefixes[0]}{key}"
        shard[name] = torch.randint(-9999, 9999, claim.shape, dtype=torch.int16).view(DTYPE)
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(path.stat().st_size for path in find_safetensors(directory))


def read_plainly(directory: Path) -> float:
    buffer = memoryview(bytearray(BUFFER_BYTES))
    begin = time.perf_counter()
    for path in find_safetensors(directory):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


class MemoryPeaks:
    """Watches this process's resident memory from a thread."""

    def __init__(self) -> None:
        self.before = self._now()
        self.peaks = dict(self.before)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> MemoryPeaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.01):
            for name, value in self._now().items():
                self.peaks[name] = max(self.peaks[name], value)

    @staticmethod
    def _now() -> dict[str, int]:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        pairs = dict(line.split(":", 1) for line in lines)
        return {name: int(pairs[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "VmHWM")}


@dataclass(frozen=True)
class Load:
    """One call of `load_weights`, whose result is gone again."""

    seconds: float
    cpu: float
    num_bytes: int


def load(directory: Path, config: ModelConfig) -> Load:
    begin, busy = time.perf_counter(), time.process_time()
    weights = load_weights(directory, config, DTYPE, torch.device("cpu"))
    return Load(time.perf_counter() - begin, time.process_time() - busy, weights.num_bytes)


def measure(what: str, directory: Path, gb: float, threads: int) -> dict[str, float]:
    """One measurement in this process."""
    if what == "read":
        return {"seconds": read_plainly(directory)}
    torch.set_num_threads(threads)
    config = llama_config(int(gb * GB))
    torch.ones(1).bfloat16().sum()  # Thread pools and the like start here.
    with MemoryPeaks() as memory:
        first = load(directory, config)
    second = load(directory, config)
    return {
        "seconds": second.seconds,
        "first": first.seconds,
        "cpu": second.cpu,
        "weights": second.num_bytes,
        "beyond_weights": memory.peaks["RssAnon"] - memory.before["RssAnon"] - second.num_bytes,
        "mapped": memory.peaks["RssFile"] - memory.before["RssFile"],
        "hwm": memory.peaks["VmHWM"],
    }


def in_a_process(what: str, directory: Path, options: argparse.Namespace) -> dict[str, float]:
    command = [
        sys.executable, __file__, "--measure", what, "--keep", str(directory), "--gb", str(options.gb),
        "--threads", str(options.threads),
    ]  # fmt: skip
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint in GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--keep", type=Path, help="use, or make and keep, the checkpoint in this directory")
    parser.add_argument("--measure", choices=("read", "load"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.keep, options.gb, options.threads)))
        return 0
    directory = options.keep or Path(tempfile.mkdtemp(prefix="bench-load-"))
    try:
        if not any(directory.glob("*.safetensors")):
            directory.mkdir(parents=True, exist_ok=True)
            size = write_checkpoint(llama_config(int(options.gb * GB)), directory)
            print(f"wrote {size / GB:.2f} GB to {directory}")
        run(directory, options)
    finally:
        if options.keep is None:
            shutil.rmtree(directory)
    return 0


def run(directory: Path, options: argparse.Namespace) -> None:
    size = sum(path.stat().st_size for path in find_safetensors(directory))
    read_plainly(directory)
    reads, loads = [], []
    for index in range(options.rounds):
        reads.append(in_a_process("read", directory, options)["seconds"])
        found = in_a_process("load", directory, options)
        loads.append(found["seconds"])
        own, mapped, peak = found["beyond_weights"] / 1e6, found["mapped"] / GB, found["hwm"] / GB
        print(
            f"round {index + 1}: read {reads[-1]:.2f} s ({size / reads[-1] / GB:.1f} GB/s), load {loads[-1]:.2f} s "
            f"({found['cpu']:.2f} s of CPU; the first time {found['first']:.2f} s), ratio "
            f"{loads[-1] / reads[-1]:.2f}; beyond the weights' {found['weights'] / GB:.2f} GB: {own:.0f} MB own, "
            f"{mapped:.2f} GB mapped pages of files; VmHWM {peak:.2f} GB"
        )
    ratio = statistics.median(loads) / statistics.median(reads)
    print(f"median: read {statistics.median(reads):.2f} s, load {statistics.median(loads):.2f} s, ratio {ratio:.2f}")


if __name__ == "__main__":
    sys.exit(main())
