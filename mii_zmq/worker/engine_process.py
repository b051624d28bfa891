# SPDX-License-Identifier: Apache-2.0
"""The engine process: `python -m mii_zmq.worker.engine_process`, started by the actor and ended with it.

A plain loop: read what the actor sent, run a step, report. It blocks while there is nothing to do, and reports at a
fixed interval even then, so that its silence means that it hangs. Signals are the actor's business and are ignored
here: the actor ends this process by a message, or by dying. Touches no text and no socket but the private one.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from mii_zmq import transport
from mii_zmq.command_line import add_arguments, from_arguments
from mii_zmq.config import EngineConfig
from mii_zmq.errors import InternalError, MiiError, StartupError
from mii_zmq.logs import setup_logging
from mii_zmq.process import ChildLink
from mii_zmq.protocol import Load
from mii_zmq.structured_output import GRAMMAR_KINDS
from mii_zmq.tokenizer import FAKE_PREFIX
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.engine_channel import (
    AddSequence,
    CancelSequences,
    EngineFailed,
    EngineReady,
    FromEngine,
    ModelResolved,
    OutputRow,
    PrefixCacheReset,
    Progress,
    ResetPrefixCache,
    Shutdown,
    StepReport,
    decode_to_engine,
    encode,
    load_values,
)
from mii_zmq.worker.fake_options import is_fake_model, make_fake_executor
from mii_zmq.worker.grammar_service import make_grammar_service
from mii_zmq.worker.plan import Executor, SequenceOutput
from mii_zmq.worker.ranked_executor import load_ranked_executor
from mii_zmq.worker.step_trace import StepTrace

IDLE_REPORT_S = 0.5
"""A report at least this often; when idle it is all that the process does."""
TIMES_REPORT_S = 0.4
"""Between two reports with histograms; heartbeats, which they are for, come about as often."""
STEP_TIME_WEIGHT = 0.1
"""Of the newest step in the moving average that the load reports."""

log = logging.getLogger("mii_zmq.worker.engine")


class EngineLoop:
    """Runs the core until the actor says Shutdown."""

    def __init__(self, core: EngineCore, channel: transport.BlockingSocket, trace: StepTrace | None = None) -> None:
        self._core = core
        self._trace = trace
        self._channel = channel
        self._rows: list[OutputRow] = []
        """Of this turn: refusals, then the step's output."""
        self._is_running = True
        self._generated_tokens = 0
        self._step_ms = 0.0
        self._last_report = 0.0
        self._last_times = 0.0

    def run(self) -> None:
        self._report()
        while self._is_running:
            is_busy = self._core.has_work
            if not is_busy:
                wait_ms = max(1, int(1000 * self._core.max_wait_s(IDLE_REPORT_S)))
                self._channel.wait(wait_ms, self._core.poll_set())
            self._receive()
            if not is_busy:
                self._core.take_masks()
            if self._core.has_work:
                started = time.monotonic()
                outputs = self._core.step()
                elapsed_ms = 1000 * (time.monotonic() - started)
                # The first step after a pause says nothing about the pace: it only fills the pipeline.
                if is_busy:
                    weight = STEP_TIME_WEIGHT if self._step_ms else 1.0
                    self._step_ms += weight * (elapsed_ms - self._step_ms)
                self._take(outputs)
            if self._rows or time.monotonic() - self._last_report >= IDLE_REPORT_S or not self._core.has_work:
                self._report()

    def _receive(self) -> None:
        frames = self._channel.receive(0)
        while frames is not None:
            message = decode_to_engine(frames)
            if isinstance(message, AddSequence):
                self._add(message)
            elif isinstance(message, CancelSequences):
                self._core.cancel(message.seq_ids)
            elif isinstance(message, ResetPrefixCache):
                self._core.reset_prefix_cache()
                self._channel.send(encode(PrefixCacheReset(message.number)))
            elif isinstance(message, Shutdown):
                self._is_running = False
                return
            frames = self._channel.receive(0)

    def _add(self, message: AddSequence) -> None:
        try:
            self._core.add(message.request)
        except MiiError as error:
            self._rows.append(OutputRow(message.request.seq_id, (), "error", 0, error.to_wire()))
        except Exception as error:
            log.exception("the engine failed to take a sequence")
            wire = InternalError(f"the engine failed to take this request: {type(error).__name__}").to_wire()
            self._rows.append(OutputRow(message.request.seq_id, (), "error", 0, wire))

    def _take(self, outputs: Sequence[SequenceOutput]) -> None:
        rows = self._rows
        for output in outputs:
            error = None if output.error is None else output.error.to_wire()
            rows.append(
                OutputRow(
                    output.seq_id,
                    output.token_ids,
                    output.finish_reason,
                    output.num_cached_tokens,
                    error,
                    output.logprobs,
                    output.prompt_scores,
                    output.timing,
                    output.pooled,
                )
            )
            self._generated_tokens += len(output.token_ids)

    def _report(self) -> None:
        stats = self._core.stats()
        load = Load(
            step=stats.step,
            running=stats.num_running,
            waiting=stats.num_waiting,
            outstanding_tokens=stats.num_outstanding_tokens,
            used_blocks=stats.num_used_blocks,
            total_blocks=stats.num_blocks,
            num_preemptions=stats.num_preemptions,
            prompt_tokens=stats.num_prefix_queried_tokens - stats.num_prefix_hit_tokens,
            cached_tokens=stats.num_prefix_hit_tokens,
            generated_tokens=self._generated_tokens,
            step_ms=round(self._step_ms, 3),
            num_failed_steps=stats.num_failed_steps,
            num_numeric_errors=stats.num_numeric_errors,
            token_budget=stats.token_budget,
        )
        started = time.monotonic()
        times = None
        if started - self._last_times >= TIMES_REPORT_S:
            times, self._last_times = self._core.times.values(), started
        self._channel.send(
            encode(StepReport(stats.step, self._rows, load_values(load), self._core.awaits_masks, times))
        )
        if self._trace is not None and self._rows:
            self._trace.sent(stats.step, len(self._rows), started)
        self._rows = []
        self._last_report = started


