# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mii_zmq.protocol import MAX_BODY_BYTES, FinalBody, Verb, iterate_tokens, parse_body
from mii_zmq.tokenizer import FAKE_EOS
from mii_zmq.worker.engine_channel import ids_from_bytes, ids_to_bytes
from tests.worker.actor_harness import PATIENCE_S, Harness, row


@pytest.fixture
async def harness():
    made = Harness()
    yield made
    made.actor.close("test over")


async def test_each_token_becomes_one_row_and_final_follows(harness: Harness) -> None:
    request_id = harness.generate(max_new_tokens=3)
    sequence = await harness.added()
    assert sequence.prompt_token_ids == list(b"hello")
    harness.step(row(sequence.seq_id, "a", cached=4))
    harness.step(row(sequence.seq_id, "b"))
    harness.step(row(sequence.seq_id, "c", "length"))
    deltas = []
    for _ in range(3):
        message = await harness.link.take(Verb.TOKENS)
        assert message.header["client"] == 7
        deltas += iterate_tokens(message)
    assert [(d.seq, d.token_offset, d.text, d.finish_reason) for d in deltas] == [
        (0, 0, b"a", None),
        (1, 1, b"b", None),
        (2, 2, b"c", "length"),
    ]
    assert all(d.request_id == request_id for d in deltas)
    assert [d.prompt_length for d in deltas] == [5, 0, 0]
    final = await harness.link.take(Verb.FINAL)
    assert final.request_id == request_id
    assert final.header["finish_reason"] == "length"
    assert parse_body(final, FinalBody) == FinalBody(
        finish_reason="length", prompt_length=5, generated_length=3, num_cached_tokens=4
    )
    harness.assert_empty()


async def test_rows_of_one_step_share_a_message_per_connection() -> None:
    harness = Harness(num_links=2)
    for number, (link, client) in enumerate([(0, 1), (0, 1), (0, 2), (1, 1)], start=1):
        harness.generate(number, link=link, client=client)
    sequences = {s.seq_id: s for s in [await harness.added() for _ in range(4)]}
    harness.step(*[row(seq_id, "x") for seq_id in sorted(sequences)])
    first, second = await harness.links[0].take(Verb.TOKENS), await harness.links[0].take(Verb.TOKENS)
    other = await harness.links[1].take(Verb.TOKENS)
    assert [(m.header["client"], len(m.header["rows"])) for m in (first, second, other)] == [(1, 2), (2, 1), (1, 1)]
    assert all(link.sent.empty() for link in harness.links)
    harness.actor.close("test over")


async def test_ids_wait_for_whole_characters(harness: Harness) -> None:
    harness.generate()
    seq_id = (await harness.added()).seq_id
    smile = "🙂".encode()
    for byte in smile[:3]:
        harness.step(row(seq_id, bytes((byte,))))
    assert harness.link.sent.empty()
    harness.step(row(seq_id, smile[3:]))
    (delta,) = iterate_tokens(await harness.link.take(Verb.TOKENS))
    assert (delta.seq, delta.token_offset, ids_from_bytes(delta.token_ids)) == (0, 0, list(smile))
    assert delta.text == smile
    harness.step(row(seq_id, smile[:1]))
    harness.step(row(seq_id, [FAKE_EOS], "stop"))
    (delta,) = iterate_tokens(await harness.link.take(Verb.TOKENS))
    assert (delta.seq, delta.token_offset, delta.text) == (1, 4, "\N{REPLACEMENT CHARACTER}".encode())
    assert ids_from_bytes(delta.token_ids) == [smile[0], FAKE_EOS]
    assert delta.finish_reason == "stop"
    final = await harness.link.take(Verb.FINAL)
    assert parse_body(final, FinalBody).generated_length == 6
    harness.assert_empty()


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_string_over_token_borders_ends_the_sequence(harness: Harness, stream: bool) -> None:
    harness.generate(stop=["</s>"], stream=stream)
    seq_id = (await harness.added()).seq_id
    for char in "ab<c</s>":
        harness.step(row(seq_id, char))
    harness.step(row(seq_id, "late"))
    text, offsets = b"", []
    while True:
        message = harness.link.sent.get_nowait()
        if message.verb is Verb.FINAL:
            break
        (delta,) = iterate_tokens(message)
        text += delta.text
        offsets.append(delta.token_offset)
    body = parse_body(message, FinalBody)
    assert (body.finish_reason, body.generated_length) == ("stop", 8)
    if stream:
        assert (text, offsets) == (b"ab<c", [0, 1, 2, 4])
        assert delta.finish_reason == "stop"
    else:
        assert (body.text, ids_from_bytes(message.raw[0])) == ("ab<c", list(b"ab<c</s>"))
    assert harness.engine.cancelled == [seq_id]
    harness.assert_empty()


