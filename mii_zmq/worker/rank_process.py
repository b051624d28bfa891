# SPDX-License-Identifier: Apache-2.0
"""A rank above 0: `python -m mii_zmq.worker.rank_process`, started by rank 0's process and ended with it.

It loads its part of the model and then runs the step plans that rank 0 sends, two at a time as rank 0 does. Its results
go nowhere, since every rank draws the same tokens; it acknowledges each step with a digest of what it drew, so that
ranks which drift apart are found. Its announcements are progress, readiness, acknowledgements, and a beat at a fixed
interval whatever it does. Any failure is the group's: the process says why and ends. Knows no scheduling and no text.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mii_zmq import transport
from mii_zmq.command_line import add_arguments, from_arguments
from mii_zmq.config import EngineConfig
from mii_zmq.errors import MiiError, ProtocolError
from mii_zmq.logs import setup_logging
from mii_zmq.process import ChildLink
from mii_zmq.worker.fake_options import is_fake_model, make_fake_executor
from mii_zmq.worker.parallel import RankInfo
from mii_zmq.worker.plan import Executor, PendingStep
from mii_zmq.worker.plan_channel import decode_invitation, decode_plan, result_digest

BEAT_S = 0.5
MAX_IN_FLIGHT = 2
POLL_MS = 1
"""How often a running step is looked at while the next plan is awaited."""

log = logging.getLogger("mii_zmq.worker.rank")


class RankLoop:
    """Runs plans until the process ends, or raises."""

    def __init__(self, executor: Executor, channel: transport.BlockingSocket, parent: ChildLink) -> None:
        self._executor = executor
        self._channel = channel
        self._parent = parent
        self._in_flight: deque[PendingStep] = deque()
        self._step = 0

    def run(self) -> None:
        while True:
            self.turn(-1)

    def turn(self, idle_timeout_ms: int) -> None:
        """Take a plan if one is there and there is room, or finish a step; wait for a plan when nothing runs."""
        is_full, is_done = len(self._in_flight) == MAX_IN_FLIGHT, bool(self._in_flight) and self._in_flight[0].done()
        if not is_full:
            frames = self._channel.receive((0 if is_done else POLL_MS) if self._in_flight else idle_timeout_ms)
            if frames is not None:
                self._submit(frames)
                return
        if is_full or is_done:
            result = self._in_flight.popleft().result()
            self._parent.announce(done=result.step, digest=result_digest(result))

    def _submit(self, frames: list[bytes]) -> None:
        plan = decode_plan(frames)
        if plan.step != self._step + 1:
            raise ProtocolError(f"plan {plan.step} follows plan {self._step}; a plan was lost or sent twice")
        self._step = plan.step
        self._in_flight.append(self._executor.submit(plan))


def load(
    config: EngineConfig, rank: RankInfo, invitation: dict[str, Any], memory_fd: int, parent: ChildLink
) -> Executor:
    """This rank's executor. Raises StartupError when it cannot be loaded."""
    if is_fake_model(config.model):
        parent.announce(joined=True)
        return make_fake_executor(config, rank.rank)
    # Torch takes seconds to import: not for the test engine.
    from mii_zmq.worker.collectives import STEP_TIMEOUT_S, Invitation, open_collectives
    from mii_zmq.worker.loading import load_executor

    parent.announce(joined=True)
    collectives = open_collectives(Invitation(**invitation), rank, config, memory_fd=memory_fd)
    executor = load_executor(
        config, lambda text, fraction: parent.announce(progress=text, fraction=fraction), rank, collectives
    )
    collectives.set_timeout(STEP_TIMEOUT_S)
    return executor


def serve(
    config: EngineConfig, rank: RankInfo, channel: transport.BlockingSocket, memory_fd: int, parent: ChildLink
) -> None:
    """Join, load and run plans. Never returns; raises whatever ends the rank."""
    frames = channel.receive(-1)
    assert frames is not None
    executor = load(config, rank, decode_invitation(frames), memory_fd, parent)
    parent.announce(ready=True, limits=asdict(executor.limits))
    gc.collect()
    gc.freeze()
    threading.Thread(target=_beat, args=(parent,), name="beat", daemon=True).start()
    RankLoop(executor, channel, parent).run()


def main(argv: Sequence[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="mii_zmq.worker.rank_process", description="A further rank of an engine.")
    parser.add_argument("--endpoint", required=True, help="rank 0's plan channel")
    parser.add_argument("--rank", required=True, type=int, help="this rank's number")
    parser.add_argument("--memory-fd", required=True, type=int, help="memory that the ranks share")
    add_arguments(parser, EngineConfig)
    ChildLink.add_arguments(parser)
    options = parser.parse_args(argv)
    parent = ChildLink.from_arguments(options)
    try:
        setup_logging(f"rank {options.rank}")
        context: Any = transport.make_context()
        channel = transport.BlockingSocket(transport.connect_pair(context, options.endpoint))
        config = from_arguments(options, EngineConfig)
        serve(config, RankInfo(options.rank, config.tensor_parallel), channel, options.memory_fd, parent)
    except MiiError as error:
        log.error("%s", error.message)
        parent.announce(error=error.message)
    except Exception as error:
        log.exception("the rank failed")
        text = str(error).strip().splitlines()
        parent.announce(error=f"{type(error).__name__}: {text[0] if text else 'no message'}")
    return 1


def _beat(parent: ChildLink) -> None:
    event = threading.Event()
    while not event.wait(BEAT_S):
        parent.announce(beat=True)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not through the interpreter's own end, which waits for threads that may wait for a lost rank.
    os._exit(code)
