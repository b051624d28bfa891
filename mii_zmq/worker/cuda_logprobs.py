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

from mii_zmq.worker.cuda_batch import ScoredChunk
from mii_zmq.worker.cuda_listed_tokens import ListedTokens, to_host, upload
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

    def __init__(self, decoder: CudaDecoder, state: DeviceState, listed: ListedTokens) -> None:
        self.slots = LogprobSlots()
        self._decoder, self._state, self._listed = decoder, state, listed

    def of_drawn(self, sample_slots: list[int], drawn: Tensor) -> PendingLogprobs | None:
        """Of the tokens `drawn` from the decoder's last logits, for those of the slots that want them."""
        wanted = self.slots.rows(sample_slots)
        if not wanted:
            return None
        rows = upload(np.array(list(wanted), dtype=np.int64), drawn.device)
        widths = list(wanted.values())
        packed = measure(self._decoder.last_logits[rows], drawn[rows], max(widths))
        return PendingLogprobs(to_host(packed), [sample_slots[row] for row in wanted], widths)

    def of_prompts(self, chunks: list[ScoredChunk]) -> PendingScores:
        """Of the tokens behind those of the chunks. Call between trunk and head: the head's inputs are put back."""
        widths = [self.slots.prompt_width(chunk.slot) for chunk in chunks]
        tokens = np.concatenate([np.arange(chunk.count) + chunk.first_token for chunk in chunks])
        if not len(tokens):
            return PendingScores(None, chunks, widths)
        stride = self._state.token_ids.stride(0)
        following = np.concatenate([np.arange(chunk.count) + chunk.slot * stride + chunk.start + 1 for chunk in chunks])
        successors = self._state.token_ids.view(-1)[upload(following.astype(np.int64), self._state.packed.device)]
        parts = [
            measure(logits, successors[some], max(widths))
            for some, logits in self._listed.run(tokens, self._decoder.head)
        ]
        return PendingScores(to_host(torch.cat(parts)), chunks, widths)