async def test_not_streamed_answers_with_one_message(harness: Harness) -> None:
    harness.generate(stream=False, prompt="héllo", return_full_text=True)
    seq_id = (await harness.added()).seq_id
    harness.step(row(seq_id, "ab"))
    harness.step(row(seq_id, [*b"c", FAKE_EOS], "stop"))
    final = await harness.link.take(Verb.FINAL)
    body = parse_body(final, FinalBody)
    assert (body.text, body.generated_length, body.prompt_length) == ("hélloabc", 4, 6)
    assert ids_from_bytes(final.raw[0]) == [*b"abc", FAKE_EOS]
    harness.assert_empty()


@pytest.mark.parametrize("stream", [True, False])
async def test_resumed_request_goes_on_behind_the_given_ids(harness: Harness, stream: bool) -> None:
    smile = "🙂".encode()
    harness.generate(stream=stream, resume=[*b"ab", *smile[:2]], max_new_tokens=6)
    sequence = await harness.added()
    assert sequence.resumed_token_ids == [*b"ab", *smile[:2]]
    harness.step(row(sequence.seq_id, smile[2:], "length"))
    if stream:
        (delta,) = iterate_tokens(await harness.link.take(Verb.TOKENS))
        assert (delta.seq, delta.token_offset, delta.text) == (0, 4, smile)
        assert ids_from_bytes(delta.token_ids) == list(smile[2:])
    final = await harness.link.take(Verb.FINAL)
    body = parse_body(final, FinalBody)
    assert body.generated_length == 6
    if not stream:
        assert (body.text, ids_from_bytes(final.raw[0])) == ("ab🙂", [*b"ab", *smile])
    harness.assert_empty()


async def test_a_request_for_which_there_is_no_thread_ends_with_an_error(harness: Harness) -> None:
    harness.actor._threads.shutdown()
    harness.generate()
    assert (await harness.link.take(Verb.ERROR)).header["code"] == "internal"
    harness.assert_empty()


async def test_an_answer_larger_than_a_message_ends_with_an_error(harness: Harness) -> None:
    request_id = harness.generate(stream=False)
    sequence = await harness.added()
    harness.actor._by_seq[sequence.seq_id]._texts.append("x" * MAX_BODY_BYTES)
    harness.step(row(sequence.seq_id, "a", "length"))
    message = await harness.link.take(Verb.ERROR)
    assert (message.request_id, message.header["code"]) == (request_id, "request_too_large")
    harness.assert_empty()


async def test_continued_stream_continues_the_numbers_of_its_rows(harness: Harness) -> None:
    harness.generate(resume=list(b"ab"), max_new_tokens=4, header={"first_seq": 7})
    sequence = await harness.added()
    harness.step(row(sequence.seq_id, b"c"))
    harness.step(row(sequence.seq_id, b"d", "length"))
    deltas = [delta for _ in range(2) for delta in iterate_tokens(await harness.link.take(Verb.TOKENS))]
    assert [(delta.seq, delta.token_offset) for delta in deltas] == [(7, 2), (8, 3)]


