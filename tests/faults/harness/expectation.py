# SPDX-License-Identifier: Apache-2.0
"""What the fake engine must answer to a request, computed with the same pure code that the product uses, but without
any process: tokens, text and finish reason of a run that nothing disturbs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mii_zmq.sampling_params import SamplingParams
from mii_zmq.tokenizer import FakeTokenizer
from mii_zmq.worker.fake_model import EOS_TOKEN_ID, VOCAB_SIZE, FakeModel
from mii_zmq.worker.output_text import OutputProcessor
from mii_zmq.worker.plan import EngineLimits
from mii_zmq.worker.prompt_text import PromptInput
from mii_zmq.worker.text import build_sequence

LIMITS = EngineLimits(
    vocab_size=VOCAB_SIZE, max_model_len=8192, num_blocks=4096, block_size=64, max_sequences=256, token_budget=512,
    eos_token_ids=(EOS_TOKEN_ID,),
)  # fmt: skip
"""Those of `fake:` without options that change them."""
_TOKENIZER = FakeTokenizer()


@dataclass(frozen=True, slots=True)
class Expectation:
    """The one right answer to a request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def expect(prompt: str, model: FakeModel | None = None, **params: Any) -> Expectation:
    """The answer to `prompt` under the options of SamplingParams."""
    options = SamplingParams.from_mapping(params)
    prepared = build_sequence(_TOKENIZER, LIMITS, options, bytes(16), PromptInput(text=prompt))
    sequence = prepared.sequence
    drawn = (model or FakeModel()).generate(sequence)
    is_stopped = bool(drawn) and drawn[-1] in sequence.sampling.stop_token_ids and len(drawn) > options.min_new_tokens
    processor = OutputProcessor(_TOKENIZER, options, prompt_text=prompt)
    text, token_ids = "", list[int]()
    for index, token_id in enumerate(drawn):
        is_last = index == len(drawn) - 1
        piece, finish_reason, _ = processor.push([token_id], ("stop" if is_stopped else "length") if is_last else None)
        text += piece
        token_ids.append(token_id)
        if finish_reason is not None:
            return Expectation(tuple(token_ids), text, finish_reason)
    raise AssertionError("the model drew no token")
