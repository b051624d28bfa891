# SPDX-License-Identifier: Apache-2.0
"""The step trace of a real engine process: plan n + 1 is made before result n is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError
from mii_zmq.worker.engine_process import load_engine
from mii_zmq.worker.plan import SequenceRequest
from mii_zmq.worker.step_trace import StepTrace


def test_next_step_is_planned_before_the_last_one_is_read(tmp_path: Path) -> None:
    trace = StepTrace(str(tmp_path / "trace"))
    core, _ = load_engine(EngineConfig(model="fake:"), lambda message: None, trace)
    core.add(SequenceRequest(seq_id=1, prompt_token_ids=[65], max_new_tokens=20))
    while core.has_work:
        core.step()
    core.close()
    trace.sent(20, 1, 0.5)
    trace.close()
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert lines[-1] == {"event": "sent", "step": 20, "rows": 1, "at": 0.5}
    order = [(line["event"], line["step"]) for line in lines]
    for step in range(1, 20):
        assert order.index(("submit", step + 1)) < order.index(("read", step))


def test_unwritable_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="step_trace"):
        StepTrace(str(tmp_path / "no" / "such"))
