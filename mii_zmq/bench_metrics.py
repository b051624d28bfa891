# SPDX-License-Identifier: Apache-2.0
"""What a serving benchmark measures, by vLLM's definitions. Pure: records of requests in, figures out.

TTFT is the time from sending a request to its first chunk with text. TPOT is the rest of its time divided by its output
tokens but the first, one value per request. ITL is every gap between two chunks with text, pooled over all requests.
E2EL is the time from sending to the last token. Only completed requests have these; failed ones are counted by kind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mii_zmq.errors import ConfigError

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request is no result. `kind` is counted, `message` is one example of it."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it. All times are seconds of one monotonic clock."""

    prompt_tokens: int
    output_tokens: int
    sent_at: float
    ended_at: float
    """When its last token came, or when it failed."""
    chunk_times: tuple[float, ...] = ()
    """Arrivals of the chunks with text."""
    queued_s: float = 0.0
    """How long it waited in the client, for its turn under the limit on concurrency."""
    has_usage: bool = True
    """Whether the server said the number of tokens; else there is one output token per chunk."""
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float:
        """A completed request without any text (of special tokens, say) has its first token when it ends."""
        return (self.chunk_times[0] if self.chunk_times else self.ended_at) - self.sent_at

    @property
    def e2el_s(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """None for an output of one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        return [after - before for before, after in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one metric, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Throughputs are per second of `duration_s`, which ends with the last request."""

    duration_s: float
    num_completed: int
    failures: dict[str, int]
    """Number of failed requests by kind."""
    num_without_usage: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    """Requests per second that meet all objectives; None without objectives."""
    max_output_tokens_per_s: int
    """The most chunks with text that came within one second of the run."""
    max_concurrent_requests: int
    latencies: dict[str, Distribution | None]
    """By name, 'ttft', 'tpot', 'itl', 'e2el' and 'client_queue'; None where no request has such a value."""

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())


def summarize(
    records: Sequence[RequestRecord],
    duration_s: float,
    percentiles: Iterable[float] = (99.0,),
    objectives: Mapping[str, float] | None = None,
) -> Summary:
    """The figures of one run; `objectives` as from `parse_goodput`, or nothing."""
    completed = [record for record in records if record.failure is None]
    values = {
        "ttft": [record.ttft_s for record in completed],
        "tpot": [tpot for record in completed if (tpot := record.tpot_s) is not None],
        "itl": [itl for record in completed for itl in record.itls_s],
        "e2el": [record.e2el_s for record in completed],
        "client_queue": [record.queued_s for record in completed],
    }
    wanted = tuple(percentiles)
    num_input, num_output = (
        sum(record.prompt_tokens for record in completed),
        sum(record.output_tokens for record in completed),
    )
    return Summary(
        duration_s=duration_s,
        num_completed=len(completed),
        failures=dict(Counter(record.failure.kind for record in records if record.failure is not None)),
        num_without_usage=sum(not record.has_usage for record in completed),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=per_second(len(completed), duration_s),
        output_throughput=per_second(num_output, duration_s),
        total_token_throughput=per_second(num_input + num_output, duration_s),
        request_goodput=(
            per_second(sum(meets_objectives(record, objectives) for record in completed), duration_s)
            if objectives
            else None
        ),
        max_output_tokens_per_s=max_tokens_per_s(completed),
        max_concurrent_requests=max_concurrency(completed),
        latencies={name: distribution(seconds, wanted) for name, seconds in values.items()},
    )


def distribution(seconds: Sequence[float], percentiles: Iterable[float]) -> Distribution | None:
    """In milliseconds; None of nothing. The deviation is that of the values themselves, not of a sample."""
    if not seconds:
        return None
    ordered = sorted(value * 1000 for value in seconds)
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(
        mean=mean,
        median=percentile(ordered, 50.0),
        std=math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)),
        percentiles={wanted: percentile(ordered, wanted) for wanted in percentiles},
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, linear between neighbours as numpy's default."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # Never beyond the two by rounding.
    return min(max(low + (high - low) * (position - below), low), high)


def per_second(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def parse_goodput(texts: Iterable[str]) -> dict[str, float]:
    """Objectives such as 'ttft:500', in milliseconds, by the metric's name.

    Raises:
        ConfigError: an unknown metric, or a value that is no positive number.
    """
    objectives: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in GOODPUT_METRICS:
            raise ConfigError(f"--goodput {text!r} names no metric; use {', '.join(GOODPUT_METRICS)}, as in ttft:500")
        try:
            objectives[name] = float(value)
        except ValueError:
            objectives[name] = math.nan
        if not objectives[name] > 0:
            raise ConfigError(f"--goodput {text!r} needs a number of milliseconds above 0, as in ttft:500")
    return objectives


def meets_objectives(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether a completed request meets all of them. An output of one token has a TPOT of 0."""
    found = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(found[name] * 1000 <= limit_ms for name, limit_ms in objectives.items())


def max_concurrency(records: Iterable[RequestRecord]) -> int:
    """The most requests that were under way at one moment; one that ends when another is sent makes room for it."""
    changes = [change for record in records for change in ((record.sent_at, 1), (record.ended_at, -1))]
    most = current = 0
    for _, change in sorted(changes):
        current += change
        most = max(most, current)
    return most


def max_tokens_per_s(records: Sequence[RequestRecord]) -> int:
    """Chunks with text in the fullest second, seconds counted from the first request that was sent."""
    if not records:
        return 0
    start = min(record.sent_at for record in records)
    return max(Counter(int(at - start) for record in records for at in record.chunk_times).values(), default=0)
