# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mii_zmq.errors import InvalidRequest, MiiError, PromptTooLong, ProtocolError
from mii_zmq.protocol import GenerateHeader, Verb, decode, encode
from mii_zmq.tokenizer import FakeTokenizer
from mii_zmq.worker.engine_channel import ids_to_bytes
from mii_zmq.worker.intake import Intake
from mii_zmq.worker.plan import EngineLimits
from mii_zmq.worker.text import PreparedSequence

LIMITS = EngineLimits(257, max_model_len=64, num_blocks=8, block_size=16, max_sequences=8, token_budget=64)


class MarkingTokenizer(FakeTokenizer):
    """Puts a mark in front of every text, as tokenizers with a BOS token do."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + super().encode(text)


def prepare(body: Any, *raw: bytes, **header: Any) -> PreparedSequence:
    message = decode(encode(Verb.GENERATE, bytes(16), {"deployment": "d"}, body, raw))
    return Intake(MarkingTokenizer(), LIMITS).prepare(message, GenerateHeader(deployment="d", **header), seq_id=3)


def test_everything_reaches_the_sequence() -> None:
    body = {"prompt": "ab", "params": {"max_new_tokens": 5, "seed": 9}}
    sequence = prepare(body, ids_to_bytes([5, 6]), tenant="t", priority=2).sequence
    assert (sequence.seq_id, sequence.prompt_token_ids, sequence.max_new_tokens) == (3, [1, *b"ab"], 5)
    assert (sequence.resumed_token_ids, sequence.priority, sequence.cache_salt) == ([5, 6], 2, "t")
    assert sequence.sampling.seed == 9


def test_special_tokens_can_be_left_out_of_the_prompt() -> None:
    body = {"prompt": "ab", "add_special_tokens": False, "params": {"max_length": 10, "return_full_text": True}}
    prepared = prepare(body)
    assert prepared.sequence.prompt_token_ids == list(b"ab")
    assert prepared.sequence.max_new_tokens == 8
    assert prepared.output_processor().push(list(b"c")) == ("abc", None, 1)


def test_generation_prompt_can_be_left_out() -> None:
    messages = [{"role": "user", "content": "hi"}]
    whole = prepare({"messages": messages}).prompt_text
    bare = prepare({"messages": messages, "add_generation_prompt": False}).prompt_text
    assert whole is not None
    assert bare is not None
    assert whole.startswith(bare)
    assert len(whole) > len(bare)


def test_all_that_a_template_takes_is_handed_to_it() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    body = {
        "messages": messages,
        "add_generation_prompt": False,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": True,
        "return_reasoning_start": True,
    }
    intake = Intake(MarkingTokenizer(), replace(LIMITS, max_model_len=512, num_blocks=64))
    message = decode(encode(Verb.GENERATE, bytes(16), {"deployment": "d"}, body))
    prepared = intake.prepare(message, GenerateHeader(deployment="d"), seq_id=3)
    tools = 'tools: [{"type": "function", "function": {"name": "f"}}]'
    assert prepared.prompt_text == f"{tools}\nuser: hi\nassistant: so"
    assert prepared.lead == ""


@pytest.mark.parametrize("extra", [{}, {"add_special_tokens": False}])
@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        ({"prompt": ""}, InvalidRequest, "prompt"),
        ({}, InvalidRequest, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, InvalidRequest, "prompt"),
        ({"prompt": "a", "params": {"n": 3}}, InvalidRequest, "n"),
        ({"prompt": "a", "params": {"top_k": "many"}}, InvalidRequest, "top_k"),
        ({"prompt": "a", "stream": True}, InvalidRequest, "stream"),
        ({"prompt": "a" * 100}, PromptTooLong, None),
    ],
)
def test_refusals_name_the_field(
    body: dict[str, Any], extra: dict[str, Any], error: type[MiiError], param: str | None
) -> None:
    with pytest.raises(error) as caught:
        prepare({**body, **extra})
    assert param is None or caught.value.param == param


def test_body_that_is_no_map_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolError, match="body"):
        prepare(b"\x91" * 100_000)


@pytest.mark.parametrize("raw", [(b"abc",), (b"", b"")])
def test_malformed_resume_frames(raw: tuple[bytes, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare({"prompt": "a"}, *raw)
    assert caught.value.param == "resume"


def test_empty_resume_frame_means_nothing_to_resume() -> None:
    assert prepare({"prompt": "a"}, b"").sequence.resumed_token_ids == []


def test_more_resumed_tokens_than_asked_for_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="resume holds 3") as caught:
        prepare({"prompt": "ab", "params": {"max_new_tokens": 2}}, ids_to_bytes([5, 6, 7]))
    assert caught.value.param == "resume"
