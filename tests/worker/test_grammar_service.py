# SPDX-License-Identifier: Apache-2.0
"""The engine's hold on its grammar process: with the real one, and with one that hangs and dies when told to."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mii_zmq.config import EngineConfig
from mii_zmq.errors import InternalError, InvalidRequest, ServiceError
from mii_zmq.process import processor_ticks
from mii_zmq.worker.core import MaskEvent
from mii_zmq.worker.fake_model import EOS_TOKEN_ID, VOCAB_SIZE
from mii_zmq.worker.grammar_service import (
    STALLED_S,
    START_TIMEOUT_S,
    GrammarProcessService,
    has_library,
    make_grammar_service,
)
from mii_zmq.worker.plan import EngineLimits, SamplingSpec, SequenceRequest
from tests.engine_driver import Clock

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
SLOW_REGEX = "(" + "|".join(f"[a-z]{{1,{length}}}" for length in range(1, 300)) + ")*"
REAL = ["--tokenizer=fake:", "--timeout-s=3", "--memory-mb=64", "--cache-mb=1"]


def request(seq_id: int, text: str, kind: str = "regex", **fields: object) -> SequenceRequest:
    sampling = SamplingSpec(stop_token_ids=(EOS_TOKEN_ID,), is_masked=True)
    made = SequenceRequest(seq_id, [1], 99, sampling, grammar=(kind, text))
    return replace(made, **fields)  # type: ignore[arg-type]


@contextlib.contextmanager
def running(
    *arguments: str,
    module: str = "tests.worker.stub_grammars",
    hang_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Follower]:
    service = GrammarProcessService(VOCAB_SIZE, arguments, module=module, hang_s=hang_s, max_rows=3, clock=clock)
    try:
        yield Follower(service)
    finally:
        service.shut_down()
        assert service.pid is None


class Follower:
    """Collects what a service says."""

    def __init__(self, service: GrammarProcessService) -> None:
        self.service = service
        self.events: list[MaskEvent] = []

    def next(self, num_events: int = 1) -> list[MaskEvent]:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.events) < num_events:
            assert time.monotonic() < deadline, f"only {self.events} came"
            self.events += self.service.poll()
            poll = select.poll()
            for fd, flags in self.service.poll_set():
                poll.register(fd, flags)
            if len(self.events) < num_events:
                poll.poll(50)
        events, self.events = self.events[:num_events], self.events[num_events:]
        return sorted(events)

    def allowed(self) -> str:
        """What the next mask allows, as text."""
        (event,) = self.next()
        assert event.error is None
        assert event.mask is not None
        return "".join(chr(i) for i in range(VOCAB_SIZE) if event.mask[i // 8] >> (i % 8) & 1)


def masks_come_along_the_grammar(real: Follower) -> None:
    service = real.service
    service.open(request(1, "ab?c"))
    assert real.allowed() == "a"
    service.advance(1, ord("a"))
    assert real.allowed() == "bc"
    service.advance(1, ord("c"))
    assert real.allowed() == chr(EOS_TOKEN_ID)
    service.close(1)
    service.advance(1, ord("c"))
    service.open(request(2, "ab?c", resumed_token_ids=[ord("a")]))
    assert real.allowed() == "bc"
    service.close(2)


def masks_come_also_where_there_are_more_sequences_than_rows(real: Follower) -> None:
    service = real.service
    for turn in range(2):
        seq_ids = [20 + 10 * turn + index for index in range(7)]
        for seq_id in seq_ids:
            service.open(request(seq_id, chr(ord("a") + seq_id % 10)))
        for event in real.next(len(seq_ids)):
            assert event.mask is not None
            letter = ord("a") + event.seq_id % 10
            assert event.mask[letter // 8] == 1 << letter % 8
        for seq_id in seq_ids:
            service.close(seq_id)


def what_cannot_be_compiled_ends_its_sequence_alone(real: Follower) -> None:
    service = real.service
    service.open(request(3, SLOW_REGEX))
    service.open(request(4, "(a"))
    service.open(request(5, '{"not": {}}', "json_schema"))
    service.open(request(6, "x"))
    events = real.next(4)
    assert [event.seq_id for event in events] == [3, 4, 5, 6]
    late, malformed, refused, fine = events
    for event, reason in ((late, "more than 3 s"), (malformed, "not closed"), (refused, "/not cannot be")):
        assert isinstance(event.error, InvalidRequest)
        assert reason in event.error.message
        assert event.error.param == "structured_output"
    assert fine.mask is not None
    # Refused from memory: no fork works on it again.
    assert service.pid is not None
    before = ticks_of_children(service.pid)
    service.open(request(7, SLOW_REGEX))
    (again,) = real.next()
    assert isinstance(again.error, InvalidRequest)
    assert ticks_of_children(service.pid) == before > 0
    service.close(6)


def ticks_of_children(pid: int) -> int:
    """Processor time, in hundredths of a second, of those that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[13]) + int(fields[14])


