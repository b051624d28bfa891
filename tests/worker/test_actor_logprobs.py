# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities on their way through the actor: one record per delivered token, whatever holds tokens back."""

from __future__ import annotations

import pytest

from mii_zmq.logprobs import Record, decode_records
from mii_zmq.protocol import FinalBody, TokenDelta, Verb, iterate_tokens, parse_body
from mii_zmq.worker.engine_channel import ids_from_bytes
from mii_zmq.worker.plan import TokenLogprobs
from tests.worker.actor_harness import Harness, row


def measured(text: str) -> dict[str, list[TokenLogprobs]]:
    """Each token twice as far from certain as the one before, and beside it the letter that follows it."""
    return {"logprobs": [TokenLogprobs(-float(index), 2, [ord(char) + 1], [-0.5]) for index, char in enumerate(text)]}


async def delta_of(harness: Harness) -> tuple[TokenDelta, list[Record]]:
    (delta,) = iterate_tokens(await harness.link.take(Verb.TOKENS))
    records = decode_records(delta.logprobs)
    outputs = [record for record in records if not record.is_prompt]
    assert [record.chosen.token_id for record in outputs] == ids_from_bytes(delta.token_ids)
    return delta, records


async def test_records_go_out_with_their_tokens() -> None:
    harness = Harness()
    harness.generate(logprobs=1, prompt_logprobs=0)
    sequence = await harness.added()
    assert sequence.score_prompt
    assert sequence.sampling.num_logprobs == 1
    scores = [TokenLogprobs(-1.0, 1, [], [])] * 4
    harness.step(row(sequence.seq_id, b"\xc3", **measured("a"), prompt_scores=scores))
    harness.step(row(sequence.seq_id, b"\xa9", **measured("b")))
    delta, records = await delta_of(harness)
    assert delta.text.decode() == "é"
    assert [record.chosen.text for record in records if record.is_prompt] == [b"h", b"e", b"l", b"l", b"o"]
    assert [record.chosen.rank for record in records if record.is_prompt] == [0, 1, 1, 1, 1]
    assert records[-1].top[0].text == b"c"
    harness.step(row(sequence.seq_id, "x", "length", **measured("x")))
    delta, records = await delta_of(harness)
    assert delta.finish_reason == "length"
    assert [(record.chosen.text, record.chosen.logprob, record.chosen.rank) for record in records] == [(b"x", 0.0, 2)]
    await harness.link.take(Verb.FINAL)
    harness.assert_empty()


async def test_tokens_behind_a_stop_string_have_no_record() -> None:
    harness = Harness()
    harness.generate(stream=False, stop=["cd"], logprobs=0)
    sequence = await harness.added()
    harness.step(row(sequence.seq_id, "abcdef", **measured("abcdef")))
    final = await harness.link.take(Verb.FINAL)
    assert parse_body(final, FinalBody).text == "ab"
    ids, logprobs = final.raw
    assert bytes(ids_from_bytes(ids)) == b"abcd"
    assert b"".join(record.chosen.text for record in decode_records(logprobs)) == b"abcd"
    harness.assert_empty()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_resumed_stream_has_the_prompts_records_already(stream: bool) -> None:
    harness = Harness()
    harness.generate(stream=stream, resume=list(b"ab"), logprobs=0, prompt_logprobs=0)
    sequence = await harness.added()
    assert sequence.score_prompt is not stream
    assert sequence.sampling.num_logprobs == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_no_output_wanted(stream: bool) -> None:
    harness = Harness()
    harness.generate(stream=stream, max_new_tokens=0, return_full_text=True, logprobs=1, prompt_logprobs=0)
    sequence = await harness.added()
    assert sequence.max_new_tokens == 1
    scores = [TokenLogprobs(-1.0, 1, [], [])] * 4
    harness.step(row(sequence.seq_id, "x", "length", **measured("x"), prompt_scores=scores))
    if stream:
        delta, records = await delta_of(harness)
        assert (delta.text, delta.finish_reason) == (b"hello", "length")
    final = await harness.link.take(Verb.FINAL)
    body = parse_body(final, FinalBody)
    assert (body.finish_reason, body.generated_length, body.prompt_length) == ("length", 0, 5)
    if not stream:
        assert body.text == "hello"
        records = decode_records(final.raw[1])
    assert [record.is_prompt for record in records] == [True] * 5
    harness.assert_empty()


@pytest.mark.slow
async def test_too_much_for_a_message_ends_the_request_alone() -> None:
    harness = Harness()
    harness.generate(1, stream=False, logprobs=20, max_new_tokens=200)
    harness.generate(2, stream=False)
    sequences = [await harness.added(), await harness.added()]
    found = TokenLogprobs(-1.0, 1, list(range(20)), [-1.0] * 20)
    first, other = sorted(sequences, key=lambda item: item.sampling.num_logprobs is None)
    # One row with far more tokens than any step makes.
    harness.step(row(first.seq_id, list(range(250)) * 120, logprobs=[found] * 30000), row(other.seq_id, "a", "length"))
    messages = [await harness.link.take(Verb.ERROR), await harness.link.take(Verb.FINAL)]
    assert messages[0].header["param"] == "logprobs"
    harness.assert_empty()


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"257": 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [257]}, "allowed_token_ids"),
        ({"allowed_token_ids": [256], "min_new_tokens": 2}, "allowed_token_ids"),
        ({"allowed_token_ids": [97], "bad_words": ["ba"]}, "allowed_token_ids"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
async def test_impossible_options_are_refused(params: dict[str, object], param: str) -> None:
    harness = Harness()
    harness.generate(**params)
    assert (await harness.link.take(Verb.ERROR)).header["param"] == param


async def test_biases_reach_the_engine() -> None:
    harness = Harness()
    harness.generate(logit_bias={"5": -100, "6": 1.5}, allowed_token_ids=[7, 5, 7])
    sequence = await harness.added()
    assert sequence.sampling.logit_bias == ((5, -100.0), (6, 1.5))
    assert sequence.sampling.allowed_token_ids == (5, 7)
    assert not sequence.score_prompt
    assert sequence.sampling.num_logprobs is None
