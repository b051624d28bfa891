# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities through gateway, broker and worker against transformers' own, in float32."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from mii_zmq.worker.models.demo_model import ensure_demo_model
from tests.stack import Stack, http, stream_events
from tests.tiny_tokenizers import byte_level

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

TOLERANCE = 1e-3


def tiny_checkpoint(directory: Path) -> Path:
    tokenizer = byte_level()
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_ids[0],
    )  # fmt: skip
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer._backend.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


class Served:
    """A checkpoint behind a gateway, and transformers' model of it."""

    def __init__(self, directory: Path, stack: Stack) -> None:
        self.stack = stack
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.vocab_size: int = self.model.config.vocab_size

    def prompt(self, length: int) -> list[int]:
        return random.Random(length).choices(range(300), k=length)

    def ask(self, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
        status, body = http(self.stack.url + path, {"model": "m", **fields})
        assert status == 200, body
        answer: dict[str, Any] = json.loads(body)
        return answer

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        """Log-probabilities [len - 1, V] of what may follow each token but the last one."""
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1)

    def check(self, prompt: list[int], found: dict[str, Any], num_top: int, first: int) -> list[int]:
        """Compare a completion's `logprobs`, whose tokens are named by id; `first`: index of its first token. Returns
        the ids."""
        named = [int(name.removeprefix("token_id:")) for name in found["tokens"]]
        token_ids = [*prompt[:first], *named]
        expected = self.expected(token_ids)
        for index, token_id in enumerate(token_ids[first:], start=first):
            logprob, shown = found["token_logprobs"][index - first], found["top_logprobs"][index - first]
            if not index:
                assert logprob is shown is None
                continue
            row = expected[index - 1]
            assert abs(logprob - row[token_id]) < TOLERANCE
            by_id = {int(name.removeprefix("token_id:")): value for name, value in shown.items()}
            assert token_id in by_id
            assert num_top <= len(by_id) <= num_top + 1
            assert all(abs(value - row[other]) < TOLERANCE for other, value in by_id.items())
            assert min(sorted(by_id.values())[-num_top:], default=0.0) > row.sort().values[-num_top - 1] - TOLERANCE
        return named


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.long)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    is_tiny = request.param == "tiny"
    directory = tiny_checkpoint(tmp_path_factory.mktemp("tiny")) if is_tiny else Path(ensure_demo_model())
    stack = Stack()
    try:
        # Long prompts are cut into chunks.
        stack.start_group("g", str(directory), "--token-budget", "32", "--num-blocks", "64", "--block-size", "16")
        stack.start_gateway()
        yield Served(directory, stack)
    finally:
        stack.close()


NAMED: dict[str, Any] = {"return_tokens_as_token_ids": True, "ignore_eos": True}


def test_prompt_and_output_tokens_equal_transformers(served: Served) -> None:
    for length, options in ((1, {"temperature": 0}), (70, {"temperature": 0}), (41, {"seed": 5, "top_p": 0.9, "n": 2})):
        prompt = served.prompt(length)
        answer = served.ask(prompt=prompt, max_tokens=12, logprobs=4, echo=True, prompt_logprobs=1, **NAMED, **options)
        for choice in answer["choices"]:
            ids = served.check(prompt, choice["logprobs"], 4, 0)
            assert ids[:length] == prompt
            assert len(ids) == length + 12
            assert choice["logprobs"]["text_offset"][0] == 0
            assert choice["prompt_logprobs"][0] is None
            expected = served.expected(prompt) if length > 1 else []
            for token_id, row, shown in zip(prompt[1:], expected, choice["prompt_logprobs"][1:], strict=True):
                assert abs(shown[str(token_id)]["logprob"] - row[token_id]) < TOLERANCE
                # Where many tokens are nearly as probable, rounding decides.
                lowest, highest = (1 + int((row > row[token_id] + slack).sum()) for slack in (TOLERANCE, -TOLERANCE))
                assert lowest <= shown[str(token_id)]["rank"] <= highest


def test_a_prompt_alone_is_scored(served: Served) -> None:
    """As evaluation harnesses ask: echo with no, or one, output token."""
    prompt = served.prompt(50)
    for max_tokens in (0, 1):
        answer = served.ask(prompt=prompt, max_tokens=max_tokens, temperature=0, logprobs=1, echo=True, **NAMED)
        assert served.check(prompt, answer["choices"][0]["logprobs"], 1, 0)[:50] == prompt
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 50 + max_tokens


