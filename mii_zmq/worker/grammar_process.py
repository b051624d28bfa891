# SPDX-License-Identifier: Apache-2.0
"""The grammar process: `python -m mii_zmq.worker.grammar_process`, started by an engine and ended with it.

Reads the model's tokenizer, compiles grammars (in forks, see `grammar_compiler`), keeps compiled ones
(`grammar_cache`), and follows every running sequence that has one. A plain loop that is never busy for longer than one
mask takes. In shared memory it notes which sequence it works on, so that the engine knows which one it hangs or dies
of.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import xgrammar

from mii_zmq.errors import InternalError, MiiError
from mii_zmq.logs import place_of, setup_logging
from mii_zmq.process import ChildLink
from mii_zmq.tokenizer import TextTokenizer, load_tokenizer
from mii_zmq.worker.compilations import Compilations
from mii_zmq.worker.grammar_cache import GrammarCache, Key
from mii_zmq.worker.grammar_channel import GrammarChannel
from mii_zmq.worker.grammar_compiler import MIB, refusal
from mii_zmq.worker.grammar_follower import GrammarFollower, Vocabulary
from mii_zmq.worker.grammar_limits import SequenceLimits
from mii_zmq.worker.grammar_memory import MemoryTrimmer, bytes_of
from mii_zmq.worker.mask_table import NOBODY, MaskTable

ANSWERS_AT_ONCE = 16
"""Tokens taken before the engine hears of it: a process that is silent for long counts as hung."""
SLOW_TOKEN_S = 0.1
"""Processor time for one token of one sequence."""
MAX_SLOW_TOKENS = 5

log = logging.getLogger("mii_zmq.worker.grammar")

_Answer = tuple[int, int, bytes | bool | None]
TextForm = Literal["json", "text", "marked"]

_CONTROL = re.compile(rb"[\x00-\x09\x0B-\x1F]")


@dataclass(slots=True)
class _Followed:
    row: int | None
    """Of the table of masks."""
    key: Key
    limits: SequenceLimits
    token_ids: list[int]
    """Output so far when it was opened, and what came while its grammar was compiled."""
    follower: GrammarFollower | None = None
    """None: its grammar is being compiled."""
    num_slow: int = 0


class GrammarHost:
    """Answers one engine."""

    def __init__(
        self,
        channel: GrammarChannel,
        tokenizer: TextTokenizer,
        options: argparse.Namespace,
        table: MaskTable,
    ) -> None:
        """`options`: those of `main`."""
        self._channel = channel
        self._options = options
        self._table = table
        self._spellings = spellings(tokenizer, options.vocab_size, options.eos)
        self._vocabularies: dict[TextForm, Vocabulary] = {}
        self._cache: GrammarCache[xgrammar.CompiledGrammar] = GrammarCache(options.cache_mb * MIB)
        self._sequences: dict[int, _Followed] = {}
        self._waiting: dict[Key, list[int]] = {}
        """Sequences by the grammar that they wait for."""
        self._compilations = Compilations(
            self._vocabulary, channel.fileno(), timeout_s=options.timeout_s, memory_mb=options.memory_mb
        )
        self._trimmer = MemoryTrimmer()
        self._vocabulary("json_schema")

    def run(self) -> None:
        """Until the engine is gone."""
        while not self._channel.is_closed:
            self._wait()
            for message in self._channel.receive():
                self._obey(message)
            for key, outcome in self._compilations.advance(self._is_wanted):
                self._take(key, outcome)
            self._channel.flush()
        self._compilations.close()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fileno(), self._channel.poll_events)
        due = self._compilations.register(poll)
        poll.poll(None if due is None else max(1, int(1000 * (due - time.monotonic())) + 1))

    def _obey(self, message: list[Any]) -> None:
        kind, *values = message
        if kind == "open":
            seq_id, row, grammar_kind, text, limits, token_ids = values
            self._open(seq_id, _Followed(row, (grammar_kind, text), SequenceLimits(**limits), token_ids))
        elif kind == "advance":
            for begin in range(0, len(values[0]), ANSWERS_AT_ONCE):
                answers = [self._advance(*change) for change in values[0][begin : begin + ANSWERS_AT_ONCE]]
                self._channel.send("masks", [answer for answer in answers if answer is not None])
                self._channel.flush()
        elif kind == "close":
            for seq_id in values[0]:
                self._drop(seq_id)
        elif kind == "ping":
            self._channel.send("pong")

    def _open(self, seq_id: int, followed: _Followed) -> None:
        self._sequences[seq_id] = followed
        found = self._cache.get(followed.key)
        if found is not None:
            self._start(seq_id, followed, found)
            return
        if followed.key not in self._waiting:
            self._waiting[followed.key] = []
            self._compilations.add(followed.limits.tenant, followed.key)
        self._waiting[followed.key].append(seq_id)

    def _start(self, seq_id: int, followed: _Followed, found: xgrammar.CompiledGrammar | MiiError) -> None:
        if isinstance(found, MiiError):
            self._fail(seq_id, found)
            return
        self._table.note(seq_id)
        try:
            vocabulary = self._vocabulary(followed.key[0])
            followed.follower = GrammarFollower(found, vocabulary, followed.limits, followed.token_ids)
            self._cache.use(followed.key)
            answer = self._answer(seq_id, followed, followed.follower)
        except Exception as error:  # noqa: BLE001
            self._fail(seq_id, error)
        else:
            self._channel.send("masks", [answer])
        self._table.note(NOBODY)

    def _answer(self, seq_id: int, followed: _Followed, follower: GrammarFollower) -> _Answer:
        mask = follower.next_mask()
        if mask is None or followed.row is None:
            return seq_id, follower.num_output_tokens, mask
        self._table.write(followed.row, mask)
        return seq_id, follower.num_output_tokens, True

    def _advance(self, seq_id: int, token_id: int) -> _Answer | None:
        followed = self._sequences.get(seq_id)
        if followed is None:
            return None
        if followed.follower is None:
            # Drawn with a mask of the process before this one; its grammar is compiled here again.
            followed.token_ids.append(token_id)
            return None
        self._table.note(seq_id)
        try:
            started = time.thread_time()
            followed.follower.accept(token_id)
            answer = self._answer(seq_id, followed, followed.follower)
            if time.thread_time() - started > self._options.slow_token_s:
                self._note_slow(followed)
            return answer
        except Exception as error:  # noqa: BLE001
            self._fail(seq_id, error)
            return None
        finally:
            self._table.note(NOBODY)

    def _note_slow(self, followed: _Followed) -> None:
        """Grammars that can be read in many ways take longer with every token, and all sequences wait for that."""
        followed.num_slow += 1
        if followed.num_slow >= MAX_SLOW_TOKENS:
            limit_ms = 1000 * self._options.slow_token_s
            raise refusal(followed.key[0], f"a token takes more than {limit_ms:g} ms; write it with fewer ambiguities")

    def _is_wanted(self, key: Key) -> bool:
        return any(seq_id in self._sequences for seq_id in self._waiting[key])

    def _take(self, key: Key, outcome: str | MiiError | None) -> None:
        """A grammar was compiled, or was not. None: nobody waits for it."""
        found: xgrammar.CompiledGrammar | MiiError
        if outcome is None:
            del self._waiting[key]
            return
        if isinstance(outcome, MiiError):
            found = outcome
            if not outcome.retryable:
                self._cache.refuse(key, outcome)
        else:
            self._table.note(self._waiting[key][0])
            try:
                found = xgrammar.CompiledGrammar.deserialize_json(outcome, self._vocabulary(key[0]).info)
                self._cache.add(key, found, bytes_of(found, outcome))
                self._trimmer.note(outcome)
            except Exception as error:  # noqa: BLE001
                found = refusal(key[0], f"what it compiles to cannot be read: {type(error).__name__}")
                self._cache.refuse(key, found)
            self._table.note(NOBODY)
        for seq_id in self._waiting.pop(key):
            if (followed := self._sequences.get(seq_id)) is not None:
                self._start(seq_id, followed, found)

    def _fail(self, seq_id: int, error: Exception) -> None:
        if not isinstance(error, MiiError):
            log.error("following the grammar of sequence %d failed: %s", seq_id, place_of(error))
            error = InternalError(f"following the request's grammar failed: {type(error).__name__}: {error}")
        self._drop(seq_id)
        self._channel.send("failed", seq_id, error.to_wire())

    def _drop(self, seq_id: int) -> None:
        followed = self._sequences.pop(seq_id, None)
        if followed is not None and followed.follower is not None:
            self._cache.release(followed.key)

    def _vocabulary(self, kind: str) -> Vocabulary:
        form = text_form(kind)
        if form not in self._vocabularies:
            self._vocabularies[form] = Vocabulary(self._spellings[form])
        return self._vocabularies[form]


def text_form(kind: str) -> TextForm:
    """Which tokens count as text for a kind of grammar.

    In JSON, control characters are escaped; the library lets them pass in some strings, so no token has any but the
    line feed. Special tokens are text only where a request writes the model's own marks, as those of tool calls.
    """
    if kind in ("json_object", "json_schema"):
        return "json"
    return "marked" if kind == "structural_tag" else "text"


def spellings(tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> dict[TextForm, list[bytes]]:
    """The bytes of every id of the logits as `text_form` has it; empty: stands for no text.

    Raises:
        InternalError: the tokenizer does not say.
    """
    spell = tokenizer.token_bytes
    if spell is None:
        raise InternalError("this model's tokenizer does not tell the bytes of its tokens")
    known = [spell(token_id) if token_id < tokenizer.vocab_size else b"" for token_id in range(vocab_size)]
    ends = {*eos_token_ids, *tokenizer.eos_token_ids}
    spelt = [b"" if token_id in ends else text for token_id, text in enumerate(known)]
    special = tokenizer.all_special_ids
    plain = [b"" if token_id in special else text for token_id, text in enumerate(spelt)]
    json_text = [b"" if _CONTROL.search(text) else text for text in plain]
    return {"marked": spelt, "text": plain, "json": json_text}


def _silence_library() -> None:
    """Descriptor 2 leads nowhere from here on, in forks as well: the library writes its warnings there, which quote
    clients' schemas. Python's own lines go to where it led."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def main(argv: Sequence[str] | None = None) -> int:
    _silence_library()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="mii_zmq.worker.grammar_process", description="Grammars of an engine.")
    parser.add_argument("--channel-fd", required=True, type=int, help="our end of the engine's pair of sockets")
    parser.add_argument("--memory-fd", required=True, type=int, help="memory for the table of masks")
    parser.add_argument("--tokenizer", required=True, help="directory of the model's tokenizer")
    parser.add_argument("--vocab-size", required=True, type=int, help="width of the model's logits")
    parser.add_argument("--eos", type=int, nargs="*", default=[], help="the model's end-of-sequence ids")
    parser.add_argument("--timeout-s", required=True, type=float, help="limit of one compilation")
    parser.add_argument("--memory-mb", required=True, type=int, help="limit of one compilation")
    parser.add_argument("--cache-mb", required=True, type=int, help="of compiled grammars, to be kept")
    parser.add_argument(
        "--slow-token-s", type=float, default=SLOW_TOKEN_S, help="a sequence with some such tokens ends"
    )
    ChildLink.add_arguments(parser)
    options = parser.parse_args(argv)
    ChildLink.from_arguments(options)
    try:
        setup_logging("grammars")
        channel = GrammarChannel(socket.socket(fileno=options.channel_fd))
        table = MaskTable(options.memory_fd, options.vocab_size)
        host = GrammarHost(channel, load_tokenizer(options.tokenizer), options, table)
    except MiiError as error:
        log.error("the grammar process failed: %s", error.message)
        return 1
    except Exception:
        log.exception("the grammar process failed")
        return 1
    try:
        channel.send("ready")
        host.run()
    except Exception as error:  # noqa: BLE001 - its text may be a client's
        log.error("the grammar process failed: %s", place_of(error))
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not through the interpreter's own end, which would run what a fork might share.
    os._exit(code)
