# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from mii_zmq.tokenizer import FakeTokenizer, HfTokenizer, TextTokenizer
from mii_zmq.worker.detokenizer import Detokenizer, StopMatcher
from tests import tiny_tokenizers

JOINING = tiny_tokenizers.joining()
PARTS = ["你", "好吗", " ", "   ", "\n", "👩\u200d🚀", "é", "e\u0301", "x", "</s>", "ￗ", "\ufffd"]
TEXTS = st.lists(st.sampled_from([*tiny_tokenizers.CORPUS, *PARTS]), max_size=6).map("".join) | st.text(max_size=40)
WORDS = ["the", "quick", "brown", "fox", "jumps", "END", "stop", "123"]
PROPERTY = settings(max_examples=60, deadline=None)


def detokenize(tokenizer: TextTokenizer, tail: list[int], steps: list[list[int]], skip: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, tail, skip)
    return [*(detokenizer.push(step) for step in steps), detokenizer.flush()]


def one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


@pytest.mark.parametrize("name", JOINING)
@PROPERTY
@given(text=TEXTS, skip=st.booleans())
def test_joined_pieces_equal_a_decode_of_the_whole(name: str, text: str, skip: bool) -> None:
    tokenizer = JOINING[name]
    ids = tokenizer.encode(text)
    pieces = detokenize(tokenizer, [], one_by_one(ids), skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip)
    assert "".join(pieces) == "".join(detokenize(tokenizer, [], [ids], skip))


