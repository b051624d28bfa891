# SPDX-License-Identifier: Apache-2.0
"""One layer's mixture of experts on a GPU: routing, two grouped products, the sum over each token's experts.

Nothing is read by the host and all buffers are given, so that everything can be captured in a CUDA graph: grids are as
large as a step of so many tokens may need, the work is read from device memory. The shared expert's products are
ordinary linear layers of the caller; its result is folded into the sum here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mii_zmq.kernels.triton.elementwise import ACTIVATION_NUMBERS
from mii_zmq.kernels.triton.moe_gemm import combine_kernel, expert_gemm_kernel
from mii_zmq.kernels.triton.moe_routing import (
    ITEM_WORDS,
    choose_kernel,
    items_kernel,
    route_few_kernel,
    router_kernel,
    sort_kernel,
)
from mii_zmq.worker.models.cuda_gemm import launch_options
from mii_zmq.worker.models.cuda_moe_tiles import (
    MAX_SPLIT,
    NARROWEST,
    SPLIT_TOKENS,
    MoeSizes,
    MoeTiles,
    ProductTiles,
    choose_tiles,
)
from mii_zmq.worker.models.model_weights import MoeWeights
from mii_zmq.worker.models.spec import MoeConfig

GROUP = 8
FEW_CELLS = 4096
"""Tokens times experts up to which one program does the whole routing."""
CHOOSE_CELLS = 1024
FEW_ROUTED, MANY_ROUTED = (16, 16, 256, 4), (64, 64, 64, 4)
"""Tiles of tokens, experts and K, and stages of the router's product; small ones spread it over the card."""
MANY_PROGRAMS = 4
"""Programs per multiprocessor above which larger tiles read less."""
COMBINE_TILE = 1024


@dataclass(frozen=True)
class MoeScratch:
    """Buffers that all layers of a model share, for the most tokens of a step."""

    max_tokens: int
    logits: Tensor
    """[T, experts]."""
    chosen: Tensor
    """[T * top_k] int32 by entry, like the next three."""
    weights: Tensor
    places: Tensor
    order: Tensor
    counts: Tensor
    """[held experts] int32."""
    items: Tensor
    num_items: Tensor
    inner: Tensor
    """[T * top_k, expert width]."""
    results: Tensor
    """[T * top_k, hidden]."""
    partial: Tensor
    """[MAX_SPLIT * SPLIT_TOKENS * top_k * hidden] float32."""

    @classmethod
    def create(cls, sizes: MoeSizes, max_tokens: int, dtype: torch.dtype, device: torch.device) -> MoeScratch:
        entries = max_tokens * sizes.top_k

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        def integers(*shape: int) -> Tensor:
            return zeros(*shape, kind=torch.int32)

        return cls(
            max_tokens=max_tokens,
            logits=zeros(max_tokens, sizes.num_experts),
            chosen=integers(entries),
            weights=zeros(entries, kind=torch.float32),
            places=integers(entries),
            order=integers(entries),
            counts=integers(sizes.held),
            items=integers(sizes.max_items(max_tokens, NARROWEST), ITEM_WORDS.value),
            num_items=integers(1),
            inner=zeros(entries, sizes.inner),
            results=zeros(entries, sizes.hidden),
            partial=zeros(MAX_SPLIT * SPLIT_TOKENS * sizes.top_k * sizes.hidden, kind=torch.float32),
        )


def moe_sizes(weights: MoeWeights, config: MoeConfig) -> MoeSizes:
    """What `MoeScratch.create` needs; experts of other layers and ranks may be more, never wider."""
    held, hidden, inner = weights.down.shape
    return MoeSizes(config.num_experts, held, config.top_k, hidden, inner)


