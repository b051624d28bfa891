# SPDX-License-Identifier: Apache-2.0
"""Top-k, top-p and min-p, and the draw among the tokens that they keep.

Order and meaning are those of transformers' logits warpers: top-k keeps every token that is not below the k-th
largest; top-p then keeps the smallest set whose share of the remaining mass reaches top_p; min-p then drops tokens less
probable than min_p times the most probable one. Where equal logits stand at the edge of the top-p set, lower token ids
come first, so the kept set never depends on how a sort treats equal keys.

The vocabulary is hardly ever sorted. The largest `width` logits of each row are taken through the group maxima, and a
row is settled when they provably hold its kept set, ties included, against the mass of the whole row. A row whose
top-p set is wider draws from the whole vocabulary and looks whether the token is in its set: the best score of all
tokens, if kept, is the best score of the kept ones; if not, the set lies among the tokens ranked before it, and the
draw is repeated there. A row whose top-k set is wider is sorted. Noise is keyed by token id and sums have one fixed
order per row, so a row's draw is the same by every way and beside any other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mii_zmq.worker.random_draw import GROUP, GroupedLogits, gumbel, lowest_id_of_max, take_groups

CANDIDATE_WIDTH = 128
"""Candidates taken before the costlier ways."""
_ELEMENTS = 2**20
"""Elements handled at a time in the passes over whole rows; bounds memory and keeps intermediates in the cache."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Per-row settings on the device; every row has top-k or top-p on."""

    top_k: Tensor
    """[R] int64, from 1; the vocabulary's size or more: off."""
    top_p: Tensor
    """[R] float64 in (0, 1]; 1: off."""
    log_min_p: Tensor
    """[R] float32; -inf: off."""
    needs_mass: bool
    """A row has top-p on and top-k off: its mass is that of the whole vocabulary."""

    def rows(self, index: Tensor) -> Filters:
        return Filters(self.top_k[index], self.top_p[index], self.log_min_p[index], self.needs_mass)


