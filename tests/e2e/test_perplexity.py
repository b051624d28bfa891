# SPDX-License-Identifier: Apache-2.0
"""Perplexity of the demo model on a long text, from the engine's logits in chunked prompts, against transformers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mii_zmq.config import EngineConfig
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.loading import load_executor
from mii_zmq.worker.models.demo_model import ensure_demo_model
from mii_zmq.worker.plan import SequenceRequest

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

NUM_TOKENS = 4000
ROOT = Path(__file__).parents[2]


def test_perplexity_equals_that_of_transformers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = ensure_demo_model()
    text = (ROOT / "LICENSE").read_text(encoding="utf-8") + (ROOT / "PROTOCOL.md").read_text(encoding="utf-8")
    token_ids = AutoTokenizer.from_pretrained(directory)(text)["input_ids"][:NUM_TOKENS]
    assert len(token_ids) == NUM_TOKENS

    core = EngineCore(load_executor(EngineConfig(model=str(directory), device="cpu")), model="demo", prefix_cache=True)
    assert core.limits.token_budget < NUM_TOKENS
    core.add(SequenceRequest(seq_id=1, prompt_token_ids=token_ids, max_new_tokens=1, score_prompt=True))
    outputs = []
    while core.has_work:
        outputs += core.step()
    core.close()
    assert outputs[0].prompt_scores is not None
    scores = [score.logprob for score in outputs[0].prompt_scores]
    assert len(scores) == NUM_TOKENS - 1

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
    expected = -torch.nn.functional.cross_entropy(logits, torch.tensor(token_ids[1:]), reduction="none")
    ours, theirs = math.exp(-sum(scores) / len(scores)), math.exp(-float(expected.double().mean()))
    print(f"perplexity over {NUM_TOKENS} tokens: {ours:.6f}, transformers {theirs:.6f}")
    assert ours == pytest.approx(theirs, rel=1e-3)
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=1e-3, atol=2e-3)
