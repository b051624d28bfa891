# SPDX-License-Identifier: Apache-2.0
"""The bridge between transformers' attention interface and whoever answers it for the running forward pass.

transformers keeps one process-wide table of attention functions; ours look up the `Step` of their own thread's forward
pass, so models that run at the same time never see each other's. Two names are registered: PROBE is also told which
mask each layer gets, PAGED has no mask function, so that transformers builds no masks at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

PROBE = "mii_zmq_probe"
PAGED = "mii_zmq_paged"
EAGER = "eager"
"""transformers' own."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks for. All tokens lie in a batch of one."""

    module: nn.Module
    """The layer's attention."""
    query: Tensor
    """[1, Hq, T, D]."""
    key: Tensor
    """[1, Hk, T, D], as is `value`."""
    value: Tensor
    mask: Tensor | None
    scale: float | None
    options: dict[str, Any]
    """The family's other keyword arguments."""


class Step(Protocol):
    """Answers the attention calls of one forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """[1, T, Hq, D]."""

    def mask(self, visible: Callable[..., Any], num_tokens: int, like: dict[str, Any]) -> Tensor:
        """`visible(batch, head, query position, key position)` says what a layer may see; `like` has dtype, device."""


_step: ContextVar[Step] = ContextVar("step")
# A context variable and no keyword argument: some families do not hand keyword arguments down to their attention, and
# mask functions never get any.


@contextmanager
def answering(step: Step) -> Iterator[None]:
    """Let `step` answer the calls of this thread's forward pass."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def register() -> None:
    """Enter our functions into transformers' tables; doing it again changes nothing."""
    for name in (PROBE, PAGED):
        AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(PROBE, _mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    return _step.get().attend(AttentionCall(module, query, key, value, attention_mask, scaling, options)), None


def _mask(*, q_length: int, mask_function: Callable[..., Any], dtype: Any, device: Any, **_: Any) -> Tensor:
    return _step.get().mask(mask_function, q_length, {"dtype": dtype, "device": device})
