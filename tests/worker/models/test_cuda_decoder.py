# SPDX-License-Identifier: Apache-2.0
"""Every choice of an architecture on the GPU's decoder, in Triton's interpreter, against the CPU's decoder.

In processes of their own, because the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mii_zmq.errors import ModelUnsupported

pytest.importorskip("triton")

HERE = Path(__file__).parent
GROUPS = [("plain", "norms"), ("parallel", "ropes"), ("experts", "deterministic"), ("ranks",)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("groups", GROUPS)
def test_logits_are_those_of_the_cpu_decoder(groups: tuple[str, ...]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "cuda_decoder_cases.py"), *groups],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [word for group in groups for word in (group, "ok")]


def test_heads_too_large_for_the_kernels_are_refused() -> None:
    from mii_zmq.worker.models.cuda_attention import chunk_tiles
    from mii_zmq.worker.models.cuda_buffers import Card

    card = Card(num_processors=132, is_hopper=True)
    assert chunk_tiles(256, 16, card).keys == 16, "a tile of keys lies within one block"
    with pytest.raises(ModelUnsupported, match="512 elements"):
        chunk_tiles(512, 64, card)
