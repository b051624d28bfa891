# SPDX-License-Identifier: Apache-2.0
"""An engine inside the calling process, for `pipeline()`: one thread that steps, callers that wait, and no sockets,
unless further ranks share the model: those are processes of their own.

Any number of threads submit; their sequences share the engine's batches. Text is handled by the same classes as in a
worker group. Everything about the engine happens in its thread, loading included, because thread settings of the
numeric libraries belong to a thread. The thread holds no reference to `LocalEngine`, so dropping that ends it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from mii_zmq.config import EngineConfig
from mii_zmq.errors import Cancelled, DeadlineExceeded, InternalError, MiiError
from mii_zmq.protocol import GenerateBody
from mii_zmq.response import ResponseReader
from mii_zmq.sampling_params import SamplingParams
from mii_zmq.tokenizer import TextTokenizer, load_tokenizer
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.embedding import build_embedding
from mii_zmq.worker.engine_channel import FromEngine, ModelResolved, Progress
from mii_zmq.worker.engine_inbox import EngineInbox
from mii_zmq.worker.engine_process import load_engine
from mii_zmq.worker.local_embedding import LocalEmbedding
from mii_zmq.worker.plan import EngineLimits, EngineStats, SequenceOutput
from mii_zmq.worker.prompt_text import PromptInput
from mii_zmq.worker.text import PreparedSequence, build_sequence

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0
WATCH_S = 0.5
"""How often the grammar process is looked after, once there is one."""

Prompt = str | list[dict[str, Any]]
"""A text, or chat messages for the model's template."""


class Piece(NamedTuple):
    """What a step brought for a sequence."""

    text: str
    num_tokens: int
    """Output tokens so far, the ending one included."""
    finish_reason: str | None
    records: bytes = b""
    """Log-probabilities (mii_zmq.logprobs)."""


