# SPDX-License-Identifier: Apache-2.0
"""lm-eval's `local-completions` backend against our gateway: a task's scores are those of its transformers backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mii_zmq.worker.models.demo_model import ensure_demo_model
from tests.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200), pytest.mark.filterwarnings("default")]

pytest.importorskip("accelerate", reason="lm-eval's transformers backend needs it")
evaluator = pytest.importorskip("lm_eval.evaluator")
tasks = pytest.importorskip("lm_eval.tasks")

QUESTIONS = [
    ("The capital of France is", ["Paris", "London", "Rome"]),
    ("The opposite of hot is", ["cold", "warm", "a very large dog"]),
    ("Two plus two makes", ["four", "five", "seven"]),
    ("Water freezes at zero degrees", ["Celsius", "Kelvin", "of the north star"]),
    ("A baby cat is called a", ["kitten", "puppy", "calf"]),
    ("Die Hauptstadt von Österreich heißt", ["Wien", "Zürich", "München"]),
    ("The sun rises in the", ["east", "west", "kitchen"]),
    ("def add(a, b):\n    return a", ["+ b", "- b", "🙂"]),
]


@pytest.fixture
def gateway() -> Iterator[str]:
    stack = Stack()
    try:
        stack.start_group("g", str(ensure_demo_model()), "--kv-cache-gb", "0.5", "--token-budget", "64")
        yield stack.start_gateway()
    finally:
        stack.close()


def local_task(directory: Path) -> Any:
    """A multiple-choice task out of local files; the right answer comes first."""
    lines = [json.dumps({"question": question, "answers": answers}) for question, answers in QUESTIONS]
    (directory / "questions.jsonl").write_text("\n".join(lines))
    return {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(directory / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "answers",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


def log_likelihoods(result: dict[str, Any]) -> list[tuple[float, bool]]:
    samples = sorted(result["samples"]["questions"], key=lambda sample: sample["doc_id"])
    return [(float(entry[0]), str(entry[1]) == "True") for sample in samples for entry in sample["filtered_resps"]]


def test_a_local_task_scores_as_on_transformers(gateway: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    checkpoint = str(ensure_demo_model())
    backends = {
        "local-completions": {
            "base_url": gateway + "/v1/completions", "model": "m", "tokenizer": checkpoint,
            "tokenizer_backend": "huggingface", "num_concurrent": 4, "max_retries": 1, "tokenized_requests": True,
        },
        "hf": {"pretrained": checkpoint, "dtype": "float32", "device": "cpu"},
    }  # fmt: skip
    found = {
        name: evaluator.simple_evaluate(
            model=name, model_args=arguments, tasks=[local_task(tmp_path)], batch_size=1, log_samples=True,
            bootstrap_iters=0, task_manager=tasks.TaskManager(include_defaults=False),
        )
        for name, arguments in backends.items()
    }  # fmt: skip
    ours, theirs = (log_likelihoods(found[name]) for name in backends)
    assert len(ours) == len(theirs) == sum(len(answers) for _, answers in QUESTIONS)
    for (logprob, is_greedy), (expected, was_greedy) in zip(ours, theirs, strict=True):
        assert logprob == pytest.approx(expected, abs=1e-3)
        assert is_greedy == was_greedy
    scores = [
        {key: found[name]["results"]["questions"][key] for key in ("acc,none", "acc_norm,none")} for name in backends
    ]
    assert scores[0] == scores[1]
    largest = max(abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True))
    print(f"lm-eval: {scores[0]}, largest difference of a log-likelihood {largest:.2e}")
