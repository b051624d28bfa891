# SPDX-License-Identifier: Apache-2.0
"""What is remembered of one HTTP request for its line in the log and its span. Filled on the way, read once at the end.

Numbers, names and reasons; no text of prompts or answers, and no header but the request's id and its trace context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from mii_zmq.trace_context import TraceContext

if TYPE_CHECKING:
    from mii_zmq.client import Generation


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Belongs to one request; times are monotonic."""

    request_id: str
    started: float
    parent: TraceContext | None = None
    """The caller's span."""
    trace: TraceContext | None = None
    """What the request's generations are part of: our span where the gateway traces, else the caller's."""
    model: str = ""
    stream: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling options of the first generation, as the engine names them."""
    num_choices: int = 1
    generations: Sequence[Generation] = ()
    """By prompt, then by choice."""
    first_token_s: float | None = None
    """Since `started`; of a stream."""
    error_code: str = ""
    is_gone: bool = False
    """The client left before its answer was complete."""

    @property
    def prompt_tokens(self) -> int | None:
        """Of all prompts, each counted once; None: not known of all of them."""
        finals = [generation.final for generation in self.generations[:: self.num_choices]]
        known = [final.prompt_length for final in finals if final is not None]
        return sum(known) if known and len(known) == len(finals) else None

    @property
    def cached_tokens(self) -> int | None:
        finals = [generation.final for generation in self.generations[:: self.num_choices]]
        known = [final.num_cached_tokens for final in finals if final is not None]
        return sum(known) if known and len(known) == len(finals) else None

    @property
    def output_tokens(self) -> int | None:
        """Of all choices, as far as they had come."""
        if not self.generations:
            return None
        return sum(
            generation.num_tokens if generation.final is None else generation.final.generated_length
            for generation in self.generations
        )

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices that ended well, in order."""
        finals = [generation.final for generation in self.generations]
        return [final.finish_reason for final in finals if final is not None]


RECORD = web.RequestKey("record", RequestRecord)
