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


def test_a_group_says_how_its_model_writes_calls(stack: Stack) -> None:
    info = stack.groups_status()["g"]["info"]
    assert info["tool_format"] is None  # the template of the fake tokenizer has no marks


def test_tools_reach_the_prompt(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    plain = client.chat.completions.create(model="m", messages=messages, max_tokens=4)
    offered = client.chat.completions.create(model="m", messages=messages, max_tokens=4, tools=tools)
    assert plain.usage is not None
    assert offered.usage is not None
    assert offered.usage.prompt_tokens > plain.usage.prompt_tokens + len("weather")
    hidden = client.chat.completions.create(model="m", messages=messages, max_tokens=4, tools=tools, tool_choice="none")
    assert hidden.usage is not None
    assert hidden.usage.prompt_tokens == plain.usage.prompt_tokens


def test_reasoning_that_the_prompt_has_opened(client: openai.OpenAI) -> None:
    asked = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>"}],
        "max_tokens": 9,
        "temperature": 0,
        "extra_body": {"continue_final_message": True},
    }
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.content is None
    assert message.reasoning_content
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning_content


def test_responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="m", input="Hi", instructions="Be brief.", temperature=0, max_output_tokens=9)
    assert whole.status in ("completed", "incomplete")
    assert whole.usage is not None
    assert whole.usage.output_tokens == 9
    with client.responses.stream(
        model="m", input="Hi", instructions="Be brief.", temperature=0, max_output_tokens=9
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_errors_arrive_as_the_package_expects(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.completions.create(model="nobody", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="m", prompt="a", temperature=1e9)
    with pytest.raises(openai.BadRequestError, match="temprature"):
        client.completions.create(model="m", prompt="a", extra_body={"temprature": 1})
