# SPDX-License-Identifier: Apache-2.0
"""Token ids to text, a piece at a time: the incremental detokeniser and the stop-string matcher.

Both are exact and independent of how their input is cut up: the pieces joined are the same for one token per call and
for all tokens in one call. Neither knows requests, limits or finish reasons.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence

from mii_zmq.tokenizer import TextTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_TOKENS = 8
"""Without byte access, tokens whose text ends in U+FFFD wait at most this long for the rest of a character."""
TAIL_TOKENS = 6
"""Tokens of the prompt's end that decide how the first output token is spelt."""


class Detokenizer:
    """The text of a growing list of output tokens, never ending inside a character.

    The joined pieces are what `decode(prompt tail + output)` adds to `decode(prompt tail)`; so a word that continues
    the prompt keeps its leading space, which a decode of the output alone may strip.
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompt_tail_ids: Sequence[int] = (), skip_special_tokens: bool = False
    ) -> None:
        tail = list(prompt_tail_ids)[-TAIL_TOKENS:]
        self._way: _ByteJoiner | _Window
        if tokenizer.token_bytes is not None:
            self._way = _ByteJoiner(tokenizer, tail, skip_special_tokens)
        else:
            self._way = _Window(tokenizer, tail, skip_special_tokens)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with these tokens."""
        return self._way.push(token_ids)

    def flush(self) -> str:
        """At the end: what was held back, with U+FFFD for an unfinished character."""
        return self._way.flush()


class _ByteJoiner:
    """For tokenizers whose text is the joined bytes of their tokens: a table look-up and a UTF-8 decoder."""

    def __init__(self, tokenizer: TextTokenizer, tail: list[int], skip_special_tokens: bool) -> None:
        assert tokenizer.token_bytes is not None
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.all_special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_first_space and not self._join(tail)

    def push(self, token_ids: Iterable[int]) -> str:
        data = self._join(token_ids)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", True)

    def _join(self, token_ids: Iterable[int]) -> bytes:
        token_bytes, skipped = self._token_bytes, self._skipped
        return b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skipped])


class _Window:
    """For any other tokenizer: the difference that new tokens make to the decoded text of a short window.

    The window starts a few tokens before the first one whose text has not been given out, so that its spelling does
    not depend on being first.
    """

    def __init__(self, tokenizer: TextTokenizer, tail: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = tokenizer.all_special_ids if skip_special_tokens else frozenset()
        self._ids: deque[int] = deque(i for i in tail if i not in self._skipped)
        self._num_given = len(self._ids)
        self._given_text = self._decode()

    def push(self, token_ids: Iterable[int]) -> str:
        pieces = []
        for token_id in token_ids:
            if token_id not in self._skipped:
                self._ids.append(token_id)
                pieces.append(self._step(final=False))
        return "".join(pieces)

    def flush(self) -> str:
        return self._step(final=True) if len(self._ids) > self._num_given else ""

    def _step(self, final: bool) -> str:
        text = self._decode()
        is_held = text.endswith(REPLACEMENT) and len(self._ids) - self._num_given < MAX_HELD_TOKENS
        if is_held and not final:
            return ""
        piece = text[len(self._given_text) :]
        self._num_given = len(self._ids)
        if self._num_given > TAIL_TOKENS:
            while len(self._ids) > TAIL_TOKENS // 2:
                self._ids.popleft()
            self._num_given = len(self._ids)
            text = self._decode()
        self._given_text = text
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids)


class StopMatcher:
    """Cuts a stream of text before the first stop string, and never lets any part of one through.

    The stop string that is complete first counts; of several complete at the same character, the longest. Text that
    may still become a stop string is held back (`flush` gives it out at the end). An Aho-Corasick automaton: constant
    work per character, whatever the number and shape of the strings.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [0]
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)
        self._link()
        self._state = 0
        self._held = ""
        self.matched = False
        self.matched_stop: str | None = None
        """Which one was found."""

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._next[state].get(char)
            if following is None:
                following = self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = following
        self._match[state] = len(stop)

    def _link(self) -> None:
        """Failure links, breadth first: the longest proper suffix that is also the start of a stop string."""
        order = deque(self._next[0].values())
        while order:
            state = order.popleft()
            for char, following in self._next[state].items():
                order.append(following)
                self._fail[following] = self._advance(self._fail[state], char)
                self._match[following] = self._match[following] or self._match[self._fail[following]]

    def _advance(self, state: int, char: str) -> int:
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][char]

    def push(self, text: str) -> str:
        """The text that is certainly outside any stop string; `matched` tells whether one was found."""
        if self.matched:
            return ""
        state = self._state
        for index, char in enumerate(text):
            state = self._advance(state, char)
            if self._match[state]:
                self.matched = True
                whole, self._held = self._held + text[: index + 1], ""
                self.matched_stop = whole[-self._match[state] :]
                return whole[: -self._match[state]]
        self._state = state
        text = self._held + text
        cut = len(text) - self._depth[state]
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """At the end of the text: what was held back and did not become a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