@pytest.mark.parametrize(
    ("resume", "params", "reason", "text"),
    [
        ([*b"ab", FAKE_EOS], {}, "stop", "ab"),
        (list(b"abc"), {"max_new_tokens": 3}, "length", "abc"),
        (list(b"abEND"), {"stop": "END"}, "stop", "ab"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_resumed_request_that_had_ended_gets_only_its_end(
    harness: Harness, stream: bool, resume: list[int], params: dict[str, Any], reason: str, text: str
) -> None:
    harness.generate(stream=stream, resume=resume, **params)
    if stream:
        (delta,) = iterate_tokens(await harness.link.take(Verb.TOKENS))
        assert (delta.token_offset, delta.token_ids, delta.finish_reason) == (len(resume), b"", reason)
    body = parse_body(await harness.link.take(Verb.FINAL), FinalBody)
    assert (body.finish_reason, body.generated_length) == (reason, len(resume))
    assert body.text == (None if stream else text)
    assert harness.engine.added.empty()
    harness.assert_empty()


BAD_REQUESTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("n", {"prompt": "x", "params": {"n": 2}}, {}, "invalid_request"),
    ("temprature", {"prompt": "x", "params": {"temprature": 1}}, {}, "invalid_request"),
    ("top_p", {"prompt": "x", "params": {"top_p": float("nan")}}, {}, "invalid_request"),
    ("prompt", {"prompt": ""}, {}, "invalid_request"),
    ("prompt", {"prompt": 5}, {}, "invalid_request"),
    ("prompt", {}, {}, "invalid_request"),
    ("promt", {"promt": "x"}, {}, "invalid_request"),
    ("prompt_token_ids", {"prompt_token_ids": [1, 300]}, {}, "invalid_request"),
    ("prompt", {"prompt": "x" * 256}, {}, "context_length_exceeded"),
    ("max_new_tokens", {"prompt": "x", "params": {"max_new_tokens": 10**9}}, {}, "context_length_exceeded"),
    ("stream", {"prompt": "x"}, {"stream": "yes"}, "protocol"),
    ("deadline_ms", {"prompt": "x"}, {"deadline_ms": "soon"}, "protocol"),
]


@pytest.mark.parametrize(("param", "body", "header", "code"), BAD_REQUESTS)
async def test_bad_request_ends_with_a_typed_error_and_the_next_one_works(
    harness: Harness, param: str, body: dict[str, Any], header: dict[str, Any], code: str
) -> None:
    request_id = bytes(15) + b"\1"
    harness.send(Verb.GENERATE, request_id, header={"deployment": "d", **header}, body=body)
    error = await harness.link.take(Verb.ERROR)
    assert error.request_id == request_id
    assert (error.header["code"], error.header.get("param")) == (code, param)
    assert not error.header["retryable"]
    harness.generate(2)
    harness.step(row((await harness.added()).seq_id, "y", "length"))
    await harness.link.take(Verb.TOKENS)
    await harness.link.take(Verb.FINAL)
    harness.assert_empty()


@pytest.mark.parametrize("raw", [(b"abc",), (b"", b""), (ids_to_bytes([5, -1]),)])
async def test_bad_resume_frames_are_refused(harness: Harness, raw: tuple[bytes, ...]) -> None:
    harness.send(Verb.GENERATE, bytes(16), header={"deployment": "d"}, body={"prompt": "x"}, raw=raw)
    error = await harness.link.take(Verb.ERROR)
    assert (error.header["code"], error.header["param"]) == ("invalid_request", "resume")
    harness.assert_empty()


async def test_cancel_while_running_ends_with_the_engines_last_row(harness: Harness) -> None:
    ids = [harness.generate(number) for number in (1, 2, 3)]
    seqs = [(await harness.added()).seq_id for _ in ids]
    harness.step(*[row(seq_id, "x") for seq_id in seqs])
    await harness.link.take(Verb.TOKENS)
    harness.send(Verb.CANCEL, bytes(16), header={"request_ids": ids[:2]})
    assert sorted(harness.engine.cancelled) == sorted(seqs[:2])
    harness.step(*[row(seq_id, "y") for seq_id in seqs])
    (delta,) = iterate_tokens(await harness.link.take(Verb.TOKENS))
    assert delta.request_id == ids[2]
    harness.step(row(seqs[0], "", "cancelled"), row(seqs[1], "z", "length"), row(seqs[2], "", "cancelled"))
    for _ in ids:
        error = await harness.link.take(Verb.ERROR)
        assert error.header["code"] == "cancelled"
        assert error.header["emitted_tokens"] == (2 if error.request_id == ids[2] else 1)
    harness.assert_empty()


async def test_cancel_before_the_engine_has_the_sequence_is_honoured(harness: Harness) -> None:
    request_id = harness.generate()
    harness.send(Verb.CANCEL, request_id)
    assert (await harness.link.take(Verb.ERROR)).header["code"] == "cancelled"
    harness.generate(2)
    assert (await harness.added()).seq_id == 2
    assert harness.engine.added.empty()


async def test_cancel_of_an_unknown_request_is_ignored(harness: Harness) -> None:
    harness.send(Verb.CANCEL, bytes(16))
    harness.assert_empty()


@pytest.mark.parametrize(
    ("finish", "error", "code"),
    [
        ("deadline", None, "deadline_exceeded"),
        ("error", {"code": "internal", "message": "logits are not finite"}, "internal"),
        ("error", {"code": "context_length_exceeded", "message": "long"}, "context_length_exceeded"),
        ("error", None, "internal"),
    ],
)  # fmt: skip
async def test_engine_failures_of_one_sequence(
    harness: Harness, finish: str, error: dict[str, Any] | None, code: str
) -> None:
    harness.generate(1)
    harness.generate(2)
    first, second = await harness.added(), await harness.added()
    harness.step(row(first.seq_id, "x"), row(second.seq_id, "x"))
    harness.step(row(first.seq_id, "", finish, error=error), row(second.seq_id, "y", "length"))
    await harness.link.take(Verb.TOKENS)
    (delta,) = iterate_tokens(await harness.link.take(Verb.TOKENS))
    assert delta.finish_reason == "length"
    message = await harness.link.take(Verb.ERROR)
    assert (message.header["code"], message.header["emitted_tokens"]) == (code, 1)
    await harness.link.take(Verb.FINAL)
    harness.assert_empty()


async def test_output_that_breaks_the_text_stream_fails_that_request_only(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.generate(1)
    harness.generate(2)
    first, second = await harness.added(), await harness.added()
    harness.step(row(first.seq_id, ["no id"]), row(second.seq_id, "y"))  # type: ignore[list-item]
    await harness.link.take(Verb.TOKENS)
    error = await harness.link.take(Verb.ERROR)
    assert error.header["code"] == "internal"
    assert harness.engine.cancelled == [first.seq_id]
    assert "failed on output" in caplog.text
    assert harness.actor.num_requests == 1


async def test_deadline_and_tenant_reach_the_engine(harness: Harness) -> None:
    harness.generate(header={"deadline_ms": 60_000, "tenant": "t", "priority": 3})
    sequence = await harness.added()
    assert sequence.deadline_s is not None
    assert 0 < 60 - PATIENCE_S < sequence.deadline_s <= 60, "what is left of it"
    assert (sequence.cache_salt, sequence.priority) == ("t", 3)


async def test_deadline_that_has_passed_is_refused_before_the_engine(harness: Harness) -> None:
    harness.generate(header={"deadline_ms": 0})
    assert (await harness.link.take(Verb.ERROR)).header["code"] == "deadline_exceeded"
    assert harness.engine.added.empty()
    harness.assert_empty()


async def test_request_that_the_engine_does_not_take_is_for_another_group(harness: Harness) -> None:
    harness.engine.is_full = True
    harness.generate()
    error = await harness.link.take(Verb.ERROR)
    assert (error.header["code"], error.header["retryable"]) == ("worker_lost", True)
    harness.assert_empty()


async def test_rows_that_the_broker_does_not_take_end_the_request(harness: Harness) -> None:
    harness.generate(1)
    harness.generate(2)
    first, second = await harness.added(), await harness.added()
    harness.link.is_gone = True
    harness.step(row(first.seq_id, "x"), row(second.seq_id, "x", "length"))
    assert harness.engine.cancelled == [first.seq_id]
    assert harness.actor.num_requests == 0
    ready = harness.actor.ready(0)
    assert ready is not None
    assert ready.in_flight == []


async def test_same_id_again_replaces_the_earlier_attempt(harness: Harness) -> None:
    harness.generate(1)
    first = await harness.added()
    request_id = harness.generate(1)
    second = await harness.added()
    assert harness.engine.cancelled == [first.seq_id]
    harness.step(row(first.seq_id, "", "cancelled"), row(second.seq_id, "x", "length"))
    (delta,) = iterate_tokens(await harness.link.take(Verb.TOKENS))
    assert (delta.request_id, delta.seq) == (request_id, 0)
    await harness.link.take(Verb.FINAL)
    harness.assert_empty()


async def test_ready_lists_only_the_requests_of_that_broker() -> None:
    harness = Harness(num_links=2)
    first, second = harness.generate(1, link=0), harness.generate(2, link=1)
    ready = [harness.actor.ready(link) for link in (0, 1)]
    # One Ready object is reused; it is encoded at once.
    assert ready[1] is not None
    assert ready[1].in_flight == [second]
    assert first != second
    harness.actor.close("test over")


async def test_draining_refuses_new_requests_and_finishes_the_old(harness: Harness) -> None:
    harness.link.registered.set()
    harness.generate(1)
    seq_id = (await harness.added()).seq_id
    harness.actor.start_draining()
    await harness.link.take(Verb.DRAIN)
    assert harness.actor.ready(0) is None
    heartbeat = harness.actor.heartbeat()
    assert heartbeat is not None
    assert heartbeat.state == "draining"
    harness.generate(2)
    error = await harness.link.take(Verb.ERROR)
    assert (error.header["code"], error.header["retryable"]) == ("draining", True)
    waiter = asyncio.ensure_future(harness.actor.wait_idle())
    harness.step(row(seq_id, "x", "length"))
    async with asyncio.timeout(PATIENCE_S):
        await waiter
    await harness.link.take(Verb.TOKENS)
    await harness.link.take(Verb.FINAL)
    harness.assert_empty()


async def test_many_requests_leave_nothing_behind(harness: Harness) -> None:
    for number in range(200):
        harness.generate(number, stream=number % 2 == 0, max_new_tokens=1 + number % 3, stop=["x"])
    sequences = [await harness.added() for _ in range(200)]
    for number, sequence in enumerate(sequences):
        finish = ("length", "stop", "cancelled", "deadline", "error")[number % 5]
        harness.step(row(sequence.seq_id, "axb"[number % 3], finish))
    ends = 0
    while not harness.link.sent.empty():
        ends += harness.link.sent.get_nowait().verb in (Verb.FINAL, Verb.ERROR)
    assert ends == 200
    harness.assert_empty()


async def test_a_reset_of_the_prefix_cache_is_answered_when_the_engine_has_done_it() -> None:
    harness = Harness(num_links=2)
    first, second = bytes(15) + b"\1", bytes(15) + b"\2"
    harness.send(Verb.RESET_PREFIX_CACHE, first)
    harness.send(Verb.RESET_PREFIX_CACHE, second, link=1)
    assert all(link.sent.empty() for link in harness.links)
    one, two = harness.engine.resets
    harness.actor.on_prefix_cache_reset(two)
    assert (await harness.links[1].take(Verb.RESET_PREFIX_CACHE)).request_id == second
    assert harness.links[0].sent.empty()
    harness.actor.on_prefix_cache_reset(one)
    assert (await harness.links[0].take(Verb.RESET_PREFIX_CACHE)).request_id == first


async def test_an_engine_that_takes_no_messages_is_said_to_the_broker() -> None:
    harness = Harness()
    harness.engine.is_full = True
    harness.send(Verb.RESET_PREFIX_CACHE, bytes(15) + b"\1")
    message = await harness.link.take(Verb.ERROR)
    assert (message.request_id, message.header["code"]) == (bytes(15) + b"\1", "worker_lost")
