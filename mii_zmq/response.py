# SPDX-License-Identifier: Apache-2.0
"""`Response`, which every way of generating in Python returns, and the log-probabilities in it.

`ResponseReader` makes the responses of one request out of what arrives for it, in this process or from a deployment,
so that both hold the same.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mii_zmq.logprobs import Entry, Record, decode_records
from mii_zmq.sampling_params import SamplingParams


class GenerationFinishReason(enum.StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    NONE = "none"
    """It has not ended: a part of a streamed answer."""


@dataclass
class Response:
    """One generated text; `str()` of it is the text."""

    generated_text: str
    prompt_length: int
    """Tokens. In parts of a streamed answer of a deployment: 0, only the last one knows it."""
    generated_length: int
    """Tokens, the ending one included although its text is dropped. In a stream: so far."""
    finish_reason: GenerationFinishReason
    logprobs: list[Record] | None = None
    """With the option `logprobs`: a record per output token, in a stream of those that came since the last part. Its
    `chosen` is the token, its `top` the most probable ones: `token_id`, `rank`, `logprob` (natural), `text` (bytes)."""
    prompt_logprobs: list[Record | None] | None = None
    """With the option `prompt_logprobs`: a record per prompt token, None for the first, which follows nothing. In a
    stream the first part has it."""

    def __str__(self) -> str:
        return self.generated_text

    def __repr__(self) -> str:
        return self.generated_text

    def to_msg_dict(self) -> dict[str, Any]:
        """Plain values; log-probabilities only where there are some."""
        message: dict[str, Any] = {
            "generated_text": self.generated_text,
            "prompt_length": self.prompt_length,
            "generated_length": self.generated_length,
            "finish_reason": str(self.finish_reason),
        }
        for name, records in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if records is not None:
                message[name] = [record and _plain(record) for record in records]
        return message

    @classmethod
    def from_msg_dict(cls, message: Mapping[str, Any]) -> Response:
        found = {
            name: [record and _record(record, name == "prompt_logprobs") for record in message[name]]
            for name in ("logprobs", "prompt_logprobs")
            if message.get(name) is not None
        }
        return cls(
            generated_text=message["generated_text"],
            prompt_length=message["prompt_length"],
            generated_length=message["generated_length"],
            finish_reason=GenerationFinishReason(message["finish_reason"]),
            **found,
        )


class ResponseReader:
    """The responses of one request, whose options are `params`."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._records: list[bytes] = []

    def add(self, records: bytes) -> None:
        """Records of mii_zmq.logprobs, for the next response."""
        if records:
            self._records.append(records)

    def response(self, text: str, prompt_length: int, num_tokens: int, finish_reason: str | None = None) -> Response:
        """The next one, with the records added since the last one; without a reason, a part of a stream."""
        records = decode_records(b"".join(self._records))
        self._records.clear()
        prompt = [record if record.chosen.rank else None for record in records if record.is_prompt]
        return Response(
            text,
            prompt_length,
            num_tokens,
            GenerationFinishReason(finish_reason or "none"),
            None if self._params.logprobs is None else [record for record in records if not record.is_prompt],
            prompt or None,
        )


def _plain(record: Record) -> dict[str, Any]:
    return {"chosen": _plain_entry(record.chosen), "top": list(map(_plain_entry, record.top))}


def _plain_entry(entry: Entry) -> dict[str, Any]:
    return {**entry._asdict(), "text": list(entry.text)}


def _record(message: Mapping[str, Any], is_prompt: bool) -> Record:
    chosen, *top = (
        Entry(entry["token_id"], entry["rank"], entry["logprob"], bytes(entry["text"]))
        for entry in (message["chosen"], *message["top"])
    )
    return Record(is_prompt, chosen, tuple(top))
