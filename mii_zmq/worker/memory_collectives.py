# SPDX-License-Identifier: Apache-2.0
"""What ranks of one host exchange, through memory that they share: no sockets, a few microseconds for a small tensor.

The memory is an anonymous file whose descriptor the ranks inherit, so nothing is left behind whatever ends them. Each
rank has a counter in it, a tag and two slots per counter parity. An exchange is: write the own slot, raise the own
counter, wait for the others' counters, read all slots in rank order, which gives the same bits everywhere. Two slots
make one wait enough: who writes a slot again has seen every other rank pass the exchange in between. Only for x86-64,
whose stores become visible in program order; waiting is short polling, then a futex, which releases the interpreter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time

import torch
from torch import Tensor

from mii_zmq.errors import InternalError
from mii_zmq.worker.parallel import RankInfo

SLOT_BYTES = 4 * 2**20
"""More travels in pieces of this size."""
SPIN_ROUNDS = 100
WAIT_SLICE_NS = 50_000_000
"""The longest sleep between two looks at the abort flag."""
_LINE = 64
"""Bytes of a cache line; ranks' counters do not share one."""
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
_REDUCE, _GATHER, _AGREE = 1, 2, 3


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_usable() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def make_memory(world_size: int) -> int:
    """A file descriptor for `MemoryCollectives`, to be inherited by every rank. Unused pages cost nothing."""
    fd = os.memfd_create("mii_zmq-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, _num_bytes(world_size))
    return fd


class MemoryCollectives:
    """Implements `parallel.Collectives` for tensors in host memory. Used by one thread at a time."""

    def __init__(self, fd: int, rank: RankInfo, timeout_s: float) -> None:
        """`fd` may be closed afterwards."""
        self._rank, self._timeout_s = rank, timeout_s
        size = rank.world_size
        self._memory = mmap.mmap(fd, _num_bytes(size))
        words = [ctypes.c_int32.from_buffer(self._memory, index * 4) for index in range((size + 1) * _LINE // 4)]
        per_line = _LINE // 4
        self._counters = [words[r * per_line] for r in range(size)]
        self._tags = [[words[r * per_line + 1 + parity] for r in range(size)] for parity in (0, 1)]
        self._abort = words[size * per_line]
        data = torch.frombuffer(self._memory, dtype=torch.uint8, offset=(size + 1) * _LINE)
        slots = data.view(2, size, SLOT_BYTES)
        self._slots = [[slots[parity, r] for r in range(size)] for parity in (0, 1)]
        self._count = 0
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._slice = ctypes.byref(_Timespec(0, WAIT_SLICE_NS))

    def reduce(self, x: Tensor) -> None:
        if not x.is_contiguous():
            raise InternalError("only contiguous tensors are reduced in place")
        flat, step = x.view(-1), SLOT_BYTES // x.element_size()
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            slots = self._exchange(piece, _REDUCE)
            torch.add(slots[0][: len(piece)], slots[1][: len(piece)], out=piece)
            for slot in slots[2:]:
                piece += slot[: len(piece)]

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        rows, own = x.shape[0], x.contiguous().view(-1)
        parts = [x.new_empty(rows * size) for size in sizes]
        step = SLOT_BYTES // x.element_size()
        for start in range(0, max(map(len, parts)), step):
            slots = self._exchange(own[start : start + step], _GATHER)
            for slot, part in zip(slots, parts, strict=True):
                piece = part[start : start + step]
                piece.copy_(slot[: len(piece)])
        return torch.cat([part.view(rows, size) for part, size in zip(parts, sizes, strict=True)], dim=1)

    def agree(self, value: int) -> int:
        slots = self._exchange(torch.tensor([value]), _AGREE)
        return int(min(slot[0] for slot in slots))

    def set_timeout(self, timeout_s: float) -> None:
        """How long the others may keep this rank waiting in one exchange from now on."""
        self._timeout_s = timeout_s

    def abort(self) -> None:
        """Make every exchange raise, on all ranks; may be called from any thread."""
        self._abort.value = 1

    def close(self) -> None:
        """The memory goes with the last reference to it."""

    def _exchange(self, own: Tensor, kind: int) -> list[Tensor]:
        """Everyone's slots as `own`'s dtype; each rank's piece lies at the beginning of its slot."""
        self._count = self._count + 1 & 0x7FFFFFFF
        parity, rank = self._count & 1, self._rank.rank
        slots = [slot.view(own.dtype) for slot in self._slots[parity]]
        slots[rank][: len(own)].copy_(own)
        # Widths differ between the ranks of a gather, so there the kind is all that can be compared.
        tag = kind if kind == _GATHER else kind + 4 * len(own)
        self._tags[parity][rank].value = tag
        counter = self._counters[rank]
        counter.value = self._count
        self._syscall(_SYS_FUTEX, ctypes.byref(counter), _FUTEX_WAKE, 2**31 - 1, None, None, 0)
        for other in range(self._rank.world_size):
            if other != rank:
                self._await(other)
                if self._tags[parity][other].value != tag:
                    raise InternalError(f"rank {other} exchanges something else than rank {rank}; the ranks diverged")
        return slots

    def _await(self, other: int) -> None:
        counter, wanted = self._counters[other], self._count
        for _ in range(SPIN_ROUNDS):
            if _is_reached(counter.value, wanted):
                return
        deadline = time.monotonic() + self._timeout_s
        while not _is_reached(seen := counter.value, wanted):
            if self._abort.value:
                raise InternalError("the group of ranks has ended")
            if time.monotonic() > deadline:
                raise InternalError(f"rank {other} did not take part in an exchange for {self._timeout_s:g} s")
            self._syscall(_SYS_FUTEX, ctypes.byref(counter), _FUTEX_WAIT, seen, self._slice, None, 0)


def _is_reached(count: int, wanted: int) -> bool:
    """Counters are 31 bits wide and wrap around; ranks are never more than two apart."""
    return (count - wanted & 0x7FFFFFFF) < 0x40000000


def _num_bytes(world_size: int) -> int:
    return (world_size + 1) * _LINE + 2 * world_size * SLOT_BYTES