def draw_filtered(logits: GroupedLogits, keys: Tensor, filters: Filters, width: int | None = CANDIDATE_WIDTH) -> Tensor:
    """Token ids [R] drawn by `keys` [R] among the tokens that `filters` keep; any valid id for a non-finite row.

    `width` None sorts every row: the plain computation that the other ways are checked against. Which way a row takes
    is decided on the host, so other devices than the CPU sort, too.
    """
    mass = _total_mass(logits) if filters.needs_mass else torch.zeros_like(logits.row_max, dtype=torch.float64)
    has_top_k = filters.top_k < logits.vocab_size
    if width is None or width >= logits.vocab_size or keys.device.type != "cpu":
        drawn = torch.empty_like(keys)
        unsettled = [(_draw_sorted, torch.arange(len(keys), device=keys.device))]
    else:
        values, token_ids = _largest(logits, width)
        num_kept, is_settled = _keep(values, logits.row_max, mass, filters, logits.vocab_size)
        is_settled |= ~logits.row_max.isfinite()
        drawn = _draw_kept(values, token_ids, torch.where(is_settled, num_kept, 1), keys)
        unsettled = [
            (draw, (~is_settled & is_chosen).nonzero().squeeze(1))
            for draw, is_chosen in ((_draw_sorted, has_top_k), (_draw_by_rejection, ~has_top_k))
        ]
    for draw, all_rows in unsettled:
        for rows in all_rows.split(max(1, _ELEMENTS // logits.vocab_size)) if len(all_rows) else ():
            drawn[rows] = draw(logits.rows(rows), keys[rows], mass[rows], filters.rows(rows))
    return drawn.clamp_(max=logits.vocab_size - 1)


def _draw_by_rejection(logits: GroupedLogits, keys: Tensor, mass: Tensor, filters: Filters) -> Tensor:
    """The draw of rows with top-p (and min-p), without top-k."""
    row_max = logits.row_max
    floor = row_max + filters.log_min_p
    target = filters.top_p * mass
    drawn = torch.zeros(len(keys), dtype=torch.int64)
    pending = torch.arange(len(keys))
    while True:
        token_ids = logits.draw(keys[pending], floor[pending])
        drawn[pending] = token_ids
        is_ahead, mass_ahead = _ranked_before(logits, token_ids, row_max[pending])
        rejected = (mass_ahead >= target[pending]).nonzero().squeeze(1)
        if not len(rejected):
            return drawn
        pending = pending[rejected]
        rest = logits.blocks.flatten(1)[rejected].masked_fill_(is_ahead[rejected] == 0, float("-inf"))
        logits = GroupedLogits(rest, logits.vocab_size)


def _ranked_before(logits: GroupedLogits, token_ids: Tensor, row_max: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens stand before each row's token (0.0 or 1.0, [R, V]), and their mass [R].

    The masks are float32, since on a CPU comparing into floats and multiplying is several times faster than selecting
    by bools.
    """
    values = logits.blocks.flatten(1)
    token_ids = token_ids.unsqueeze(1)
    at = values.gather(1, token_ids)
    columns = torch.arange(values.shape[1], dtype=torch.int32)
    is_ahead, scratch = torch.empty_like(values), torch.empty_like(values)
    torch.lt(columns, token_ids.int(), out=is_ahead)
    is_ahead.mul_(torch.eq(values, at, out=scratch)).add_(torch.gt(values, at, out=scratch))
    weights = torch.sub(values, row_max.unsqueeze(1), out=scratch).exp_().mul_(is_ahead)
    return is_ahead, weights.view(logits.blocks.shape).sum(-1).double().sum(-1)


def _draw_sorted(logits: GroupedLogits, keys: Tensor, mass: Tensor, filters: Filters) -> Tensor:
    """The draw by a full sort of each row."""
    values, token_ids = logits.blocks.flatten(1).sort(dim=-1, descending=True, stable=True)
    num_kept, _ = _keep(values, logits.row_max, mass, filters, logits.vocab_size)
    return _draw_kept(values, token_ids, num_kept, keys)


def _total_mass(logits: GroupedLogits) -> Tensor:
    """[R] float64: sum over the row of exp(logit - row_max), in an order that the number of rows does not change."""
    row_max = logits.row_max.view(-1, 1, 1)
    step = max(1, _ELEMENTS // logits.vocab_size)
    sums = [
        (blocks - maximum).exp_().sum(-1).double().sum(-1)
        for blocks, maximum in zip(logits.blocks.split(step), row_max.split(step), strict=True)
    ]
    return torch.cat(sums)


def _largest(logits: GroupedLogits, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest values [R, width] of each row, descending, and their token ids, ascending among equals.

    They lie in the `width` groups with the largest maxima. Which of the tokens equal to the last value are among them
    is arbitrary.
    """
    num_groups = logits.maxima.shape[1]
    if width < num_groups:
        groups = logits.maxima.topk(width, -1, sorted=False).indices.sort(-1).values
        values = take_groups(logits.blocks, groups).flatten(1)
        index = values.topk(width, -1, sorted=False).indices.sort(-1).values
        token_ids = groups.gather(1, index // GROUP) * GROUP + index % GROUP
    else:
        values = logits.blocks.flatten(1)
        token_ids = index = values.topk(width, -1, sorted=False).indices.sort(-1).values
    values, order = values.gather(1, index).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def _keep(values: Tensor, row_max: Tensor, mass: Tensor, filters: Filters, vocab_size: int) -> tuple[Tensor, Tensor]:
    """How many of the descending `values` [R, W] each row keeps, and whether the row's other tokens cannot matter."""
    width = values.shape[1]
    last = values[:, -1]
    cumulated = (values - row_max.unsqueeze(1)).exp_().cumsum(-1, dtype=torch.float64)
    has_top_k = filters.top_k < vocab_size
    kth = values.gather(1, filters.top_k.clamp(max=width).unsqueeze(1) - 1)
    # At least 1: nothing in a row of NaN compares, and its index must not fail the batch.
    num_top_k = torch.where(has_top_k, (values >= kth).sum(-1), width).clamp_(min=1)
    total = torch.where(has_top_k, cumulated.gather(1, num_top_k.unsqueeze(1) - 1).squeeze(1), mass)
    num_top_p = (cumulated < (filters.top_p * total).unsqueeze(1)).sum(-1).add_(1)
    num_top_p = torch.where(filters.top_p < 1, num_top_p, width)
    num_kept = torch.minimum(num_top_k, num_top_p).clamp_(1, width)
    edge = values.gather(1, num_kept.unsqueeze(1) - 1).squeeze(1)
    # Strictly above the last value: no token outside the candidates equals one at the edge of the kept set.
    is_settled = (edge > last) & (~has_top_k | (kth.squeeze(1) > last)) | (last == float("-inf"))
    num_min_p = (values >= (row_max + filters.log_min_p).unsqueeze(1)).sum(-1)
    return torch.minimum(num_kept, num_min_p).clamp_(min=1), is_settled


def _draw_kept(values: Tensor, token_ids: Tensor, num_kept: Tensor, keys: Tensor) -> Tensor:
    """Gumbel-max among the first `num_kept` [R] of each row's candidates."""
    if values.device.type == "cpu" and len(values):
        width = int(num_kept.max())
        values, token_ids = values[:, :width], token_ids[:, :width]
    scores = values + gumbel(keys.unsqueeze(1), token_ids)
    position = torch.arange(values.shape[1], device=values.device)
    scores.masked_fill_(position >= num_kept.unsqueeze(1), float("-inf"))
    return lowest_id_of_max(scores, token_ids)
