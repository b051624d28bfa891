# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group find each other and exchange tensors: the choice of a backend, and the one over torch.

Rank 0 chooses (`choose_backend`) and invites; every rank then opens its end (`open_collectives`) at the same time. On
GPUs that is NCCL, on a CPU memory that the ranks share, or gloo where that cannot be. The store through which NCCL and
gloo find each other listens on loopback only, as do gloo's and NCCL's own sockets, and its keys begin with a secret, so
that another user's process can neither read nor answer for a rank.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError, InternalError
from mii_zmq.worker import memory_collectives
from mii_zmq.worker.memory_collectives import MemoryCollectives
from mii_zmq.worker.parallel import Collectives, RankInfo

OPEN_TIMEOUT_S = 60.0
"""To find each other. All ranks are waiting for that when it begins."""
LOAD_TIMEOUT_S = 3600.0
"""In an exchange while loading: one rank's disk may be much slower than another's; who dies is noticed elsewhere."""
STEP_TIMEOUT_S = 30.0
"""In an exchange of a step: ranks do equal work at the same time."""
LOOPBACK = "127.0.0.1"
_NCCL_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    # A collective that fails is an error of its step; the group's own watch ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # Multicast objects are a limited resource of the host's switches, and nothing here needs them.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}

Backend = Literal["none", "memory", "gloo", "nccl"]


class GroupCollectives(Collectives, Protocol):
    """Collectives with the controls that a group needs."""

    def set_timeout(self, timeout_s: float) -> None:
        """How long one exchange may take from now on."""

    def abort(self) -> None:
        """Make exchanges under way fail, as far as that is possible; may be called from any thread."""

    def close(self) -> None:
        """The last call; nothing is exchanged any more."""


@dataclass(frozen=True)
class Invitation:
    """What rank 0 tells the others, so that they can join."""

    backend: Backend = "none"
    """'none': there is nothing to exchange (the test engine)."""
    port: int = 0
    """Of the store, on loopback."""
    secret: str = ""


def choose_backend(config: EngineConfig) -> Backend:
    """Raises ConfigError when there are fewer GPUs than ranks."""
    if config.device != "cpu" and torch.cuda.is_available():
        num_devices, last = torch.cuda.device_count(), config.device_index + config.tensor_parallel
        if last > num_devices:
            raise ConfigError(
                f"tensor_parallel is {config.tensor_parallel} from GPU {config.device_index} on, but there are "
                f"{num_devices} GPUs; use fewer ranks, or make more GPUs visible"
            )
        return "nccl"
    return "memory" if memory_collectives.is_usable() else "gloo"


def invite(backend: Backend) -> tuple[Invitation, socket.socket | None]:
    """The invitation, and the listening socket that rank 0 gives to `open_collectives`."""
    if backend not in ("gloo", "nccl"):
        return Invitation(backend), None
    listener = socket.create_server((LOOPBACK, 0), backlog=128)
    return Invitation(backend, listener.getsockname()[1], secrets.token_hex(16)), listener


def open_collectives(
    invitation: Invitation,
    rank: RankInfo,
    config: EngineConfig,
    *,
    memory_fd: int,
    listener: socket.socket | None = None,
) -> GroupCollectives:
    """This rank's end; returns once all ranks have opened theirs. Takes `listener` over, not `memory_fd`."""
    if invitation.backend == "memory":
        return MemoryCollectives(memory_fd, rank, LOAD_TIMEOUT_S)
    store = _open_store(invitation, rank, listener)
    if invitation.backend == "gloo":
        return TorchCollectives(_open_gloo(store, rank), rank, torch.device("cpu"))
    device = torch.device("cuda", config.device_index + rank.rank)
    # Triton is there only where a GPU is.
    from mii_zmq.worker.cuda_collectives import over_peer_memory

    with _environment(_NCCL_ENVIRONMENT):
        group = _open_nccl(store, rank, device)
        collectives = TorchCollectives(group, rank, device, in_rank_order=config.deterministic)
        return over_peer_memory(collectives, rank, device) if config.peer_memory else collectives


