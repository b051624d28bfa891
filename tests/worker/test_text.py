# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from mii_zmq.errors import InvalidRequest, MiiError, PromptTooLong
from mii_zmq.sampling_params import SamplingParams
from mii_zmq.worker.prompt_text import PromptInput
from mii_zmq.worker.text import bad_words_ids, build_sequence
from tests import tiny_tokenizers
from tests.worker.preparing import EOS, FAKE, REQUEST_ID, build, limits, refusal


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 59),
        ({"max_new_tokens": 59}, 59),
        ({"max_new_tokens": 3}, 3),
        ({"max_length": 6}, 1),
        ({"max_length": 64}, 59),
        ({"max_length": 10, "max_new_tokens": 20}, 20),
    ],
)
def test_output_limit(options: dict[str, Any], expected: int) -> None:
    assert build("hello", **options).sequence.max_new_tokens == expected


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"max_length": 5}, InvalidRequest, "max_length"),
        ({"max_length": 65}, PromptTooLong, "max_length"),
        ({"max_new_tokens": 60}, PromptTooLong, "max_new_tokens"),
        ({"max_new_tokens": 2**31 - 1}, PromptTooLong, "max_new_tokens"),
        ({"min_new_tokens": 60}, InvalidRequest, "min_new_tokens"),
        ({"min_new_tokens": 6, "max_length": 10}, InvalidRequest, "min_new_tokens"),
        ({"stop_token_ids": [300]}, InvalidRequest, "stop_token_ids"),
    ],
)
def test_options_that_do_not_fit_name_the_field(options: dict[str, Any], kind: type[MiiError], param: str) -> None:
    error = refusal("hello", **options)
    assert type(error) is kind
    assert error.param == param


def test_sampling_defaults() -> None:
    spec = build().sequence.sampling
    assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p) == (1.0, 0.9, 0, 0.0)
    assert spec.stop_token_ids == (EOS,)


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"temperature": 0}, {"do_sample": False, "temperature": 0.7}]
)
def test_greedy(options: dict[str, Any]) -> None:
    spec = build(**options, top_k=5, repetition_penalty=1.2).sequence.sampling
    assert (spec.temperature, spec.top_p, spec.top_k, spec.repetition_penalty) == (0.0, 1.0, 0, 1.2)


def test_seed_is_derived_from_request_and_choice() -> None:
    def seed(request_id: bytes, choice: int, **options: Any) -> int:
        params = SamplingParams.from_mapping({"n": 4, **options})
        prompt = PromptInput(text="a")
        return build_sequence(FAKE, limits(), params, request_id, prompt, choice=choice).sequence.sampling.seed

    assert seed(REQUEST_ID, 0) == seed(REQUEST_ID, 0)
    assert len({seed(REQUEST_ID, 0), seed(REQUEST_ID, 1), seed(bytes(16), 0)}) == 3
    assert seed(REQUEST_ID, 0, seed=7) == seed(bytes(16), 0, seed=7) == 7
    assert seed(REQUEST_ID, 1, seed=7) != 7
    assert all(0 <= seed(REQUEST_ID, choice) < 2**63 for choice in range(4))


def test_stop_ids_are_merged_and_ignored_on_request() -> None:
    engine = limits(eos_token_ids=(9, 4))
    assert build(engine=engine, stop_token_ids=[30, 4]).sequence.sampling.stop_token_ids == (4, 9, 30)
    assert build(engine=engine, stop_token_ids=[30], ignore_eos=True).sequence.sampling.stop_token_ids == ()


def test_fields_for_the_engine_are_passed_on() -> None:
    params = SamplingParams.from_mapping({"bad_words": ["no"]})
    prepared = build_sequence(
        FAKE, limits(), params, REQUEST_ID, PromptInput(text="a"),
        seq_id=5, resumed_token_ids=[1, 2], priority=3, deadline_s=1.5, cache_salt="tenant",
    )  # fmt: skip
    sequence = prepared.sequence
    assert (sequence.seq_id, sequence.resumed_token_ids, sequence.priority) == (5, [1, 2], 3)
    assert (sequence.deadline_s, sequence.cache_salt) == (1.5, "tenant")
    assert sequence.sampling.bad_words == (tuple(b"no"), tuple(b" no"))


def test_bad_words_cover_both_spellings() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    alone, spaced = (tuple(tokenizer.encode(text)) for text in ("the", " the"))
    assert set(bad_words_ids(tokenizer, ["the"])) == {alone, spaced}
    assert set(bad_words_ids(tokenizer, [" the"])) == {spaced}
    marked = tiny_tokenizers.space_mark()
    assert marked.token_bytes is not None
    spelt = {b"".join(map(marked.token_bytes, ids)) for ids in bad_words_ids(marked, ["dog"])}
    assert spelt == {b"dog", b" dog"}
    assert bad_words_ids(tokenizer, []) == ()


# --- structured output ---------------------------------------------------------------------------------------------


def test_a_grammar_goes_to_the_engine_with_the_request():
    prepared = build(engine=limits(takes_grammars=True), structured_output={"kind": "regex", "value": "a+"})
    assert prepared.sequence.grammar == ("regex", "a+")
    assert prepared.sequence.sampling.is_masked
    plain = build(engine=limits(takes_grammars=True))
    assert plain.sequence.grammar is None
    assert not plain.sequence.sampling.is_masked


@pytest.mark.parametrize(
    ("takes_grammars", "wanted", "reason"),
    [
        (False, {"kind": "regex", "value": "a+"}, "extra 'structured'"),
        (True, {"kind": "json_schema", "value": '{"not": {}}'}, "/not cannot be enforced"),
        (True, {"kind": "json_schema", "value": "{"}, "no JSON"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_before_it_reaches_the_engine(
    takes_grammars: bool, wanted: dict[str, str], reason: str
):
    error = refusal(engine=limits(takes_grammars=takes_grammars), structured_output=wanted)
    assert isinstance(error, InvalidRequest)
    assert error.param == "structured_output"
    assert reason in error.message


def test_a_tokenizer_that_does_not_spell_its_tokens_takes_no_grammar():
    params = SamplingParams.from_mapping({"structured_output": {"kind": "regex", "value": "a+"}})
    engine = limits(takes_grammars=True, vocab_size=2000)
    with pytest.raises(InvalidRequest, match="bytes of its tokens"):
        build_sequence(tiny_tokenizers.word_pieces(), engine, params, REQUEST_ID, PromptInput(token_ids=[1]))