def load_engine(
    config: EngineConfig,
    send: Callable[[FromEngine], None],
    trace: StepTrace | None = None,
    on_failure: Callable[[MiiError], None] = lambda error: None,
) -> tuple[EngineCore, dict[str, Any]]:
    """The core around the executor that the model's name asks for, and facts about it; says how far loading is.

    `on_failure` is called when a further rank of the engine is lost, from any thread, while loading or later.

    Raises:
        StartupError: the model cannot be served; one line says why.
    """

    def say(text: str, fraction: float) -> None:
        send(Progress(text, fraction))

    if is_fake_model(config.model):
        send(ModelResolved(FAKE_PREFIX))
    else:
        from mii_zmq.worker.models.demo_model import resolve_model

        path = resolve_model(config.model, lambda text: say(text, 0.0))
        send(ModelResolved(path))
        config = replace(config, model=path)
    info: dict[str, Any] = {}
    executor: Executor
    if config.tensor_parallel > 1:
        executor, info["memory"] = ranked = load_ranked_executor(config, say, on_failure)
        info["rank_pids"] = ranked[0].group.pids
    elif is_fake_model(config.model):
        executor, info["memory"] = make_fake_executor(config), "none"
    else:
        # Torch takes seconds to import: not before the model is known to be there, and not for the test engine.
        from mii_zmq.worker.loading import load_executor

        loaded = load_executor(config, say)
        executor, info["memory"] = loaded, str(loaded.bill)
    if not is_fake_model(config.model):
        from mii_zmq.worker.loading import describe_device

        info["device"] = describe_device(config)
    grammars = make_grammar_service(
        config, executor.limits, FAKE_PREFIX if is_fake_model(config.model) else config.model
    )
    info["structured_output"] = list(GRAMMAR_KINDS) if grammars is not None else []
    core = EngineCore(executor, model=config.model, prefix_cache=config.prefix_cache, trace=trace, grammars=grammars)
    return core, info


def serve(config: EngineConfig, channel: transport.BlockingSocket, on_failure: Callable[[MiiError], None]) -> None:
    """Load and run until Shutdown; `on_failure` as for `load_engine`. Raises StartupError when loading fails."""

    def send(message: FromEngine) -> None:
        channel.send(encode(message))

    send(Progress("starting", 0.0))
    trace = None if config.step_trace is None else StepTrace(config.step_trace)
    core, info = load_engine(config, send, trace, on_failure)
    try:
        send(EngineReady(core.limits, info))
        gc.collect()
        gc.freeze()
        EngineLoop(core, channel, trace).run()
        # Not after an error: it waits for the device, which may be what failed.
        core.close()
    finally:
        if trace is not None:
            trace.close()


def main(argv: Sequence[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="mii_zmq.worker.engine_process", description="The engine of a worker group.")
    parser.add_argument("--endpoint", required=True, help="the actor's private socket")
    add_arguments(parser, EngineConfig)
    ChildLink.add_arguments(parser)
    options = parser.parse_args(argv)
    setup_logging("engine")
    parent = ChildLink.from_arguments(options)

    def end(error: MiiError) -> None:
        """A rank is lost. The main thread may be waiting for it, and owns the socket: the pipe takes the message."""
        parent.announce(error=error.message)
        _exit(1)

    context: Any = transport.make_context()
    channel = transport.BlockingSocket(transport.connect_pair(context, options.endpoint))
    code = 1
    try:
        serve(from_arguments(options, EngineConfig), channel, end)
        code = 0
    except StartupError as error:
        channel.send(encode(EngineFailed(error)))
    except Exception as error:
        log.error("the engine failed: %s", error, exc_info=not is_explained(error))
        text = str(error).strip().splitlines()
        reason = InternalError(f"the engine failed: {type(error).__name__}: {text[0] if text else 'no message'}")
        channel.send(encode(EngineFailed(reason)))
    finally:
        channel.close()
        transport.close_context(context)
    return code


def is_explained(error: BaseException | None) -> bool:
    """It is, and comes from, nothing but errors of our own, whose messages say all: a lost rank is no bug to trace."""
    while isinstance(error, MiiError):
        error = error.__cause__
    return error is None


def _exit(code: int) -> NoReturn:
    """Not through the interpreter's own end, which waits for the executor's thread, and that for the device."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main())
