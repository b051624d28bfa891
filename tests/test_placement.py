# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest

from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError
from mii_zmq.placement import count_gpus, place_groups, share_gpus


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("3", 1), ("0,1,5", 3), ("GPU-a, GPU-b", 2), ("0,-1,1", 1)]
)
def test_visible_gpus_are_counted_as_the_driver_does(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


@pytest.mark.parametrize(
    ("size", "first", "replicas", "num_gpus", "places"),
    [
        (1, 0, 3, 8, [0, 1, 2]),
        (1, 2, 3, 4, [2, 3, 0]),
        (1, 0, 3, 1, [0, 0, 0]),
        (2, 0, 4, 8, [0, 2, 4, 6]),
        (2, 2, 1, 4, [2]),
        (4, 0, 2, 0, [0, 0]),
    ],
)
def test_groups_get_gpus_of_their_own(size: int, first: int, replicas: int, num_gpus: int, places: list[int]) -> None:
    engine = EngineConfig(model="m", tensor_parallel=size, device_index=first)
    assert share_gpus(engine, replicas, num_gpus) == places


def test_ranks_never_share_a_gpu() -> None:
    engine = EngineConfig(model="m", tensor_parallel=2)
    with pytest.raises(ConfigError, match="2 groups of 2 ranks from GPU 0 on need 4 GPUs, but 3 are visible"):
        share_gpus(engine, 2, 3)
    assert share_gpus(EngineConfig(model="m", tensor_parallel=2, device="cpu"), 2, 3) == [0, 0]


def test_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    engine = EngineConfig(model="m", device="cpu", tensor_parallel=2)
    assert [group.num_threads for group in place_groups(engine, 3)] == [2, 2, 2]
    assert [group.num_threads for group in place_groups(engine, 1)] == [None]
    assert [group.num_threads for group in place_groups(engine, 100)][:2] == [1, 1]
    fixed = EngineConfig(model="m", device="cpu", num_threads=5)
    assert [group.num_threads for group in place_groups(fixed, 2)] == [5, 5]
