# SPDX-License-Identifier: Apache-2.0
"""All-reduce between GPUs of one host over each other's memory, for the sizes where that beats NCCL.

Small tensors take the one-shot kernel, larger ones the two-shot kernel, long prompts NCCL. Both kernels add in
rank order whatever the size, so that a row's sum does not depend on the rows beside it. Their flags and epochs live on
the device, so that they may be captured into CUDA graphs; all ranks make the same calls in the same order. Multicast is
not used.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from mii_zmq.errors import InternalError
from mii_zmq.kernels.triton.all_reduce import (
    ALL,
    FLAG_BYTES,
    MAX_PROGRAMS,
    all_reduce_norm_kernel,
    two_shot_all_reduce_kernel,
)
from mii_zmq.worker.collectives import GroupCollectives, TorchCollectives
from mii_zmq.worker.parallel import RankInfo

logger = logging.getLogger(__name__)

HALF_BYTES = 8 * 2**20
"""The largest tensor that the kernels take."""
ONE_SHOT_BYTES = {2: 512 * 1024, 4: 256 * 1024, 8: 128 * 1024}
"""Up to which size one-shot is used, by number of ranks: it moves (n - 1) times the tensor into every rank at one
barrier, two-shot 2 (n - 1) / n times at two."""
TWO_SHOT_TILE = 2048
MAX_WORLD = 8


def over_peer_memory(fallback: TorchCollectives, rank: RankInfo, device: torch.device) -> GroupCollectives:
    """Collectives that prefer peer memory, or `fallback` itself where some rank cannot reach all others' memory."""
    first = device.index - rank.rank
    can_reach = rank.world_size <= MAX_WORLD and all(
        peer == device.index or torch.cuda.can_device_access_peer(device, peer)
        for peer in range(first, first + rank.world_size)
    )
    # Together or not at all.
    if not fallback.agree(int(can_reach)):
        logger.info("the GPUs cannot reach each other's memory, so NCCL does all exchanges")
        return fallback
    return SymmetricCollectives(fallback, rank, device)


class SymmetricCollectives:
    """Implements `parallel.Collectives` on GPUs that map each other's memory."""

    def __init__(self, fallback: TorchCollectives, rank: RankInfo, device: torch.device) -> None:
        """All ranks at the same time."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._fallback, self._rank = fallback, rank
        self._buffer = symmetric_memory.empty(FLAG_BYTES + 2 * HALF_BYTES, dtype=torch.uint8, device=device)
        self._buffer.zero_()
        group = dist.group.WORLD
        assert group is not None
        # Kept, since it is what holds the peers' memory mapped.
        self._handle = symmetric_memory.rendezvous(self._buffer, group=group.group_name)
        self._addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        self._epoch = torch.zeros(2, dtype=torch.int32, device=device)
        properties = torch.cuda.get_device_properties(device)
        # All programs must be on the device at once, beside whatever still runs before them.
        self._num_programs = min(properties.multi_processor_count, MAX_PROGRAMS)
        self._pdl = properties.major >= 9
        self._one_shot_bytes = ONE_SHOT_BYTES.get(rank.world_size, min(ONE_SHOT_BYTES.values()))
        # Nobody writes a flag before everybody's flags are zero.
        torch.cuda.synchronize(device)
        fallback.agree(0)

    def reduce(self, x: Tensor) -> None:
        num_bytes = x.numel() * x.element_size()
        if not x.is_contiguous():
            raise InternalError("only contiguous tensors are reduced in place")
        if num_bytes > HALF_BYTES or x.numel() % 16 or x.ndim != 2:
            self._fallback.reduce(x)
        elif num_bytes <= self._one_shot_bytes and x.shape[1] % 16 == 0:
            self._one_shot(x, x, x, x, 0.0, 0.0, norm=False)
        else:
            self._two_shot(x)

    def reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, offset: float = 0.0
    ) -> bool:
        """residual += sum of x over the ranks; out = RMSNorm of it (x itself is left undefined). All [T, D].

        False: not for this size, and nothing was done; `reduce` it and norm it apart.
        """
        if x.shape[1] % 16 or x.numel() * x.element_size() > self._one_shot_bytes:
            return False
        self._one_shot(x, residual, weight, out, eps, offset, norm=True)
        return True

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        return self._fallback.gather(x, sizes)

    def agree(self, value: int) -> int:
        return self._fallback.agree(value)

    def set_timeout(self, timeout_s: float) -> None:
        self._fallback.set_timeout(timeout_s)

    def abort(self) -> None:
        self._fallback.abort()

    def close(self) -> None:
        self._fallback.close()

    def _one_shot(
        self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, offset: float, *, norm: bool
    ) -> None:
        tokens, width = x.shape
        padded = triton.next_power_of_2(width)
        options = {"launch_pdl": True} if self._pdl else {}
        all_reduce_norm_kernel[(min(tokens, self._num_programs),)](
            x, self._addresses, self._epoch, residual, weight, out,
            x.stride(0), residual.stride(0), out.stride(0), tokens, HALF_BYTES // x.element_size(), self._rank.rank,
            eps, offset, WORLD=self._rank.world_size, FLAGS=FLAG_BYTES, D=width, D_PAD=padded, NORM=norm,
            PHASES=ALL, SYNC=True, PDL=self._pdl, num_warps=8 if padded >= 2048 else 4, **options,
        )  # fmt: skip

    def _two_shot(self, x: Tensor) -> None:
        runs = triton.cdiv(x.numel(), self._rank.world_size * TWO_SHOT_TILE)
        options = {"launch_pdl": True} if self._pdl else {}
        two_shot_all_reduce_kernel[(min(runs, self._num_programs),)](
            x, self._addresses, self._epoch, x.numel(), HALF_BYTES // x.element_size(), self._rank.rank,
            WORLD=self._rank.world_size, FLAGS=FLAG_BYTES, TILE=TWO_SHOT_TILE,
            PHASES=ALL, SYNC=True, PDL=self._pdl, num_warps=8, **options,
        )  # fmt: skip