def compilations_of_sequences_that_are_gone_hurt_nobody(real: Follower) -> None:
    service = real.service
    service.open(request(12, "gone"))
    service.close(12)
    service.open(request(9, "here"))
    assert real.allowed() == "h"
    service.close(9)


def a_process_that_was_killed_is_replaced_and_sequences_go_on(real: Follower) -> None:
    service = real.service
    service.open(request(10, "abcd"))
    assert real.allowed() == "a"
    service.advance(10, ord("a"))
    assert real.allowed() == "b"
    before = service.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    service.advance(10, ord("b"))
    assert real.allowed() == "c"
    assert service.pid != before
    service.advance(10, ord("c"))
    assert real.allowed() == "d"
    service.close(10)


def a_token_that_comes_while_a_new_process_compiles_is_not_lost(real: Follower) -> None:
    service = real.service
    service.open(request(11, "abcde"))
    assert real.allowed() == "a"
    before = service.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    while service.pid in (before, None):
        real.events += service.poll()
    # Drawn with the mask of the process that has died.
    service.advance(11, ord("a"))
    assert real.allowed() == "b"
    service.close(11)


def a_fork_that_cannot_be_had_is_an_error_to_retry(real: Follower) -> None:
    service = real.service
    assert service.pid is not None
    limits = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
    before = service.pid
    taken = {int(name) for name in os.listdir(f"/proc/{before}/fd")}
    # No descriptor more, so no pipe.
    resource.prlimit(before, resource.RLIMIT_NOFILE, (min({*range(len(taken) + 1)} - taken), limits[1]))
    service.open(request(13, "forked"))
    (event,) = real.next()
    assert isinstance(event.error, ServiceError)
    assert event.error.retryable
    resource.prlimit(before, resource.RLIMIT_NOFILE, limits)
    service.open(request(14, "forked"))
    assert real.allowed() == "f"
    assert service.pid == before
    service.close(14)


def what_the_library_warns_of_stands_nowhere(real: Follower, capfd: pytest.CaptureFixture[str]) -> None:
    import xgrammar

    # One that the library takes with a warning; others quote what they warn of.
    texts = ["a^secretive", json.dumps({"pattern": "a^secretive", "type": "string"})]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([b"a"]), cache_enabled=False)
    compiler.compile_regex(texts[0])
    assert "Warning" in capfd.readouterr().err, "the library is quiet; another example is needed"
    real.service.open(request(15, texts[0]))
    real.service.open(request(16, texts[1], "json_schema"))
    real.next(2)
    assert "Warning" not in capfd.readouterr().err
    real.service.close(15)
    real.service.close(16)


def test_the_real_process(capfd: pytest.CaptureFixture[str]) -> None:
    """All in one, since each process takes seconds to start."""
    pytest.importorskip("xgrammar")
    with running(*REAL, module="mii_zmq.worker.grammar_process") as follower:
        masks_come_along_the_grammar(follower)
        masks_come_also_where_there_are_more_sequences_than_rows(follower)
        what_cannot_be_compiled_ends_its_sequence_alone(follower)
        compilations_of_sequences_that_are_gone_hurt_nobody(follower)
        a_process_that_was_killed_is_replaced_and_sequences_go_on(follower)
        a_token_that_comes_while_a_new_process_compiles_is_not_lost(follower)
        a_fork_that_cannot_be_had_is_an_error_to_retry(follower)
        what_the_library_warns_of_stands_nowhere(follower, capfd)


