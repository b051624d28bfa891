# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.errors import InvalidRequest
from mii_zmq.sampling_params import SamplingParams, check_text, check_vocabulary


def test_defaults_are_those_of_the_original() -> None:
    params = SamplingParams.from_mapping({})
    assert (params.do_sample, params.top_p, params.top_k, params.temperature) == (True, 0.9, None, None)
    assert (params.min_new_tokens, params.stop, params.ignore_eos, params.n) == (0, (), False, 1)
    assert params.to_mapping() == {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": -5}, "max_new_tokens"),
        ({"max_new_tokens": "12"}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_new_tokens": 2**31}, "max_new_tokens"),
        ({"max_length": 0}, "max_length"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 101}, "presence_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["\ud800"]}, "stop"),
        ({"bad_words": ["\udfff"]}, "bad_words"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(257))}, "stop_token_ids"),
        ({"do_sample": 1}, "do_sample"),
        ({"max_new_token": 5}, "max_new_token"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_mapping(fields)
    assert caught.value.param == param


def test_an_unknown_field_gets_the_nearest_known_one() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'max_new_tokens'"):
        SamplingParams.from_mapping({"max_new_token": 5})


def test_no_output_at_all_is_refused_with_a_word_on_where_it_is_not() -> None:
    with pytest.raises(
        InvalidRequest, match="^max_new_tokens is 0, allowed: 1 to 2147483647; 0 where prompt_logprobs or"
    ):
        SamplingParams.from_mapping({"max_new_tokens": 0})
    with pytest.raises(InvalidRequest, match="^max_new_tokens is -1, allowed: 1 to 2147483647$"):
        SamplingParams.from_mapping({"max_new_tokens": -1})
    assert SamplingParams.from_mapping({"max_new_tokens": 0, "prompt_logprobs": 0}).max_new_tokens == 0


def test_a_huge_value_is_not_repeated_in_full() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_mapping({"x" * 100_000: 1})
    assert len(str(caught.value)) < 300


def test_one_string_may_stand_for_a_list() -> None:
    params = SamplingParams.from_mapping({"stop": "END", "bad_words": "no", "stop_token_ids": None})
    assert (params.stop, params.bad_words, params.stop_token_ids) == (("END",), ("no",), ())


def test_the_originals_prompt_length_is_dropped() -> None:
    assert SamplingParams.from_mapping({"prompt_length": 5}) == SamplingParams()


@pytest.mark.parametrize(("fields", "greedy"), [({}, False), ({"do_sample": False}, True), ({"temperature": 0}, True)])
def test_greedy(fields: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams.from_mapping(fields).is_greedy is greedy


def test_choices_of_one_request_draw_differently() -> None:
    params = SamplingParams.from_mapping({"seed": 7, "n": 3})
    seeds = [params.for_choice(index).seed for index in range(3)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert all(params.for_choice(index).n == 1 for index in range(3))
    assert SamplingParams.from_mapping({"n": 2}).for_choice(1).seed is None


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    params = SamplingParams.from_mapping({"stop_token_ids": [5, 99]})
    check_vocabulary(params, 100)
    with pytest.raises(InvalidRequest, match="holds 99"):
        check_vocabulary(params, 99)


def test_text_must_be_unicode() -> None:
    assert check_text("né 👩‍🚀", "prompt") == "né 👩‍🚀"
    with pytest.raises(InvalidRequest, match="prompt holds a lone surrogate at character 2"):
        check_text("ab\ud800", "prompt")


VALID = st.fixed_dictionaries(
    {},
    optional={
        "max_new_tokens": st.integers(1, 1000),
        "temperature": st.floats(0, 100),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(1, 50_000),
        "seed": st.integers(0, 2**63 - 1),
        "stop": st.lists(st.text("abc", min_size=1, max_size=5), max_size=16),
        "stop_token_ids": st.lists(st.integers(0, 1000), max_size=5),
        "do_sample": st.booleans(),
    },
)


@settings(max_examples=50, deadline=None)
@given(VALID)
def test_a_mapping_survives_both_ways(fields: dict[str, Any]) -> None:
    params = SamplingParams.from_mapping(fields)
    assert SamplingParams.from_mapping(params.to_mapping()) == params


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__) | st.text(max_size=8), JSON, max_size=4))
def test_anything_else_is_refused_and_never_crashes(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):
        SamplingParams.from_mapping(fields)
