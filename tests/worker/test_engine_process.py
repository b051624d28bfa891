# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from mii_zmq import transport
from mii_zmq.errors import ConfigError, InternalError
from mii_zmq.process import Child, spawn
from mii_zmq.worker.engine_channel import (
    AddSequence,
    CancelSequences,
    EngineFailed,
    EngineReady,
    FromEngine,
    ModelResolved,
    OutputRow,
    Progress,
    Shutdown,
    StepReport,
    ToEngine,
    decode_from_engine,
    encode,
    load_from_values,
)
from mii_zmq.worker.engine_process import is_explained
from mii_zmq.worker.plan import SamplingSpec, SequenceRequest
from tests.worker.scripted_broker import open_context

pytestmark = pytest.mark.slow

M = TypeVar("M")
PATIENCE_S = 60


class Peer:
    """The actor's end of the channel, and the engine process at the other."""

    def __init__(self, socket: transport.BlockingSocket, child: Child) -> None:
        self._socket = socket
        self.child = child

    def send(self, message: ToEngine) -> None:
        self._socket.send(encode(message))

    def send_raw(self, *frames: bytes) -> None:
        self._socket.send(frames)

    def take(self, kind: type[M], accept: Callable[[M], bool] = lambda _: True) -> M:
        """Skip to the next message of a kind."""
        while True:
            frames = self._socket.receive(PATIENCE_S * 1000)
            assert frames is not None, f"no {kind.__name__} came"
            message: FromEngine = decode_from_engine(frames)
            if isinstance(message, kind) and accept(message):
                return message

    def take_rows(self) -> list[OutputRow]:
        return [OutputRow(*row) for row in self.take(StepReport, lambda report: len(report.rows) > 0).rows]


@contextlib.contextmanager
def engine(*arguments: str) -> Iterator[Peer]:
    with open_context() as context:
        pair, endpoint = transport.bind_pair(context)
        socket = transport.BlockingSocket(pair)
        child = spawn("mii_zmq.worker.engine_process", [f"--endpoint={endpoint}", *arguments], "engine")
        try:
            yield Peer(socket, child)
        finally:
            child.kill()
            socket.close(0)


def request(seq_id: int, **more: object) -> SequenceRequest:
    return SequenceRequest(seq_id, list(b"hello"), **{"max_new_tokens": 3, **more})  # type: ignore[arg-type]


def test_loads_generates_and_shuts_down() -> None:
    with engine("--model=fake:num_blocks=8") as peer:
        assert peer.take(Progress) == Progress("starting", 0.0)
        assert peer.take(ModelResolved).path == "fake:"
        assert peer.take(EngineReady).limits.num_blocks == 8
        idle = load_from_values(peer.take(StepReport).load)
        assert (idle.total_blocks, idle.used_blocks, idle.running) == (8, 0, 0)
        peer.send(AddSequence(request(1)))
        rows: list[OutputRow] = []
        while not rows or rows[-1].finish_reason is None:
            rows += peer.take_rows()
        assert [row.seq_id for row in rows] == [1, 1, 1]
        assert sum(len(row.token_ids) for row in rows) == 3
        assert rows[-1].finish_reason == "length"
        after = load_from_values(peer.take(StepReport).load)
        assert (after.generated_tokens, after.used_blocks, after.prompt_tokens) == (3, 0, 5)
        peer.send(Shutdown())
        assert peer.child.process.wait(PATIENCE_S) == 0


def test_refused_sequence_becomes_a_row_with_its_typed_error() -> None:
    with engine("--model=fake:num_blocks=2,block_size=16") as peer:
        peer.take(EngineReady)
        peer.send(AddSequence(request(1, max_new_tokens=1000)))
        (row,) = peer.take_rows()
        assert (row.seq_id, row.finish_reason) == (1, "error")
        assert row.error is not None
        assert row.error["code"] == "context_length_exceeded"
        peer.send(AddSequence(request(2)))
        assert peer.take_rows()[0].seq_id == 2


