# SPDX-License-Identifier: Apache-2.0
"""Log-probability records in the doors' words: OpenAI's chat form, its older completions form, vLLM's of prompts.

Pure. A token that is not whole characters is shown with U+FFFD in chats, where its bytes stand beside it, and as
`bytes:\\xe2\\x80` in completions, where it is a key. Text offsets count the characters that tokens stand for, also of
special tokens that the text leaves out.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mii_zmq.logprobs import Entry, Record, decode_records

LOWEST = -9999.0
"""In place of minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class LogprobView:
    """What a request wants to see of the records that its generations bring."""

    is_chat: bool
    num_top: int | None
    """Most probable tokens beside each output token; None: nothing about output tokens."""
    num_prompt_top: int | None = None
    """The same for prompt tokens, in vLLM's form."""
    echo: bool = False
    """Prompt tokens come first in the completions form, too."""
    by_id: bool = False
    """Tokens are named `token_id:5`."""

    def params(self) -> dict[str, Any]:
        """The engine's options for it."""
        asked = [number for number in (self.num_top if self.echo else None, self.num_prompt_top) if number is not None]
        return {"logprobs": self.num_top, "prompt_logprobs": max(asked, default=None)}

    def choice(self, data: bytes) -> dict[str, Any] | None:
        """`logprobs` of one whole choice."""
        return None if self.num_top is None else self.writer().write(data)

    def prompt(self, data: bytes) -> dict[str, Any]:
        """`prompt_logprobs` as a dict with that key; empty if it was not asked for."""
        if self.num_prompt_top is None:
            return {}
        records = [record for record in decode_records(data) if record.is_prompt]
        return {"prompt_logprobs": [_by_token_id(record, self.num_prompt_top) for record in records]}

    def entry(self, data: bytes) -> dict[str, Any]:
        """What an answer in MII's form holds beside the original's fields; empty if nothing was asked for."""
        prompt = self.prompt(data)
        found = prompt if prompt.get("prompt_logprobs") else {}
        return found if self.num_top is None else {**found, "logprobs": ChatWriter(self).write(data)["content"]}

    def writer(self) -> ChatWriter | CompletionWriter:
        """For the rows of one choice, in order."""
        return ChatWriter(self) if self.is_chat else CompletionWriter(self)

    def name(self, entry: Entry, text: str) -> str:
        """What a token is called."""
        return f"token_id:{entry.token_id}" if self.by_id else text


class ChatWriter:
    """`logprobs` of chat completions."""

    def __init__(self, view: LogprobView) -> None:
        self._view = view

    def write(self, data: bytes) -> dict[str, Any]:
        records = [record for record in decode_records(data) if not record.is_prompt]
        return {"content": self.entries(records), "refusal": None}

    def entries(self, records: Sequence[Record]) -> list[dict[str, Any]]:
        """One per token, which OpenAI's Responses write in the same form."""
        num_top = self._view.num_top or 0
        return [
            {**self._entry(record.chosen), "top_logprobs": [self._entry(entry) for entry in record.top[:num_top]]}
            for record in records
        ]

    def _entry(self, entry: Entry) -> dict[str, Any]:
        return {
            "token": self._view.name(entry, entry.text.decode("utf-8", "replace")),
            "logprob": max(entry.logprob, LOWEST),
            "bytes": list(entry.text),
        }


class CompletionWriter:
    """`logprobs` of completions; counts the characters of the choice's text."""

    def __init__(self, view: LogprobView) -> None:
        self._view = view
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, data: bytes) -> dict[str, Any]:
        view = self._view
        records = [record for record in decode_records(data) if view.echo or not record.is_prompt]
        offsets = []
        for record in records:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(record.chosen.text))
        return {
            "text_offset": offsets,
            "token_logprobs": [_logprob(record.chosen) for record in records],
            "tokens": [self._name(record.chosen) for record in records],
            "top_logprobs": [self._top(record) for record in records],
        }

    def _top(self, record: Record) -> dict[str, float] | None:
        """The most probable tokens, and the token itself. Of two with one name the more probable one is shown."""
        if not record.chosen.rank:
            return None
        shown: dict[str, float] = {}
        for entry in (*record.top[: self._view.num_top], record.chosen):
            shown.setdefault(self._name(entry), max(entry.logprob, LOWEST))
        return shown

    def _name(self, entry: Entry) -> str:
        try:
            text = entry.text.decode("utf-8")
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.text)
        return self._view.name(entry, text)


def _logprob(entry: Entry) -> float | None:
    """None for the token that follows nothing."""
    return max(entry.logprob, LOWEST) if entry.rank else None


def _by_token_id(record: Record, num_top: int) -> dict[str, Any] | None:
    if not record.chosen.rank:
        return None
    entries: Sequence[Entry] = (record.chosen, *record.top[:num_top])
    return {
        str(entry.token_id): {
            "logprob": max(entry.logprob, LOWEST),
            "rank": entry.rank,
            "decoded_token": entry.text.decode("utf-8", "replace"),
        }
        for entry in entries
    }
