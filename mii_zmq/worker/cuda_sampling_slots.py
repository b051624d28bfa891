# SPDX-License-Identifier: Apache-2.0
"""The slots' sampling parameters on a GPU: one packed record per slot, and its list of masked tokens.

Changed on the host when a sequence is installed, brought to the device by `upload`, read there by the sampling kernels
(`kernels.triton.sampling` owns the record's layout). Also says which kernels a batch needs. Launches no kernel of ours.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mii_zmq.kernels.triton import sampling
from mii_zmq.kernels.triton.penalties import BIAS_WORDS, MASK_WORDS
from mii_zmq.kernels.triton.sampling import RECORD_WORDS
from mii_zmq.worker.penalties import needs_counts
from mii_zmq.worker.plan import SamplingSpec
from mii_zmq.worker.sampler import MIN_TEMPERATURE

_ALWAYS = 2**31 - 1
"""A position that no sequence reaches."""
_RECORD = struct.Struct("<qffdiifffiqiiqqi4x")
"""The record's fields in the order of `sampling.WORD_*`."""


@dataclass(frozen=True, slots=True)
class SamplingVariant:
    """The kernels that a batch needs; more than it needs is slower, never wrong."""

    is_sampled: bool = False
    """A row is not greedy."""
    is_filtered: bool = False
    """A row that is not greedy has top-k, top-p or min-p."""
    is_edited: bool = False
    """A row has penalties, biases, allowed tokens, a grammar, bad words or a minimum length."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """`token_id` may not be drawn below position `until` while the history ends with `prefix`."""

    token_id: int
    until: int
    prefix: tuple[int, ...]


class SamplingSlots:
    """What every slot's sequence asks of the sampler."""

    def __init__(self, max_sequences: int, vocab_size: int, device: torch.device) -> None:
        self.records = torch.zeros(max_sequences, RECORD_WORDS, dtype=torch.int32, device=device)
        self._vocab_size = vocab_size
        self._device = device
        self._variants: dict[int, SamplingVariant] = {}
        self._lists: dict[int, list[Tensor]] = {}
        """What the slots' records point to."""
        self._pending: dict[int, tuple[SamplingSpec, int]] = {}
        self._max_sequences = max_sequences
        self._mask_words = -(-vocab_size // 32)
        self._masks_of_slots: Tensor | None = None
        """[max_sequences, words] int32: what the slots with a grammar may draw in their next row."""
        self._allowed: dict[int, np.ndarray] = {}
        """What such a slot's request allows, if not everything."""

    def install(self, slot: int, spec: SamplingSpec, num_prompt_tokens: int) -> None:
        """Replace what the slot held; the device learns of it in `upload`."""
        self.release([slot])
        self._pending[slot] = (spec, num_prompt_tokens)
        is_sampled = spec.temperature >= MIN_TEMPERATURE
        self._variants[slot] = SamplingVariant(
            is_sampled=is_sampled,
            is_filtered=is_sampled and (self._has_top_k(spec) or spec.top_p < 1 or spec.min_p > 0),
            is_edited=spec.needs_penalties
            or bool(spec.logit_bias or spec.allowed_token_ids or spec.is_masked)
            or bool(self._masks(spec, num_prompt_tokens)),
        )
        if spec.is_masked and spec.allowed_token_ids:
            self._allowed[slot] = _allowed_bits(spec.allowed_token_ids, self._vocab_size).numpy()

    def release(self, slots: list[int]) -> None:
        """Forget what `slots` held; slots that hold nothing are skipped."""
        for slot in slots:
            self._variants.pop(slot, None)
            self._lists.pop(slot, None)
            self._pending.pop(slot, None)
            self._allowed.pop(slot, None)

    def variant(self, slots: list[int]) -> SamplingVariant:
        """What a batch of `slots` needs."""
        variants = {self._variants[slot] for slot in slots}
        return SamplingVariant(
            any(variant.is_sampled for variant in variants),
            any(variant.is_filtered for variant in variants),
            any(variant.is_edited for variant in variants),
        )

    def upload(self) -> None:
        """Bring what was installed since the last call to the device: asynchronous copies from pinned memory."""
        if not self._pending:
            return
        packed = b"".join(self._pack(slot, *settings) for slot, settings in self._pending.items())
        records = torch.frombuffer(bytearray(packed), dtype=torch.int32).view(-1, RECORD_WORDS)
        index = torch.tensor(list(self._pending), dtype=torch.int64)
        self.records.index_copy_(0, self._to_device(index), self._to_device(records))
        self._pending.clear()

    def set_masks(self, masks: Mapping[int, bytes]) -> None:
        """What rows of slots with a grammar may draw (`StepPlan.masks`), from the next launch on: one asynchronous copy
        from pinned memory, and no kernel of a graph's."""
        packed = bytearray().join(masks.values())
        rows = np.frombuffer(packed, dtype=np.int32).reshape(len(masks), self._mask_words)
        for row, slot in zip(rows, masks, strict=True):
            if slot in self._allowed:
                row &= self._allowed[slot]
        index = torch.tensor(list(masks), dtype=torch.int64)
        self._slot_masks().index_copy_(0, self._to_device(index), self._to_device(torch.from_numpy(rows)))

    def _slot_masks(self) -> Tensor:
        if self._masks_of_slots is None:
            shape = (self._max_sequences, self._mask_words)
            self._masks_of_slots = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._masks_of_slots

    def _pack(self, slot: int, spec: SamplingSpec, num_prompt_tokens: int) -> bytes:
        masks = self._masks(spec, num_prompt_tokens)
        biases = [(token_id, bias) for token_id, bias in spec.logit_bias if 0 <= token_id < self._vocab_size]
        self._lists[slot] = []
        has_top_k = self._has_top_k(spec)
        is_drawn = spec.temperature >= MIN_TEMPERATURE
        flags = (
            (sampling.FLAG_DRAWN, is_drawn),
            (sampling.FLAG_TOP_K, has_top_k),
            (sampling.FLAG_TOP_P, spec.top_p < 1),
            (sampling.FLAG_MIN_P, spec.min_p > 0),
            (sampling.FLAG_PENALISED, spec.needs_penalties),
            (sampling.FLAG_COUNTED, needs_counts(spec)),
            (sampling.FLAG_RESTRICTED, bool(spec.allowed_token_ids or spec.is_masked)),
        )
        return _RECORD.pack(
            spec.seed,
            spec.temperature if is_drawn else 1.0,
            math.log(spec.min_p) if spec.min_p > 0 else -math.inf,
            spec.top_p,
            spec.top_k if has_top_k else self._vocab_size,
            sum(flag.value for flag, is_set in flags if is_set),
            spec.repetition_penalty,
            spec.presence_penalty,
            spec.frequency_penalty,
            num_prompt_tokens,
            self._keep(slot, torch.tensor(_mask_words(masks), dtype=torch.int32)),
            len(masks),
            max((len(mask.prefix) for mask in masks), default=0),
            self._slot_masks()[slot].data_ptr()
            if spec.is_masked
            else self._keep(slot, _allowed_bits(spec.allowed_token_ids, self._vocab_size)),
            self._keep(slot, _bias_words(biases)),
            len(biases),
        )

    def _keep(self, slot: int, words: Tensor) -> int:
        """Address on the device of a list that lives as long as the slot's sequence; 0 for an empty one."""
        if not len(words):
            return 0
        words = self._to_device(words)
        self._lists[slot].append(words)
        return words.data_ptr()

    def _masks(self, spec: SamplingSpec, num_prompt_tokens: int) -> list[_Mask]:
        """What may never, or not yet, be drawn; ids outside the vocabulary can never be."""
        masks = [
            _Mask(word[-1], _ALWAYS, word[:-1])
            for word in spec.bad_words
            if word and 0 <= min(word) <= max(word) < self._vocab_size
        ]
        if spec.min_new_tokens > 0:
            until = min(num_prompt_tokens + spec.min_new_tokens, _ALWAYS)
            stops = {token_id for token_id in spec.stop_token_ids if 0 <= token_id < self._vocab_size}
            masks += [_Mask(token_id, until, ()) for token_id in sorted(stops)]
        return masks

    def _has_top_k(self, spec: SamplingSpec) -> bool:
        return 0 < spec.top_k < self._vocab_size

    def _to_device(self, tensor: Tensor) -> Tensor:
        # The caching allocator of pinned memory reuses a block only after the copy from it has run.
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def _bias_words(biases: list[tuple[int, float]]) -> Tensor:
    """As `penalties.mask_kernel` reads them."""
    words = torch.empty(len(biases), BIAS_WORDS, dtype=torch.int32)
    words[:, 0] = torch.tensor([token_id for token_id, _ in biases], dtype=torch.int32)
    words[:, 1] = torch.tensor([bias for _, bias in biases], dtype=torch.float32).view(torch.int32)
    return words.flatten()


def _allowed_bits(token_ids: tuple[int, ...], vocab_size: int) -> Tensor:
    """One bit per token, as `penalties.edit_kernel` reads them; nothing where all are allowed."""
    if not token_ids:
        return torch.empty(0, dtype=torch.int32)
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[[token_id for token_id in token_ids if 0 <= token_id < vocab_size]] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


def _mask_words(masks: list[_Mask]) -> list[int]:
    """A slot's list as `penalties.mask_kernel` reads it: the entries, then all prefixes."""
    words: list[int] = []
    prefixes: list[int] = []
    begin = MASK_WORDS * len(masks)
    for mask in masks:
        words += [mask.token_id, mask.until, len(mask.prefix), begin + len(prefixes)]
        prefixes += mask.prefix
    return words + prefixes
