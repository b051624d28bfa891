# SPDX-License-Identifier: Apache-2.0
"""Compiled grammars and the masks along them, on a vocabulary of bytes and a few longer tokens."""

from __future__ import annotations

import functools
import json
import os
import select
import time
import warnings

import pytest

pytest.importorskip("xgrammar")
import xgrammar

from mii_zmq.errors import InternalError, InvalidRequest, MiiError
from mii_zmq.tokenizer import FakeTokenizer
from mii_zmq.worker.grammar_compiler import Compilation, compile_grammar, run_fork
from mii_zmq.worker.grammar_follower import GrammarFollower, Vocabulary
from mii_zmq.worker.grammar_limits import SequenceLimits
from mii_zmq.worker.grammar_process import spellings, text_form

pytestmark = pytest.mark.slow

LONGER = [b"ab", b"true", b'{"', b" the"]
EOS, PADDING = 260, 261
TOKENS = [bytes((byte,)) for byte in range(256)] + LONGER + [b"", b""]
SIZE = len(TOKENS)
STOPS = SequenceLimits(stop_token_ids=[EOS])


class BytesTokenizer(FakeTokenizer):
    """Ids are `TOKENS`; end-of-sequence and padding have none."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size, self.eos_token_ids, self.all_special_ids = SIZE, (EOS,), frozenset((EOS,))
        self.token_bytes = TOKENS.__getitem__


@functools.cache
def vocabulary(kind: str = "regex") -> Vocabulary:
    return Vocabulary(spellings(BytesTokenizer(), SIZE, (EOS,))[text_form(kind)])


@functools.cache
def compiled(kind: str, value: str) -> xgrammar.CompiledGrammar:
    compiler = xgrammar.GrammarCompiler(vocabulary(kind).info, max_threads=1, cache_enabled=False)
    return compile_grammar(compiler, kind, value)


def follow(
    kind: str, value: str, limits: SequenceLimits = STOPS, token_ids: bytes | list[int] = b""
) -> GrammarFollower:
    return GrammarFollower(compiled(kind, value), vocabulary(kind), limits, list(token_ids))


def allowed(follower: GrammarFollower) -> set[int] | None:
    mask = follower.next_mask()
    if mask is None:
        return None
    assert len(mask) == 4 * -(-SIZE // 32)
    return {token_id for token_id in range(8 * len(mask)) if mask[token_id // 8] >> (token_id % 8) & 1}


def test_text_of_the_prompt_is_read_first() -> None:
    think = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
    form = {
        "type": "sequence",
        "elements": [{"type": "optional", "content": think}, {"type": "const_string", "value": "x"}],
    }
    tag = json.dumps({"type": "structural_tag", "format": form})
    assert allowed(follow("structural_tag", tag)) == chars("<x")
    opened = SequenceLimits(stop_token_ids=[EOS], lead="<think>\n")
    assert len(allowed(follow("structural_tag", tag, opened)) or ()) > 200
    assert allowed(follow("structural_tag", tag, opened, b"hm</think>")) == chars("x")
    with pytest.raises(InvalidRequest, match="'<think>'"):
        follow("regex", "a", opened)


def chars(text: str) -> set[int]:
    return set(text.encode())


def test_masks_allow_what_can_follow_in_tokens_of_any_length():
    follower = follow("regex", "a(b|c)d?")
    assert allowed(follower) == {*chars("a"), TOKENS.index(b"ab")}
    follower.accept(TOKENS.index(b"ab"))
    assert follower.num_output_tokens == 1
    assert allowed(follower) == {*chars("d"), EOS}
    follower.accept(ord("d"))
    assert allowed(follower) == {EOS}


def test_a_token_against_the_mask_is_a_bug():
    follower = follow("regex", "ab")
    with pytest.raises(InternalError, match="token 120"):
        follower.accept(ord("x"))


def test_output_that_is_continued_is_followed_first():
    assert allowed(follow("regex", "abcd", token_ids=b"abc")) == chars("d")
    with pytest.raises(InvalidRequest, match="does not follow"):
        follow("regex", "abcd", token_ids=b"abx")


def test_ids_without_text_are_never_allowed():
    follower = follow("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "any_text"}}))
    found = allowed(follower)
    assert found is not None
    assert found >= {*range(128), EOS}
    assert PADDING not in found


def test_stop_ids_are_allowed_only_at_the_end_and_not_before_the_minimum():
    limits = SequenceLimits(stop_token_ids=[EOS, ord("}")], min_new_tokens=2)
    follower = follow("regex", "a*}?b?", limits)
    assert allowed(follower) == {*chars("ab"), TOKENS.index(b"ab")}
    follower.accept(ord("a"))
    follower.accept(ord("a"))
    assert allowed(follower) == {*chars("ab}"), TOKENS.index(b"ab"), EOS}


@pytest.mark.parametrize(
    "limits", [SequenceLimits(), SequenceLimits(stop_token_ids=[EOS], min_new_tokens=9)], ids=["no stops", "minimum"]
)
def test_an_output_that_can_only_end_is_complete(limits: SequenceLimits):
    follower = follow("choice", '["no", "none"]', limits)
    for character in b"no":
        assert allowed(follower) == {character}
        follower.accept(character)
    assert allowed(follower) == chars("n")
    for character in b"ne":
        follower.accept(character)
    assert allowed(follower) is None


def test_what_the_request_forbids_is_forbidden_too():
    limits = SequenceLimits(stop_token_ids=[EOS], allowed_token_ids=[*b"abc", EOS])
    assert allowed(follow("regex", "[a-f]+", limits)) == chars("abc")
    limits = SequenceLimits(bad_words=[[*b"xab"], [*b"c"], []], prompt_tail=[*b"xa"])
    follower = follow("regex", "[a-f]+", limits)
    assert allowed(follower) == {*chars("adef"), TOKENS.index(b"ab")}
    follower.accept(ord("a"))
    assert allowed(follower) == {*chars("abdef"), TOKENS.index(b"ab")}


def test_a_dead_end_is_the_requests_error():
    with pytest.raises(InvalidRequest, match="nothing can follow"):
        follow("regex", "[a-f]+", SequenceLimits(allowed_token_ids=[ord("x")])).next_mask()


def test_output_is_utf8_as_it_should_be():
    for lead, second in ((0xE0, {*range(0xA0, 0xC0)}), (0xED, {*range(0x80, 0xA0)}), (0xF4, {*range(0x80, 0x90)})):
        follower = follow("regex", ".*", token_ids=[lead])
        assert allowed(follower) == second
    first = allowed(follow("regex", ".*"))
    assert first is not None
    assert first.isdisjoint({0xC0, 0xC1, 0xFF})


def test_strings_of_json_hold_no_control_characters():
    follower = follow("json_schema", '{"type": "string", "maxLength": 9}', token_ids=b'"')
    found = allowed(follower)
    assert found is not None
    assert found.isdisjoint(range(32))


def test_special_spellings_and_characters_in_choices():
    choices = ["é\n", 'q"\\', "😀", "[a-z]+"]
    for choice in choices:
        follower = follow("choice", json.dumps(choices), token_ids=choice.encode())
        assert allowed(follower) == {EOS}


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("regex", "(a", "parenthesis that is not closed"),
        ("regex", r"a\1", "a backreference"),
        ("ebnf", "start ::= 'a'", "EBNF"),
        ("ebnf", "root ::= missing", "missing"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"$ref": "#/$defs/a"}', "defs"),
        ("json_schema", '{"uniqueItems": true}', "uniqueItems"),
        ("structural_tag", '{"type": "tag"}', "cannot be used"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(kind: str, value: str, reason: str):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiled(kind, value)
    assert "/project/" not in caught.value.message
    assert caught.value.message.startswith("structured_output: ")


def outcome(kind: str, value: str, timeout_s: float = 30.0, memory_mb: int = 1024) -> str | MiiError:
    compilation = Compilation(vocabulary(kind), kind, value, timeout_s=timeout_s, memory_mb=memory_mb)
    while True:
        select.select([compilation], [], [], max(0.0, compilation.deadline - time.monotonic()) + 0.01)
        found = compilation.outcome()
        if found is not None:
            return found


def test_a_fork_compiles_within_its_limits():
    found = outcome("regex", "a+b")
    assert isinstance(found, str)
    grammar = xgrammar.CompiledGrammar.deserialize_json(found, vocabulary().info)
    assert allowed(GrammarFollower(grammar, vocabulary(), STOPS)) == {*chars("a"), TOKENS.index(b"ab")}
    refused = outcome("regex", "(a")
    assert isinstance(refused, InvalidRequest)
    assert refused.param == "structured_output"


def test_a_fork_whose_parent_died_before_it_could_say_so_ends_at_once():
    read_fd, write_fd = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            # Whoever it is told to be its parent is not.
            run_fork(os.getpid(), vocabulary(), "regex", "a+b", write_fd, 1024, (read_fd,))
        finally:
            os._exit(9)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as answer:
        assert answer.read() == b""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


SLOW = "(" + "|".join(f"[a-z]{{1,{length}}}" for length in range(1, 300)) + ")*"
LARGE = json.dumps(["x" * 100 + str(number) for number in range(1000)])


def test_a_compilation_beyond_its_time_or_memory_is_refused():
    late = outcome("regex", SLOW, timeout_s=0.3)
    assert isinstance(late, InvalidRequest)
    assert "its regex cannot be used: compiling it took more than 0.3 s" in late.message
    large = outcome("choice", LARGE, memory_mb=8)
    assert isinstance(large, InvalidRequest)
    assert "more than 8 MB" in large.message


def test_a_large_schema_of_an_ordinary_kind_is_compiled():
    names = [f"field_{number}" for number in range(300)]
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}, "required": names}
    found = outcome("json_schema", json.dumps({**schema, "additionalProperties": False}))
    assert isinstance(found, str)
    assert len(found) > 2**25
