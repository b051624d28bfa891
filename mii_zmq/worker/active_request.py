# SPDX-License-Identifier: Apache-2.0
"""One request inside the actor, from GENERATE to its terminal message: what of its output has been delivered.

Turns the engine's rows into `TokenDelta`s (streamed) or collects them for FINAL (not streamed). Ids whose text is not
certain yet are held and go out with the next text, at the latest with the finishing row; so are log-probabilities.
Knows no sockets, and of the engine only the rows it gives out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mii_zmq.errors import Cancelled, DeadlineExceeded, InternalError, MiiError, from_wire
from mii_zmq.protocol import FinalBody, TokenDelta
from mii_zmq.trace_context import TraceContext
from mii_zmq.worker.embedding import PreparedEmbedding, shape_vector
from mii_zmq.worker.engine_channel import OutputRow, ids_to_bytes
from mii_zmq.worker.logprob_records import RecordWriter
from mii_zmq.worker.output_text import OutputProcessor
from mii_zmq.worker.text import PreparedSequence
from mii_zmq.worker.text_tasks import TextAnswer


@dataclass(slots=True)
class RequestTimes:
    """When a request came how far; monotonic, 0: not yet."""

    arrived: float
    tokenize_start: float = 0.0
    tokenize_end: float = 0.0
    added: float = 0.0
    """To the engine."""
    engine_start: float = 0.0
    """By the engine: a step was planned for it."""
    first_row: float = 0.0
    """The engine's first output came."""
    num_preemptions: int = 0


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """State of a request: `prepared` makes it ready for output, `take` consumes the engine's rows."""

    request_id: bytes
    link: int
    """Which broker it came from."""
    client: int
    """The broker's number of the client connection."""
    stream: bool
    seq_id: int
    times: RequestTimes
    name: str = ""
    """In logs: its caller's name for it, or its id."""
    trace: tuple[TraceContext | None, TraceContext] | None = None
    """The sender's span and ours, if it is traced."""
    is_cancelled: bool = False
    """Nothing more is delivered; the engine's finishing row ends it."""
    next_seq: int = 0
    """Of the next row: a stream that comes from another group continues that one's numbers."""
    prompt_length: int = 0
    num_resumed_tokens: int = 0
    num_cached_tokens: int = 0
    _processor: OutputProcessor | None = None
    _records: RecordWriter | None = None
    """Of a request that asked for log-probabilities."""
    _has_told_length: bool = False
    """The client has a row that says how long its prompt is."""
    _embedding: PreparedEmbedding | None = None
    _vector: bytes | None = None
    _num_delivered: int = 0
    """Output tokens that the client has, resumed ones included."""
    _held_ids: list[int] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)

    def prepared(self, sequence: PreparedSequence | PreparedEmbedding | TextAnswer) -> str | None:
        """Take over the tokenized form; replays resumed tokens.

        Returns the finish reason when the resumed tokens already hold everything, so that only the end is missing; and
        where there is nothing to generate.
        """
        if isinstance(sequence, TextAnswer):
            self.prompt_length = len(sequence.token_ids)
            self._texts.append(sequence.text)
            self._held_ids.extend(sequence.token_ids)
            return "stop"
        if isinstance(sequence, PreparedEmbedding):
            self.prompt_length = sequence.prompt_length
            self._embedding = sequence
            return None
        resumed = sequence.sequence.resumed_token_ids
        self.prompt_length = sequence.prompt_length
        self.num_resumed_tokens = len(resumed)
        self._processor = sequence.output_processor()
        self._records = sequence.record_writer()
        reason = self._processor.replay(resumed)
        if self.stream:
            self._num_delivered = len(resumed)
        elif resumed:
            # The answer is one piece: it holds the resumed tokens and their text as well.
            ends_with_text = reason == "stop" and resumed[-1] not in sequence.sequence.sampling.stop_token_ids
            text, _, _ = sequence.output_processor().push(resumed, None if ends_with_text else reason)
            self._texts.append(text)
            self._held_ids.extend(resumed)
        return reason

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens, resumed ones included."""
        return 0 if self._processor is None else self._processor.num_tokens

    def take(self, row: OutputRow, finish_reason: str | None) -> tuple[TokenDelta | None, str | None]:
        """Consume a row that did not fail; returns what to send now, and the reason if the request has ended.

        Raises:
            InvalidRequest: it asked for more log-probabilities than a message can hold.
        """
        if self._embedding is not None:
            if row.pooled is not None:
                self._vector = shape_vector(row.pooled, self._embedding.dimensions, self._embedding.normalize)
            elif finish_reason is not None:
                raise InternalError("the engine ended an embedding without a vector")
            return None, finish_reason
        processor = self._processor
        assert processor is not None
        token_ids = row.token_ids
        text, reason, num_used = processor.push(token_ids, finish_reason)
        held = self._held_ids
        held += token_ids[:num_used]
        if self._records is not None:
            if row.prompt_scores is not None:
                self._records.add_prompt(row.prompt_scores)
            if row.logprobs is not None:
                self._records.add_output(token_ids[:num_used], row.logprobs[:num_used])
        if not self.stream:
            if text:
                self._texts.append(text)
            return None, reason
        if not text and reason is None:
            return None, None
        return self._delta(text, reason), reason

    def end_of_resumed(self, reason: str) -> TokenDelta | None:
        """The finishing row of a request whose resumed tokens already held everything."""
        return self._delta("", reason) if self.stream else None

    def final(self, reason: str) -> tuple[FinalBody, tuple[bytes, ...]]:
        """Body and raw frames of the FINAL message."""
        processor = self._processor
        body = FinalBody(
            finish_reason=reason,
            prompt_length=self.prompt_length,
            generated_length=0 if processor is None else processor.num_tokens,
            num_cached_tokens=self.num_cached_tokens,
            matched_stop=None if processor is None else processor.matched_stop,
            embedding=self._vector,
        )
        if self.stream:
            return body, ()
        body.text = "".join(self._texts)
        ids = ids_to_bytes(self._held_ids)
        return body, (ids,) if self._records is None else (ids, self._records.take())

    def failure(self, row: OutputRow) -> MiiError:
        """The error that ends this request after a row that is no ordinary end."""
        if row.error is not None:
            error = from_wire(row.error)
        elif row.finish_reason == "deadline":
            error = DeadlineExceeded("the request's deadline passed before it finished; allow more time")
        elif row.finish_reason == "cancelled":
            error = Cancelled("the request was cancelled")
        else:
            error = InternalError(f"the engine ended the sequence with {row.finish_reason!r} and gave no reason")
        return self.with_progress(error)

    def with_progress(self, error: MiiError) -> MiiError:
        """The error, saying how many output tokens the client has."""
        error.emitted_tokens = self._num_delivered
        return error

    def _delta(self, text: str, reason: str | None) -> TokenDelta:
        held = self._held_ids
        ids = held[0].to_bytes(4, "little") if len(held) == 1 else ids_to_bytes(held)
        logprobs = b"" if self._records is None else self._records.take()
        length = 0 if self._has_told_length else self.prompt_length
        self._has_told_length = True
        delta = TokenDelta(
            self.request_id, self.next_seq, self._num_delivered, ids, text.encode(), reason, logprobs, length
        )
        self.next_seq += 1
        self._num_delivered += len(held)
        held.clear()
        return delta
