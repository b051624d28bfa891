# SPDX-License-Identifier: Apache-2.0
"""The sampler on a GPU: what `Sampler` computes, as kernel launches that a CUDA graph can hold.

Owns the scratch memory of the kernels and, through `SamplingSlots`, the slots' parameters. What depends on the batch is
read from device memory: slots, positions, the number of rows, the histories. The host decides one thing only, which
kernels a batch needs at all (`SamplingVariant`); a captured graph belongs to a variant and a number of rows. Semantics,
order and noise are those of `sampler.Sampler`, which the tests hold it against.

Every call must be made with the same current stream, or streams that wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from mii_zmq.kernels.triton import argmax, penalties, sampling, topk_edge, topk_topp
from mii_zmq.kernels.triton.sampling import RECORD_WORDS
from mii_zmq.worker.cuda_sampling_slots import SamplingSlots, SamplingVariant
from mii_zmq.worker.models.cuda_gemm import launch_options
from mii_zmq.worker.plan import SamplingSpec


@dataclass(frozen=True, slots=True)
class SamplerTuning:
    """Sizes of the kernels' programs; they change no result."""

    argmax_tile: int = 4096
    """Tokens per program where every row is greedy."""
    draw_tile: int = 2048
    """Tokens per program of the other passes over all tokens."""
    draw_warps: int = 4
    filter_tile: int = 4096
    """Tokens per program of the passes for top-k, top-p and min-p."""
    filter_warps: int = 4
    collect_warps: int = 4
    num_candidates: int = 16384
    """Length of a row's list of candidates for the edge of its kept set."""
    num_held: int = 4096
    """Candidates that one program searches in registers."""
    chunk: int = 1024
    """Candidates handled at a time where there are more."""
    threshold_warps: int = 8
    history_tile: int = 1024
    history_programs: int = 8
    mask_tile: int = 128


@dataclass(frozen=True, slots=True)
class _Rows:
    """The device tensors that describe the rows of one call."""

    slots: Tensor
    positions: Tensor
    num_rows: Tensor
    token_ids: Tensor


