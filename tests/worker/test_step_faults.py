# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from mii_zmq.errors import InternalError
from mii_zmq.worker.step_faults import FaultKind, NumericStreak, classify


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


def caused_by(cause: Exception) -> Exception:
    error = ValueError("the step failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), FaultKind.MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), FaultKind.MEMORY),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            FaultKind.MEMORY,
        ),
        (RuntimeError("CUDA error: out of memory"), FaultKind.MEMORY),
        (CUDARuntimeError("cudaErrorMemoryAllocation: out of memory"), FaultKind.MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), FaultKind.MEMORY),
        (caused_by(MemoryError()), FaultKind.MEMORY),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), FaultKind.FATAL),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FaultKind.FATAL),
        (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), FaultKind.FATAL),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), FaultKind.FATAL),
        (CUDARuntimeError("cudaErrorECCUncorrectable"), FaultKind.FATAL),
        (caused_by(torch.AcceleratorError("anything")), FaultKind.FATAL),
        (InternalError("step 5 follows step 1; a plan was lost or sent twice"), FaultKind.FATAL),
        (InternalError("step 3 failed on rank 0: OutOfMemoryError: CUDA out of memory"), FaultKind.FATAL),
        (RuntimeError("index 5 is out of bounds"), FaultKind.STEP),
        (KeyError("slot"), FaultKind.STEP),
        (ValueError(), FaultKind.STEP),
    ],
)
def test_kinds(error: Exception, kind: FaultKind):
    assert classify(error) is kind


def test_a_streak_ends_with_a_success_and_with_time():
    streak = NumericStreak(limit=3, window_s=10.0)
    for now in (0.0, 4.0):
        streak.failed(now)
    assert not streak.is_unhealthy
    streak.succeeded()
    for now in (5.0, 6.0, 16.0):
        streak.failed(now)
    assert not streak.is_unhealthy, "the three lie too far apart"
    streak.failed(16.0)
    assert streak.is_unhealthy
