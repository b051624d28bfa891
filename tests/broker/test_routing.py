# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mii_zmq.broker.routing import choose_group, estimate_tokens, retry_after_ms


def test_no_groups() -> None:
    assert choose_group([], b"") is None


def test_estimates() -> None:
    assert estimate_tokens(500, 10, 100) == 400
    assert estimate_tokens(5, 10, 100) == 1
    assert estimate_tokens(0, 400, 0) == 228


@pytest.mark.parametrize(
    ("waiting", "rate", "expected"), [(100, 0, 1000), (100, 10, 1000), (1, 1000, 100), (2048, 1, 30_000)]
)
def test_retry_after(waiting: int, rate: float, expected: int) -> None:
    assert retry_after_ms(waiting, rate) == expected
