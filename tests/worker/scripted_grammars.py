# SPDX-License-Identifier: Apache-2.0
"""A grammar service without a process, for tests of engines: masks come as many polls late as the test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mii_zmq.errors import InternalError
from mii_zmq.worker.core import MaskEvent
from mii_zmq.worker.fake_model import EOS_TOKEN_ID, VOCAB_SIZE, FakeModel, extend_hash
from mii_zmq.worker.plan import SequenceRequest

NUM_BYTES = 4 * -(-VOCAB_SIZE // 32)


def to_mask(token_ids: set[int]) -> bytes:
    return sum(1 << token_id for token_id in token_ids).to_bytes(NUM_BYTES, "little")


def mask_behind(request: SequenceRequest, num_output_tokens: int) -> bytes | None:
    """The grammar's text is what the output has to be, in small or capital letters; then nothing, or end-of-sequence if
    that is a stop id."""
    assert request.grammar is not None
    text = request.grammar[1]
    if num_output_tokens < len(text):
        letter = text[num_output_tokens]
        return to_mask({ord(letter.lower()), ord(letter.upper())})
    return to_mask({EOS_TOKEN_ID}) if EOS_TOKEN_ID in request.sampling.stop_token_ids else None


def constrained(request: SequenceRequest, text: str) -> SequenceRequest:
    """The same request with a grammar."""
    return replace(request, grammar=("choice", text), sampling=replace(request.sampling, is_masked=True))


def expected_output(model: FakeModel, request: SequenceRequest) -> tuple[list[int], str]:
    """New tokens and finish reason of a request with a grammar, whatever the engine does."""
    hash_so_far, outputs = 0, list(request.resumed_token_ids)
    for token_id in [*request.prompt_token_ids, *outputs]:
        hash_so_far = extend_hash(hash_so_far, token_id)
    reason = "length"
    while len(outputs) < request.max_new_tokens:
        mask = mask_behind(request, len(outputs))
        if mask is None:
            reason = "stop"
            break
        token_id = model.next_token(hash_so_far, len(outputs), request.sampling, mask)
        outputs.append(token_id)
        hash_so_far = extend_hash(hash_so_far, token_id)
        if token_id in request.sampling.stop_token_ids:
            reason = "stop"
            break
    return outputs[len(request.resumed_token_ids) :], reason


@dataclass
class _Followed:
    request: SequenceRequest
    token_ids: list[int]


class ScriptedGrammars:
    """Implements `core.GrammarService`."""

    def __init__(
        self,
        delay: Callable[[int, int], int] = lambda seq_id, number: 0,
        mask_behind: Callable[[SequenceRequest, int], bytes | None] = mask_behind,
    ) -> None:
        """`delay`: polls that the mask of a sequence behind so many output tokens takes; below 0: it never comes, an
        error does. Masks may come twice, and when nobody wants them any more."""
        self._mask_behind = mask_behind
        self.followed: dict[int, _Followed] = {}
        self.num_opened = 0
        self.is_shut_down = False
        self._delay = delay
        self._polls = 0
        self._due: list[tuple[int, MaskEvent]] = []

    def open(self, request: SequenceRequest) -> None:
        assert request.seq_id not in self.followed
        self.num_opened += 1
        self.followed[request.seq_id] = _Followed(request, list(request.resumed_token_ids))
        self._answer(request.seq_id)

    def advance(self, seq_id: int, token_id: int) -> None:
        followed = self.followed.get(seq_id)
        if followed is None:
            return  # it has failed
        mask = self._mask_behind(followed.request, len(followed.token_ids))
        assert mask is not None
        assert mask[token_id // 8] >> (token_id % 8) & 1, f"sequence {seq_id} drew {token_id} against its mask"
        followed.token_ids.append(token_id)
        self._answer(seq_id)

    def close(self, seq_id: int) -> None:
        self.followed.pop(seq_id, None)

    def poll(self) -> list[MaskEvent]:
        self._polls += 1
        events = [event for due, event in self._due if due <= self._polls]
        self._due = [entry for entry in self._due if entry[0] > self._polls]
        return events

    def poll_set(self) -> list[tuple[int, int]]:
        return []

    def shut_down(self) -> None:
        self.is_shut_down = True

    def _answer(self, seq_id: int) -> None:
        followed = self.followed[seq_id]
        number = len(followed.token_ids)
        delay = self._delay(seq_id, number)
        event = MaskEvent(seq_id, number, self._mask_behind(followed.request, number))
        if delay < 0:
            event = MaskEvent(seq_id, 0, None, InternalError("the grammar fails (made up by a test)"))
            del self.followed[seq_id]
        for late in (0, 5):
            self._due.append((self._polls + 1 + abs(delay) + late, event))
