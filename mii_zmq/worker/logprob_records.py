# SPDX-License-Identifier: Apache-2.0
"""The engine's log-probabilities -> the records that go to the client: numbers joined with the texts of tokens.

Pure text work on what the engine gave out for one sequence; the form of a record is `mii_zmq.logprobs`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mii_zmq.errors import InvalidRequest
from mii_zmq.logprobs import encode_record
from mii_zmq.tokenizer import HfTokenizer, TextTokenizer
from mii_zmq.worker.engine_channel import WireLogprobs

MAX_PROMPT_ENTRIES = 2**17
"""Tokens that one request may ask about with its prompt: prompt tokens, and the most probable ones beside each."""
MAX_BYTES = 8 * 2**20
"""Of one request's records in one message."""


def check_prompt_entries(prompt_length: int, num_top: int) -> None:
    """Raises InvalidRequest when a prompt's log-probabilities would be too many."""
    if prompt_length * (1 + num_top) > MAX_PROMPT_ENTRIES:
        raise InvalidRequest(
            f"prompt_logprobs is {num_top} for {prompt_length} prompt tokens; (prompt_logprobs + 1) * prompt tokens "
            f"may be {MAX_PROMPT_ENTRIES} at most",
            param="prompt_logprobs",
        )


class RecordWriter:
    """Writes the records of one sequence; keeps those that have not been taken yet."""

    def __init__(self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._texts: dict[int, bytes] = {}
        self._records: list[bytes] = []
        self._num_bytes = 0

    def add_prompt(self, scores: Sequence[WireLogprobs]) -> None:
        """The whole prompt: `scores` are those of its tokens 1, 2, ...

        Raises:
            InvalidRequest: what waits here has become too much for one message.
        """
        first, *others = self._prompt_token_ids
        self._add(encode_record(True, [(first, 0, 0.0, self._text(first))]))
        for token_id, score in zip(others, scores, strict=True):
            self._add(encode_record(True, list(self._entries(token_id, score))))

    def add_output(self, token_ids: Sequence[int], logprobs: Sequence[WireLogprobs]) -> None:
        """Output tokens, one of `logprobs` for each. Raises as `add_prompt`."""
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            self._add(encode_record(False, list(self._entries(token_id, entry))))

    def take(self) -> bytes:
        """The records added since the last call."""
        records = b"".join(self._records)
        self._records.clear()
        self._num_bytes = 0
        return records

    def _add(self, record: bytes) -> None:
        self._records.append(record)
        self._num_bytes += len(record)
        if self._num_bytes > MAX_BYTES:
            raise InvalidRequest(
                f"the log-probabilities of this request take more than {MAX_BYTES} bytes; stream, or ask for fewer",
                param="logprobs",
            )

    def _entries(self, token_id: int, found: WireLogprobs) -> Iterator[tuple[int, int, float, bytes]]:
        logprob, rank, top_ids, top_logprobs = found
        yield token_id, rank, logprob, self._text(token_id)
        for place, (top_id, top_logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
            yield top_id, place, top_logprob, self._text(top_id)

    def _text(self, token_id: int) -> bytes:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = token_text(self._tokenizer, token_id)
        return text


def token_text(tokenizer: TextTokenizer, token_id: int) -> bytes:
    """What a token inside a text adds to it, also where that is no whole character."""
    if tokenizer.token_bytes is not None:
        return tokenizer.token_bytes(token_id)
    text = tokenizer.decode([token_id])
    if isinstance(tokenizer, HfTokenizer) and (tokenizer.token_text(token_id) or "").startswith("▁"):
        text = " " + text.removeprefix(" ")
    return text.encode()
