# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mii_zmq.worker.plan import SamplingSpec

pytest.importorskip("triton")

HERE = Path(__file__).parent


def run_on_cpu(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    done = subprocess.run(
        [sys.executable, str(HERE / "cuda_engine_on_cpu.py"), *arguments],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_blocks", "preempts", "options"),
    [
        pytest.param(24, False, [], marks=pytest.mark.long),
        (4, True, []),
        pytest.param(4, True, ["deterministic"], marks=pytest.mark.long),
    ],
)
def test_tokens_are_those_of_the_cpu_engine(num_blocks: int, preempts: bool, options: list[str]) -> None:
    assert run_on_cpu(str(num_blocks), *options).startswith("0 preemptions") != preempts


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_requests_that_cannot_be_computed_end_alone_and_leave_nothing_behind() -> None:
    assert "failed steps" in run_on_cpu("24", "faults")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SamplingSpec(), True),
        (SamplingSpec(stop_token_ids=(2,)), True),
        (SamplingSpec(min_new_tokens=3), True),
        (SamplingSpec(min_new_tokens=3, stop_token_ids=(2,)), False),
        (SamplingSpec(temperature=0.5), False),
        (SamplingSpec(frequency_penalty=0.1), False),
        (SamplingSpec(bad_words=((3,),)), False),
        (SamplingSpec(logit_bias=((3, 1.0),)), False),
        (SamplingSpec(allowed_token_ids=(3,)), False),
        (SamplingSpec(is_masked=True), False),
        (SamplingSpec(num_logprobs=2), True),
    ],
)
def test_plain_rows_take_the_largest_logit(spec: SamplingSpec, expected: bool) -> None:
    from mii_zmq.worker.cuda_executor import is_plain

    assert is_plain(spec) is expected
