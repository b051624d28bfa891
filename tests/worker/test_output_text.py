# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.sampling_params import SamplingParams
from mii_zmq.tokenizer import FakeTokenizer, TextTokenizer
from mii_zmq.worker.output_text import OutputProcessor
from mii_zmq.worker.prompt_text import PromptInput
from mii_zmq.worker.text import build_sequence
from tests import tiny_tokenizers
from tests.worker.preparing import EOS, FAKE, build, limits

JOINING = tiny_tokenizers.joining()


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