class TorchCollectives:
    """Implements `parallel.Collectives` over a torch process group: gloo on a CPU, NCCL on a GPU.

    On a GPU the exchanges are queued on the current stream, and may be captured into a CUDA graph once the same group
    has exchanged something before, which `agree` does while loading.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: RankInfo, device: torch.device, *, in_rank_order: bool = False
    ) -> None:
        """`in_rank_order`: a row's sum does not depend on the rows beside it; costs bandwidth. Two ranks need it not,
        whose sum is the same in any order."""
        self._group, self._rank, self._device = group, rank, device
        self._adds_in_rank_order = in_rank_order and rank.world_size > 2
        self._is_aborted = False
        self._options = dist.AllreduceOptions()
        if hasattr(self._options, "asyncOp"):
            # On the caller's stream, instead of one of NCCL's own with events before and after.
            self._options.asyncOp = False

    def reduce(self, x: Tensor) -> None:
        if not x.is_contiguous():
            raise InternalError("only contiguous tensors are reduced in place")
        if not self._adds_in_rank_order:
            _wait(self._group.allreduce([x], self._options))
            return
        total, *parts = self._all_parts(x)
        total = total.float()
        for part in parts:
            total += part
        x.copy_(total)

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        width = max(sizes)
        padded = x if x.shape[1] == width else torch.nn.functional.pad(x, (0, width - x.shape[1]))
        parts = self._all_parts(padded.contiguous())
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def agree(self, value: int) -> int:
        parts = self._all_parts(torch.tensor([value], device=self._device))
        return int(torch.stack(parts).min())

    def set_timeout(self, timeout_s: float) -> None:
        # NCCL's waiting happens on the device, where no such limit reaches it; the group's own watch is what counts.
        if self._device.type == "cpu":
            self._group.set_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        self._is_aborted, was_aborted = True, self._is_aborted
        if not was_aborted:
            self._group.abort()

    def close(self) -> None:
        # Not an orderly end, which would wait for ranks that may be gone.
        self.abort()
        if self._device.type == "cuda":
            dist.destroy_process_group()

    def _all_parts(self, x: Tensor) -> list[Tensor]:
        parts = list(x.new_empty(self._rank.world_size, *x.shape).unbind())
        _wait(self._group.allgather([parts], [x]))
        return parts


def _wait(work: Any) -> None:
    # NCCL answers nothing where the exchange was queued on the caller's stream.
    if work is not None:
        work.wait()


def _open_store(invitation: Invitation, rank: RankInfo, listener: socket.socket | None) -> dist.Store:
    timeout = timedelta(seconds=OPEN_TIMEOUT_S)
    is_host = listener is not None
    store = dist.TCPStore(
        LOOPBACK, invitation.port, rank.world_size, is_host, timeout, wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None, use_libuv=False,
    )  # fmt: skip
    return dist.PrefixStore(invitation.secret, store)


def _open_gloo(store: dist.Store, rank: RankInfo) -> dist.ProcessGroup:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=OPEN_TIMEOUT_S)
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    group: dist.ProcessGroup = gloo(store, rank.rank, rank.world_size, options)
    group.set_timeout(timedelta(seconds=LOAD_TIMEOUT_S))
    return group


def _open_nccl(store: dist.Store, rank: RankInfo, device: torch.device) -> dist.ProcessGroup:
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is in use in this process already; use serve(), whose engine is a process of its own"
        )
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", store=store, rank=rank.rank, world_size=rank.world_size, device_id=device,
        # The store limits the joining; torch ends exchanges that take longer than this, also while loading.
        timeout=timedelta(seconds=LOAD_TIMEOUT_S),
    )  # fmt: skip
    group = dist.group.WORLD
    assert group is not None
    # The first exchange makes connections and buffers, which a capture must not.
    group.allreduce([torch.ones(1, device=device)]).wait()
    torch.cuda.synchronize(device)
    return group


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Settings that NCCL takes from nowhere else, where the user has set none."""
    unset = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in unset})
    try:
        yield
    finally:
        for name in unset:
            os.environ.pop(name, None)
