# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mii_zmq.errors import InvalidRequest, PromptTooLong
from mii_zmq.worker.prompt_text import PromptInput
from tests.worker.preparing import build, limits, refusal


def test_text_prompt() -> None:
    prepared = build("héllo")
    assert prepared.sequence.prompt_token_ids == list("héllo".encode())
    assert prepared.prompt_length == 6
    assert prepared.sequence.max_new_tokens == 58
    assert prepared.prompt_text == "héllo"


def test_token_ids_prompt() -> None:
    prepared = build(PromptInput(token_ids=[1, 2, 299]))
    assert prepared.sequence.prompt_token_ids == [1, 2, 299]
    assert prepared.prompt_text is None


def test_messages_prompt_is_rendered_and_encoded_without_more_special_tokens() -> None:
    prepared = build(PromptInput(messages=[{"role": "user", "content": "hi"}]))
    assert prepared.prompt_text == "user: hi\nassistant: "
    assert bytes(prepared.sequence.prompt_token_ids).decode() == prepared.prompt_text


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (PromptInput(), "prompt"),
        (PromptInput(text="a", token_ids=[1]), "prompt"),
        (PromptInput(text=""), "prompt"),
        (PromptInput(text=5), "prompt"),  # type: ignore[arg-type]
        (PromptInput(text="a\ud800"), "prompt"),
        (PromptInput(token_ids=[]), "prompt_token_ids"),
        (PromptInput(token_ids=[300]), "prompt_token_ids"),
        (PromptInput(token_ids=[-1]), "prompt_token_ids"),
        (PromptInput(token_ids=[True]), "prompt_token_ids"),
        (PromptInput(token_ids=[1.5]), "prompt_token_ids"),  # type: ignore[list-item]
        (PromptInput(messages=[]), "messages"),
        (PromptInput(messages=[{"role": "user", "content": "\udc00"}]), "messages[0].content"),
    ],
)
def test_malformed_prompts_name_the_field(prompt: PromptInput, param: str) -> None:
    error = refusal(prompt)
    assert isinstance(error, InvalidRequest)
    assert error.param == param


def test_a_prompt_that_leaves_no_room_is_too_long() -> None:
    assert build("x" * 63).sequence.max_new_tokens == 1
    for prompt in ("x" * 64, "x" * 10_000_000, PromptInput(token_ids=[1] * 64)):
        error = refusal(prompt)
        assert isinstance(error, PromptTooLong)
        assert "64 tokens" in error.message


def test_a_prompt_larger_than_the_pool_is_too_long() -> None:
    engine = limits(num_blocks=2)
    assert build("x" * 31, engine).sequence.max_new_tokens == 1
    error = refusal("x" * 32, engine)
    assert isinstance(error, PromptTooLong)
    assert "KV pool holds 32 tokens" in error.message


def test_a_token_that_the_model_lacks_is_refused() -> None:
    error = refusal("xyz\xff", limits(vocab_size=100))
    assert error.param == "prompt"
    assert "not" in error.message
