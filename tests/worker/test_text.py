# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.errors import InvalidRequest, MiiError, PromptTooLong
from mii_zmq.sampling_params import SamplingParams
from mii_zmq.tokenizer import FakeTokenizer, TextTokenizer
from mii_zmq.worker.plan import EngineLimits
from mii_zmq.worker.text import OutputProcessor, PreparedSequence, PromptInput, bad_words_ids, build_sequence
from tests import tiny_tokenizers

FAKE = FakeTokenizer()
JOINING = tiny_tokenizers.joining()
REQUEST_ID = bytes(range(16))
EOS = 256


def limits(**changes: Any) -> EngineLimits:
    facts: dict[str, Any] = {
        "vocab_size": 300, "max_model_len": 64, "num_blocks": 100, "block_size": 16, "max_sequences": 8,
        "token_budget": 32,
    }  # fmt: skip
    return EngineLimits(**{**facts, **changes})


def build(prompt: PromptInput | str = "hello", engine: EngineLimits | None = None, **options: Any) -> PreparedSequence:
    form = PromptInput(text=prompt) if isinstance(prompt, str) else prompt
    return build_sequence(FAKE, engine or limits(), SamplingParams.from_mapping(options), REQUEST_ID, form)


def refusal(prompt: PromptInput | str = "hello", engine: EngineLimits | None = None, **options: Any) -> MiiError:
    with pytest.raises(MiiError) as caught:
        build(prompt, engine, **options)
    return caught.value


def process(
    tokenizer: TextTokenizer, steps: list[list[int]], reason: str, replayed: int = 0, **options: Any
) -> tuple[str, str | None, int]:
    """Feed steps, the last with the engine's reason; returns joined text, reason, tokens used."""
    processor = OutputProcessor(tokenizer, SamplingParams.from_mapping(options), prompt_text="P:")
    text, used = "", 0
    if replayed:
        processor.replay([token_id for step in steps for token_id in step][:replayed])
        used, steps = replayed, [[token_id for step in steps for token_id in step][replayed:]]
    for index, step in enumerate(steps):
        piece, finished, count = processor.push(step, reason if index == len(steps) - 1 else None)
        text, used = text + piece, used + count
        if finished:
            break
    assert processor.num_tokens == used
    return text, processor.finish_reason, used


# --- prompts -------------------------------------------------------------------------------------------------------


def test_text_prompt() -> None:
    prepared = build("héllo")
    assert prepared.sequence.prompt_token_ids == list("héllo".encode())
    assert prepared.prompt_length == 6
    assert prepared.sequence.max_new_tokens == 58
    assert prepared.prompt_text == "héllo"


def test_token_ids_prompt() -> None:
    prepared = build(PromptInput(token_ids=[1, 2, 299]))
    assert prepared.sequence.prompt_token_ids == [1, 2, 299]
    assert prepared.prompt_text is None


def test_messages_prompt_is_rendered_and_encoded_without_more_special_tokens() -> None:
    prepared = build(PromptInput(messages=[{"role": "user", "content": "hi"}]))
    assert prepared.prompt_text == "user: hi\nassistant: "
    assert bytes(prepared.sequence.prompt_token_ids).decode() == prepared.prompt_text


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (PromptInput(), "prompt"),
        (PromptInput(text="a", token_ids=[1]), "prompt"),
        (PromptInput(text=""), "prompt"),
        (PromptInput(text=5), "prompt"),  # type: ignore[arg-type]
        (PromptInput(text="a\ud800"), "prompt"),
        (PromptInput(token_ids=[]), "prompt_token_ids"),
        (PromptInput(token_ids=[300]), "prompt_token_ids"),
        (PromptInput(token_ids=[-1]), "prompt_token_ids"),
        (PromptInput(token_ids=[True]), "prompt_token_ids"),
        (PromptInput(token_ids=[1.5]), "prompt_token_ids"),  # type: ignore[list-item]
        (PromptInput(messages=[]), "messages"),
        (PromptInput(messages=[{"role": "user", "content": "\udc00"}]), "messages[0].content"),
    ],
)
def test_malformed_prompts_name_the_field(prompt: PromptInput, param: str) -> None:
    error = refusal(prompt)
    assert isinstance(error, InvalidRequest)
    assert error.param == param


