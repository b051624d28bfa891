# SPDX-License-Identifier: Apache-2.0
"""The official `openai` package, unchanged, against our gateway with a fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack import Stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.start_group("g", "fake:step_ms=2")
        stack.start_gateway()
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").object == "model"


def test_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    whole = client.chat.completions.create(model="m", messages=messages, temperature=0, max_tokens=12)
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    stream = client.chat.completions.create(
        model="m",
        messages=messages,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="m", prompt=["a", "b"], temperature=0, max_tokens=9, n=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text
    assert whole.choices[0].text != whole.choices[2].text
    parts = client.completions.create(model="m", prompt="a", temperature=0, max_tokens=9, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_errors_arrive_as_the_package_expects(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.completions.create(model="nobody", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="m", prompt="a", temperature=1e9)
    with pytest.raises(openai.BadRequestError, match="temprature"):
        client.completions.create(model="m", prompt="a", extra_body={"temprature": 1})
