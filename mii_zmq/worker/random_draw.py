# SPDX-License-Identifier: Apache-2.0
"""The keyed random draw: noise that depends on (seed, position, token id) and on nothing else.

Gumbel-max sampling (Gumbel 1954; Maddison, Tarlow, Minka, "A* Sampling", NeurIPS 2014): the argmax of
`logit + gumbel` over the kept tokens is a draw from their softmax. The noise is counter based, SplitMix64 (Steele, Lea,
Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) with random access. Over unsigned 64-bit integers
that wrap, `>>` logical:

    mix64(z):  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;  z ^ (z >> 31)
    key     =  mix64(mix64(seed + GAMMA) + (position + 1) * GAMMA)             GAMMA = 0x9E3779B97F4A7C15
    bits    =  mix64(key + (token_id + 1) * GAMMA) >> 40                       24 bits
    gumbel  =  -log(-log(max(bits, 1) * 2**-24))                               float32, within [-2.82, 16.64]

so a row's noise is the SplitMix64 stream of state `key`, token id t reading its output number t. The last xor of mix64
reaches only bits 0 to 32 and is left out where only `bits` is wanted. Equal scores go to the lowest token id. A kernel
for another device computes the same integers; golden values stand in the tests.

Knows nothing of requests, slots or filters. Every function works row by row, so a row's result does not depend on the
rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15 - 2**64
"""Weyl constant of SplitMix64, as the signed integer that torch.int64 holds."""
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64
GUMBEL_MAX = 16.7
"""No noise is above this: -log(-log(1 - 2**-24)) is 16.636, and the rest is room for the log's rounding."""
GROUP = 64
"""Tokens per group of `GroupedLogits`."""
_SIGN = -(2**63)
_LOG_SLACK = 1e-3
"""Far above the rounding of two float32 logarithms."""
_CHUNK = 2**17
"""Elements whose noise is computed at a time, so that the 64-bit intermediates stay in the CPU's cache."""
_BOUND_GROUPS = 8
"""Groups per row whose noise is computed first, to learn which other groups can still win."""