class LocalRequest:
    """One sequence under way: iterate for the pieces of its text. Belongs to the thread that iterates."""

    def __init__(self, prepared: PreparedSequence, engine: _EngineThread) -> None:
        self.prompt_length = prepared.prompt_length
        self.num_tokens = 0
        """Output tokens so far, the ending one included."""
        self.finish_reason: str | None = None
        self.sequence = prepared.sequence
        self.reader = ResponseReader(prepared.params)
        """Has the log-probabilities of what was iterated."""
        self._processor = prepared.output_processor()
        self._writer = prepared.record_writer()
        self._engine = engine
        self._pieces: queue.SimpleQueue[Piece | MiiError] = queue.SimpleQueue()
        self._is_over = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next piece, possibly empty; raises the MiiError that ended the sequence."""
        if self._is_over:
            raise StopIteration
        piece = self._pieces.get()
        if isinstance(piece, MiiError):
            self._is_over = True
            raise piece
        self.num_tokens, self.finish_reason = piece.num_tokens, piece.finish_reason
        self.reader.add(piece.records)
        self._is_over = self.finish_reason is not None
        return piece.text

    def take(self, output: SequenceOutput) -> str | None:
        """Hand a step's output, which did not fail, to whom iterates; returns the reason if the sequence has ended.
        For the engine's thread, like `fail`.

        Raises:
            InvalidRequest: it asked for more log-probabilities than fit.
        """
        text, reason, num_used = self._processor.push(output.token_ids, output.finish_reason)
        records = b""
        if self._writer is not None:
            if output.prompt_scores is not None:
                self._writer.add_prompt(output.prompt_scores)
            if output.logprobs is not None:
                self._writer.add_output(output.token_ids[:num_used], output.logprobs[:num_used])
            records = self._writer.take()
        self._pieces.put(Piece(text, self._processor.num_tokens, reason, records))
        return reason

    def fail(self, error: MiiError) -> None:
        self._pieces.put(error)

    def cancel(self) -> None:
        """Stop generating; harmless after the end."""
        if not self._is_over:
            self._is_over = True
            self._engine.send(_Cancel(self))

    close = cancel


Local = LocalRequest | LocalEmbedding


@dataclass(frozen=True, slots=True)
class _Add:
    requests: Sequence[Local]


@dataclass(frozen=True, slots=True)
class _Cancel:
    request: Local


@dataclass(frozen=True, slots=True)
class _Ask:
    answer: Future[EngineStats]


@dataclass(frozen=True, slots=True)
class _Loaded:
    tokenizer: TextTokenizer
    limits: EngineLimits


class LocalEngine:
    """Loads a model and runs it until `close`. All methods may be called from any thread."""

    def __init__(self, config: EngineConfig, report: Callable[[dict[str, Any]], None]) -> None:
        """Returns when the model is loaded; `report` is called with progress meanwhile.

        Raises:
            StartupError: the model cannot be served; one line says why.
        """
        self._thread = _EngineThread(config, report)
        self._finalizer = weakref.finalize(self, self._thread.end)
        self._thread.start()
        loaded = self._thread.loaded.result()
        self.tokenizer = loaded.tokenizer
        self.limits = loaded.limits
        self._seq_ids = itertools.count(1)
        self._pooling = config.pooling

    def submit(self, wanted: Sequence[tuple[Prompt, SamplingParams, int]]) -> list[LocalRequest]:
        """Start generating for (prompt, options, index of the choice among `options.n`) each.

        Raises:
            RequestError: one of them cannot be done; then none was started.
        """
        requests = [self._prepare(prompt, params, choice) for prompt, params, choice in wanted]
        self._thread.send(_Add(requests))
        return requests

    def embed(self, bodies: Sequence[GenerateBody]) -> list[LocalEmbedding]:
        """Start computing the embeddings that these (`embeddings.embedding_bodies`) ask for.

        Raises:
            RequestError: one of them cannot be done; then none was started.
        """
        wanted = [
            build_embedding(
                self.tokenizer, self.limits, body, PromptInput(text=body.prompt, token_ids=body.prompt_token_ids),
                self._pooling, seq_id=next(self._seq_ids), priority=0, cache_salt="",
            )
            for body in bodies
        ]  # fmt: skip
        thread = self._thread
        requests = [LocalEmbedding(prepared, lambda request: thread.send(_Cancel(request))) for prepared in wanted]
        thread.send(_Add(requests))
        return requests

    def stats(self) -> EngineStats:
        """Counters of the scheduler and the block pool, between two steps."""
        ask = _Ask(Future())
        self._thread.send(ask)
        return ask.answer.result()

    def close(self) -> None:
        """End what runs with Cancelled, free the engine, and wait until that is done. Idempotent."""
        self._finalizer()

    def _prepare(self, prompt: Prompt, params: SamplingParams, choice: int) -> LocalRequest:
        form = PromptInput(text=prompt) if isinstance(prompt, str) else PromptInput(messages=prompt)
        prepared = build_sequence(
            self.tokenizer,
            self.limits,
            params,
            os.urandom(16),
            form,
            seq_id=next(self._seq_ids),
            choice=choice,
        )
        return LocalRequest(prepared, self._thread)


class _EngineThread(threading.Thread):
    """Owns the core. Others `send` commands."""

    def __init__(self, config: EngineConfig, report: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(name="mii_zmq-engine", daemon=True)
        self._inbox: EngineInbox[_Add | _Cancel | _Ask | None] = EngineInbox()
        self._ending = threading.Lock()
        self._ended_by: MiiError | None = None
        """Set under the lock once nobody reads the inbox any more."""
        self.loaded: Future[_Loaded] = Future()
        self._config = config
        self._report = report
        self._requests: dict[int, Local] = {}

    def send(self, command: _Add | _Cancel | _Ask) -> None:
        """Hand over a command; after the end of the engine its requests fail with the reason of that."""
        with self._ending:
            if self._ended_by is None:
                self._inbox.put(command)
                return
        _refuse(command, self._ended_by)

    def end(self) -> None:
        self._inbox.put(None)
        if threading.current_thread() is not self and self.is_alive():
            self.join(JOIN_TIMEOUT_S)

    def run(self) -> None:
        try:
            core, tokenizer = self._load()
        except Exception as error:  # noqa: BLE001 - the thread that waits for the engine raises it
            self._set_loaded(error)
            return
        self._set_loaded(_Loaded(tokenizer, core.limits))
        reason: MiiError = Cancelled("the pipeline was destroyed")
        try:
            while self._turn(core):
                pass
        except Exception as error:
            log.exception("the engine failed")
            reason = InternalError(f"the engine failed: {type(error).__name__}: {error}; make a new pipeline")
        self._refuse_all(reason)
        self._requests.clear()
        core.close()

    def on_rank_failure(self, error: MiiError) -> None:
        """A rank of the engine is lost; called by another thread, since this one may be waiting for that rank."""
        reason = InternalError(f"{error.message}; make a new pipeline")
        self._set_loaded(error)
        self._refuse_all(reason)
        self._inbox.put(None)

    def _refuse_all(self, reason: MiiError) -> None:
        """End what runs and what comes, with the first reason that there was."""
        with self._ending:
            reason = self._ended_by = self._ended_by or reason
        for request in list(self._requests.values()):
            request.fail(reason)
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._inbox.get_nowait()
                if command is not None:
                    _refuse(command, reason)

    def _set_loaded(self, loaded: _Loaded | Exception) -> None:
        """The first to know says how loading went."""
        with self._ending:
            if self.loaded.done():
                return
            if isinstance(loaded, Exception):
                self.loaded.set_exception(loaded)
            else:
                self.loaded.set_result(loaded)

    def _load(self) -> tuple[EngineCore, TextTokenizer]:
        path = self._config.model

        def on_message(message: FromEngine) -> None:
            nonlocal path
            if isinstance(message, Progress):
                self._report({"progress": message.text, "fraction": message.fraction})
            elif isinstance(message, ModelResolved):
                path = message.path

        core, _ = load_engine(self._config, on_message, on_failure=self.on_rank_failure)
        try:
            tokenizer = load_tokenizer(self._config.tokenizer or path)
            return core, tokenizer
        except BaseException:
            core.close()
            raise

    def _turn(self, core: EngineCore) -> bool:
        """Take the commands that are there, waiting for one if there is nothing to do; then run a step."""
        if not core.has_work:
            is_idle = not core.awaits_masks and not core.poll_set()
            self._inbox.wait(None if is_idle else core.max_wait_s(WATCH_S), core.poll_set())
            core.take_masks()
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                break
            if command is None:
                return False
            self._obey(core, command)
        for output in core.step() if core.has_work else ():
            self._deliver(core, output)
        return True

    def _obey(self, core: EngineCore, command: _Add | _Cancel | _Ask) -> None:
        if isinstance(command, _Ask):
            command.answer.set_result(core.stats())
        elif isinstance(command, _Cancel):
            if self._requests.pop(command.request.sequence.seq_id, None) is not None:
                core.cancel([command.request.sequence.seq_id])
        else:
            for request in command.requests:
                try:
                    core.add(request.sequence)
                except MiiError as error:
                    request.fail(error)
                else:
                    self._requests[request.sequence.seq_id] = request

    def _deliver(self, core: EngineCore, output: SequenceOutput) -> None:
        request = self._requests.get(output.seq_id)
        if request is None:
            return
        if isinstance(request, LocalEmbedding) and output.pooled is not None:
            request.put(output.pooled)
        elif isinstance(request, LocalRequest) and output.finish_reason in (None, "stop", "length"):
            try:
                reason = request.take(output)
            except MiiError as error:
                request.fail(error)
            else:
                if reason is None:
                    return
            if output.finish_reason is None:
                # A stop string or an error ended it, of which the engine knows nothing.
                core.cancel([output.seq_id])
        else:
            request.fail(_failure(output))
        del self._requests[output.seq_id]


def _refuse(command: _Add | _Cancel | _Ask, reason: MiiError) -> None:
    if isinstance(command, _Add):
        for request in command.requests:
            request.fail(reason)
    elif isinstance(command, _Ask):
        command.answer.set_exception(reason)


def _failure(output: SequenceOutput) -> MiiError:
    if output.finish_reason == "deadline":
        return DeadlineExceeded("the request's deadline passed before it finished")
    if output.finish_reason == "cancelled":
        return Cancelled("the request was cancelled")
    return output.error or InternalError(f"the engine ended the sequence with {output.finish_reason!r}")
