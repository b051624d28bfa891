# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes that all run one function, with the collectives that a group of them has: NCCL and peer memory on
GPUs, gloo without. Rank 0 is this process.

The function must be importable, as must its arguments. A rank that fails takes all others with it, this process too:
they may be waiting for it on the device, where nothing reaches them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, NoReturn, TypeVar

import torch

from mii_zmq.config import EngineConfig
from mii_zmq.worker.collectives import GroupCollectives, Invitation, invite, open_collectives
from mii_zmq.worker.parallel import RankInfo

Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """One rank's."""

    rank: RankInfo
    device: torch.device
    collectives: GroupCollectives

    @property
    def is_first(self) -> bool:
        return self.rank.rank == 0

    def all_hold(self, condition: bool) -> bool:
        """Whether it holds on every rank."""
        return bool(self.collectives.agree(int(condition)))

    def is_same(self, value: int) -> bool:
        """Whether all ranks have this value."""
        return self.collectives.agree(value) == -self.collectives.agree(-value)


def run_on_ranks(
    work: Callable[..., Result], *arguments: Any, world_size: int = 2, on_gpu: bool | None = None
) -> Result:
    """work(place, *arguments) on all ranks at once; returns rank 0's result. Once per process.

    `on_gpu`: None: where there are enough of them.
    """
    is_gpu = torch.cuda.device_count() >= world_size if on_gpu is None else on_gpu
    invitation, listener = invite("nccl" if is_gpu else "gloo")
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_run_rank, args=(work, arguments, invitation, RankInfo(rank, world_size)), daemon=True)
        for rank in range(1, world_size)
    ]
    for process in ranks:
        process.start()
    watch = threading.Thread(target=_watch, args=(ranks,), daemon=True)
    watch.start()
    try:
        place = _open(invitation, RankInfo(0, world_size), listener)
        result = work(place, *arguments)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        _leave(1, ranks)
    # The others leave the last exchange before its memory goes.
    watch.join()
    place.collectives.close()
    return result


def _open(invitation: Invitation, rank: RankInfo, listener: Any = None) -> Place:
    is_gpu = invitation.backend == "nccl"
    device = torch.device("cuda", rank.rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    config = EngineConfig(model="ranks", tensor_parallel=rank.world_size, device="cuda" if is_gpu else "cpu")
    return Place(rank, device, open_collectives(invitation, rank, config, memory_fd=-1, listener=listener))


def _run_rank(work: Callable[..., Any], arguments: tuple[Any, ...], invitation: Invitation, rank: RankInfo) -> None:
    code = 1
    try:
        work(_open(invitation, rank), *arguments)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        code = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    _leave(code)


def _leave(code: int, ranks: Sequence[Any] = ()) -> NoReturn:
    """Not through the interpreter's own end, which may wait for peers."""
    for process in ranks:
        process.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _watch(ranks: list[Any]) -> None:
    """Until all have ended well."""
    left = {process.sentinel: process for process in ranks}
    while left:
        for sentinel in wait(list(left)):
            process = left.pop(sentinel)
            process.join()
            if process.exitcode:
                print(f"a rank ended with exit code {process.exitcode}", file=sys.stderr, flush=True)
                _leave(1, list(left.values()))
