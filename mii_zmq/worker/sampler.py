# SPDX-License-Identifier: Apache-2.0
"""The sampler: one token per row of logits, each row by its own request's options, all rows at once.

Owns the sampling state of every slot. A row's result depends on its logits, its options and its history only: not on
the rows beside it, its slot, chunking, preemption or resumption (see `random_draw`). Greedy rows, rows that draw from
the whole vocabulary and rows with top-k or top-p take different routes, but every route gives what the plain
computation would give. The host never needs to know the tokens drawn last: histories and counts live on the device.

Order: repetition penalty, presence and frequency penalties, biases, allowed tokens, bad words, stop ids before
min_new_tokens, the masks of grammars, then argmax, or temperature, top-k, top-p, min-p and the keyed draw.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mii_zmq.worker.penalties import (
    AllowedTokens,
    MaskEntry,
    OutputCounts,
    Penalties,
    TokenBiases,
    TokenMasks,
    apply_masks_,
    needs_counts,
)
from mii_zmq.worker.plan import SamplingSpec
from mii_zmq.worker.random_draw import GroupedLogits, row_keys
from mii_zmq.worker.token_filters import Filters, draw_filtered

logger = logging.getLogger(__name__)

MIN_TEMPERATURE = 1e-5
"""Below it a row is greedy: the draw could differ only between logits closer than 2e-4, and the division overflow."""


@dataclass(frozen=True, slots=True)
class _SlotState:
    spec: SamplingSpec
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class _Part:
    """The drawn rows of a batch that take the same route: through filters (top-k, top-p), or the whole vocabulary."""

    rows: Tensor | None
    """None: all rows of the batch."""
    seeds: Tensor
    temperature: Tensor | None
    """[n]; None: 1 in every row."""
    log_min_p: Tensor | None
    """[n]; None: off in every row."""
    filters: Filters | None


@dataclass(frozen=True, slots=True)
class _Batch:
    """Everything about a batch that stays the same while its slots do."""

    slots: list[int]
    has_greedy: bool
    parts: list[_Part]
    """The rows that are not greedy."""
    penalties: Penalties | None
    edits: list[TokenBiases | AllowedTokens | TokenMasks]
    """In this order, behind the penalties."""


class Sampler:
    """Draws tokens for the sequences installed in its slots."""

    def __init__(self, max_sequences: int, vocab_size: int, device: torch.device) -> None:
        self._max_sequences = max_sequences
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[int, _SlotState] = {}
        self._counts = OutputCounts(vocab_size, device)
        self._batch: _Batch | None = None

    def install(self, slot: int, spec: SamplingSpec, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Start the sequence of `slot`, replacing what the slot held.

        `token_ids` is the prompt and the output so far: a sequence resumed behind its outputs draws what it would
        have drawn without the interruption. Bad words and stop ids outside the vocabulary can never be drawn and are
        ignored.

        Raises:
            ValueError: slot, prompt length or a token id is out of range.
        """
        if not 0 <= slot < self._max_sequences:
            raise ValueError(f"slot is {slot}, but there are {self._max_sequences} slots, numbered from 0")
        if not 0 < num_prompt_tokens <= len(token_ids):
            raise ValueError(
                f"num_prompt_tokens is {num_prompt_tokens}, allowed: 1 to the {len(token_ids)} token ids given"
            )
        output_token_ids = token_ids[num_prompt_tokens:]
        if output_token_ids and not 0 <= min(output_token_ids) <= max(output_token_ids) < self._vocab_size:
            raise ValueError(f"an output token id lies outside the vocabulary of {self._vocab_size} entries")
        self.release([slot])
        self._states[slot] = _SlotState(spec, num_prompt_tokens)
        self._batch = None
        if needs_counts(spec):
            self._counts.add(slot, output_token_ids)

    def release(self, slots: list[int]) -> None:
        """Forget the sequences of `slots`; slots that hold none are skipped."""
        for slot in slots:
            if self._states.pop(slot, None) is not None:
                self._counts.remove(slot)
                self._batch = None

    @torch.inference_mode()
    def prepare(self, slots: list[int]) -> dict[int, str]:
        """Get ready to draw for these slots. Returns those for which that is impossible, and why; as long as they are
        among the slots, `sample` raises."""
        batch = self._batch
        if batch is not None and batch.slots == slots:
            return {}
        try:
            self._batch = self._pack(slots)
        except Exception:
            logger.exception("the sampling options of a sequence cannot be applied")
            reasons = {slot: self._refusal(slot) for slot in slots}
            return {slot: reason for slot, reason in reasons.items() if reason is not None}
        return {}

    def _refusal(self, slot: int) -> str | None:
        try:
            self._pack([slot])
        except Exception as error:  # noqa: BLE001
            return f"the sampling options cannot be applied: {type(error).__name__}: {error}"
        return None

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        slots: list[int],
        positions: list[int],
        token_ids: Tensor,
        masks: Mapping[int, bytes] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw one token per row.

        Args:
            logits: [R, V] float32; may be modified.
            slots: the R slots, all different and installed.
            positions: per row the number of tokens before the one drawn, at least 1.
            token_ids: [max_sequences, max_model_len] integers on the device, one row per slot; the columns below a
                row's position are its history.
            masks: by slot, what the row may draw (`StepPlan.masks`).

        Returns:
            Token ids [R] int64, all within the vocabulary, and bools [R]: False where the row's token means nothing,
            since its logits held NaN or +inf, or no token had a finite logit (all masked).
        """
        if not slots:
            empty = torch.empty(0, dtype=torch.int64, device=self._device)
            return empty, empty.bool()
        batch = self._batch
        if batch is None or batch.slots != slots:
            batch = self._batch = self._pack(slots)
        position = torch.tensor(positions, dtype=torch.int64, device=self._device)
        logits = logits.contiguous()
        for edit in (batch.penalties, *batch.edits):
            if edit is not None:
                edit.apply_(logits, position, positions, token_ids)
        if masks:
            apply_masks_(logits, [(row, masks[slot]) for row, slot in enumerate(slots) if slot in masks])
        grouped = GroupedLogits(logits)
        is_finite = grouped.row_max.isfinite()
        drawn = grouped.argmax() if batch.has_greedy else torch.empty_like(position)
        for part in batch.parts:
            if part.rows is None:
                drawn = _draw_part(part, grouped, position)
            else:
                drawn.index_copy_(0, part.rows, _draw_part(part, grouped.rows(part.rows), position[part.rows]))
        if batch.penalties is not None:
            batch.penalties.record_(drawn)
        return drawn, is_finite

    def _pack(self, slots: list[int]) -> _Batch:
        specs = [self._states[slot].spec for slot in slots]
        penalised = [(row, slots[row], spec) for row, spec in enumerate(specs) if spec.needs_penalties]
        return _Batch(
            slots=list(slots),
            has_greedy=any(_is_greedy(spec) for spec in specs),
            parts=self._pack_parts(specs),
            penalties=Penalties(penalised, self._counts, self._device) if penalised else None,
            edits=[*self._pack_choices(specs), *self._pack_masks(slots)],
        )

    def _pack_choices(self, specs: list[SamplingSpec]) -> list[TokenBiases | AllowedTokens]:
        biased = [(row, spec.logit_bias) for row, spec in enumerate(specs) if spec.logit_bias]
        restricted = [(row, spec.allowed_token_ids) for row, spec in enumerate(specs) if spec.allowed_token_ids]
        edits: list[TokenBiases | AllowedTokens] = []
        if biased:
            edits.append(TokenBiases(biased, self._vocab_size, self._device))
        if restricted:
            edits.append(AllowedTokens(restricted, self._vocab_size, self._device))
        return edits

    def _pack_masks(self, slots: list[int]) -> list[TokenMasks]:
        both = (self._bad_words(slots), self._early_stops(slots))
        return [TokenMasks(entries, self._device) for entries in both if entries]

    def _pack_parts(self, specs: list[SamplingSpec]) -> list[_Part]:
        filtered: list[int] = []
        unfiltered: list[int] = []
        for row, spec in enumerate(specs):
            if not _is_greedy(spec):
                (filtered if spec.top_p < 1 or self._has_top_k(spec) else unfiltered).append(row)
        parts = []
        for rows, is_filtered in ((filtered, True), (unfiltered, False)):
            if rows:
                index = None if len(rows) == len(specs) else torch.tensor(rows, device=self._device)
                parts.append(self._pack_part(index, [specs[row] for row in rows], is_filtered))
        return parts

    def _pack_part(self, rows: Tensor | None, specs: list[SamplingSpec], is_filtered: bool) -> _Part:
        device = self._device
        temperature = log_min_p = filters = None
        if any(spec.temperature != 1.0 for spec in specs):
            temperature = torch.tensor([spec.temperature for spec in specs], device=device)
        if is_filtered or any(spec.min_p > 0 for spec in specs):
            log_min_p = torch.tensor([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in specs], device=device)
        if is_filtered:
            assert log_min_p is not None
            top_k = [spec.top_k if self._has_top_k(spec) else self._vocab_size for spec in specs]
            filters = Filters(
                top_k=torch.tensor(top_k, device=device),
                top_p=torch.tensor([spec.top_p for spec in specs], dtype=torch.float64, device=device),
                log_min_p=log_min_p,
                needs_mass=any(spec.top_p < 1 and not self._has_top_k(spec) for spec in specs),
            )
        seeds = torch.tensor([spec.seed for spec in specs], dtype=torch.int64, device=device)
        return _Part(rows, seeds, temperature, log_min_p, filters)

    def _has_top_k(self, spec: SamplingSpec) -> bool:
        return 0 < spec.top_k < self._vocab_size

    def _bad_words(self, slots: list[int]) -> list[MaskEntry]:
        return [
            MaskEntry(row, slot, word[-1], prefix=word[:-1])
            for row, slot in enumerate(slots)
            for word in self._states[slot].spec.bad_words
            if word and 0 <= min(word) <= max(word) < self._vocab_size
        ]

    def _early_stops(self, slots: list[int]) -> list[MaskEntry]:
        entries = []
        for row, slot in enumerate(slots):
            state = self._states[slot]
            if state.spec.min_new_tokens > 0:
                until = state.num_prompt_tokens + state.spec.min_new_tokens
                stops = {token_id for token_id in state.spec.stop_token_ids if 0 <= token_id < self._vocab_size}
                entries += [MaskEntry(row, slot, token_id, until=until) for token_id in sorted(stops)]
        return entries


def _is_greedy(spec: SamplingSpec) -> bool:
    return spec.temperature < MIN_TEMPERATURE


def _draw_part(part: _Part, logits: GroupedLogits, positions: Tensor) -> Tensor:
    """Token ids of the part's rows; `logits` is overwritten."""
    if part.temperature is not None:
        logits.divide_(part.temperature)
    keys = row_keys(part.seeds, positions)
    if part.filters is not None:
        return draw_filtered(logits, keys, part.filters)
    return logits.draw(keys, None if part.log_min_p is None else logits.row_max + part.log_min_p)
