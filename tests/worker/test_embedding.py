# SPDX-License-Identifier: Apache-2.0
"""An embedding's way through the actor: what is asked of the engine, and what is made of its vector."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from mii_zmq.errors import InvalidRequest, MiiError, PromptTooLong
from mii_zmq.protocol import FinalBody, GenerateBody, GenerateHeader, Verb, decode, encode, parse_body
from mii_zmq.tokenizer import FakeTokenizer
from mii_zmq.worker.embedding import PreparedEmbedding, shape_vector
from mii_zmq.worker.engine_channel import OutputRow
from mii_zmq.worker.intake import Intake
from mii_zmq.worker.plan import EngineLimits, SamplingSpec
from tests.worker.actor_harness import Harness

LIMITS = EngineLimits(
    257, max_model_len=8, num_blocks=1, block_size=16, max_sequences=8, token_budget=64, hidden_size=4
)


def prepare(
    body: dict[str, Any],
    *,
    limits: EngineLimits = LIMITS,
    pooling: str = "last",
    raw: tuple[bytes, ...] = (),
    **header: Any,
) -> PreparedEmbedding:
    message = decode(encode(Verb.GENERATE, bytes(16), {"deployment": "d"}, {"task": "embed", **body}, raw))
    intake = Intake(FakeTokenizer(), limits, pooling)
    found = intake.prepare(message, GenerateHeader(deployment="d", **header), seq_id=3)
    assert isinstance(found, PreparedEmbedding)
    return found


def pack(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_what_the_engine_is_asked() -> None:
    found = prepare({"prompt": "hi"}, tenant="t", priority=2)
    sequence = found.sequence
    assert (sequence.prompt_token_ids, sequence.max_new_tokens, sequence.sampling) == (
        [104, 105], 0, SamplingSpec(pooling="last"),
    )  # fmt: skip
    assert (sequence.seq_id, sequence.cache_salt, sequence.priority) == (3, "t", 2)
    assert (found.dimensions, found.normalize, found.prompt_length) == (None, True, 2)


@pytest.mark.parametrize(
    ("asked", "deployment", "expected"),
    [(None, "mean", "mean"), ("last", "mean", "last"), ("cls", "last", "first"), (None, "cls", "first")],
)
def test_pooling_is_the_deployment_s_unless_the_request_names_one(asked: Any, deployment: str, expected: str) -> None:
    assert prepare({"prompt": "a", "pooling": asked}, pooling=deployment).sequence.sampling.pooling == expected


def test_a_prompt_may_fill_the_context() -> None:
    assert prepare({"prompt_token_ids": [1] * 8}).prompt_length == 8
    for body in ({"prompt_token_ids": [1] * 9}, {"prompt": "x" * 9}):
        with pytest.raises(PromptTooLong, match="9"):
            prepare(body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "pooling": "sum"}, "pooling"),
        ({"prompt": "a", "dimensions": 5}, "dimensions"),
        ({"prompt": "a", "dimensions": 0}, "dimensions"),
        ({"prompt": "a", "params": {"temperature": 0.5}}, "params"),
        ({"prompt": ""}, "prompt"),
        ({}, "prompt"),
        ({"task": "generate", "prompt": "a", "pooling": "last"}, "pooling"),
        ({"task": "generate", "prompt": "a", "dimensions": 2}, "dimensions"),
        ({"task": "generate", "prompt": "a", "dimensions": 1}, "dimensions"),
        ({"task": "tokenize", "prompt": "a", "normalize": False}, "normalize"),
    ],
)
def test_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        prepare(body)
    assert error.value.param == param


def test_neither_streamed_nor_resumed() -> None:
    with pytest.raises(InvalidRequest, match="leave stream out"):
        prepare({"prompt": "a"}, stream=True)
    with pytest.raises(InvalidRequest, match="no output to resume"):
        prepare({"prompt": "a"}, raw=(bytes(4),))


def test_a_model_without_hidden_states_is_said_to_be_one() -> None:
    with pytest.raises(InvalidRequest, match="cannot embed"):
        prepare({"prompt": "a"}, limits=replace(LIMITS, hidden_size=0))


def test_vectors_are_cut_and_then_scaled() -> None:
    vector = pack(3.0, 4.0, 12.0)
    assert shape_vector(vector, None, False) == vector
    assert shape_vector(vector, 2, False) == pack(3.0, 4.0)
    assert shape_vector(vector, 2, True) == pack(0.6, 0.8)
    assert shape_vector(vector, None, True) == pack(3 / 13, 4 / 13, 12 / 13)
    assert shape_vector(bytes(12), None, True) == bytes(12)


@pytest.mark.slow
def test_an_actor_loads_no_numeric_library_before_it_embeds() -> None:
    code = "import sys, mii_zmq.worker.__main__; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_huge_numbers_do_not_overflow() -> None:
    found = struct.unpack("<2f", shape_vector(pack(3e38, 3e38), None, True))
    assert math.hypot(*found) == pytest.approx(1.0)


async def embed(harness: Harness) -> int:
    body = GenerateBody(prompt="hello", task="embed", dimensions=2)
    harness.send(Verb.GENERATE, bytes(15) + b"\1", header={"deployment": "d"}, body=body)
    return (await harness.added()).seq_id


@pytest.fixture
async def harness() -> Harness:
    return Harness()


async def test_final_has_the_vector_and_nothing_else(harness: Harness) -> None:
    seq_id = await embed(harness)
    harness.step(OutputRow(seq_id, [], "stop", 3, None, pooled=pack(3.0, 4.0, 5.0)))
    message = await harness.link.take(Verb.FINAL)
    final = parse_body(message, FinalBody)
    assert final.embedding == pack(0.6, 0.8)
    assert (final.finish_reason, final.prompt_length, final.generated_length, final.text) == ("stop", 5, 0, "")
    assert (final.num_cached_tokens, message.raw[0]) == (3, b"")
    harness.assert_empty()


@pytest.mark.parametrize(
    ("reason", "code"), [("cancelled", "cancelled"), ("deadline", "deadline_exceeded"), ("stop", "internal")]
)
async def test_ends_without_a_vector_are_errors(harness: Harness, reason: str, code: str) -> None:
    seq_id = await embed(harness)
    harness.step(OutputRow(seq_id, [], reason, 0, None))
    message = await harness.link.take(Verb.ERROR)
    assert message.header["code"] == code
    harness.assert_empty()


async def test_an_error_of_the_engine(harness: Harness) -> None:
    seq_id = await embed(harness)
    error: MiiError = PromptTooLong("too long")
    harness.step(OutputRow(seq_id, [], "error", 0, error.to_wire()))
    assert (await harness.link.take(Verb.ERROR)).header["code"] == "context_length_exceeded"
    harness.assert_empty()
