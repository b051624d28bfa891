# SPDX-License-Identifier: Apache-2.0
"""One decoder layer on a GPU: every choice of the architecture becomes, once, a tuple of bound kernel launches.

Each launch reads and writes the fields of `Rows`. Where one rank holds the whole model and nothing stands behind a
half of a layer, its last matrix adds to the residual stream and every norm is folded into the matrix behind it.
Otherwise the half leaves its result in `delta`; it is summed over the ranks, and one kernel adds it to the stream,
through the norm that stands behind it, if there is one, and applies the next norm. Knows nothing of attention itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mii_zmq.worker.models.cuda_buffers import Buffers, Card, Rows
from mii_zmq.worker.models.cuda_invariant_linear import InvariantLinear
from mii_zmq.worker.models.cuda_linear import FusedLinear, Norm
from mii_zmq.worker.models.cuda_moe import CudaMoe, MoeScratch, moe_sizes
from mii_zmq.worker.models.model_weights import Affine, LayerWeights
from mii_zmq.worker.models.spec import MlpKind, ModelConfig, NormKind, ResidualKind
from mii_zmq.worker.parallel import Collectives

Launch = Callable[[Rows], None]
Field = Callable[[Rows], Tensor]
Linear = FusedLinear | InvariantLinear

X: Field = attrgetter("x")
NORMED: Field = attrgetter("normed")
DELTA: Field = attrgetter("delta")
QKV: Field = attrgetter("qkv")
ATTENDED: Field = attrgetter("attended")
INNER: Field = attrgetter("inner")
SHARED: Field = attrgetter("shared")


@dataclass(frozen=True)
class Source:
    """Where a matrix finds its input: a field, and the norm that it has to apply itself."""

    field: Field
    norm: Norm | None = None


@dataclass(frozen=True)
class Pending:
    """`delta`, with several ranks still each one's part, waits to be added to `x`, through `post` if there is one."""

    post: Norm | None


@runtime_checkable
class FusedCollectives(Protocol):
    """Collectives that know the sum over the ranks, its addition and the RMSNorm behind it as one operation."""

    def reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float) -> bool:
        """residual += sum of x over the ranks; out = RMSNorm of it. False: not for this size, nothing was done."""


@dataclass(frozen=True)
class LayerLaunches:
    """A layer around its attention."""

    before: tuple[Launch, ...]
    """From `x` to `qkv`."""
    again: tuple[Launch, ...]
    """What `after` needs of `before`, for rows that were picked out in between."""
    after: tuple[Launch, ...]
    """From `attended` to the next layer's `x`, or `delta`."""


