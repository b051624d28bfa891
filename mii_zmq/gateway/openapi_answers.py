# SPDX-License-Identifier: Apache-2.0
"""The shapes of the doors' answers, for their description; the doors themselves write them field by field.

What is listed here is promised, but for fields with a default, which may be missing; an answer may hold more.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct

Count = Annotated[int, msgspec.Meta(ge=0)]
OpenAIReason = Literal["stop", "length", "tool_calls"]


class MiiCompletion(Struct):
    """One prompt's, or one choice's, entry in the answer of MII's door."""

    finish_reason: Literal["stop", "length"]
    generated_length: Count
    generated_text: str
    prompt_length: Count
    logprobs: Any = None
    """Only where they were asked for, like those of the prompt."""
    prompt_logprobs: Any = None


class MiiEvent(Struct):
    """`finish_reason` is "none" up to a choice's last event, which has the lengths."""

    finish_reason: Literal["none", "stop", "length"]
    generated_text: str
    index: Count
    generated_length: Count = 0
    prompt_length: Count = 0


class MiiErrorEvent(Struct):
    message: str
    code: str


class PromptTokensDetails(Struct):
    cached_tokens: Count


class Usage(Struct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(Struct):
    index: Count
    text: str
    logprobs: Any
    finish_reason: OpenAIReason
    prompt_logprobs: Any = None
    """Only where they were asked for."""


class Completion(Struct):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str


class ChunkChoice(Struct):
    """`text` of completions, `delta` of chats."""

    index: Count
    logprobs: Any
    finish_reason: OpenAIReason | None
    text: str = ""
    delta: dict[str, Any] = {}


class Chunk(Struct):
    """The last one of a stream has the usage, where it was asked for, and no choices."""

    id: str
    object: Literal["text_completion", "chat.completion.chunk"]
    created: Count
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | None = None


class AnsweredFunction(Struct):
    name: str
    arguments: str
    """The text of a JSON object."""


class AnsweredToolCall(Struct):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[AnsweredToolCall] = []


class ChatChoice(Struct):
    index: Count
    message: AnsweredMessage
    logprobs: Any
    finish_reason: OpenAIReason


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: Any = None
    """Only where they were asked for."""


class ResponsesUsage(Struct):
    input_tokens: Count
    output_tokens: Count
    total_tokens: Count


class OutputItem(Struct):
    """A message, some reasoning, or a function call, by its type."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["completed", "incomplete"]


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class Response(Struct):
    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage


class ResponseEvent(Struct):
    """OpenAI's events from response.created to response.completed; other fields by the type."""

    type: str
    sequence_number: Count


class AnsweredBlock(Struct):
    """Text, thinking or the use of a tool, by its type."""

    type: Literal["text", "thinking", "tool_use"]


class MessagesUsage(Struct):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class AnthropicMessage(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesEvent(Struct):
    """Anthropic's events from message_start to message_stop, or an error; other fields by the type."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "ping", "error",
    ]  # fmt: skip


class TokenCount(Struct):
    """The number of tokens of a conversation."""

    input_tokens: Count


class Tokenized(Struct):
    count: Count
    max_model_len: Count | None
    tokens: list[int]
    token_strs: Any


class Detokenized(Struct):
    prompt: str


class PromptUsage(Struct):
    prompt_tokens: Count
    total_tokens: Count


class EmbeddingData(Struct):
    """`embedding` in base64: float32, little endian."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingList(Struct):
    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[EmbeddingData]
    usage: PromptUsage


class ScoreData(Struct):
    index: Count
    object: Literal["score"]
    score: float


class ScoreList(Struct):
    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[ScoreData]
    usage: PromptUsage


class RankedDocument(Struct):
    text: str


class RankedResult(Struct):
    """`index` counts the documents of the request."""

    index: Count
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(Struct):
    """The best first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: PromptUsage


class AbortedRequests(Struct):
    """`num_requests` counts choices and prompts, of which one HTTP request may have several."""

    aborted: list[str]
    not_found: list[str]
    num_requests: Count


class ResetGroups(Struct):
    model: str
    groups: list[str]


class Model(Struct):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count | None


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class Index(Struct):
    service: str
    endpoints: list[str]


class Liveness(Struct):
    status: Literal["live", "stalled"]
    event_loop_lag_s: float


class Startup(Struct):
    status: Literal["started", "starting"]
    message: str = ""


class Readiness(Struct):
    status: Literal["ready", "not ready"]
    deployments: list[str] = []
    code: str = ""
    message: str = ""


class GatewayStatus(Struct):
    uptime_s: float
    num_in_flight: Count
    is_leaving: bool
    event_loop_lag_s: float


class Status(Struct):
    """`broker`: the broker's STATUS body as PROTOCOL.md has it, with `epoch` in hex."""

    age_ms: Count
    gateway: GatewayStatus
    broker: dict[str, Any]


class MiiErrorAnswer(Struct):
    message: str


class OpenAIErrorDetails(Struct):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorAnswer(Struct):
    error: OpenAIErrorDetails


class AnthropicErrorDetails(Struct):
    type: str
    message: str


class AnthropicErrorAnswer(Struct):
    type: Literal["error"]
    error: AnthropicErrorDetails


ANSWERS: dict[str, type[Struct]] = {
    kind.__name__: kind
    for kind in (
        MiiCompletion, MiiEvent, MiiErrorEvent, Completion, ChatCompletion, Chunk, Response, ResponseEvent,
        AnthropicMessage, MessagesEvent, TokenCount, Tokenized, Detokenized, EmbeddingList, ScoreList, Ranking,
        AbortedRequests, ResetGroups, Model,
        ModelList, Index, Liveness, Startup, Readiness, Status, MiiErrorAnswer, OpenAIErrorAnswer, AnthropicErrorAnswer,
    )
}  # fmt: skip
"""Those that operations name; the others are parts of them."""