def test_the_process_says_why_it_ends(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xgrammar")
    with running("--tokenizer=/nonexistent", *REAL[1:], module="mii_zmq.worker.grammar_process") as follower:
        follower.service.open(request(1, "a"))
        follower.next()
    assert "the grammar process failed: there is no model directory '/nonexistent'" in capfd.readouterr().err


@pytest.mark.long
def test_a_sequence_whose_tokens_take_too_long_ends() -> None:
    pytest.importorskip("xgrammar")
    with running(*REAL, "--slow-token-s=0", module="mii_zmq.worker.grammar_process") as follower:
        follower.service.open(request(1, "a*"))
        follower.next()
        for _ in range(5):
            follower.service.advance(1, ord("a"))
            (event,) = follower.next()
        assert isinstance(event.error, InvalidRequest)
        assert "a token takes more than 0 ms" in event.error.message


def test_of_a_hang_only_the_sequence_it_works_on_ends():
    with running(hang_s=0.5) as follower:
        follower.service.open(request(1, "fine"))
        follower.service.open(request(2, "hang@1"))
        follower.next(2)
        follower.service.advance(2, 7)
        follower.service.advance(1, 7)
        events = follower.next(2)
        assert [event.seq_id for event in events] == [1, 2]
        assert events[0].mask is not None
        assert events[0].num_output_tokens == 1
        assert isinstance(events[1].error, InternalError)
        assert "make the grammar simpler" in events[1].error.message


def test_a_process_that_dies_twice_of_one_sequence_loses_it():
    with running() as follower:
        follower.service.open(request(1, "fine"))
        follower.service.open(request(2, "die@1"))
        follower.next(2)
        follower.service.advance(1, 7)
        follower.next()
        follower.service.advance(2, 7)
        (failed,) = [event for event in follower.next(3) if event.error is not None]
        assert failed.seq_id == 2
        assert isinstance(failed.error, InternalError)
        follower.events.clear()
        follower.service.advance(1, 7)
        assert 2 in [event.num_output_tokens for event in follower.next(1)]


def test_a_process_that_cannot_be_had_ends_sequences_with_an_error_to_retry():
    with running("--die-at-once") as follower:
        follower.service.open(request(1, "a"))
        follower.service.open(request(2, "b"))
        events = follower.next(2)
        assert all(isinstance(event.error, ServiceError) and event.error.retryable for event in events)
        # The next request tries again.
        follower.service.open(request(3, "a"))
        (event,) = follower.next()
        assert isinstance(event.error, ServiceError)


def until_it_is_given_up(service: GrammarProcessService, clock: Clock) -> float:
    """Seconds until the process that runs now does no more, nobody doing anything but polling."""
    started, before = clock.now, service.pid
    assert before is not None
    while service.pid == before:
        assert clock.now - started < 1000
        clock.now += 1.0
        assert service.poll() == []
    return clock.now - started


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_start_that_hangs_is_given_up_whether_somebody_waits_or_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_awaited: bool
) -> None:
    clock, mark = Clock(), tmp_path / "hangs"
    with running(f"--hang-once={mark}", clock=clock) as follower:
        service = follower.service
        service.open(request(1, "fine"))
        deadline = time.monotonic() + PATIENCE_S
        while not mark.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if not is_awaited:
            service.close(1)
        assert until_it_is_given_up(service, clock) < 2 * STALLED_S
        assert "the grammar process has done nothing for" in caplog.text
        assert (service.pid is not None) == is_awaited
        if not is_awaited:
            service.open(request(2, "fine"))
        (event,) = follower.next()
        assert event.mask is not None


def test_a_start_that_goes_on_has_more_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with running("--spin", clock=clock) as follower:
        service = follower.service
        service.open(request(1, "fine"))
        service.close(1)
        pid, begun = service.pid, clock.now
        while (found := service.pid) is not None:
            ticks = processor_ticks(found)
            while processor_ticks(found) == ticks:
                pass
            clock.now += 1.0
            service.poll()
        assert pid is not None
        assert START_TIMEOUT_S <= clock.now - begun < START_TIMEOUT_S + 5
        assert "the grammar process is not ready after" in caplog.text


def test_a_sequence_that_cannot_be_sent_to_a_new_process_ends_alone() -> None:
    with running() as follower:
        service = follower.service
        service.open(request(1, "fine"))
        follower.next()
        with pytest.raises(UnicodeEncodeError):
            service.open(request(2, "half a pair: \ud800"))
        assert service.pid is not None
        os.kill(service.pid, signal.SIGKILL)
        events = follower.next(2)
        assert [event.seq_id for event in events] == [1, 2]
        assert events[0].mask is not None
        assert isinstance(events[1].error, InternalError)


def test_nothing_is_started_before_it_is_needed():
    with running() as follower:
        assert follower.service.poll() == []
        assert follower.service.poll_set() == []
        assert follower.service.pid is None


def test_the_process_is_told_of_the_settings_and_a_missing_library_is_no_error() -> None:
    config = EngineConfig(model="m", tokenizer="t", grammar_timeout_s=2.5, grammar_memory_mb=7, grammar_cache_mb=9)
    limits = EngineLimits(300, 64, 8, 16, 4, 32, eos_token_ids=(5, 6))
    made = make_grammar_service(config, limits, "path")
    assert (made is not None) == has_library()
    if made is not None:
        assert made.arguments == (
            "--tokenizer=t", "--timeout-s=2.5", "--memory-mb=7", "--cache-mb=9", "--eos", "5", "6"
        )  # fmt: skip
