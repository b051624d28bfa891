# SPDX-License-Identifier: Apache-2.0
"""The engine's hold on its grammar process: starts it when a request needs it, and again when it hangs or dies.

Implements `core.GrammarService`; nothing here waits. What a sequence has drawn is kept, so that a new process goes on
with it. A sequence of which the process hangs, or dies twice, ends with an error; when the process cannot be
had at all, every sequence that has a grammar does. Belongs to the thread that made it, which must live as long.
"""

from __future__ import annotations

import importlib.util
import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mii_zmq.config import EngineConfig
from mii_zmq.errors import InternalError, MiiError, ProtocolError, ServiceError, from_wire
from mii_zmq.process import Child, describe_exit, spawn
from mii_zmq.worker.core import MaskEvent
from mii_zmq.worker.grammar_channel import GrammarChannel, socket_pair
from mii_zmq.worker.grammar_limits import SequenceLimits
from mii_zmq.worker.plan import EngineLimits, SequenceRequest

MODULE = "mii_zmq.worker.grammar_process"
START_TIMEOUT_S = 120.0
HANG_S = 10.0
"""Without a word from a process that was asked something."""
PING_S = 1.0
MAX_STARTS = 3
"""In a row, without a mask from any of them."""
MAX_DEATHS = 2
"""Of the process while it worked on one sequence."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    request: SequenceRequest
    token_ids: list[int]
    """Output so far."""
    is_asked: bool = True
    """A mask, or an error, is due."""
    num_deaths: int = 0


class GrammarProcessService:
    """At most one process at a time."""

    def __init__(
        self, arguments: Sequence[str], *, module: str = MODULE, hang_s: float = HANG_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`arguments`: the process's command line, without what belongs to one process."""
        self._arguments, self._module, self._hang_s, self._clock = list(arguments), module, hang_s, clock
        self._open: dict[int, _Open] = {}
        self._child: Child | None = None
        self._channel: GrammarChannel | None = None
        self._current: mmap.mmap | None = None
        self._is_ready = False
        self._silent_s = self._watched_at = self._pinged_at = 0.0
        self._num_starts = 0
        """Since the last mask."""
        self._advances: list[tuple[int, int]] = []
        self._closes: list[int] = []
        self._events: list[MaskEvent] = []

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._child is None else self._child.pid

    def open(self, request: SequenceRequest) -> None:
        opened = self._open[request.seq_id] = _Open(request, list(request.resumed_token_ids))
        if self._child is None:
            self._start()
        else:
            self._send_open(opened)

    def advance(self, seq_id: int, token_id: int) -> None:
        opened = self._open.get(seq_id)
        if opened is not None:
            opened.token_ids.append(token_id)
            opened.is_asked = True
            self._advances.append((seq_id, token_id))

    def close(self, seq_id: int) -> None:
        if self._open.pop(seq_id, None) is not None:
            self._closes.append(seq_id)

    def poll(self) -> list[MaskEvent]:
        if self._channel is not None:
            self._flush(self._channel)
            try:
                for message in self._channel.receive():
                    self._take(message)
            except ProtocolError as error:
                self._lose(error.message, is_hung=False)
            else:
                self._watch(self._channel)
        events, self._events = self._events, []
        return events

    def poll_set(self) -> list[tuple[int, int]]:
        if self._channel is None or self._channel.is_closed:
            return []
        return [(self._channel.fileno(), self._channel.poll_events)]

    def shut_down(self) -> None:
        self._end_process()
        self._open.clear()

    def _start(self) -> None:
        """A new process, which is told of every open sequence."""
        self._num_starts += 1
        self._is_ready = False
        ours, theirs = socket_pair()
        memory_fd = os.memfd_create("mii_zmq-grammar", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory_fd, mmap.PAGESIZE)
            self._current = mmap.mmap(memory_fd, mmap.PAGESIZE)
            self._channel = GrammarChannel(ours)
            own = [f"--channel-fd={theirs.fileno()}", f"--current-fd={memory_fd}"]
            self._child = spawn(
                self._module, [*own, *self._arguments], "grammars", pass_fds=(theirs.fileno(), memory_fd)
            )
        except OSError as error:
            self._lose(f"cannot be started: {error}", is_hung=False)
            return
        finally:
            theirs.close()
            os.close(memory_fd)
        self._silent_s, self._watched_at = 0.0, self._clock()
        self._advances.clear()
        self._closes.clear()
        for opened in self._open.values():
            opened.is_asked = True
            self._send_open(opened)

    def _send_open(self, opened: _Open) -> None:
        request = opened.request
        assert self._channel is not None
        assert request.grammar is not None
        limits = asdict(SequenceLimits.of(request))
        kind, text = request.grammar
        self._channel.send("open", request.seq_id, kind, text, limits, opened.token_ids)

    def _flush(self, channel: GrammarChannel) -> None:
        if self._advances:
            channel.send("advance", self._advances)
            self._advances = []
        if self._closes:
            channel.send("close", self._closes)
            self._closes = []
        channel.flush()

    def _take(self, message: list[Any]) -> None:
        self._silent_s = 0.0
        kind, *values = message
        if kind == "ready":
            self._is_ready = True
        elif kind == "masks":
            self._num_starts = 0
            for seq_id, num_output_tokens, mask in values[0]:
                opened = self._open.get(seq_id)
                if opened is not None and len(opened.token_ids) == num_output_tokens:
                    opened.is_asked = False
                    self._events.append(MaskEvent(seq_id, num_output_tokens, mask))
        elif kind == "failed":
            self._num_starts = 0
            seq_id, error = values
            self._fail(seq_id, from_wire(error))

    def _watch(self, channel: GrammarChannel) -> None:
        """See that the process lives and answers; time counts only while something is asked of it, and hardly where the
        engine did not look for long."""
        now = self._clock()
        elapsed_s, self._watched_at = min(now - self._watched_at, PING_S), now
        if channel.is_closed:
            self._lose("has ended", is_hung=False)
        elif not any(opened.is_asked for opened in self._open.values()):
            self._silent_s = 0.0
            return
        self._silent_s += elapsed_s
        if self._silent_s > (self._hang_s if self._is_ready else START_TIMEOUT_S):
            self._lose(f"has not answered for {self._silent_s:.0f} s", is_hung=True)
        elif now - self._pinged_at > PING_S:
            self._pinged_at = now
            channel.send("ping")

    def _lose(self, what: str, *, is_hung: bool) -> None:
        """End what is left of the process; start another one for those who can go on."""
        guilty = 0 if self._current is None else int.from_bytes(self._current[:8], "little")
        how = "" if self._child is None or is_hung else f" ({describe_exit(self._child)})"
        log.warning("the grammar process %s%s", what, how)
        self._end_process()
        opened = self._open.get(guilty)
        if opened is not None:
            opened.num_deaths += 1
            if is_hung or opened.num_deaths >= MAX_DEATHS:
                reason = f"structured_output: following this request's grammar took more than {self._hang_s:g} s"
                if not is_hung:
                    reason = "structured_output: the grammar process died of this request"
                self._fail(guilty, InternalError(f"{reason}; make the grammar simpler"))
        if not self._open:
            return
        if self._num_starts < MAX_STARTS:
            self._start()
            return
        self._num_starts = 0
        for seq_id in list(self._open):
            self._fail(seq_id, ServiceError("structured_output: the grammar process of this worker does not work"))

    def _fail(self, seq_id: int, error: MiiError) -> None:
        if self._open.pop(seq_id, None) is not None:
            self._events.append(MaskEvent(seq_id, 0, None, error))

    def _end_process(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._child is not None:
            self._child.kill()
            self._child = None
        if self._current is not None:
            self._current.close()
            self._current = None


def has_library() -> bool:
    """The grammar library is installed; it is loaded only in the grammar process."""
    return importlib.util.find_spec("xgrammar") is not None and importlib.util.find_spec("tvm_ffi") is not None


def make_grammar_service(config: EngineConfig, limits: EngineLimits, model_path: str) -> GrammarProcessService | None:
    """None where the library is missing. Starts nothing."""
    if not has_library():
        return None
    return GrammarProcessService(
        [
            f"--tokenizer={config.tokenizer or model_path}",
            f"--vocab-size={limits.vocab_size}",
            f"--timeout-s={config.grammar_timeout_s}",
            f"--memory-mb={config.grammar_memory_mb}",
            f"--cache-mb={config.grammar_cache_mb}",
            *(["--eos", *map(str, limits.eos_token_ids)] if limits.eos_token_ids else []),
        ]
    )
