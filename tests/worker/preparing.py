# SPDX-License-Identifier: Apache-2.0
"""Prepares sequences for the tests of text on its way to the engine and back."""

from __future__ import annotations

from typing import Any

import pytest

from mii_zmq.errors import MiiError
from mii_zmq.sampling_params import SamplingParams
from mii_zmq.tokenizer import FakeTokenizer
from mii_zmq.worker.plan import EngineLimits
from mii_zmq.worker.prompt_text import PromptInput
from mii_zmq.worker.text import PreparedSequence, build_sequence

FAKE = FakeTokenizer()
REQUEST_ID = bytes(range(16))
EOS = 256


def limits(**changes: Any) -> EngineLimits:
    facts: dict[str, Any] = {
        "vocab_size": 300, "max_model_len": 64, "num_blocks": 100, "block_size": 16, "max_sequences": 8,
        "token_budget": 32,
    }  # fmt: skip
    return EngineLimits(**{**facts, **changes})


def build(prompt: PromptInput | str = "hello", engine: EngineLimits | None = None, **options: Any) -> PreparedSequence:
    form = PromptInput(text=prompt) if isinstance(prompt, str) else prompt
    return build_sequence(FAKE, engine or limits(), SamplingParams.from_mapping(options), REQUEST_ID, form)


def refusal(prompt: PromptInput | str = "hello", engine: EngineLimits | None = None, **options: Any) -> MiiError:
    with pytest.raises(MiiError) as caught:
        build(prompt, engine, **options)
    return caught.value
