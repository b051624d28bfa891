# SPDX-License-Identifier: Apache-2.0
"""The demo model's undisturbed answers, and the comparison of streams that were disturbed with them.

Two greedy runs of a float32 model may differ where its two best logits lie within rounding, since the batch decides
how sums are rounded. So a stream that is not the undisturbed one is forced through a reference model: each of its
tokens must be the best one there, or within the tolerance of it.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from mii_zmq.client import AsyncClient, BackgroundLoop, Completion
from mii_zmq.protocol import GenerateBody
from tests.faults.harness.history import History, Kind
from tests.faults.harness.load import Case

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a",
    "The three laws of robotics are",
    "1, 2, 3, 5, 8, 13,",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n",
    "The quick brown fox jumps over the lazy dog. The quick brown",
)
NUM_TOKENS = (8, 16, 32)


class DemoRuns:
    """Knows the model's answers once `record` has asked for them."""

    options = ("--kv-cache-gb=0.3", "--num-threads=1")

    def __init__(self) -> None:
        from mii_zmq.worker.models.demo_model import ensure_demo_model

        self.model = str(ensure_demo_model())
        self._answers: dict[str, Completion] = {}

    def record(self, endpoint: str, deployment: str) -> None:
        """One request after the other, so that nothing else is in the batch."""
        loop = BackgroundLoop("undisturbed")
        try:
            loop.run(self._record(endpoint, deployment))
        finally:
            loop.close()

    async def _record(self, endpoint: str, deployment: str) -> None:
        client = AsyncClient([endpoint])
        await client.connect(30)
        for prompt in PROMPTS:
            body = GenerateBody(prompt=prompt, params=_params(max(NUM_TOKENS)))
            self._answers[prompt] = await client.generate(deployment, body, stream=False).result()
        await client.close()

    def case(self, rng: random.Random, max_tokens: int) -> Case:
        """For Load: the answer is judged by `compare`, not token by token."""
        return Case(rng.choice(PROMPTS), _params(rng.choice(NUM_TOKENS)), None)

    def compare(self, history: History) -> list[str]:
        """What is wrong with streams that ended well."""
        from transformers import AutoModelForCausalLM

        from mii_zmq.tokenizer import load_tokenizer
        from tests.equal_output import EqualOutput

        tokenizer = load_tokenizer(self.model)
        equal = EqualOutput(AutoModelForCausalLM.from_pretrained(self.model, dtype="float32"))
        problems, num_other = [], 0
        for record in history.records():
            if not record.events or record.events[-1].kind is not Kind.COMPLETE:
                continue
            prompt, length = record.note
            answer = self._answers[prompt]
            text = "".join(event.facts["text"] for event in record.events if event.kind is Kind.DELTA)
            ids = [i for event in record.events if event.kind is Kind.DELTA for i in event.facts["token_ids"]]
            if record.events[-1].facts["num_tokens"] != length:
                problems.append(f"{record.key}: {record.events[-1].facts['num_tokens']} tokens instead of {length}")
            if ids == answer.token_ids[:length] or (not ids and answer.text.startswith(text)):
                equal.num_tokens += length
                continue
            num_other += 1
            # Doors that show no ids: the text's own tokens, which are nearly always the drawn ones.
            ids = ids or tokenizer.encode(text, add_special_tokens=False)
            try:
                equal.compare(tokenizer.encode(prompt), ids)
            except AssertionError as error:
                problems.append(f"{record.key}: {error}")
        try:
            print(f"{num_other} streams differ from the undisturbed run; {equal.check()}", file=sys.stderr)
        except AssertionError as error:
            problems.append(str(error))
        return problems


def _params(num_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": num_tokens, "do_sample": False, "ignore_eos": True}
