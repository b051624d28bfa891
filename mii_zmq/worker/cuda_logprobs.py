# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities on a GPU: of drawn tokens from the logits that were sampled, of prompts by more runs of the head.

Runs eagerly behind the step's graphs, on the same stream and for those rows only that ask, so that steps without such
rows launch nothing more. A prompt chunk's tokens go through the head as many at a time as its buffers hold. Results
come to the host by asynchronous copies; they can be read once the step's event has passed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mii_zmq.worker.cuda_batch import NUM_SAMPLES, PackedLayout, ScoredChunk, decode_buckets, row_bucket
from mii_zmq.worker.models.cuda_buffers import DeviceState
from mii_zmq.worker.models.cuda_decoder import CudaDecoder
from mii_zmq.worker.plan import TokenLogprobs
from mii_zmq.worker.token_logprobs import LogprobSlots, measure, unpack


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Of drawn tokens, on their way to the host."""

    packed: Tensor
    slots: list[int]
    widths: list[int]

    def read(self) -> dict[int, TokenLogprobs]:
        """By slot."""
        return dict(zip(self.slots, unpack(self.packed.numpy(), self.widths), strict=True))


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Of prompt tokens, on their way to the host."""

    packed: Tensor | None
    """None: no token of the chunks has a known successor."""
    chunks: list[ScoredChunk]
    widths: list[int]

    def read(self) -> dict[int, list[TokenLogprobs]]:
        """By slot."""
        scores: dict[int, list[TokenLogprobs]] = {}
        at = 0
        for chunk, width in zip(self.chunks, self.widths, strict=True):
            scores[chunk.slot] = []
            if self.packed is not None and chunk.count:
                scores[chunk.slot] = unpack(self.packed.numpy()[at : at + chunk.count], [width] * chunk.count)
            at += chunk.count
        return scores


class CudaLogprobs:
    """Queues measurements on the current stream."""

    def __init__(self, decoder: CudaDecoder, state: DeviceState, layout: PackedLayout) -> None:
        self.slots = LogprobSlots()
        self._decoder, self._state, self._layout = decoder, state, layout
        self._rows_per_head = min(layout.max_rows, layout.token_budget)
        self._buckets = decode_buckets(self._rows_per_head)

    def of_drawn(self, sample_slots: list[int], drawn: Tensor) -> PendingLogprobs | None:
        """Of the tokens `drawn` from the decoder's last logits, for those of the slots that want them."""
        wanted = self.slots.rows(sample_slots)
        if not wanted:
            return None
        rows = self._upload(np.array(list(wanted), dtype=np.int64))
        widths = list(wanted.values())
        packed = measure(self._decoder.last_logits[rows], drawn[rows], max(widths))
        return PendingLogprobs(_to_host(packed), [sample_slots[row] for row in wanted], widths)

    def of_prompts(self, chunks: list[ScoredChunk]) -> PendingScores:
        """Of the tokens behind those of the chunks. Call between trunk and head: the head's inputs are put back."""
        widths = [self.slots.prompt_width(chunk.slot) for chunk in chunks]
        tokens = np.concatenate([np.arange(chunk.count) + chunk.first_token for chunk in chunks])
        if not len(tokens):
            return PendingScores(None, chunks, widths)
        stride = self._state.token_ids.stride(0)
        following = np.concatenate([np.arange(chunk.count) + chunk.slot * stride + chunk.start + 1 for chunk in chunks])
        packed, layout = self._state.packed, self._layout
        count = packed[NUM_SAMPLES : NUM_SAMPLES + 1]
        listed = packed[layout.sample_tokens : layout.sample_tokens + layout.max_rows]
        saved = count.clone(), listed.clone()
        histories = self._state.token_ids.view(-1)
        parts = []
        for begin in range(0, len(tokens), self._rows_per_head):
            some = slice(begin, begin + self._rows_per_head)
            indices = self._upload(np.stack([tokens[some], following[some]]).astype(np.int64))
            num_rows = indices.shape[1]
            listed[:num_rows].copy_(indices[0])
            count.fill_(num_rows)
            # Padded, so that the head runs in the shapes that it has been compiled for.
            logits = self._decoder.head(row_bucket(num_rows, self._buckets))[:num_rows]
            parts.append(measure(logits, histories[indices[1]], max(widths)))
        count.copy_(saved[0])
        listed.copy_(saved[1])
        return PendingScores(_to_host(torch.cat(parts)), chunks, widths)

    def _upload(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).pin_memory().to(self._state.packed.device, non_blocking=True)


def _to_host(packed: Tensor) -> Tensor:
    host = torch.zeros(packed.shape, dtype=packed.dtype, pin_memory=True)
    return host.copy_(packed, non_blocking=True)