def test_a_stream_has_the_same_entries_as_a_whole_answer(served: Served) -> None:
    prompt = served.prompt(20)
    asked = {"prompt": prompt, "max_tokens": 16, "logprobs": 2, "echo": True, "temperature": 1.0, "seed": 3, **NAMED}
    (whole,) = served.ask(**asked)["choices"]
    events = list(stream_events(served.stack.url, "/v1/completions", {"model": "m", **asked}))
    parts = [event["choices"][0] for event in events]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, values in whole["logprobs"].items():
        joined = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
        if name in ("tokens", "text_offset"):
            assert joined == values
        else:
            assert len(joined) == len(values)
    served.check(prompt, {name: [v for p in parts if p["logprobs"] for v in p["logprobs"][name]] for name in
                          ("tokens", "token_logprobs", "top_logprobs")}, 2, 0)  # fmt: skip


def test_chats_show_tokens_and_their_bytes(served: Served) -> None:
    asked = {
        "messages": [{"role": "user", "content": "The quick brown fox 你好"}], "max_tokens": 12, "temperature": 0,
        "logprobs": True, "top_logprobs": 3, "ignore_eos": True, "skip_special_tokens": False,
    }  # fmt: skip
    (choice,) = served.ask("/v1/chat/completions", **asked)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 12
    text = bytes(byte for entry in content for byte in entry["bytes"])
    assert text.decode("utf-8", "replace") == choice["message"]["content"]
    for entry in content:
        best = entry["top_logprobs"]
        assert len(best) == 3
        assert (best[0]["logprob"], best[0]["bytes"]) == (entry["logprob"], entry["bytes"])
        assert best == sorted(best, key=lambda other: -other["logprob"])
    events = stream_events(served.stack.url, "/v1/chat/completions", {"model": "m", **asked})
    logprobs = [event["choices"][0]["logprobs"] for event in events]
    streamed = [entry for found in logprobs if found for entry in found["content"]]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in content]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_official_package_reads_them(served: Served) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=served.stack.url + "/v1", api_key="unused", max_retries=0) as client:
        messages = [{"role": "user", "content": "The lazy dog"}]
        chat = client.chat.completions.create(
            model="m", messages=messages, max_tokens=4, logprobs=True, top_logprobs=2, logit_bias={"80": 100}
        )
        (choice,) = chat.choices
        assert [entry.top_logprobs[1].logprob <= entry.top_logprobs[0].logprob for entry in choice.logprobs.content]
        assert len({entry.token for entry in choice.logprobs.content}) == 1
        whole = client.completions.create(model="m", prompt="The lazy", max_tokens=3, logprobs=2, echo=True, seed=1)
        logprobs = whole.choices[0].logprobs
        assert len(logprobs.tokens) == whole.usage.total_tokens
        assert logprobs.token_logprobs[0] is None
        assert whole.choices[0].text.startswith("The lazy")


def test_tokens_behind_a_stop_string_have_no_entry(served: Served) -> None:
    prompt = served.prompt(9)
    asked = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 0, **NAMED, "ignore_eos": False}
    ids = served.check(prompt, served.ask(**asked)["choices"][0]["logprobs"], 0, 9)
    (choice,) = served.ask(**asked, stop=served.ask(**asked)["choices"][0]["text"][3:5])["choices"]
    cut = served.check(prompt, choice["logprobs"], 0, 9)
    assert choice["finish_reason"] == "stop"
    assert 0 < len(cut) < len(ids)
    assert cut == ids[: len(cut)]


def test_biases_and_allowed_tokens_decide_what_is_drawn(served: Served) -> None:
    """And the log-probabilities stay the model's own."""
    prompt = served.prompt(12)
    asked = {"prompt": prompt, "max_tokens": 8, "logprobs": 1, "seed": 1, **NAMED}
    biased = served.ask(**asked, logit_bias={"77": 100})["choices"][0]["logprobs"]
    assert served.check(prompt, biased, 1, 12) == [77] * 8
    allowed = served.ask(**asked, allowed_token_ids=[5, 80, 81], logit_bias={"5": -100})["choices"][0]["logprobs"]
    assert set(served.check(prompt, allowed, 1, 12)) <= {80, 81}


def test_miis_door_shows_them_where_they_are_asked_for(served: Served) -> None:
    asked = {"prompts": ["Hello there"], "max_new_tokens": 3, "do_sample": False, "ignore_eos": True}
    (plain,) = post_mii(served, asked)
    (entry,) = post_mii(served, {**asked, "logprobs": 2, "prompt_logprobs": 0})
    assert set(entry) - set(plain) == {"logprobs", "prompt_logprobs"}
    assert entry["generated_text"] == plain["generated_text"]
    assert [len(token["top_logprobs"]) for token in entry["logprobs"]] == [2] * 3
    assert len(entry["prompt_logprobs"]) == entry["prompt_length"]


def post_mii(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, answer = http(served.stack.url + "/mii/m", body)
    assert status == 200, answer
    entries: list[dict[str, Any]] = json.loads(answer)
    return entries