class CudaSampler:
    """Draws tokens for the sequences installed in its slots."""

    def __init__(
        self,
        max_sequences: int,
        vocab_size: int,
        device: torch.device,
        max_rows: int | None = None,
        tuning: SamplerTuning | None = None,
        pdl: bool = False,
    ) -> None:
        """`max_rows`: rows of one call at most; as many as sequences if None. `pdl`: see `launch_options`."""
        self._max_sequences = max_sequences
        self._max_rows = max_rows or max_sequences
        self._vocab_size = vocab_size
        self._device = device
        self._tuning = tuning or SamplerTuning()
        self._pdl = pdl
        self._slots = SamplingSlots(max_sequences, vocab_size, device)
        self._scratch: dict[str, Tensor] = {}

    def install(self, slot: int, spec: SamplingSpec, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Start the sequence of `slot`, replacing what the slot held; the device learns of it in `prepare`.

        `token_ids` is the prompt and the output so far. Bad words and stop ids outside the vocabulary can never be
        drawn and are ignored.

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
        self._slots.install(slot, spec, num_prompt_tokens)

    def release(self, slots: list[int]) -> None:
        """Forget the sequences of `slots`; slots that hold none are skipped."""
        self._slots.release(slots)

    def prepare(self, slots: list[int]) -> SamplingVariant:
        """Bring the parameters of newly installed sequences to the device; what a batch of `slots` needs.

        To be called before every `sample` or replay, outside the graph. Nothing waits for the device.
        """
        self._slots.upload()
        return self._slots.variant(slots)

    def set_masks(self, masks: Mapping[int, bytes]) -> None:
        """By slot, what the next rows of sequences with a grammar may draw (`StepPlan.masks`); nothing waits for the
        device. To be called after the slots were installed, before the `sample` or replay that draws these rows."""
        self._slots.set_masks(masks)

    def reserve(self, variant: SamplingVariant) -> int:
        """Allocate the scratch memory of `variant`; the bytes of scratch memory that there are now.

        `sample` does it, too; a graph should be captured after it, or the memory would belong to the graph's pool.
        """
        rows, vocab_size, pivots = self._max_rows, self._vocab_size, topk_topp.NUM_PIVOTS
        argmax_tiles = triton.cdiv(vocab_size, self._tuning.argmax_tile)
        draw_tiles = triton.cdiv(vocab_size, self._tuning.draw_tile)
        filter_tiles = triton.cdiv(vocab_size, self._tuning.filter_tile)
        wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "best": (torch.float32, (rows, argmax_tiles)),
            "best_id": (torch.int32, (rows, argmax_tiles)),
            "score": (torch.int32, (rows, draw_tiles)),
            "id": (torch.int32, (rows, draw_tiles)),
            "largest": (torch.int32, (rows, draw_tiles)),
            "threshold": (torch.float32, (rows,)),
            "tie_limit": (torch.int32, (rows,)),
        }
        if variant.is_filtered:
            wanted["row_max"] = (torch.int32, (rows, filter_tiles))
            wanted["count"] = (torch.int32, (rows,))
            wanted["pivot"] = (torch.float32, (rows, 2, pivots))
            wanted["sum"] = (torch.float64, (rows, 2, filter_tiles, pivots))
            wanted["candidate"] = (torch.float32, (rows, self._tuning.num_candidates))
            wanted["candidate_id"] = (torch.int32, (rows, self._tuning.num_candidates))
        if variant.is_edited:
            wanted["edited"] = (torch.float32, (rows, vocab_size))
        for name, (dtype, shape) in wanted.items():
            if name not in self._scratch:
                self._scratch[name] = torch.empty(shape, dtype=dtype, device=self._device)
        return sum(tensor.nbytes for tensor in self._scratch.values())

    def sample(
        self,
        variant: SamplingVariant,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        num_rows: Tensor,
        token_ids: Tensor,
        out_ids: Tensor,
        out_finite: Tensor,
        *,
        record: bool = True,
        out_log_probs: Tensor | None = None,
    ) -> None:
        """Draw one token per row: kernel launches only, with grids that depend on shapes alone.

        Args:
            variant: at least what `prepare` gave for the batch.
            logits: [R, V] of any float dtype up to float32, rows contiguous; left as it is.
            slots, positions: [R] int32; the slots, all different and installed, and per row the number of tokens
                before the one drawn.
            num_rows: [1] int32; rows from it on are neither read nor written.
            token_ids: [max_sequences, max_model_len] int32, one row per slot; the columns below a row's position are
                its history.
            out_ids, out_finite: [R] integers; the drawn ids, all within the vocabulary, and 0 where the row's id
                means nothing, since its logits held NaN or +inf, or no token had a finite logit (all masked).
            record: write the drawn id into `token_ids` at the row's position.
            out_log_probs: [R] float32; log-probability of the drawn token under the softmax of `logits`.
        """
        self.reserve(variant)
        rows = _Rows(slots, positions, num_rows, token_ids)
        source = self._edit(logits, rows) if variant.is_edited else logits
        if variant.is_filtered:
            self._find_thresholds(source, rows)
        if variant.is_sampled:
            self._draw(variant, source, rows, out_ids, out_finite, record)
        else:
            self._take_largest(source, rows, out_ids, out_finite, record)
        if out_log_probs is not None:
            self._log_probs(logits, num_rows, out_ids, out_log_probs)

    def _edit(self, logits: Tensor, rows: _Rows) -> Tensor:
        """The logits behind penalties and masks, [R, V] float32."""
        tuning, vocab_size, history_stride = self._tuning, self._vocab_size, rows.token_ids.stride(0)
        edited = self._scratch["edited"]
        notes = edited.view(torch.int32)
        count = rows.slots.shape[0]
        grid = (count, triton.cdiv(vocab_size, tuning.draw_tile))
        common = (self._slots.records, rows.slots)
        history = (*common, rows.positions, rows.num_rows, rows.token_ids)
        options = {"WORDS": RECORD_WORDS, "enable_fp_fusion": False}
        penalties.clear_kernel[grid](*common, rows.num_rows, notes, vocab_size, TILE=tuning.draw_tile, **options)
        penalties.count_kernel[(count, tuning.history_programs)](
            *history, notes, history_stride, vocab_size, TILE=tuning.history_tile, **options
        )
        penalties.edit_kernel[grid](
            logits, *common, rows.num_rows, notes, edited, logits.stride(0), vocab_size,
            TILE=tuning.draw_tile, num_warps=tuning.draw_warps, **options,
        )  # fmt: skip
        penalties.mask_kernel[(count,)](
            *history, edited, history_stride, vocab_size, TILE=tuning.mask_tile, **options
        )  # fmt: skip
        return edited

    def _find_thresholds(self, logits: Tensor, rows: _Rows) -> None:
        tuning, scratch, shape = self._tuning, self._scratch, (logits.stride(0), self._vocab_size)
        count = rows.slots.shape[0]
        num_tiles = triton.cdiv(self._vocab_size, tuning.filter_tile)
        grid = (count, num_tiles)
        common = (logits, self._slots.records, rows.slots, rows.num_rows, scratch["row_max"])
        sums = (scratch["pivot"], scratch["sum"])
        lists = (*sums, scratch["count"], scratch["candidate"], scratch["candidate_id"])
        options = {"WORDS": RECORD_WORDS, "enable_fp_fusion": False}
        tiles = {"NUM_TILES": num_tiles, "PAD": triton.next_power_of_2(num_tiles), **options}
        topk_topp.row_max_kernel[grid](
            *common, scratch["count"], *shape, TILE=tuning.filter_tile, num_warps=tuning.filter_warps, **options
        )
        for index in (0, 1):
            topk_topp.pivot_sums_kernel[grid](
                *common, *sums, *shape, PASS=index, TILE=tuning.filter_tile, num_warps=tuning.filter_warps, **tiles
            )
        topk_topp.collect_kernel[grid](
            *common, *lists, *shape,
            CAPACITY=tuning.num_candidates, TILE=tuning.filter_tile, num_warps=tuning.collect_warps, **tiles,
        )  # fmt: skip
        topk_edge.threshold_kernel[(count,)](
            *common, *lists, scratch["threshold"], scratch["tie_limit"], *shape,
            CAPACITY=tuning.num_candidates, CHUNK=tuning.chunk, HELD=tuning.num_held,
            num_warps=tuning.threshold_warps, **tiles,
        )  # fmt: skip

    def _take_largest(self, logits: Tensor, rows: _Rows, out_ids: Tensor, out_finite: Tensor, record: bool) -> None:
        tile, vocab_size, pdl = self._tuning.argmax_tile, self._vocab_size, self._pdl
        best, best_id = self._scratch["best"], self._scratch["best_id"]
        count, num_tiles = rows.slots.shape[0], best.shape[1]
        argmax.argmax_tiles_kernel[(count, num_tiles)](
            logits, best, best_id, logits.stride(0),
            V=vocab_size, TILE=tile, NUM_TILES=num_tiles, PDL=pdl, **launch_options(pdl),
        )  # fmt: skip
        argmax.argmax_rows_kernel[(count,)](
            best, best_id, rows.num_rows, rows.slots, rows.positions, rows.token_ids, out_ids, out_finite,
            rows.token_ids.stride(0), vocab_size,
            NUM_TILES=num_tiles, PAD=triton.next_power_of_2(num_tiles), RECORD=record, PDL=pdl, num_warps=1,
            **launch_options(pdl),
        )  # fmt: skip

    def _draw(
        self, variant: SamplingVariant, logits: Tensor, rows: _Rows, out_ids: Tensor, out_finite: Tensor, record: bool
    ) -> None:
        tuning, scratch, vocab_size = self._tuning, self._scratch, self._vocab_size
        count = rows.slots.shape[0]
        num_tiles = triton.cdiv(vocab_size, tuning.draw_tile)
        described = (rows.slots, rows.positions, rows.num_rows)
        partial = (scratch["score"], scratch["id"], scratch["largest"])
        sampling.draw_tiles_kernel[(count, num_tiles)](
            logits, self._slots.records, *described, scratch["threshold"], scratch["tie_limit"], *partial,
            logits.stride(0), vocab_size,
            FILTERED=variant.is_filtered, WORDS=RECORD_WORDS, TILE=tuning.draw_tile, num_warps=tuning.draw_warps,
            enable_fp_fusion=False,
        )  # fmt: skip
        sampling.draw_rows_kernel[(count,)](
            *partial, *described, rows.token_ids, out_ids, out_finite, rows.token_ids.stride(0), vocab_size,
            NUM_TILES=num_tiles, PAD=triton.next_power_of_2(num_tiles), RECORD=record, num_warps=1,
        )  # fmt: skip

    def _log_probs(self, logits: Tensor, num_rows: Tensor, token_ids: Tensor, out: Tensor) -> None:
        tuning, count = self._tuning, out.shape[0]
        num_tiles = triton.cdiv(self._vocab_size, tuning.draw_tile)
        # The draw is done with its partial results.
        partial = (self._scratch["score"].view(torch.float32), self._scratch["largest"].view(torch.float32))
        sampling.exp_sum_tiles_kernel[(count, num_tiles)](
            logits, num_rows, *partial, logits.stride(0), self._vocab_size,
            TILE=tuning.draw_tile, num_warps=tuning.draw_warps,
        )  # fmt: skip
        sampling.log_prob_rows_kernel[(count,)](
            logits, num_rows, *partial, token_ids, out, logits.stride(0),
            NUM_TILES=num_tiles, PAD=triton.next_power_of_2(num_tiles), num_warps=1,
        )  # fmt: skip
