# SPDX-License-Identifier: Apache-2.0
"""The official `anthropic` package, unchanged, against our gateway with a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.stack import Stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

anthropic = pytest.importorskip("anthropic")

ASKED: dict[str, Any] = {
    "model": "m",
    "max_tokens": 12,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "Hi"}],
    "extra_body": {"temperature": 0},
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.start_group("g", "fake:alphabet=letters")
        stack.start_gateway()
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key="unused", max_retries=0) as client:
        yield client


def test_messages(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert len(text) == 12
    assert final.usage.output_tokens == 12
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == whole.usage.input_tokens


def test_the_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**ASKED).content[0].text
    stopped = client.messages.create(**ASKED, stop_sequences=["0", text[5:8]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[5:8])
    assert stopped.content[0].text == text[: text.index(text[5:8])]


def test_the_assistants_last_words_are_gone_on_with(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**ASKED).content[0].text
    begun = {**ASKED, "messages": [*ASKED["messages"], {"role": "assistant", "content": text[:6]}], "max_tokens": 6}
    assert client.messages.create(**begun).content[0].text == text[6:]


def test_count_tokens_is_what_a_message_costs(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="m", system=ASKED["system"], messages=ASKED["messages"])
    assert counted.input_tokens == client.messages.create(**ASKED).usage.input_tokens
