# SPDX-License-Identifier: Apache-2.0
"""A worker group from start to exit: engine and tokenizer loaded, brokers joined, requests served, everything ended.

The group is one unit of failure: when its engine is lost it leaves the brokers, which retry what can be retried, and
exits with a non-zero code, so that whoever supervises it starts a new one with a new incarnation. The first SIGTERM or
SIGINT drains, the second ends at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from mii_zmq import transport
from mii_zmq.config import EngineConfig, WorkerConfig
from mii_zmq.errors import MiiError, StartupError
from mii_zmq.logs import is_json, of_group
from mii_zmq.process import ChildLink
from mii_zmq.protocol import Ready
from mii_zmq.tokenizer import TextTokenizer, load_tokenizer
from mii_zmq.tracing import start_tracing
from mii_zmq.worker.actor import Actor
from mii_zmq.worker.broker_link import BrokerLink
from mii_zmq.worker.chat_template import reasons, template_problem, tool_format_of
from mii_zmq.worker.engine_channel import (
    EngineReady,
    FromEngine,
    ModelResolved,
    PrefixCacheReset,
    Progress,
    StepReport,
)
from mii_zmq.worker.engine_handle import EngineHandle
from mii_zmq.worker.intake import Intake
from mii_zmq.worker.request_accounts import RequestAccounts
from mii_zmq.worker.request_spans import RequestSpans
from mii_zmq.worker.watchdog import Watchdog

T = TypeVar("T")

PROGRESS_LOG_S = 2.0
THREAD_SWITCH_S = 0.001
"""A tokenizer thread that computes in Python may keep the event loop waiting for at most this long."""

log = logging.getLogger(__name__)


class _Stopped(Exception):
    """A signal came before the group was serving."""


class WorkerGroup:
    """One run of a worker group. `run` is called once, in the main thread's event loop."""

    def __init__(self, engine_config: EngineConfig, worker_config: WorkerConfig, parent: ChildLink) -> None:
        self._engine_config = engine_config
        self._config = worker_config
        self._parent = parent
        self._name = worker_config.group or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(2).hex()}"
        self._incarnation = os.urandom(16)
        self._tracing = start_tracing(worker_config, "worker", group=self._name, deployment=worker_config.deployment)
        self._actor: Actor | None = None
        self._last_progress = 0.0
        loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[None] = loop.create_future()
        self._stop_now: asyncio.Future[None] = loop.create_future()
        self._resolved: asyncio.Future[str] = loop.create_future()
        self._ready: asyncio.Future[EngineReady] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    async def run(self) -> int:
        """Load, serve, drain. Returns the exit code.

        Raises:
            StartupError: it never came to serve, for this reason.
        """
        context: Any = transport.make_context()
        engine: EngineHandle | None = None
        try:
            with of_group(self._name):
                engine = EngineHandle(context, self._engine_config, self._on_engine_message)
            ready, tokenizer = await self._load(engine)
            self._actor = self._make_actor(engine, ready, tokenizer)
            self._actor.links = [
                BrokerLink(context, endpoint, index, self._actor, self._actor.on_broker_message)
                for index, endpoint in enumerate(self._config.brokers)
            ]
            await self._join(engine, self._actor, ready)
            return await self._serve(engine, self._actor)
        except _Stopped:
            log.info("stopped before the group was serving")
            return 0
        finally:
            if self._actor is not None:
                self._actor.close("the group ends")
            if engine is not None:
                await self._end_engine(engine)
            transport.close_context(context)
            if self._tracing is not None:
                self._tracing.close()

    async def _load(self, engine: EngineHandle) -> tuple[EngineReady, TextTokenizer]:
        """Wait for the engine; reads the tokenizer meanwhile."""
        deadline = time.monotonic() + self._config.load_timeout_s
        path = await self._first(engine, self._resolved, deadline)
        tokenizer = asyncio.ensure_future(asyncio.to_thread(load_tokenizer, self._engine_config.tokenizer or path))
        try:
            # A tokenizer that cannot be read is reported at once, not after the weights.
            loaded_tokenizer = await self._first(engine, tokenizer, deadline)
            return await self._first(engine, self._ready, deadline), loaded_tokenizer
        finally:
            tokenizer.cancel()

    def _make_actor(self, engine: EngineHandle, ready: EngineReady, tokenizer: TextTokenizer) -> Actor:
        limits = ready.limits
        if (problem := template_problem(tokenizer)) is not None:
            log.warning("%s; chats will be refused, prompts work", problem)
        registration = Ready(
            group=self._name,
            incarnation=self._incarnation,
            deployment=self._config.deployment,
            # A few more than can run, so that a freed slot does not wait for the next one's way through the broker.
            max_requests=limits.max_sequences + limits.max_sequences // 8,
            max_model_len=limits.max_model_len,
            info={
                "model": self._engine_config.model,
                "pid": os.getpid(),
                "engine_pid": engine.pid,
                "max_sequences": limits.max_sequences,
                "kv_tokens": limits.num_blocks * limits.block_size,
                "tool_format": tool_format_of(tokenizer),
                "reasoning": reasons(tokenizer),
                "pooling": self._engine_config.pooling if limits.hidden_size else None,
                "hidden_size": limits.hidden_size,
                **ready.info,
                **({"structured_output": []} if tokenizer.token_bytes is None else {}),
            },
        )
        intake = Intake(tokenizer, limits, self._engine_config.pooling)
        watchdog = Watchdog(self._engine_config.step_timeout_s)
        spans = None
        if self._tracing is not None:
            spans = RequestSpans(self._tracing, self._name, self._config.deployment)
        return Actor(
            engine,
            intake,
            registration,
            self._config.tokenizer_threads,
            watchdog,
            RequestAccounts(spans),
        )

    async def _join(self, engine: EngineHandle, actor: Actor, ready: EngineReady) -> None:
        """Register with at least one broker, then say that the group serves."""
        waiting = [asyncio.ensure_future(link.registered.wait()) for link in actor.links]
        try:
            await self._first(engine, asyncio.ensure_future(_any(waiting)))
        finally:
            for task in waiting:
                task.cancel()
        limits = ready.limits
        kv_tokens = limits.num_blocks * limits.block_size
        _say(
            f"group {self._name} serves {self._config.deployment} (model {self._engine_config.model}, context "
            f"{limits.max_model_len}, {kv_tokens} KV tokens, {limits.max_sequences} sequences)"
        )
        self._parent.announce(
            ready=True,
            deployment=self._config.deployment,
            group=self._name,
            info=ready.info,
            limits={
                "max_model_len": limits.max_model_len,
                "max_sequences": limits.max_sequences,
                "kv_tokens": kv_tokens,
                "token_budget": limits.token_budget,
                "vocab_size": limits.vocab_size,
            },
        )
        sys.setswitchinterval(THREAD_SWITCH_S)
        gc.collect()
        gc.freeze()

    async def _serve(self, engine: EngineHandle, actor: Actor) -> int:
        drain_requested = asyncio.ensure_future(actor.drain_requested.wait())
        try:
            await _any([engine.lost, self._stop, drain_requested])
        finally:
            drain_requested.cancel()
        if not engine.lost.done():
            await self._drain(engine, actor)
        if engine.lost.done():
            error = engine.lost.result()
            log.error("%s; %d requests are given back to the brokers", error.message, actor.num_requests)
            self._parent.announce(error=error.message)
            actor.close(error.message)
            return 1
        return 1 if self._stop_now.done() else 0

    async def _drain(self, engine: EngineHandle, actor: Actor) -> None:
        """Finish what is running; returns when that is done, the time is up, or nothing is to be waited for."""
        actor.start_draining()
        log.info("draining: %d requests get up to %.0f s", actor.num_requests, self._config.drain_timeout_s)
        idle = asyncio.ensure_future(actor.wait_idle())
        await _any([idle, engine.lost, self._stop_now], self._config.drain_timeout_s)
        if not idle.done():
            idle.cancel()
            log.warning("%d requests did not finish; they are given back to the brokers", actor.num_requests)
        actor.close("the group was drained")

    async def _end_engine(self, engine: EngineHandle) -> None:
        if self._stop_now.done() or engine.lost.done() or not self._ready.done():
            engine.kill()
        else:
            await engine.stop()

    async def _first(self, engine: EngineHandle, wanted: asyncio.Future[T], deadline: float | None = None) -> T:
        """Wait for `wanted`, unless the engine is lost, a signal comes or the time is up before."""
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        await _any([wanted, engine.lost, self._stop], left_s)
        if wanted.done():
            return wanted.result()
        if self._stop.done():
            raise _Stopped
        if engine.lost.done():
            raise _startup_error(engine.lost.result())
        raise StartupError(
            f"the engine was not loaded within {self._config.load_timeout_s:.0f} s; give it more with --load-timeout-s"
        )

    def _on_engine_message(self, message: FromEngine) -> None:
        if isinstance(message, StepReport):
            if self._actor is not None:
                self._actor.on_step(message)
        elif isinstance(message, PrefixCacheReset):
            if self._actor is not None:
                self._actor.on_prefix_cache_reset(message.number)
        elif isinstance(message, Progress):
            self._on_progress(message)
        elif isinstance(message, ModelResolved):
            self._resolved.set_result(message.path)
        elif isinstance(message, EngineReady):
            self._ready.set_result(message)

    def _on_progress(self, progress: Progress) -> None:
        self._parent.announce(progress=progress.text, fraction=progress.fraction)
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_LOG_S or progress.fraction >= 1.0:
            self._last_progress = now
            log.info("loading: %s (%.0f %%)", progress.text, 100 * progress.fraction)

    def _on_signal(self) -> None:
        if not self._stop.done():
            self._stop.set_result(None)
        elif not self._stop_now.done():
            log.warning("second signal: ending at once")
            self._stop_now.set_result(None)


async def run_group(engine_config: EngineConfig, worker_config: WorkerConfig, parent: ChildLink) -> int:
    """Run one worker group to its end; returns the exit code. Raises StartupError when it never came to serve."""
    return await WorkerGroup(engine_config, worker_config, parent).run()


async def _any(futures: Sequence[asyncio.Future[Any]], timeout_s: float | None = None) -> None:
    """Wait until one is done, or the time is up."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _say(line: str) -> None:
    """Print for the operator; a full disk behind standard output is no reason to stop serving."""
    if is_json():
        log.info("%s", line)
        return
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it at exit
        log.warning("standard output cannot be written; the ready line is lost: %s", line)


def _startup_error(error: MiiError) -> StartupError:
    return error if isinstance(error, StartupError) else StartupError(error.message)
