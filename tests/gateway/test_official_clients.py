# SPDX-License-Identifier: Apache-2.0
"""The official `openai` and `anthropic` packages, unchanged, against a gateway whose model says what a test wants."""

from __future__ import annotations

import json
import typing
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mii_zmq.gateway.anthropic_fields import MESSAGES_FIELDS
from mii_zmq.gateway.embedding_fields import EMBEDDING_FIELDS
from mii_zmq.gateway.field_rules import IGNORED
from mii_zmq.gateway.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS
from mii_zmq.gateway.responses_fields import RESPONSES_FIELDS
from tests.gateway.fake_client import FakeClient, FakeGeneration

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
anthropic = pytest.importorskip("anthropic")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
ANSWER = f"<think>\nLook it up.\n</think>\n\nOne moment.\n{CALL}"


@pytest.fixture
async def openai_client(address: tuple[str, int]) -> AsyncIterator[Any]:
    url = f"http://{address[0]}:{address[1]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
async def anthropic_client(address: tuple[str, int]) -> AsyncIterator[Any]:
    url = f"http://{address[0]}:{address[1]}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def model(broker: FakeClient) -> None:
    """Calls its tool, and once it has the result says it."""

    def answer(generation: FakeGeneration) -> None:
        messages = generation.body.messages or []
        text = f"It is {messages[-1]['content']}." if messages[-1]["role"] == "tool" else ANSWER
        generation.push(*(text[at : at + 4] for at in range(0, len(text), 4)))
        generation.finish("stop")

    broker.answer = answer


async def test_chat_with_a_tool(openai_client: Any) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    whole = await openai_client.chat.completions.create(model="fake", messages=messages, tools=tools)
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content) == ("One moment.", "Look it up.")
    assert whole.choices[0].finish_reason == "tool_calls"
    async with openai_client.chat.completions.stream(model="fake", messages=messages, tools=tools) as stream:
        final = await stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    assert final.choices[0].message.content == "One moment."
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
    whole = await openai_client.chat.completions.create(model="fake", messages=messages, tools=tools)
    assert whole.choices[0].message.content == "It is sunny."


async def test_responses_with_a_tool(openai_client: Any) -> None:
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    whole = await openai_client.responses.create(model="fake", input=items, tools=tools, store=False)
    assert whole.output_text == "One moment."
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    async with openai_client.responses.stream(model="fake", input=items, tools=tools) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == "One moment."
    assert json.loads(final.output[2].arguments) == {"city": "Zürich"}
    items += [*whole.output, {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "sunny"}]
    whole = await openai_client.responses.create(model="fake", input=items, tools=tools)
    assert whole.output_text == "It is sunny."
    with pytest.raises(openai.BadRequestError, match="store"):
        await openai_client.responses.create(model="fake", input="x", store=True)


async def test_messages_with_a_tool(anthropic_client: Any) -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    asked: dict[str, Any] = {"model": "fake", "max_tokens": 100, "tools": tools, "system": "Be kind."}
    whole = await anthropic_client.messages.create(messages=messages, **asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert (whole.content[2].name, whole.content[2].input) == ("weather", {"city": "Zürich"})
    assert whole.stop_reason == "tool_use"
    async with anthropic_client.messages.stream(messages=messages, **asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "One moment."
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"city": "Zürich"}
    assert final.usage == whole.usage
    result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "sunny"}
    messages += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    whole = await anthropic_client.messages.create(messages=messages, **asked)
    assert whole.content[0].text == "It is sunny."


class City(pydantic.BaseModel):
    """What an answer or a call's arguments shall be."""

    city: str
    inhabitants: int | None = None


def constrained(generation: FakeGeneration) -> None:
    """Says what the grammar of its request wants, of which it knows two kinds: a schema of cities, or calls."""
    form = generation.body.params["structured_output"]
    text = '{"city": "Zürich", "inhabitants": 436332}'
    if form["kind"] == "structural_tag":
        [tag] = json.loads(form["value"])["format"]["tags"]
        schema = tag["content"]["json_schema"]
        text = f"{tag['begin']}{text}{tag['end']}"
    else:
        schema = json.loads(form["value"])
    assert list(schema["properties"]) == ["city", "inhabitants"]
    generation.push(*(text[at : at + 4] for at in range(0, len(text), 4)))
    generation.finish("stop")