def test_a_prompt_that_leaves_no_room_is_too_long() -> None:
    assert build("x" * 63).sequence.max_new_tokens == 1
    for prompt in ("x" * 64, "x" * 10_000_000, PromptInput(token_ids=[1] * 64)):
        error = refusal(prompt)
        assert isinstance(error, PromptTooLong)
        assert "64 tokens" in error.message


def test_a_prompt_larger_than_the_pool_is_too_long() -> None:
    engine = limits(num_blocks=2)
    assert build("x" * 31, engine).sequence.max_new_tokens == 1
    error = refusal("x" * 32, engine)
    assert isinstance(error, PromptTooLong)
    assert "KV pool holds 32 tokens" in error.message


def test_a_token_that_the_model_lacks_is_refused() -> None:
    error = refusal("xyz\xff", limits(vocab_size=100))
    assert error.param == "prompt"
    assert "not" in error.message


# --- lengths -------------------------------------------------------------------------------------------------------


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


# --- sampling ------------------------------------------------------------------------------------------------------


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


# --- output --------------------------------------------------------------------------------------------------------


def test_end_token_is_counted_but_not_shown() -> None:
    assert process(FAKE, [list(b"ab"), [EOS]], "stop") == ("ab", "stop", 3)
    assert process(FAKE, [[EOS]], "stop") == ("", "stop", 1)
    assert process(FAKE, [[EOS], list(b"a")], "length", ignore_eos=True) == ("<eos>a", "length", 2)
    assert process(FAKE, [[EOS], list(b"a")], "length", skip_special_tokens=True) == ("a", "length", 2)


def test_length_flushes_what_was_held() -> None:
    assert process(FAKE, [list(b"a"), [0xE4]], "length") == ("a\ufffd", "length", 2)
    assert process(FAKE, [list(b"xEN")], "length", stop="END") == ("xEN", "length", 3)
    assert process(FAKE, [list(b"xEN"), [EOS]], "stop", stop="END") == ("xEN", "stop", 4)
    assert process(FAKE, [list(b"xEN"), []], "cancelled", stop="END") == ("xEN", "cancelled", 3)


def test_stop_string_ends_within_a_step() -> None:
    assert process(FAKE, [list(b"ab EN"), list(b"D rest")], "length", stop=["END"]) == ("ab ", "stop", 6)
    assert process(FAKE, [list(b"ab END")], "length", stop=["END"]) == ("ab ", "stop", 6)


def test_nothing_comes_after_the_end() -> None:
    processor = OutputProcessor(FAKE, SamplingParams.from_mapping({"stop": "x"}))
    assert processor.push(list(b"axb")) == ("a", "stop", 2)
    assert processor.push(list(b"b"), "length") == ("", "stop", 0)
    assert processor.num_tokens == 2


def test_ignore_eos_ignores_stop_strings() -> None:
    assert process(FAKE, [list(b"a END b")], "length", stop="END", ignore_eos=True) == ("a END b", "length", 7)


def test_stop_strings_wait_for_min_new_tokens() -> None:
    assert process(FAKE, [list(b"x.x.x.")], "length", stop="x.", min_new_tokens=3) == ("x.x.", "stop", 6)
    assert process(FAKE, [list(b"x.x.x.")], "length", stop="x.", min_new_tokens=2) == ("x.", "stop", 4)
    assert process(FAKE, [list(b"x."), [EOS]], "stop", stop="x.", min_new_tokens=2) == ("x.", "stop", 3)


def test_full_text_starts_with_the_prompt_once() -> None:
    assert process(FAKE, [list(b"a"), list(b"b")], "length", return_full_text=True) == ("P:ab", "length", 2)
    from_ids = build(PromptInput(token_ids=list(b"ids ")), return_full_text=True).output_processor()
    assert from_ids.push(list(b"a")) == ("ids a", None, 1)