class CudaMoe:
    """The experts of one layer that this rank holds."""

    def __init__(
        self,
        weights: MoeWeights,
        config: MoeConfig,
        activation: str,
        scratch: MoeScratch,
        *,
        num_processors: int,
        adds_to_out: bool = True,
        pdl: bool = False,
        deterministic: bool = False,
        tiles: MoeTiles | None = None,
    ) -> None:
        """`adds_to_out`: onto the residual stream, else instead of what `out` held (a rank's part of a sum).

        `deterministic`: no bit of a token's result depends on what else is in the step. `tiles`: these for every
        number of tokens.
        """
        self._weights, self._config, self._scratch = weights, config, scratch
        self._kind = ACTIVATION_NUMBERS[activation]
        self._num_processors, self._adds, self._pdl = num_processors, adds_to_out, pdl
        self._deterministic, self._tiles = deterministic, tiles
        self._sizes = moe_sizes(weights, config)
        self._expert_pad = max(16, triton.next_power_of_2(config.num_experts))

    def tiles(self, num_tokens: int) -> MoeTiles:
        if self._tiles is not None:
            return self._tiles
        return choose_tiles(self._sizes, num_tokens, self._num_processors, self._deterministic)

    def run(self, x: Tensor, out: Tensor, live: Tensor | None = None, shared: Tensor | None = None) -> None:
        """Tokens of `x` [T, hidden], already normed, into `out` [T, hidden].

        Tokens behind the first `live[0]` (int32) are padding: they choose no expert. `shared` [T, hidden] is the
        shared expert's result for `x`, without its switch.
        """
        num_tokens = x.shape[0]
        if num_tokens > self._scratch.max_tokens:
            raise ValueError(f"{num_tokens} tokens, but the buffers hold {self._scratch.max_tokens}")
        if num_tokens == 0:
            return
        tiles = self.tiles(num_tokens)
        if self._sizes.held:
            self.route(x, live, tiles)
            self.up(x, tiles)
            self.down(num_tokens, tiles)
        self.combine(x, out, shared, tiles)

    def up(self, x: Tensor, tiles: MoeTiles) -> None:
        """The first product of all routed tokens, with its activation."""
        self._multiply(x, self._weights.up, self._inner(x.shape[0]), tiles.tile_m, tiles.up, x.shape[0], gated=True)

    def down(self, num_tokens: int, tiles: MoeTiles) -> None:
        """The second product, times the routing weights."""
        inner, results = self._inner(num_tokens), self._results(num_tokens, tiles)
        self._multiply(inner, self._weights.down, results, tiles.tile_m, tiles.down, num_tokens, gated=False)

    def _inner(self, num_tokens: int) -> Tensor:
        return self._scratch.inner[: num_tokens * self._sizes.top_k]

    def _results(self, num_tokens: int, tiles: MoeTiles) -> Tensor:
        """[parts of K * entries, hidden]"""
        rows = num_tokens * self._sizes.top_k * tiles.down.split_k
        if tiles.down.split_k == 1:
            return self._scratch.results[:rows]
        return self._scratch.partial[: rows * self._sizes.hidden].view(rows, -1)

    def route(self, x: Tensor, live: Tensor | None, tiles: MoeTiles) -> None:
        """Choices, weights, places and work items of these tokens."""
        num_tokens, width = x.shape
        config, sizes, scratch, pdl = self._config, self._sizes, self._scratch, self._pdl
        options = launch_options(pdl)
        logits = scratch.logits[:num_tokens]
        programs = triton.cdiv(num_tokens, FEW_ROUTED[0]) * triton.cdiv(config.num_experts, FEW_ROUTED[1])
        is_few = self._deterministic or programs <= MANY_PROGRAMS * self._num_processors
        tile_t, tile_e, tile_k, stages = FEW_ROUTED if is_few else MANY_ROUTED
        router_kernel[(triton.cdiv(num_tokens, tile_t), triton.cdiv(config.num_experts, tile_e))](
            x, self._weights.router, logits, num_tokens, x.stride(0),
            NUM_EXPERTS=config.num_experts, K=width, TILE_T=tile_t, TILE_E=tile_e, TILE_K=tile_k, STAGES=stages,
            PDL=pdl, num_warps=4, **options,
        )  # fmt: skip
        facts = {
            "NUM_EXPERTS": config.num_experts, "HELD": sizes.held, "TOP_K": config.top_k,
            "RENORMALISE": config.renormalise, "HAS_LIVE": live is not None, "E_PAD": self._expert_pad, "PDL": pdl,
        }  # fmt: skip
        first_expert, token_pad = self._weights.first_expert, triton.next_power_of_2(num_tokens)
        cells = token_pad * self._expert_pad
        # The order in which a token's powers are summed follows from the tile, so deterministic mode has only one.
        if cells <= FEW_CELLS and not self._deterministic:
            route_few_kernel[(1,)](
                logits, live, scratch.weights, scratch.places, scratch.order, scratch.items, scratch.num_items,
                num_tokens, first_expert,
                T_PAD=token_pad, TILE_M=tiles.tile_m, num_warps=min(8, max(1, cells // 256)), **facts, **options,
            )  # fmt: skip
            return
        tile_t = CHOOSE_CELLS // self._expert_pad
        choose_kernel[(triton.cdiv(num_tokens, tile_t),)](
            logits, live, scratch.weights, scratch.chosen, scratch.places, num_tokens, first_expert,
            TILE_T=tile_t, num_warps=4, **facts, **options,
        )  # fmt: skip
        entries = num_tokens * config.top_k
        is_small = entries <= 1024
        sort_kernel[(sizes.held,)](
            scratch.chosen, scratch.places, scratch.order, scratch.counts, entries,
            CHUNK=1024 if is_small else 4096, PDL=pdl, num_warps=4 if is_small else 8, **options,
        )  # fmt: skip
        items_kernel[(1,)](
            scratch.counts, scratch.items, scratch.num_items,
            HELD=sizes.held, HELD_PAD=max(16, triton.next_power_of_2(sizes.held)), TILE_M=tiles.tile_m, PDL=pdl,
            num_warps=1, **options,
        )  # fmt: skip

    def _multiply(
        self, x: Tensor, weight: Tensor, out: Tensor, tile_m: int, tiles: ProductTiles, num_tokens: int, gated: bool
    ) -> None:
        scratch, sizes = self._scratch, self._sizes
        width, num_out = weight.shape[2], out.shape[1]
        descriptor = None
        if tiles.tma:
            flat = weight.view(-1, width)
            descriptor = TensorDescriptor(flat, list(flat.shape), [width, 1], [tiles.tile_n, tiles.tile_k])
        programs = sizes.max_items(num_tokens, tile_m) * triton.cdiv(num_out, tiles.tile_n)
        expert_gemm_kernel[(programs, tiles.split_k)](
            x, weight, descriptor, scratch.items, scratch.num_items, scratch.order, scratch.weights, out, x.stride(0),
            num_out, out.shape[0] // tiles.split_k * num_out,
            N=num_out, K=width, TOP_K=sizes.top_k, TILE_M=tile_m, TILE_N=tiles.tile_n, TILE_K=tiles.tile_k,
            SPLIT_K=tiles.split_k, GROUP=GROUP, GATED=gated, KIND=self._kind, STAGES=tiles.stages, USE_TMA=tiles.tma,
            PDL=self._pdl, num_warps=tiles.num_warps, **launch_options(self._pdl),
        )  # fmt: skip

    def combine(self, x: Tensor, out: Tensor, shared: Tensor | None, tiles: MoeTiles) -> None:
        """The sum over each token's experts, and the shared one."""
        num_tokens, width = x.shape
        results, split_k = self._results(num_tokens, tiles), tiles.down.split_k
        switch = self._weights.shared_switch
        tile = min(COMBINE_TILE, triton.next_power_of_2(width))
        combine_kernel[(num_tokens, triton.cdiv(width, tile))](
            results, self._scratch.places, x, switch, shared, out, results.shape[0] // split_k * width, x.stride(0),
            0 if shared is None else shared.stride(0), out.stride(0),
            D=width, D_PAD=triton.next_power_of_2(width), TILE=tile,
            TOP_K=self._sizes.top_k if self._sizes.held else 0, SPLIT_K=split_k, HAS_SHARED=shared is not None,
            HAS_SWITCH=switch is not None, HAS_RESIDUAL=self._adds, PDL=self._pdl, num_warps=4,
            **launch_options(self._pdl),
        )  # fmt: skip
