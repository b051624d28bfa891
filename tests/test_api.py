# SPDX-License-Identifier: Apache-2.0
"""The Python interface on the fake engine inside this process; deployments are in tests/e2e."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import mii_zmq as mii
from mii_zmq.embeddings import values_of
from mii_zmq.errors import Cancelled, CheckpointError, ConfigError, InvalidRequest, PromptTooLong
from mii_zmq.logprobs import Record
from mii_zmq.registry import DeploymentRecord, Registry, process_identity
from mii_zmq.worker.embedding import shape_vector
from mii_zmq.worker.fake_model import EOS_TOKEN_ID, FakeModel
from mii_zmq.worker.fake_options import HIDDEN_SIZE
from mii_zmq.worker.plan import SamplingSpec, SequenceRequest, TokenLogprobs
from tests.ctrl_c import interrupted_when

POOL = "fake:num_blocks=8,max_sequences=4"


@pytest.fixture
def pipe() -> Iterator[mii.Pipeline]:
    with mii.pipeline("fake:") as pipe:
        yield pipe


@pytest.fixture
def slow_pipe() -> Iterator[mii.Pipeline]:
    with mii.pipeline("fake:step_ms=5") as pipe:
        yield pipe


def expected_text(prompt: str, max_new_tokens: int) -> str:
    sampling = SamplingSpec(stop_token_ids=(EOS_TOKEN_ID,))
    request = SequenceRequest(0, list(prompt.encode()), max_new_tokens, sampling)
    return bytes(FakeModel().generate(request)).decode()


def wait_until_idle(pipe: mii.Pipeline) -> None:
    deadline = time.monotonic() + 30
    while (stats := pipe.inference_engine.stats()).num_running + stats.num_waiting or stats.num_used_blocks:
        assert time.monotonic() < deadline, stats


def test_a_response_is_its_text() -> None:
    response = mii.Response("text", 3, 5, mii.GenerationFinishReason.STOP)
    assert (str(response), repr(response), response.finish_reason) == ("text", "text", "stop")
    message = response.to_msg_dict()
    assert message == {
        "generated_text": "text",
        "prompt_length": 3,
        "generated_length": 5,
        "finish_reason": "stop",
    }
    assert type(message["finish_reason"]) is str
    assert mii.Response.from_msg_dict(message) == response


def test_names_are_imported_when_needed() -> None:
    assert set(mii.__all__) <= set(dir(mii))
    for name in mii.__all__:
        assert getattr(mii, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        mii.nothing  # noqa: B018


def test_the_function_client_survives_its_module() -> None:
    module = importlib.import_module("mii_zmq.client")
    importlib.reload(importlib.import_module("mii_zmq"))
    assert module.AsyncClient
    assert mii.client.__module__ == "mii_zmq.api"


@pytest.mark.slow
def test_importing_the_package_imports_next_to_nothing() -> None:
    script = "import sys, mii_zmq; print(sorted(name for name in sys.modules if name.startswith('mii_zmq')))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "['mii_zmq', 'mii_zmq.version']\n"


def test_responses_come_in_the_order_of_the_prompts(pipe: mii.Pipeline) -> None:
    prompts = [f"prompt {index}" for index in range(8)]
    responses = pipe(prompts, max_new_tokens=20)
    assert [r.generated_text for r in responses] == [expected_text(prompt, 20) for prompt in prompts]
    assert [(r.prompt_length, r.generated_length, r.finish_reason) for r in responses] == [(8, 20, "length")] * 8


def test_one_prompt_may_be_a_string(pipe: mii.Pipeline) -> None:
    (response,) = pipe("DeepSpeed is", max_length=20)
    assert (response.prompt_length, response.generated_length) == (12, 8)


def test_choices_follow_their_prompt(pipe: mii.Pipeline) -> None:
    responses = pipe(["a", "b"], n=2, max_new_tokens=5)
    a, b = expected_text("a", 5), expected_text("b", 5)
    assert [r.generated_text for r in responses] == [a, a, b, b]


def test_the_end_of_sequence_counts_but_has_no_text() -> None:
    with mii.pipeline("fake:eos_after=3") as pipe:
        (response,) = pipe("x")
    assert (response.finish_reason, response.generated_length, len(response.generated_text)) == ("stop", 4, 3)


def test_a_stop_string_ends_the_sequence_in_the_engine_too(pipe: mii.Pipeline) -> None:
    text = expected_text("hello", 50)
    (response,) = pipe("hello", max_new_tokens=50, stop=text[10:13])
    assert response.finish_reason == "stop"
    assert response.generated_text == text[: text.index(text[10:13])]
    wait_until_idle(pipe)


def test_streaming_calls_back_once_per_token(pipe: mii.Pipeline) -> None:
    calls: list[list[mii.Response]] = []
    assert pipe("hello", streaming_fn=calls.append, max_new_tokens=6) == []
    assert all(len(call) == 1 for call in calls)
    *parts, last = [call[0] for call in calls]
    assert "".join(part.generated_text for part in parts) == expected_text("hello", 6)
    assert [part.generated_length for part in parts] == [1, 2, 3, 4, 5, 6]
    assert {part.finish_reason for part in parts} == {"none"}
    assert (last.generated_text, last.finish_reason, last.prompt_length, last.generated_length) == ("", "length", 5, 6)


def numbers(record: Record | None) -> Any:
    """Of a record, what the fake model says."""
    if record is None:
        return None
    chosen, top = record.chosen, record.top
    return TokenLogprobs(chosen.logprob, chosen.rank, [e.token_id for e in top], [e.logprob for e in top])


def test_log_probabilities_come_with_the_response(pipe: mii.Pipeline) -> None:
    model, text = FakeModel(), expected_text("hello", 6)
    options: dict[str, Any] = {"max_new_tokens": 6, "logprobs": 3, "prompt_logprobs": 1}
    responses = pipe(["hello", "hello"], n=2, **options)
    assert len(responses) == 4
    for response in responses:
        assert response.generated_text == text
        assert response.logprobs is not None
        assert response.prompt_logprobs is not None
        assert b"".join(record.chosen.text for record in response.logprobs) == text.encode()
        assert list(map(numbers, response.logprobs)) == [model.logprobs(byte, 3) for byte in text.encode()]
        assert list(map(numbers, response.prompt_logprobs)) == [None, *(model.logprobs(byte, 1) for byte in b"ello")]

    parts = list(pipe.stream("hello", **options))
    assert [record for part in parts for record in part.logprobs or ()] == responses[0].logprobs
    assert parts[0].prompt_logprobs == responses[0].prompt_logprobs
    assert all(part.prompt_logprobs is None for part in parts[1:])

    (plain,) = pipe("hello", max_new_tokens=6)
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)
    (scored,) = pipe("hello", max_new_tokens=0, prompt_logprobs=1)
    assert (scored.generated_text, scored.logprobs, scored.generated_length) == ("", None, 0)
    assert scored.prompt_logprobs == responses[0].prompt_logprobs


def test_tokens_without_text_of_their_own_have_log_probabilities() -> None:
    with mii.pipeline("fake:eos_after=3") as pipe:
        (response,) = pipe("x", logprobs=0)
        parts = list(pipe.stream("x", logprobs=0))
    assert [record.chosen.token_id for record in response.logprobs or ()][3:] == [EOS_TOKEN_ID]
    assert [record for part in parts for record in part.logprobs or ()] == response.logprobs


def test_log_probabilities_end_where_a_stop_string_ends_the_text(pipe: mii.Pipeline) -> None:
    text = expected_text("hello", 50)
    (response,) = pipe("hello", max_new_tokens=50, stop=text[10:13], logprobs=0)
    assert len(response.logprobs or ()) == response.generated_length == text.index(text[10:13]) + 3


def test_chat_messages_can_be_streamed(pipe: mii.Pipeline) -> None:
    parts = list(pipe.stream([{"role": "user", "content": "hi"}], max_new_tokens=4))
    assert "".join(map(str, parts)) == expected_text("user: hi\nassistant: ", 4)


def test_only_one_prompt_can_be_streamed(pipe: mii.Pipeline) -> None:
    for arguments in ({"prompts": ["a", "b"]}, {"prompts": "a", "n": 2}):
        with pytest.raises(InvalidRequest, match="streaming takes one prompt"):
            pipe(streaming_fn=print, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"prompts": []}, InvalidRequest),
        ({"prompts": 5}, InvalidRequest),
        ({"prompts": ["a", None]}, InvalidRequest),
        ({"prompts": ""}, InvalidRequest),
        ({"prompts": "\ud800"}, InvalidRequest),
        ({"prompts": "a", "max_new_tokens": 0}, InvalidRequest),
        ({"prompts": "a", "logprobs": 21}, InvalidRequest),
        ({"prompts": "x" * 7000, "prompt_logprobs": 20}, InvalidRequest),
        ({"prompts": "a", "max_new_token": 1}, InvalidRequest),
        ({"prompts": "abc", "max_length": 3}, InvalidRequest),
        ({"prompts": "x" * 9000}, PromptTooLong),
    ],
)
def test_a_wrong_call_fails_and_the_next_one_works(
    pipe: mii.Pipeline, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        pipe(**arguments)
    assert pipe("a", max_new_tokens=1)[0].generated_length == 1


def test_one_wrong_prompt_starts_none(pipe: mii.Pipeline) -> None:
    with pytest.raises(InvalidRequest):
        pipe(["fine", ""], max_new_tokens=5)
    assert pipe.inference_engine.stats().step == 0


@pytest.mark.slow
def test_many_threads_share_the_batches(slow_pipe: mii.Pipeline) -> None:
    start = threading.Barrier(16)

    def call(index: int) -> str:
        start.wait()
        return slow_pipe(f"thread {index}", max_new_tokens=40)[0].generated_text

    with ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(call, range(16)))
    assert texts == [expected_text(f"thread {index}", 40) for index in range(16)]
    # One after the other it would have been 640 steps; some come late on a busy machine.
    assert slow_pipe.inference_engine.stats().step < 320


async def test_a_pipeline_works_inside_a_running_loop(pipe: mii.Pipeline) -> None:
    assert pipe("a", max_new_tokens=3)[0].generated_text == expected_text("a", 3)
    (response,) = await asyncio.to_thread(pipe, "b", max_new_tokens=3)
    assert response.generated_text == expected_text("b", 3)


def test_leaving_a_stream_frees_its_blocks(slow_pipe: mii.Pipeline) -> None:
    stream = slow_pipe.stream("hello", max_new_tokens=5000)
    next(stream)
    stream.close()
    wait_until_idle(slow_pipe)


def test_an_interrupt_cancels_the_call(slow_pipe: mii.Pipeline) -> None:
    with interrupted_when(lambda: slow_pipe.inference_engine.stats().num_running == 2):
        slow_pipe(["a", "b"], max_new_tokens=5000)
    wait_until_idle(slow_pipe)


@pytest.mark.slow
def test_a_small_pool_changes_no_text() -> None:
    prompts = [f"{index:0100d}" for index in range(16)]
    with mii.pipeline(POOL, max_length=400) as pipe:
        responses = pipe(prompts, max_new_tokens=200)
        wait_until_idle(pipe)
        assert pipe.inference_engine.stats().num_preemptions > 0
        with pytest.raises(PromptTooLong):
            pipe("x" * 600)
        assert pipe("ok", max_new_tokens=2)[0].generated_length == 2
    assert [r.generated_text for r in responses] == [expected_text(prompt, 200) for prompt in prompts]


def test_a_destroyed_pipeline_says_so(slow_pipe: mii.Pipeline) -> None:
    stream = slow_pipe.stream("hello", max_new_tokens=5000)
    next(stream)
    engine = slow_pipe.inference_engine
    slow_pipe.destroy()
    with pytest.raises(Cancelled, match="destroyed"):
        list(stream)
    for action in (lambda: slow_pipe("a"), lambda: slow_pipe.inference_engine, lambda: list(slow_pipe.stream("a"))):
        with pytest.raises(RuntimeError, match="destroyed"):
            action()
    with pytest.raises(Cancelled):
        engine.stats()
    slow_pipe.destroy()


def test_a_dropped_pipeline_ends_its_thread() -> None:
    pipe = mii.pipeline("fake:")
    assert "mii_zmq-engine" in {thread.name for thread in threading.enumerate()}
    del pipe
    gc.collect()
    assert "mii_zmq-engine" not in {thread.name for thread in threading.enumerate()}


def test_what_users_of_the_original_look_at(pipe: mii.Pipeline) -> None:
    assert pipe.is_rank_0
    assert pipe.local_rank == 0
    assert pipe.tokenizer.decode(pipe.tokenizer.encode("né")) == "né"


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        (("fake:bogus=1",), ConfigError, "bogus=1"),
        (("/nowhere/model",), CheckpointError, "/nowhere/model"),
        ((), ConfigError, "no model is named"),
    ],
)
def test_a_pipeline_that_cannot_load_says_why(arguments: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        mii.pipeline(*arguments)


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(mii.UnknownArgument, match="did you mean 'replica_num'"):
        mii.serve("fake:", replica_nums=2)
    with pytest.raises(mii.UnknownArgument, match="zzz"):
        mii.pipeline("fake:", zzz=1)


@pytest.mark.parametrize("find", [mii.client, mii.async_client])
def test_a_deployment_that_does_not_run_is_not_found(find: Any) -> None:
    with pytest.raises(mii.DeploymentNotFoundError, match="no deployment 'nobody' runs on this host; running: none"):
        find("nobody")
    identity = process_identity(os.getpid()) or ""
    Registry().claim(DeploymentRecord(deployment="loading", model="m", pid=os.getpid(), identity=identity))
    with pytest.raises(mii.DeploymentNotFoundError, match="still loading"):
        find("loading")


def test_embeddings(pipe: mii.Pipeline) -> None:
    def expected(
        text: str, pooling: str = "last", dimensions: int | None = None, normalize: bool = True
    ) -> list[float]:
        pooled = FakeModel().pool(list(text.encode()), pooling, HIDDEN_SIZE)
        return values_of(shape_vector(pooled, dimensions, normalize))

    texts = ["hello", "x" * 700, "né"]
    assert pipe.embed(texts) == [expected(text) for text in texts]
    assert pipe.embed("hi", pooling="mean", dimensions=3, normalize=False) == [expected("hi", "mean", 3, False)]
    assert pipe.embed([104, 105]) == pipe.embed("hi")
    for wrong, message in (({"pooling": "sum"}, "pooling"), ({"dimensions": 99}, "dimensions")):
        with pytest.raises(InvalidRequest, match=message):
            pipe.embed(["hello", "there"], **wrong)
    with pytest.raises(PromptTooLong):
        pipe.embed("x" * 9000)
    wait_until_idle(pipe)
