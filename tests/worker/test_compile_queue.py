# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mii_zmq.worker.compile_queue import CompileQueue


def test_tenants_take_turns_and_each_keeps_its_order():
    queue: CompileQueue[str] = CompileQueue()
    for key in ("a1", "a2", "a3"):
        queue.add("a", key)
    queue.add("b", "b1")
    assert queue.pop() == "a1"
    queue.add("c", "c1")
    queue.add("b", "b2")
    assert [queue.pop() for _ in range(5)] == ["b1", "a2", "c1", "b2", "a3"]
    assert not queue
    with pytest.raises(KeyError):
        queue.pop()