ZURICH = City(city="Zürich", inhabitants=436332)


async def test_chat_answers_are_parsed(openai_client: Any, broker: FakeClient) -> None:
    broker.answer, broker.tool_format = constrained, "hermes"
    asked: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "The largest?"}]}
    whole = await openai_client.chat.completions.parse(response_format=City, **asked)
    assert whole.choices[0].message.parsed == ZURICH
    async with openai_client.chat.completions.stream(response_format=City, **asked) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == ZURICH
    tools = [openai.pydantic_function_tool(City)]
    for choice, reason in (
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "City"}}, "stop"),
    ):
        whole = await openai_client.chat.completions.parse(
            tools=tools, tool_choice=choice, parallel_tool_calls=False, **asked
        )
        assert whole.choices[0].finish_reason == reason
        assert whole.choices[0].message.tool_calls[0].function.parsed_arguments == ZURICH
    extra = {"structured_outputs": {"json": City.model_json_schema()}}
    whole = await openai_client.completions.create(model="fake", prompt="x", extra_body=extra)
    assert City.model_validate_json(whole.choices[0].text) == ZURICH
    with pytest.raises(
        openai.BadRequestError, match="guided_regex and response_format|response_format and guided_regex"
    ):
        await openai_client.chat.completions.parse(response_format=City, extra_body={"guided_regex": "a"}, **asked)


async def test_responses_are_parsed(openai_client: Any, broker: FakeClient) -> None:
    broker.answer, broker.tool_format = constrained, "hermes"
    whole = await openai_client.responses.parse(model="fake", input="The largest?", text_format=City)
    assert whole.output_parsed == ZURICH
    assert whole.text.format.name == "City"
    async with openai_client.responses.stream(model="fake", input="The largest?", text_format=City) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == ZURICH
    whole = await openai_client.responses.parse(
        model="fake",
        input="The largest?",
        tools=[openai.pydantic_function_tool(City)],
        tool_choice={"type": "function", "name": "City"},
    )
    assert whole.output[0].parsed_arguments == ZURICH
    assert whole.tool_choice.name == "City"


async def test_messages_are_parsed(anthropic_client: Any, broker: FakeClient) -> None:
    broker.answer, broker.tool_format = constrained, "hermes"
    asked: dict[str, Any] = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": "Largest?"}]}
    whole = await anthropic_client.messages.parse(output_format=City, **asked)
    assert whole.parsed_output == ZURICH
    async with anthropic_client.messages.stream(output_format=City, **asked) as stream:
        final = await stream.get_final_message()
    assert final.parsed_output == ZURICH
    tools = [{"name": "City", "input_schema": City.model_json_schema(), "strict": True}]
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "City"},
    ):
        whole = await anthropic_client.messages.create(tools=tools, tool_choice=choice, **asked)
        assert (whole.stop_reason, whole.content[0].input) == ("tool_use", ZURICH.model_dump())


async def test_errors_arrive_as_the_package_expects(anthropic_client: Any) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        await anthropic_client.messages.create(model="nobody", **asked)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await anthropic_client.messages.create(model="fake", extra_body={"temperature": 1e9}, **asked)
    with pytest.raises(anthropic.BadRequestError, match="temprature"):
        await anthropic_client.messages.create(model="fake", extra_body={"temprature": 1}, **asked)


def test_every_field_of_the_packages_is_known() -> None:
    from anthropic.types import message_create_params as messages
    from anthropic.types.beta import message_create_params as beta_messages
    from openai.types import completion_create_params as completions
    from openai.types import embedding_create_params as embeddings
    from openai.types.chat import completion_create_params as chats
    from openai.types.responses import response_create_params as responses

    for params, rules in (
        (messages.MessageCreateParamsBase, MESSAGES_FIELDS),
        (beta_messages.MessageCreateParamsBase, {**MESSAGES_FIELDS, "betas": IGNORED}),
        (responses.ResponseCreateParamsBase, RESPONSES_FIELDS),
        (chats.CompletionCreateParamsBase, CHAT_FIELDS),
        (completions.CompletionCreateParamsBase, COMPLETION_FIELDS),
        (embeddings.EmbeddingCreateParams, EMBEDDING_FIELDS),
    ):
        assert set(typing.get_type_hints(params)) <= set(rules)