class LayerBuilder:
    """Makes the launches of layer after layer, and keeps what the layer before has left to do."""

    def __init__(
        self, config: ModelConfig, buffers: Buffers, card: Card, deterministic: bool, collectives: Collectives | None
    ) -> None:
        self._config, self._buffers, self._card, self._deterministic = config, buffers, card, deterministic
        self._collectives = collectives
        self._pdl = card.is_hopper
        self._pending: Pending | None = None
        self._moe_scratch: MoeScratch | None = None
        self._build_after = {
            ResidualKind.SEQUENTIAL: self._sequential,
            ResidualKind.PARALLEL: self._parallel,
            ResidualKind.POST_NORM: self._post_norm,
        }[config.spec.residual]

    @staticmethod
    def needs_delta(config: ModelConfig, layers: list[LayerWeights], collectives: Collectives | None) -> bool:
        """Whether any layer leaves something in `delta`."""
        if config.spec.residual is ResidualKind.POST_NORM:
            return collectives is not None
        has_post = any(layer.attn_post_norm or layer.mlp_post_norm for layer in layers)
        return collectives is not None or has_post

    def build(self, weights: LayerWeights) -> LayerLaunches:
        """The next layer's."""
        before: list[Launch] = []
        norm = self.norm(weights.attn_norm)
        source = self.read(before, norm)
        again: list[Launch] = []
        if self._config.spec.residual is ResidualKind.PARALLEL and weights.mlp_norm is None and norm is not None:
            # The MLP reads what the attention read.
            again.append(self._apply_norm(norm, X, NORMED))
            if source.norm is not None:
                before += again
            source = Source(NORMED)
        before.append(self.matrix(weights.qkv, source, QKV))
        after: list[Launch] = []
        self._build_after(after, weights, source)
        return LayerLaunches(tuple(before), tuple(again), tuple(after))

    def read(self, launches: list[Launch], norm: Norm | None) -> Source:
        """Where the next matrix finds norm(x), with all that waits added to `x`."""
        pending, pdl, collectives = self._pending, self._pdl, self._collectives
        self._pending = None
        if pending is None:
            return Source(X, norm)
        post = pending.post
        # In the deterministic mode one kernel makes the norm, whatever the number of rows: another one adds up the
        # squares in another order.
        can_fuse = post is None and not self._deterministic
        if can_fuse and norm is not None and norm.is_plain_rms and isinstance(collectives, FusedCollectives):
            launches.append(_fused(collectives, norm, collectives.reduce, pdl))
            return Source(NORMED)
        if collectives is not None:
            reduce = collectives.reduce
            launches.append(lambda rows: reduce(rows.delta))
        if post is not None:
            launches.append(lambda rows: post.add_to(rows.delta, rows.x, norm, rows.normed, pdl))
        elif norm is not None:
            launches.append(lambda rows: norm.absorb(rows.delta, rows.x, rows.normed, pdl))
        else:
            launches.append(_add)
        return Source(X if norm is None else NORMED)

    def matrix(self, weights: Affine, source: Source, target: Field, **surroundings: Any) -> Launch:
        """The launch of one matrix and its surroundings."""
        linear, field = self.linear(weights, norm=source.norm, **surroundings), source.field
        return lambda rows: linear.run(field(rows), target(rows))

    def linear(self, weights: Affine, **surroundings: Any) -> Linear:
        common = (weights.weight, weights.bias, self._buffers.scratch)
        if self._deterministic:
            processors = self._card.num_processors
            return InvariantLinear(*common, **surroundings, pdl=self._pdl, num_processors=processors)
        return FusedLinear(*common, **surroundings, pdl=self._pdl)

    def norm(self, weights: Affine | None) -> Norm | None:
        if weights is None:
            return None
        return Norm(weights.weight, weights.bias, self._config.norm_eps, self._config.spec.norm is NormKind.LAYER)

    def _sequential(self, after: list[Launch], weights: LayerWeights, _: Source) -> None:
        self._leave(after, [self._out(weights)], weights.attn_post_norm)
        enter, leave = self._mlp(weights, self.read(after, self.norm(weights.mlp_norm)))
        after += enter
        self._leave(after, [leave], weights.mlp_post_norm)

    def _parallel(self, after: list[Launch], weights: LayerWeights, attn_source: Source) -> None:
        norm = self.norm(weights.mlp_norm)
        enter, leave = self._mlp(weights, attn_source if norm is None else Source(X, norm))
        after += enter
        self._leave(after, [self._out(weights), leave], None)

    def _post_norm(self, after: list[Launch], weights: LayerWeights, _: Source) -> None:
        self._leave(after, [self._out(weights)], None)
        self._settle(after, weights.attn_post_norm)
        enter, leave = self._mlp(weights, Source(X))
        after += enter
        self._leave(after, [leave], None)
        self._settle(after, weights.mlp_post_norm)

    def _settle(self, launches: list[Launch], weights: Affine | None) -> None:
        """x = norm(x), with what waits."""
        self.read(launches, None)
        if (norm := self.norm(weights)) is not None:
            launches.append(self._apply_norm(norm, X, X))

    def _leave(self, launches: list[Launch], parts: list[Part], post_weights: Affine | None) -> None:
        """Add the sum of `parts` to `x`, or leave it in `delta`."""
        post = self.norm(post_weights)
        if self._collectives is None and post is None:
            for part in parts:
                launches += part(X, True)
            return
        for index, part in enumerate(parts):
            launches += part(DELTA, index > 0)
        self._pending = Pending(post)

    def _out(self, weights: LayerWeights) -> Part:
        return lambda target, adds: [self.matrix(weights.out, Source(ATTENDED), target, adds_to_out=adds)]

    def _mlp(self, weights: LayerWeights, source: Source) -> tuple[list[Launch], Part]:
        """What reads the MLP's input, and what makes its output."""
        if weights.moe is not None:
            return self._experts(weights, source)
        up, down, config = weights.up, weights.down, self._config
        assert up is not None
        assert down is not None
        inner, is_gated = self._inner(down), config.spec.mlp is MlpKind.GATED
        enter = self.matrix(up, source, inner, activation=config.activation, gated=is_gated)
        return [enter], lambda target, adds: [self.matrix(down, Source(inner), target, adds_to_out=adds)]

    def _experts(self, weights: LayerWeights, source: Source) -> tuple[list[Launch], Part]:
        moe, config, card = weights.moe, self._config.moe, self._card
        assert moe is not None
        assert config is not None
        if self._moe_scratch is None:
            x = self._buffers.tokens.x
            self._moe_scratch = MoeScratch.create(moe_sizes(moe, config), x.shape[0], x.dtype, x.device)
        scratch, activation, enter = self._moe_scratch, self._config.activation, list[Launch]()
        if source.norm is not None:
            enter.append(self._apply_norm(source.norm, source.field, NORMED))
            source = Source(NORMED)
        has_shared = moe.shared_up is not None and moe.shared_down is not None
        if moe.shared_up is not None and moe.shared_down is not None:
            down = Affine(moe.shared_down)
            inner = self._inner(down)
            enter.append(self.matrix(Affine(moe.shared_up), source, inner, activation=activation, gated=True))
            enter.append(self.matrix(down, Source(inner), SHARED))

        def leave(target: Field, adds: bool) -> list[Launch]:
            experts = CudaMoe(
                moe, config, activation, scratch,
                num_processors=card.num_processors, adds_to_out=adds, pdl=self._pdl, deterministic=self._deterministic,
            )  # fmt: skip
            shared = SHARED if has_shared else None
            return [
                lambda rows: experts.run(
                    source.field(rows), target(rows), rows.live, None if shared is None else shared(rows)
                )
            ]

        return enter, leave

    def _inner(self, down: Affine) -> Field:
        """The buffer between the MLP's matrices, in this layer's width."""
        width = down.weight.shape[1]
        if width == self._buffers.inner_width:
            return INNER
        return lambda rows: rows.inner.view(-1)[: rows.inner.shape[0] * width].view(-1, width)

    def _apply_norm(self, norm: Norm, source: Field, target: Field) -> Launch:
        pdl = self._pdl
        return lambda rows: norm.run(source(rows), target(rows), pdl)


def _add(rows: Rows) -> None:
    rows.x.add_(rows.delta)


def _fused(collectives: FusedCollectives, norm: Norm, reduce: Callable[[Tensor], None], pdl: bool) -> Launch:
    """x += the ranks' sum of delta; normed = norm(x)."""

    def launch(rows: Rows) -> None:
        if not collectives.reduce_add_norm(rows.delta, rows.x, norm.weight, rows.normed, norm.eps):
            reduce(rows.delta)
            norm.absorb(rows.delta, rows.x, rows.normed, pdl)

    return launch


class Part(Protocol):
    """One of the sums of a layer's half."""

    def __call__(self, target: Field, adds: bool) -> list[Launch]:
        """Launches that add it to `target`, or replace `target` by it."""
