# SPDX-License-Identifier: Apache-2.0
"""Exchanges between ranks, which are threads here; the ones over shared memory and over gloo are held to the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from mii_zmq.config import EngineConfig
from mii_zmq.errors import InternalError
from mii_zmq.worker import memory_collectives
from mii_zmq.worker.collectives import GroupCollectives, choose_backend, invite, open_collectives
from mii_zmq.worker.memory_collectives import MemoryCollectives, make_memory
from mii_zmq.worker.parallel import RankInfo

T = TypeVar("T")
CONFIG = EngineConfig(model="m", device="cpu")
BACKENDS = ["gloo", *(["memory"] if memory_collectives.is_usable() else [])]
needs_memory = pytest.mark.skipif(not memory_collectives.is_usable(), reason="ranks share memory on x86-64 only")


class Ranks:
    """Runs a function on every rank at the same time."""

    def __init__(self, backend: Any, size: int) -> None:
        self.size = size
        self._threads = ThreadPoolExecutor(size)
        invitation, listener = invite(backend)
        fd = make_memory(size)

        def open_rank(rank: int) -> GroupCollectives:
            return open_collectives(
                invitation, RankInfo(rank, size), CONFIG, memory_fd=fd, listener=None if rank else listener
            )

        self.collectives = list(self._threads.map(open_rank, range(size)))
        os.close(fd)

    def run(self, function: Callable[[GroupCollectives, int], T]) -> list[T]:
        return list(self._threads.map(function, self.collectives, range(self.size)))

    def close(self) -> None:
        for collectives in self.collectives:
            collectives.close()
        self._threads.shutdown()


@pytest.fixture(params=[(backend, size) for backend in BACKENDS for size in (2, 3)], ids=str)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(*request.param)
    yield made
    made.close()


def parts_of(ranks: Ranks, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[0])
    return [torch.randn(*shape, generator=generator).to(dtype) for _ in range(ranks.size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_same_bits_on_every_rank(ranks: Ranks, dtype: torch.dtype) -> None:
    for rows in (1, 7, 64):
        parts = parts_of(ranks, rows, 577, dtype=dtype)
        own = [part.clone() for part in parts]
        ranks.run(lambda collectives, rank, own=own: collectives.reduce(own[rank]))  # type: ignore[misc]
        for x in own:
            assert torch.equal(x, own[0])
        expected = torch.stack([part.float() for part in parts]).sum(0)
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(own[0].float(), expected, rtol=1e-2, atol=tolerance)


def test_uneven_widths_are_gathered_in_rank_order(ranks: Ranks) -> None:
    sizes = [5, 3, 4][: ranks.size]
    for rows in (1, 6):
        parts = [torch.randn(rows, size) for size in sizes]
        gathered = ranks.run(lambda collectives, rank, parts=parts: collectives.gather(parts[rank], sizes))  # type: ignore[misc]
        for x in gathered:
            assert torch.equal(x, torch.cat(parts, dim=1))


def test_ranks_agree_on_the_smallest(ranks: Ranks) -> None:
    assert (
        ranks.run(lambda collectives, rank: collectives.agree(10**12 - rank)) == [10**12 - ranks.size + 1] * ranks.size
    )


def test_many_exchanges_of_changing_size_stay_in_step(ranks: Ranks) -> None:
    def work(collectives: GroupCollectives, rank: int) -> list[float]:
        sums = []
        for index in range(300):
            x = torch.full((1 + index % 5, 3), float(rank + index))
            collectives.reduce(x)
            sums.append(float(x[-1, -1]))
        return sums

    size = ranks.size
    expected = [float(sum(rank + index for rank in range(size))) for index in range(300)]
    assert ranks.run(work) == [expected] * size


def test_transposed_tensors_are_refused(ranks: Ranks) -> None:
    with pytest.raises(InternalError, match="contiguous"):
        ranks.collectives[0].reduce(torch.zeros(3, 4).T)


@needs_memory
def test_tensors_larger_than_a_slot_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_collectives, "SLOT_BYTES", 256)
    ranks = Ranks("memory", 2)
    parts = parts_of(ranks, 10, 33)
    own = [part.clone() for part in parts]
    ranks.run(lambda collectives, rank: collectives.reduce(own[rank]))
    assert torch.equal(own[0], parts[0] + parts[1])
    wide = [torch.randn(3, 200), torch.randn(3, 1)]
    for x in ranks.run(lambda collectives, rank: collectives.gather(wide[rank], [200, 1])):
        assert torch.equal(x, torch.cat(wide, dim=1))
    ranks.close()


@needs_memory
def test_counters_wrap_around() -> None:
    ranks = Ranks("memory", 2)
    for collectives in ranks.collectives:
        collectives._count = 2**31 - 3  # type: ignore[attr-defined]
        for counter in collectives._counters:  # type: ignore[attr-defined]
            counter.value = 2**31 - 3
    assert ranks.run(lambda collectives, rank: [collectives.agree(rank + i) for i in range(6)]) == [list(range(6))] * 2
    ranks.close()


@needs_memory
def test_a_missing_rank_is_not_waited_for_longer_than_the_timeout() -> None:
    fd = make_memory(2)
    alone = MemoryCollectives(fd, RankInfo(0, 2), timeout_s=0.01)
    os.close(fd)
    with pytest.raises(InternalError, match="rank 1 did not take part"):
        alone.agree(1)


@needs_memory
def test_abort_ends_the_waiting() -> None:
    fd = make_memory(2)
    alone = MemoryCollectives(fd, RankInfo(0, 2), timeout_s=60)
    os.close(fd)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(alone.agree, 1)
        alone.abort()
        with pytest.raises(InternalError, match="has ended"):
            waiting.result(10)


@needs_memory
def test_ranks_that_exchange_different_things_find_out() -> None:
    ranks = Ranks("memory", 2)

    def work(collectives: GroupCollectives, rank: int) -> str:
        try:
            collectives.reduce(torch.zeros(1, 4 + rank))
        except InternalError as error:
            return error.message
        return ""

    assert all("diverged" in message for message in ranks.run(work))
    ranks.close()


def test_gloo_listens_on_loopback_only() -> None:
    ranks = Ranks("gloo", 2)
    inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    listening = 0
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}", encoding="ascii") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    listening += 1
                    assert fields[1].startswith("0100007F:"), line
    assert listening >= 2
    ranks.close()


def _is_open(fd: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")


def test_a_cpu_takes_shared_memory_where_it_can() -> None:
    assert choose_backend(CONFIG) == ("memory" if memory_collectives.is_usable() else "gloo")
