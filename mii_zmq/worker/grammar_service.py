# SPDX-License-Identifier: Apache-2.0
"""The engine's hold on its grammar process: starts it when a request needs it, and again when it hangs or dies.

Implements `core.GrammarService`; nothing here waits. What a sequence has drawn is kept, so that a new process goes on
with it. A sequence of which the process hangs, or dies twice, ends with an error; when the process cannot be
had at all, every sequence that has a grammar does. Belongs to the thread that made it, which must live as long.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mii_zmq.config import EngineConfig
from mii_zmq.errors import InternalError, MiiError, ProtocolError, ServiceError, from_wire
from mii_zmq.logs import place_of
from mii_zmq.process import Child, describe_exit, processor_ticks, spawn
from mii_zmq.worker.core import MaskEvent
from mii_zmq.worker.grammar_channel import GrammarChannel, socket_pair
from mii_zmq.worker.grammar_limits import SequenceLimits
from mii_zmq.worker.mask_table import MAX_ROWS, NOBODY, MaskTable, make_memory
from mii_zmq.worker.plan import EngineLimits, SequenceRequest

MODULE = "mii_zmq.worker.grammar_process"
START_TIMEOUT_S = 120.0
"""Until it is ready, whether somebody waits for it or not."""
STALLED_S = 15.0
"""Without any processor time while it starts. Importing the library takes seconds, on a busy machine a minute, but even
there every process gets its hundredths of a second."""
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
    row: int | None = None
    """Of the table of masks; None: there were too many sequences."""


class GrammarProcessService:
    """At most one process at a time."""

    def __init__(
        self, vocab_size: int, arguments: Sequence[str], *, module: str = MODULE, hang_s: float = HANG_S,
        max_rows: int = MAX_ROWS, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`arguments`: the rest of the process's command line. `max_rows`: sequences whose masks come through shared
        memory, others' in messages."""
        self.arguments = tuple(arguments)
        self._module, self._hang_s, self._clock = module, hang_s, clock
        self._vocab_size, self._max_rows = vocab_size, max_rows
        self._open: dict[int, _Open] = {}
        self._child: Child | None = None
        self._channel: GrammarChannel | None = None
        self._table: MaskTable | None = None
        self._free_rows: list[int] = []
        self._is_ready = False
        self._silent_s = self._watched_at = self._pinged_at = 0.0
        self._start_s = 0.0
        """For which it has been starting."""
        self._start_ticks: int | None = None
        """Processor time of a start when it was looked at last."""
        self._num_starts = 0
        """Since the last mask."""
        self._advances: list[tuple[int, int]] = []
        self._closes: list[tuple[int, int | None]] = []
        """Ids and rows, which are free when the process has been told."""
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
        opened = self._open.pop(seq_id, None)
        if opened is not None:
            self._closes.append((seq_id, opened.row))

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
        with contextlib.ExitStack() as stack:
            try:
                ours, theirs = socket_pair()
                stack.callback(theirs.close)
                self._channel = GrammarChannel(ours)
                memory_fd = make_memory(self._vocab_size)
                stack.callback(os.close, memory_fd)
                self._table = MaskTable(memory_fd, self._vocab_size)
                own = [
                    f"--channel-fd={theirs.fileno()}", f"--memory-fd={memory_fd}", f"--vocab-size={self._vocab_size}"
                ]  # fmt: skip
                self._child = spawn(
                    self._module, [*own, *self.arguments], "grammars", pass_fds=(theirs.fileno(), memory_fd)
                )
            except OSError as error:
                self._lose(f"cannot be started: {error}", is_hung=False)
                return
        self._silent_s = self._start_s = 0.0
        self._watched_at = self._pinged_at = self._clock()
        self._start_ticks = None
        self._advances.clear()
        self._closes.clear()
        self._free_rows = list(range(self._max_rows - 1, -1, -1))
        for seq_id, opened in list(self._open.items()):
            opened.is_asked = True
            try:
                self._send_open(opened)
            except Exception as error:  # noqa: BLE001 - its text may quote the grammar
                log.error("the grammar process cannot be told of sequence %d; it ends: %s", seq_id, place_of(error))
                reason = f"the grammar process cannot be told of this request: {type(error).__name__}"
                self._fail(seq_id, InternalError(f"structured_output: {reason}"))

    def _send_open(self, opened: _Open) -> None:
        request = opened.request
        assert self._channel is not None
        assert request.grammar is not None
        limits = asdict(SequenceLimits.of(request))
        kind, text = request.grammar
        opened.row = self._free_rows.pop() if self._free_rows else None
        self._channel.send("open", request.seq_id, opened.row, kind, text, limits, opened.token_ids)

    def _flush(self, channel: GrammarChannel) -> None:
        if self._advances:
            channel.send("advance", self._advances)
            self._advances = []
        if self._closes:
            channel.send("close", [seq_id for seq_id, _ in self._closes])
            # Nothing that was asked about them before is unsent, so nobody writes these rows any more.
            self._free_rows += [row for _, row in self._closes if row is not None]
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
                    self._events.append(MaskEvent(seq_id, num_output_tokens, self._mask(opened, mask)))
        elif kind == "failed":
            self._num_starts = 0
            seq_id, error = values
            self._fail(seq_id, from_wire(error))

    def _mask(self, opened: _Open, mask: bytes | bool | None) -> bytes | None:
        if not isinstance(mask, bool):
            return mask
        assert self._table is not None
        assert opened.row is not None
        return self._table.read(opened.row)

    def _watch(self, channel: GrammarChannel) -> None:
        """See that the process lives and answers; time counts only while it starts or something is asked of it, and
        hardly where the engine did not look for long."""
        now = self._clock()
        elapsed_s, self._watched_at = min(now - self._watched_at, PING_S), now
        is_time = now - self._pinged_at > PING_S
        if is_time:
            self._pinged_at = now
        if channel.is_closed:
            self._lose("has ended", is_hung=False)
        elif not self._is_ready:
            self._watch_start(elapsed_s, is_time)
        elif not any(opened.is_asked for opened in self._open.values()):
            self._silent_s = 0.0
        else:
            self._silent_s += elapsed_s
            if self._silent_s > self._hang_s:
                self._lose(f"has not answered for {self._silent_s:.0f} s", is_hung=True)
            elif is_time:
                channel.send("ping")

    def _watch_start(self, elapsed_s: float, is_time: bool) -> None:
        """A start counts whether somebody waits or not: who comes next would wait for it, too."""
        assert self._child is not None
        self._start_s += elapsed_s
        self._silent_s += elapsed_s
        if is_time:
            ticks = processor_ticks(self._child.pid)
            if ticks is None or ticks != self._start_ticks:
                self._start_ticks, self._silent_s = ticks, 0.0
        if self._silent_s > STALLED_S:
            self._lose(f"has done nothing for {self._silent_s:.0f} s of its start", is_hung=True)
        elif self._start_s > START_TIMEOUT_S:
            self._lose(f"is not ready after {self._start_s:.0f} s", is_hung=True)

    def _lose(self, what: str, *, is_hung: bool) -> None:
        """End what is left of the process; start another one for those who can go on."""
        guilty = NOBODY if self._table is None else self._table.noted
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
        opened = self._open.pop(seq_id, None)
        if opened is not None:
            if opened.row is not None:
                self._free_rows.append(opened.row)
            self._events.append(MaskEvent(seq_id, 0, None, error))

    def _end_process(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._child is not None:
            self._child.kill()
            self._child = None
        if self._table is not None:
            self._table.close()
            self._table = None


def has_library() -> bool:
    """The grammar library is installed; it is loaded only in the grammar process."""
    return importlib.util.find_spec("xgrammar") is not None and importlib.util.find_spec("tvm_ffi") is not None


def make_grammar_service(config: EngineConfig, limits: EngineLimits, model_path: str) -> GrammarProcessService | None:
    """None where the library is missing. Starts nothing."""
    if not has_library():
        return None
    return GrammarProcessService(
        limits.vocab_size,
        [
            f"--tokenizer={config.tokenizer or model_path}",
            f"--timeout-s={config.grammar_timeout_s}",
            f"--memory-mb={config.grammar_memory_mb}",
            f"--cache-mb={config.grammar_cache_mb}",
            *(["--eos", *map(str, limits.eos_token_ids)] if limits.eos_token_ids else []),
        ],
    )
