# SPDX-License-Identifier: Apache-2.0
"""Grammars as requests write them -> what sequences follow, each compiled in a process of its own.

A compilation is forked off the grammar process, which stays able to answer for running sequences: the fork has limits
of time and memory, may crash, and hands its result back through a pipe. Nothing else is trusted to end. The fork holds
the loaded library and vocabulary already, so that it costs milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import signal
import time
import warnings
from collections.abc import Callable

import xgrammar

from mii_zmq.errors import InvalidRequest, MiiError
from mii_zmq.logs import place_of
from mii_zmq.process import die_with_parent
from mii_zmq.worker.grammar_checks import compilable
from mii_zmq.worker.grammar_follower import Vocabulary

MAX_WHITESPACE = 12
"""Characters of whitespace between two marks of JSON: a line's end and an indentation, not pages of nothing."""
MAX_COMPILED_BYTES = 2**26
"""In the form in which it is handed over. Reading it takes 20 to 35 ms per MiB, in which the grammar process answers
nobody: two seconds at most, a fifth of what counts as a hang. Meanwhile it takes ten times as much memory."""
MIB = 2**20

log = logging.getLogger(__name__)

_PLACE = re.compile(r"^\[[^\]]*\] \S+:\d+: ")


def compile_grammar(compiler: xgrammar.GrammarCompiler, kind: str, value: str) -> xgrammar.CompiledGrammar:
    """Compile here and now, without limits.

    Raises:
        InvalidRequest: it is malformed, or asks for what cannot be enforced.
    """
    value = compilable(kind, value)
    try:
        if kind in ("json_object", "json_schema"):
            schema = value if kind == "json_schema" else '{"type": "object"}'
            return compiler.compile_json_schema(schema, any_whitespace=True, max_whitespace_cnt=MAX_WHITESPACE)
        if kind == "choice":
            elements = [{"type": "const_string", "value": choice} for choice in json.loads(value)]
            return compiler.compile_structural_tag(
                {"type": "structural_tag", "format": {"type": "or", "elements": elements}}
            )
        if kind == "regex":
            return compiler.compile_regex(value)
        if kind == "ebnf":
            return compiler.compile_grammar(value)
        return compiler.compile_structural_tag(value)
    except (RuntimeError, ValueError, TypeError) as error:
        if "bad_alloc" in str(error):
            raise MemoryError from None
        raise refusal(kind, _PLACE.sub("", str(error)).strip() or type(error).__name__) from None


def refusal(kind: str, why: str) -> InvalidRequest:
    """The error for a grammar that cannot be used."""
    return InvalidRequest(f"structured_output: its {kind} cannot be used: {why[:500]}", param="structured_output")


class Compilation:
    """One forked compilation: wait for `fileno` to be readable or for `deadline`, then ask `outcome`."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        kind: str,
        value: str,
        *,
        timeout_s: float,
        memory_mb: int,
        inherited: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Fork. `inherited`: descriptors that the fork must not keep open.

        Raises:
            OSError: there is no process or no descriptor to be had.
        """
        self._kind, self._timeout_s, self._memory_mb, self._clock = kind, timeout_s, memory_mb, clock
        self.deadline = clock() + timeout_s
        self._received = bytearray()
        self._fd, write_fd = os.pipe()
        parent_pid = os.getpid()
        try:
            with warnings.catch_warnings():
                # The other thread waits for the end of the parent and holds no lock.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
        except OSError:
            os.close(self._fd)
            os.close(write_fd)
            raise
        if self._pid == 0:
            run_fork(parent_pid, vocabulary, kind, value, write_fd, memory_mb, (*inherited, self._fd))
        os.close(write_fd)
        os.set_blocking(self._fd, False)

    def fileno(self) -> int:
        return self._fd

    def outcome(self) -> str | MiiError | None:
        """The compiled grammar in the library's JSON form, or why there is none; None: not known yet.

        To be called until it gives one, which ends the fork.
        """
        try:
            while data := os.read(self._fd, MIB):
                self._received += data
                if len(self._received) > MAX_COMPILED_BYTES + 1:
                    return self._end(f"compiled, it has more than {MAX_COMPILED_BYTES // MIB} MB; make it simpler")
        except BlockingIOError:
            if self._clock() < self.deadline:
                return None
            return self._end(f"compiling it took more than {self._timeout_s:g} s; make it simpler")
        mark, text = bytes(self._received[:1]), self._received[1:].decode("utf-8", "replace")
        if mark == b"+":
            self.kill()
            return text
        if mark == b"-":
            self.kill()
            return InvalidRequest(text, param="structured_output")
        return self._end(f"compiling it failed, or took more than {self._memory_mb} MB of memory; make it simpler")

    def kill(self) -> None:
        """End the fork, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)

    def _end(self, why: str) -> MiiError:
        self.kill()
        return refusal(self._kind, why)


def run_fork(
    parent_pid: int,
    vocabulary: Vocabulary,
    kind: str,
    value: str,
    write_fd: int,
    memory_mb: int,
    inherited: tuple[int, ...],
) -> None:
    """The fork's whole life; never returns. Its result goes to `write_fd`; it ends with the process that forked it."""
    try:
        die_with_parent(parent_pid)
        for fd in inherited:
            os.close(fd)
        os.nice(5)
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + memory_mb * MIB, size + memory_mb * MIB))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
        try:
            answer = b"+" + compile_grammar(compiler, kind, value).serialize_json().encode()
        except MiiError as error:
            answer = b"-" + error.message.encode()
        except (MemoryError, RuntimeError):
            os._exit(1)
        view = memoryview(answer)
        while view:
            view = view[os.write(write_fd, view) :]
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - a fork must never run its parent's code
        log.error("compiling a grammar failed: %s", place_of(error))
    finally:
        os._exit(1)
