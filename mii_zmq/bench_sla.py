# SPDX-License-Identifier: Apache-2.0
"""The service level that DeepSpeed-MII was published with, and the effective throughput under it. Pure.

A request meets it if its first token comes within prompt tokens / 512 seconds and if the exponential moving average
(span 16) of the gaps between its chunks stays below 1 / rate from the first gap to the last; the rates are 2, 4 and 6
tokens per second. Effective throughput is the rate at which such requests are completed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mii_zmq.bench_metrics import RequestRecord, per_second

PROMPT_TOKENS_PER_S = 512
EMA_SPAN = 16


def moving_averages(values: Iterable[float], span: int = EMA_SPAN) -> list[float]:
    """Exponential moving average after each value, weights normalised (what pandas' `ewm(span=span).mean()` gives)."""
    keep = 1 - 2 / (span + 1)
    weighted = weights = 0.0
    averages = []
    for value in values:
        weighted = weighted * keep + value
        weights = weights * keep + 1
        averages.append(weighted / weights)
    return averages


def meets_sla(record: RequestRecord, tokens_per_s: float) -> bool:
    """Whether the request meets both halves; a failed one does not, one of a single chunk needs the first only."""
    if record.failure is not None or record.ttft_s > record.prompt_tokens / PROMPT_TOKENS_PER_S:
        return False
    return all(average < 1 / tokens_per_s for average in moving_averages(record.itls_s))


def sla_share(records: Sequence[RequestRecord], tokens_per_s: float) -> float:
    """Of all requests, failed ones included."""
    return sum(meets_sla(record, tokens_per_s) for record in records) / len(records) if records else 0.0


def effective_throughput(records: Sequence[RequestRecord], duration_s: float, tokens_per_s: float) -> float:
    """Requests per second that meet the service level."""
    return per_second(sum(meets_sla(record, tokens_per_s) for record in records), duration_s)
