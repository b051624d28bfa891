# SPDX-License-Identifier: Apache-2.0
"""Which log-probability records belong to the message of an answer, and not to the reasoning before it. Pure.

Records and text arrive side by side, but text may be held back for stop strings and characters, so that the records'
own texts tell where the message begins: at the token that holds its first character. The end-of-sequence id counts as
the message's, as it does in chats. What comes out depends on text and records alone, not on how they were cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from mii_zmq.gateway.reasoning import OPENING, ReasoningSplitter
from mii_zmq.logprobs import Record


class MessageRecords:
    """One answer without tool calls."""

    def __init__(self) -> None:
        self._head = ""
        """The answer's text, until it shows whether it begins with reasoning."""
        self._held: list[Record] = []
        self._is_decided = False
        self._splitter: ReasoningSplitter | None = None
        """Reads the records' texts while they may be reasoning."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, text: str, records: Sequence[Record]) -> list[Record]:
        """Those that have become certain."""
        if self._is_decided:
            return self._of_message(records)
        self._head += text
        self._held += records
        return self._decide(is_end=False)

    def finish(self) -> list[Record]:
        """What is left at the end of the answer."""
        return [] if self._is_decided else self._decide(is_end=True)

    def _decide(self, *, is_end: bool) -> list[Record]:
        head = self._head.lstrip()
        if OPENING.startswith(head) and head != OPENING and not is_end:
            return []
        self._is_decided = True
        held, self._held = self._held, []
        if head.startswith(OPENING):
            self._splitter = ReasoningSplitter()
            if not _joined(held).lstrip().startswith(OPENING):
                # The chat template has opened the block: the tag is in the text, but no token of the answer is.
                self._splitter.push(OPENING)
        return self._of_message(held)

    def _of_message(self, records: Sequence[Record]) -> list[Record]:
        if self._splitter is None:
            return list(records)
        found = []
        for record in records:
            if not self._splitter.is_done:
                self._splitter.push(self._decoder.decode(record.chosen.text))
            if self._splitter.is_done:
                found.append(record)
        return found


def _joined(records: Sequence[Record]) -> str:
    return b"".join(record.chosen.text for record in records).decode("utf-8", "replace")