def test_the_stop_string_that_ended_the_sequence_is_known() -> None:
    processor = OutputProcessor(FAKE, SamplingParams.from_mapping({"stop": ["yz", "never"]}), lead="<think>")
    assert processor.push(list(b"x")) == ("<think>x", None, 1)
    assert processor.matched_stop is None
    assert processor.push(list(b"yz")) == ("", "stop", 2)
    assert processor.matched_stop == "yz"
    assert OutputProcessor(FAKE, SamplingParams()).matched_stop is None


def test_the_output_begins_with_reasoning_that_the_prompt_has_opened() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}<think>{{ '\\n' }}"
    messages = [{"role": "user", "content": "hi"}]
    for wanted, lead in ((True, "<think>\n"), (False, "")):
        prompt = PromptInput(messages=messages, return_reasoning_start=wanted)
        prepared = build_sequence(tokenizer, limits(), SamplingParams(), bytes(16), prompt)
        assert prepared.output_processor().push(list(b"a")) == (f"{lead}a", None, 1)
        resumed = prepared.output_processor()
        resumed.replay(list(b"a"))
        assert resumed.push(list(b"b")) == ("b", None, 1)


def test_replay_says_when_only_the_end_is_missing() -> None:
    def replay(token_ids: list[int], **options: Any) -> str | None:
        return build("p", max_new_tokens=4, **options).output_processor().replay(token_ids)

    assert replay([]) is None
    assert replay(list(b"ab")) is None
    assert replay([*b"ab", EOS]) == "stop"
    assert replay(list(b"abcd")) == "length"
    assert replay(list(b"aEND"), stop="END") == "stop"
    assert replay([*b"ab", EOS], ignore_eos=True) is None


PIECES = st.lists(
    st.sampled_from([*tiny_tokenizers.CORPUS[:6], "END", "EN", "\n\n", "你好", "👩‍🚀", "  ", "stop"]), max_size=8
).map("".join)
OPTIONS = st.fixed_dictionaries(
    {
        "stop": st.lists(st.sampled_from(["END", "\n\n", "好，", "‍👧", " fox j", "zzz"]), max_size=3),
        "min_new_tokens": st.integers(0, 12),
        "ignore_eos": st.booleans(),
        "return_full_text": st.booleans(),
        "skip_special_tokens": st.booleans(),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINING)
@settings(max_examples=60, deadline=None)
@given(text=PIECES, options=OPTIONS, data=st.data())
def test_streamed_unstreamed_and_resumed_text_agree(name: str, text: str, options: dict[str, Any], data: Any) -> None:
    tokenizer = JOINING[name]
    reason = data.draw(st.sampled_from(["stop", "length"]))
    ids = [*tokenizer.encode(text, add_special_tokens=False), *(tokenizer.eos_token_ids if reason == "stop" else ())]
    if not ids:
        return
    whole = process(tokenizer, [ids], reason, **options)
    assert process(tokenizer, [[token_id] for token_id in ids], reason, **options) == whole
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=10))
    steps, rest = [], ids
    for size in sizes:
        steps, rest = [*steps, rest[:size]], rest[size:]
    steps = [step for step in [*steps, rest] if step]
    assert process(tokenizer, steps, reason, **options) == whole
    stopped_at = whole[2]
    cut = data.draw(st.integers(0, max(0, min(stopped_at, len(ids)) - 1)))
    if cut:
        before = OutputProcessor(tokenizer, SamplingParams.from_mapping(options), prompt_text="P:").push(ids[:cut])
        after = process(tokenizer, [ids], reason, replayed=cut, **options)
        assert (before[0] + after[0], after[1], after[2]) == whole
    active = [] if options["ignore_eos"] else options["stop"]
    if options["min_new_tokens"] == 0:
        assert not any(stop in whole[0].removeprefix("P:") for stop in active)


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
