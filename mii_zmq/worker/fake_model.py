# SPDX-License-Identifier: Apache-2.0
"""The language model of the fake executor: the next token is a pure function of the tokens so far.

Byte-level (ids 0 to 255 are bytes, 256 is end-of-sequence), O(1) per token through a rolling hash. `generate` says
what any engine around this model must produce for a request, however it batches, splits, preempts or resumes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from mii_zmq.worker.plan import SamplingSpec, SequenceRequest, TokenLogprobs

EOS_TOKEN_ID = 256
VOCAB_SIZE = 257

FADING = 0.9
"""What is left of a token in the hidden state of the next one."""

ALPHABETS: dict[str, tuple[int, ...]] = {
    "printable": tuple(range(0x20, 0x7F)),
    "letters": tuple(range(0x61, 0x7B)),
    "digits": tuple(range(0x30, 0x3A)),
    "bytes": tuple(range(256)),
}
"""Sets of output tokens by name; all but 'bytes' make valid text."""

_MASK = 2**64 - 1


def extend_hash(value: int, token_id: int) -> int:
    """The hash of a token sequence, one token longer."""
    return ((value ^ (token_id + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Token ids 0 to 255 are bytes, 256 is end-of-sequence."""

    alphabet: tuple[int, ...] = ALPHABETS["printable"]
    """Output tokens other than end-of-sequence."""
    eos_after: int | None = None
    """End-of-sequence is drawn once this many output tokens exist."""
    eos_every: int | None = None
    """End-of-sequence is drawn with a chance of 1 in this many, decided by the tokens so far."""

    def next_token(
        self, hash_so_far: int, num_output_tokens: int, sampling: SamplingSpec, mask: bytes | None = None
    ) -> int:
        """Greedy whatever `sampling` says, but stop ids are masked before `min_new_tokens`; a sequence that ignores
        end-of-sequence (has no such stop id) never draws it, so that its text stays valid. With a mask (`StepPlan`) it
        is any of what that allows, ids of the alphabet before others."""
        value = (hash_so_far ^ (hash_so_far >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
        value ^= value >> 32
        if mask is not None:
            possible = [token_id for token_id in range(VOCAB_SIZE) if mask[token_id // 8] >> (token_id % 8) & 1]
            possible = [token_id for token_id in possible if token_id in self.alphabet] or possible
            return possible[value % len(possible)]
        alphabet = self.alphabet
        token_id = alphabet[value % len(alphabet)]
        stop_token_ids = sampling.stop_token_ids
        if stop_token_ids:
            if num_output_tokens < sampling.min_new_tokens:
                if token_id in stop_token_ids:
                    allowed = [item for item in alphabet if item not in stop_token_ids] or [0]
                    token_id = allowed[value % len(allowed)]
            elif EOS_TOKEN_ID in stop_token_ids and self._draws_eos(value, num_output_tokens):
                return EOS_TOKEN_ID
        return token_id

    def logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """A token is the most probable one wherever it stands; the others follow by their ids."""
        top_ids = [(token_id + index) % VOCAB_SIZE for index in range(num_top)]
        logprob = -(1 + token_id % 7) / 8
        return TokenLogprobs(logprob, 1, top_ids, [logprob - index for index in range(num_top)])

    def hidden_states(self, token_ids: Sequence[int], size: int) -> list[list[float]]:
        """One per token, each made of the token and of those before it, which count for less the further they are away:
        what ends alike is alike."""
        states: list[list[float]] = []
        state = [0.0] * size
        for token_id in token_ids:
            state = [FADING * value for value in state]
            state[token_id % size] += 1.0
            state[(7 * token_id + 3) % size] -= 0.5
            states.append(state)
        return states

    def pool(self, token_ids: Sequence[int], pooling: str, size: int) -> bytes:
        """The vector of a prompt, as `SequenceOutput.pooled` has it: what any engine around this model must produce."""
        return pooled_bytes(self.hidden_states(token_ids, size), pooling)

    def _draws_eos(self, value: int, num_output_tokens: int) -> bool:
        if self.eos_after is not None and num_output_tokens >= self.eos_after:
            return True
        return self.eos_every is not None and (value >> 20) % self.eos_every == 0

    def generate(self, request: SequenceRequest) -> list[int]:
        """The output tokens of a request, resumed ones excluded: what any engine around this model must produce."""
        hash_so_far, outputs = 0, list(request.resumed_token_ids)
        for token_id in [*request.prompt_token_ids, *outputs]:
            hash_so_far = extend_hash(hash_so_far, token_id)
        while len(outputs) < request.max_new_tokens:
            token_id = self.next_token(hash_so_far, len(outputs), request.sampling)
            outputs.append(token_id)
            hash_so_far = extend_hash(hash_so_far, token_id)
            if token_id in request.sampling.stop_token_ids and len(outputs) > request.sampling.min_new_tokens:
                break
        return outputs[len(request.resumed_token_ids) :]


def pooled_bytes(states: Sequence[Sequence[float]], pooling: str) -> bytes:
    """The last of the states, the first, or their mean; float32, little endian."""
    if pooling == "mean":
        values = [sum(column) / len(states) for column in zip(*states, strict=True)]
    else:
        values = list(states[-1] if pooling == "last" else states[0])
    return struct.pack(f"<{len(values)}f", *values)