@pytest.mark.parametrize("name", [name for name in JOINING if "space_mark" not in name])
@PROPERTY
@given(data=st.data())
def test_arbitrary_ids_equal_a_decode_of_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = JOINING[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    skip = data.draw(st.booleans())
    assert "".join(detokenize(tokenizer, [], one_by_one(ids), skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", ["fake", "byte_level"])
@PROPERTY
@given(data=st.binary(max_size=60))
def test_broken_utf8_becomes_the_same_replacements(name: str, data: bytes) -> None:
    tokenizer = JOINING[name]
    ids = list(data)
    if isinstance(tokenizer, HfTokenizer):
        spelling = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}  # type: ignore[misc]
        ids = [spelling[bytes((byte,))] for byte in data]
    assert "".join(detokenize(tokenizer, [], one_by_one(ids))) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("name", JOINING)
@PROPERTY
@given(text=TEXTS, cut=st.integers(0, 1000))
def test_output_continues_the_prompt(name: str, text: str, cut: int) -> None:
    tokenizer = JOINING[name]
    ids = tokenizer.encode("The lazy dog" + text)
    cut = max(1, cut % len(ids))
    before = tokenizer.decode(ids[:cut])
    if before.endswith("\ufffd"):
        return
    assert before + "".join(detokenize(tokenizer, ids[:cut], one_by_one(ids[cut:]))) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", JOINING)
@PROPERTY
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_no_piece_holds_half_a_character(name: str, text: str) -> None:
    tokenizer = JOINING[name]
    ids = tokenizer.encode(text)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in detokenize(tokenizer, [], one_by_one(ids)))


@pytest.mark.parametrize("build", [tiny_tokenizers.metaspace_decoder, tiny_tokenizers.word_pieces])
@PROPERTY
@given(text=st.lists(st.sampled_from(WORDS), min_size=1, max_size=30).map(" ".join))
def test_window_equals_a_decode_of_the_whole(build: type, text: str) -> None:
    tokenizer = build()
    assert tokenizer.token_bytes is None
    ids = tokenizer.encode(text)
    pieces = detokenize(tokenizer, [], one_by_one(ids))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert sum(map(bool, pieces)) >= len(ids) - 2
    for cut in (1, len(ids) // 2):
        whole, before = tokenizer.decode(ids[:cut]) + "", tokenizer.decode(ids[:cut])
        whole += "".join(detokenize(tokenizer, ids[:cut], one_by_one(ids[cut:])))
        assert whole == tokenizer.decode(ids), before


def test_window_holds_back_byte_tokens_until_a_character_is_whole() -> None:
    backend = Tokenizer(models.BPE(vocab={f"<0x{byte:02X}>": byte for byte in range(256)}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = HfTokenizer(backend, {}, None)
    assert tokenizer.token_bytes is None
    pieces = detokenize(tokenizer, [], one_by_one(list("né👍".encode())))
    assert pieces == ["n", "", "é", "", "", "", "👍", ""]


def test_a_genuine_replacement_character_comes_out() -> None:
    backend = Tokenizer(models.BPE(vocab={"\ufffd": 0, "a": 1}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = HfTokenizer(backend, {}, None)
    assert "".join(detokenize(tokenizer, [], one_by_one([0, 0, 1, 0]))) == "\ufffd\ufffda\ufffd"
    held = detokenize(tokenizer, [], one_by_one([0] * 30))
    assert "".join(held) == "\ufffd" * 30
    assert any(held[:8]), "held back without bound"
    fake = FakeTokenizer()
    assert detokenize(fake, [], [list("\ufffd".encode())]) == ["\ufffd", ""]


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    assert detokenize(FakeTokenizer(), [], one_by_one([0x41, 0xE4, 0xBD])) == ["A", "", "", "\ufffd"]


def test_first_output_word_keeps_its_space_behind_a_prompt() -> None:
    tokenizer = tiny_tokenizers.space_mark()
    prompt, output = (
        tokenizer.encode("the quick"),
        tokenizer.encode("the quick fox")[len(tokenizer.encode("the quick")) :],
    )
    assert "".join(detokenize(tokenizer, prompt, [output])) == " fox"
    assert "".join(detokenize(tokenizer, [], [output])) == "fox"
    assert tokenizer.decode(output) == "fox"


def run_matcher(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


def expected_cut(stops: list[str], text: str) -> tuple[str, bool]:
    """By definition: the stop string that is complete first; of several at the same character, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


STOPS = st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(stops=STOPS, pieces=st.lists(st.text("ab.", max_size=4), max_size=12))
def test_stop_matcher_cuts_as_defined_however_the_text_is_cut_up(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    assert run_matcher(stops, pieces) == expected_cut(stops, text)
    assert run_matcher(stops, list(text)) == expected_cut(stops, text)


@settings(max_examples=200, deadline=None)
@given(stops=STOPS, text=st.text("ab.", max_size=30))
def test_stop_matcher_never_leaks_and_holds_no_more_than_needed(stops: list[str], text: str) -> None:
    matcher, given_out = StopMatcher(stops), ""
    for index, char in enumerate(text, start=1):
        given_out += matcher.push(char)
        if matcher.matched:
            break
        possible = {stop[:size] for stop in stops for size in range(1, len(stop))}
        held = max((len(start) for start in possible if text[:index].endswith(start)), default=0)
        assert given_out == text[: index - held]
    assert given_out + matcher.flush() == expected_cut(stops, text)[0]


def test_stop_matcher_examples() -> None:
    assert run_matcher(["END"], ["the E", "N", "D more"]) == ("the ", True)
    assert run_matcher(["\n\n"], ["a\n", "b\n", "\nc"]) == ("a\nb", True)
    assert run_matcher(["</s>", "</stop>"], ["x</st", "op"]) == ("x</stop", False)
    assert run_matcher(["👍🏽"], ["ok 👍", "🏽!"]) == ("ok ", True)
    assert run_matcher(["abcd", "bc"], list("abcd")) == ("a", True)
    assert run_matcher(["aab"], ["aaa", "ab", "x"]) == ("aa", True)


def test_stop_matcher_gives_nothing_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert (matcher.push("ax"), matcher.push("b"), matcher.flush()) == ("a", "", "")


def test_stop_matcher_work_is_linear_in_the_text() -> None:
    stops = ["a" * 1023 + char for char in "bcdefgh"]
    matcher = StopMatcher(stops)
    given_out = sum(len(matcher.push("a")) for _ in range(20_000))
    assert given_out == 20_000 - 1023
    assert not matcher.matched
