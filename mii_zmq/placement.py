# SPDX-License-Identifier: Apache-2.0
"""Which cores and GPUs of this host each worker group of a deployment gets. Needs no GPU library."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError


def place_groups(engine: EngineConfig, replicas: int) -> list[EngineConfig]:
    """The settings of every group.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    num_threads = engine.num_threads
    if num_threads is None and replicas > 1:
        # Groups divide the cores instead of each taking all, and so do the ranks of a group.
        num_threads = max(1, len(os.sched_getaffinity(0)) // (replicas * engine.tensor_parallel))
    first_gpus = share_gpus(engine, replicas, count_gpus())
    return [replace(engine, num_threads=num_threads, device_index=index) for index in first_gpus]


def count_gpus() -> int:
    """The GPUs that an engine started here can use; 0 if there are none, or none that can be counted."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    names = [name.strip() for name in visible.split(",")]
    # As the driver does it: what follows an invalid one does not count.
    ends = [index for index, name in enumerate(names) if name in ("", "-1")]
    return ends[0] if ends else len(names)


def share_gpus(engine: EngineConfig, replicas: int, num_gpus: int) -> list[int]:
    """The first GPU of every group; each takes the next `tensor_parallel` ones.

    Groups of one rank share cards when there are too few, which a smaller `gpu_memory_fraction` makes possible.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    size, first = engine.tensor_parallel, engine.device_index
    if engine.device == "cpu" or num_gpus == 0:
        return [first] * replicas
    if size == 1:
        return [(first + number) % num_gpus for number in range(replicas)]
    if first + replicas * size > num_gpus:
        raise ConfigError(
            f"{replicas} groups of {size} ranks from GPU {first} on need {first + replicas * size} GPUs, but "
            f"{num_gpus} are visible; use fewer replicas or a smaller tensor_parallel"
        )
    return [first + number * size for number in range(replicas)]