def test_cancel_answers_with_a_row() -> None:
    with engine("--model=fake:step_ms=5") as peer:
        peer.take(EngineReady)
        peer.send(AddSequence(request(1, max_new_tokens=4000)))
        peer.take_rows()
        peer.send(CancelSequences([1, 99]))
        while (row := peer.take_rows()[-1]).finish_reason is None:
            pass
        assert (row.seq_id, row.finish_reason) == (1, "cancelled")
        peer.take(StepReport, lambda report: load_from_values(report.load).used_blocks == 0)


def test_reports_go_on_while_idle() -> None:
    with engine("--model=fake:") as peer:
        peer.take(EngineReady)
        assert [peer.take(StepReport).step for _ in range(3)] == [0, 0, 0]


def test_failure_to_load_is_the_last_message() -> None:
    with engine("--model=fake:colour=red") as peer:
        failed = peer.take(EngineFailed)
        assert isinstance(failed.error, ConfigError)
        assert "colour=red" in failed.error.message
        assert peer.child.process.wait(PATIENCE_S) == 1


def test_broken_channel_ends_the_engine_with_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    with engine("--model=fake:") as peer:
        peer.take(EngineReady)
        peer.send_raw(b"?", b"\xc0")
        assert "unknown kind" in peer.take(EngineFailed).error.message
        assert peer.child.process.wait(PATIENCE_S) == 1


def test_signals_are_the_actors_business() -> None:
    with engine("--model=fake:") as peer:
        peer.take(EngineReady)
        peer.child.process.terminate()
        peer.send(AddSequence(request(1)))
        assert peer.take_rows()[0].seq_id == 1


def test_ends_when_its_parent_closes_the_death_pipe() -> None:
    with engine("--model=fake:") as peer:
        peer.take(EngineReady)
        peer.child.close()
        assert peer.child.process.wait(PATIENCE_S) == 1


def test_only_what_is_not_our_own_error_is_traced() -> None:
    lost = InternalError("step 7 failed: rank 1 was killed by SIGKILL")
    lost.__cause__ = InternalError("rank 1 was killed by SIGKILL")
    assert is_explained(lost)
    lost.__cause__.__cause__ = RuntimeError("CUDA error")
    assert not is_explained(lost)
    assert not is_explained(ValueError("a bug"))


@pytest.mark.long
def test_output_follows_a_grammar_and_the_engine_sleeps_while_it_waits_for_masks() -> None:
    pytest.importorskip("xgrammar")
    with engine("--model=fake:") as peer:
        ready = peer.take(EngineReady)
        assert ready.limits.takes_grammars
        assert "json_schema" in ready.info["structured_output"]
        sampling = SamplingSpec(stop_token_ids=(256,), is_masked=True)
        wanted = request(1, max_new_tokens=20, sampling=sampling, grammar=("regex", "[ab]{4}"))
        peer.send(AddSequence(wanted))
        waiting = peer.take(StepReport, lambda report: report.awaits_masks)
        assert load_from_values(waiting.load).waiting == 1
        ticks = process_ticks(peer.child.pid)
        peer.take(StepReport, lambda report: report.awaits_masks)
        assert process_ticks(peer.child.pid) - ticks < 25, "it did not sleep for half a second"
        found: list[int] = []
        reason = None
        while reason is None:
            (row,) = peer.take_rows()
            found += row.token_ids
            reason = row.finish_reason
        assert reason == "stop"
        assert set(bytes(found[:-1])) <= set(b"ab")
        assert len(found) == 5
        refused = request(2, sampling=sampling, grammar=("regex", "(a"))
        peer.send(AddSequence(refused))
        (row,) = peer.take_rows()
        assert row.error is not None
        assert row.error["code"] == "invalid_request"


def process_ticks(pid: int) -> int:
    """Processor time in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