def mix64(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64."""
    z = _mix_top_(z.clone())
    return z.bitwise_xor_(_shift(z, 31))


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Keys [R] int64 of the draws at `positions` [R] under `seeds` [R]."""
    return mix64(mix64(seeds + GAMMA) + (positions + 1) * GAMMA)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Noise, float32, for `keys` and `token_ids` (int64, broadcast against each other)."""
    return _negative_gumbel_(torch.add(keys, token_ids + 1, alpha=GAMMA)).neg_()


def lowest_id_of_max(scores: Tensor, token_ids: Tensor) -> Tensor:
    """For each row of `scores` [R, K] the smallest of `token_ids` [R, K] at which the row's maximum stands."""
    is_best = scores == scores.amax(-1, keepdim=True)
    return token_ids.masked_fill(~is_best, torch.iinfo(torch.int64).max).amin(-1)


class GroupedLogits:
    """Logits [R, V] seen as groups of `GROUP` neighbours, with the maximum of each group.

    The group maxima cost one fast pass; the argmax, the largest candidates and the pruned draw then read only the
    groups that matter. Vocabularies that are no multiple of `GROUP` are padded with -inf (one copy).
    """

    def __init__(self, logits: Tensor, vocab_size: int | None = None) -> None:
        """`vocab_size`, if not the width of `logits`: the columns from it on are -inf."""
        num_rows, width = logits.shape
        self.vocab_size = vocab_size or width
        padding = -width % GROUP
        if padding:
            logits = torch.nn.functional.pad(logits, (0, padding), value=float("-inf"))
        self.blocks = logits.contiguous().view(num_rows, -1, GROUP)
        """[R, G, GROUP]"""
        self.maxima = self.blocks.amax(-1)
        """[R, G]; NaN where the group holds one."""
        self.row_max = self.maxima.amax(-1)
        """[R]; NaN where the row holds one."""

    def rows(self, index: Tensor) -> GroupedLogits:
        """A copy of the rows in `index`."""
        copy = object.__new__(GroupedLogits)
        copy.vocab_size = self.vocab_size
        copy.blocks, copy.maxima = self.blocks.index_select(0, index), self.maxima.index_select(0, index)
        copy.row_max = self.row_max.index_select(0, index)
        return copy

    def divide_(self, temperature: Tensor) -> None:
        """Divide each row by `temperature` [R], in place. Rounding is monotone: the maxima stay the maxima."""
        self.blocks.div_(temperature.view(-1, 1, 1))
        self.maxima = self.maxima / temperature.unsqueeze(1)
        self.row_max = self.row_max / temperature

    def argmax(self) -> Tensor:
        """Token ids [R] of the row maxima, the lowest of equal ones; any valid id for a row with NaN."""
        group = self.maxima.argmax(-1)
        lane = take_groups(self.blocks, group.unsqueeze(1)).squeeze(1).argmax(-1)
        return (group * GROUP + lane).clamp_(max=self.vocab_size - 1)

    def draw(self, keys: Tensor, floor: Tensor | None = None) -> Tensor:
        """Token ids [R] drawn from the softmax of each row, among the tokens at or above `floor` [R].

        Groups that cannot win, even with the largest noise there is, are skipped: this changes no draw. Finding
        them needs the host, so other devices than the CPU compute all groups. Any valid id for a row without a
        finite maximum.
        """
        num_rows, num_groups, _ = self.blocks.shape
        device = self.blocks.device
        if device.type == "cpu":
            pairs = self._pairs_that_can_win(keys, floor)
            if not len(pairs):
                return torch.zeros(num_rows, dtype=torch.int64)
        else:
            pairs = torch.arange(num_rows * num_groups, device=device)
        pair_rows = pairs // num_groups
        pair_max = torch.cat([self._scores(chunk, keys, floor).amax(-1) for chunk in pairs.split(_CHUNK // GROUP)])
        best = pair_max.new_full((num_rows,), float("-inf")).scatter_reduce_(0, pair_rows, pair_max, "amax")
        order = torch.arange(len(pairs), device=device)
        order = order.masked_fill_(pair_max != best.index_select(0, pair_rows), len(pairs) - 1)
        first = torch.full((num_rows,), len(pairs) - 1, device=device)
        winner = pairs[first.scatter_reduce_(0, pair_rows, order, "amin")]
        lane = self._scores(winner, keys, floor).argmax(-1)
        return ((winner % num_groups) * GROUP + lane).clamp_(max=self.vocab_size - 1)

    def _pairs_that_can_win(self, keys: Tensor, floor: Tensor | None) -> Tensor:
        """row * G + group, ascending, of the groups that may hold their row's best score.

        The best score of the groups with the largest logits is a bound. A group stays if its largest logit with the
        largest noise there is would reach it, then if its largest logit with its own largest noise would: that needs
        the random bits, but neither logarithm. Rounding is monotone in both comparisons.
        """
        num_rows, num_groups, _ = self.blocks.shape
        top = self.maxima.topk(min(_BOUND_GROUPS, num_groups), -1, sorted=False).indices
        top += torch.arange(num_rows).unsqueeze(1) * num_groups
        bound = self._scores(top.view(-1), keys, floor).view(num_rows, -1).amax(-1)
        can_win = self.maxima + GUMBEL_MAX >= bound.unsqueeze(1)
        if floor is not None:
            can_win &= self.maxima >= floor.unsqueeze(1)
        pairs = can_win.view(-1).nonzero().squeeze(1)
        maxima = self.maxima.view(-1)
        kept = []
        for chunk in pairs.split(_CHUNK // GROUP):
            reach = maxima[chunk] + (_largest_gumbel(self._states(chunk, keys)) + _LOG_SLACK)
            kept.append(chunk[reach >= bound[chunk // num_groups]])
        return torch.cat(kept)

    def _scores(self, pairs: Tensor, keys: Tensor, floor: Tensor | None) -> Tensor:
        """logit + gumbel [P, GROUP] for `pairs` [P] = row * G + group; -inf below the row's floor."""
        values = self.blocks.view(-1, GROUP).index_select(0, pairs)
        lanes = torch.arange(GROUP, device=pairs.device) * GAMMA
        noise = _negative_gumbel_(self._states(pairs, keys).unsqueeze(1) + lanes)
        if floor is not None:
            rows = pairs // self.blocks.shape[1]
            values.masked_fill_(values < floor.index_select(0, rows).unsqueeze(1), float("-inf"))
        return values.sub_(noise)

    def _states(self, pairs: Tensor, keys: Tensor) -> Tensor:
        """Generator states [P] of the first token of each pair's group."""
        rows = pairs // self.blocks.shape[1]
        first_ids = (pairs - rows * self.blocks.shape[1]) * GROUP
        return keys.index_select(0, rows).add_(first_ids + 1, alpha=GAMMA)


def take_groups(blocks: Tensor, groups: Tensor) -> Tensor:
    """[R, K, GROUP]: the groups `groups` [R, K] of each row of `blocks` [R, G, GROUP]."""
    num_rows, num_groups, _ = blocks.shape
    flat = groups + torch.arange(num_rows, device=groups.device).unsqueeze(1) * num_groups
    return blocks.view(-1, GROUP).index_select(0, flat.view(-1)).view(num_rows, -1, GROUP)


def _shift(z: Tensor, count: int) -> Tensor:
    """Logical right shift; torch shifts int64 arithmetically."""
    return (z >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix_top_(z: Tensor) -> Tensor:
    """mix64 in place, without its last xor."""
    z.bitwise_xor_(_shift(z, 30)).mul_(_MULTIPLIER_1)
    return z.bitwise_xor_(_shift(z, 27)).mul_(_MULTIPLIER_2)


def _negative_gumbel_(state: Tensor) -> Tensor:
    """-gumbel, float32, of the int64 generator states in `state`, which is overwritten."""
    return _negative_gumbel_of_mixed_(_mix_top_(state))


def _negative_gumbel_of_mixed_(mixed: Tensor) -> Tensor:
    bits = mixed.bitwise_right_shift_(40).bitwise_and_(0xFFFFFF)
    uniform = bits.to(torch.float32).mul_(2.0**-24).clamp_(min=2.0**-24)
    return uniform.log_().neg_().log_()


def _largest_gumbel(first_states: Tensor) -> Tensor:
    """The largest noise [P] among the `GROUP` tokens from each state on, up to the log's rounding."""
    # Tokens along the first dimension, so that both passes run along contiguous memory. The flipped sign bit makes
    # the signed maximum the unsigned one.
    lanes = torch.arange(GROUP, device=first_states.device) * GAMMA
    largest = _mix_top_(lanes.unsqueeze(1) + first_states).bitwise_xor_(_SIGN).amax(0).bitwise_xor_(_SIGN)
    return _negative_gumbel_of_mixed_(largest).neg_()
