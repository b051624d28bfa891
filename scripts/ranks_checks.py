#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Everything that has to be checked and measured on two NVIDIA GPUs, in one or two goes of ten minutes.

    python scripts/ranks_checks.py [--minutes N] [--only NAME ...] [--out FOLDER]

As `gpu_checks`, which see: processes of their own with time limits, the most important first, and the same files. The
exchanges between the ranks and their thresholds; two ranks' numbers against one's; the 8B and 70B shapes; ranks killed
under load; two replicas against one; the exchanges' tests; the shapes again over NCCL alone. `--dry-run` tries it all
on a CPU, with tiny shapes and the test engine.
"""

from __future__ import annotations

import sys

from gpu_checks import PYTEST, Check, main, marked_tests


def _script(name: str, limit_s: float, file: str, *arguments: str) -> Check:
    command = (f"scripts/{file}.py", *arguments)
    return Check(name, command, limit_s, (*command, "--dry-run"))


def _engine(name: str, limit_s: float, *arguments: str) -> Check:
    return _script(name, limit_s, "ranks_engine", "--repeat", "2", *arguments)


_8B = ("--random-weights", "8B", "decode", "--batches", "1,64")
_70B = ("--random-weights", "70B", "decode", "prefill", "--batches", "1,64,128")
TESTS = marked_tests("multi_gpu")
CHECKS = (
    _script("collectives", 150, "ranks_collectives"),
    _script("verify", 150, "ranks_verify"),
    _engine("8b", 120, *_8B),
    _engine("70b", 260, *_70B),
    _script("kill", 240, "ranks_kill"),
    _engine("replicas", 150, "--random-weights", "8B", "replicas"),
    Check("tests", (*PYTEST, "-m", "multi_gpu", "-q", *TESTS), 200, (*PYTEST, "--collect-only", "-q", *TESTS)),
    _engine("8b_nccl", 120, *_8B, "--no-peer-memory"),
    _engine("70b_nccl", 260, *_70B, "--no-peer-memory"),
)


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
