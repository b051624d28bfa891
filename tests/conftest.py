# SPDX-License-Identifier: Apache-2.0
"""Every test gets a private run directory and must leave no child process and no socket file behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.timeouts"]

# How long an example takes says something about the machine, not about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

LONG_TEST_WEIGHT = 5
"""Of a test with a time limit of its own, which is a longer one than usual, in slow tests."""
LEAK_GRACE_S = 20.0
"""A process that was killed in a test may need this long to disappear."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):  # xdist's: files with many tests first, however fast these are
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest first, so that processes that share the tests by files end together; the fault suite in one
    piece, since it shares a fleet."""

    def piece(item: pytest.Item) -> Path:
        return item.path.parent if item.path.parent.name == "faults" else item.path

    weights: dict[Path, int] = {}
    for item in items:
        weight = LONG_TEST_WEIGHT if item.get_closest_marker("timeout") else 1
        weights[piece(item)] = weights.get(piece(item), 0) + (weight if item.get_closest_marker("slow") else 0)
    items.sort(key=lambda item: (-weights[piece(item)], str(piece(item))))


@pytest.fixture(autouse=True)
def run_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh MII_ZMQ_RUN_DIR with a path that is short enough for socket names."""
    directory = Path(tempfile.mkdtemp(prefix="mz-", dir="/tmp"))
    monkeypatch.setenv("MII_ZMQ_RUN_DIR", str(directory))
    # The command line sets it for its children; the next test must not inherit that.
    for name in ("MII_ZMQ_LOG_LEVEL", "MII_ZMQ_LOG_FORMAT"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    children = _children()
    yield directory
    leaked = _wait_until_empty(lambda: _children() - children)
    sockets = [str(path) for path in directory.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
    shutil.rmtree(directory, ignore_errors=True)
    assert not leaked, f"processes left behind: {[_command(pid) for pid in leaked]}"
    assert not sockets, f"socket files left behind: {sockets}"


@pytest.fixture
def deployments(run_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """For tests that start deployments: also a private cache, and no process may be left anywhere, nor any record."""
    monkeypatch.setenv("MII_ZMQ_CACHE_DIR", str(tmp_path / "cache"))
    yield run_directory
    leaked = _wait_until_empty(lambda: _processes_with(str(run_directory)))
    assert not leaked, f"processes left behind: {[_command(pid) for pid in leaked]}"
    assert not list(run_directory.iterdir())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama checkpoint with a byte-level tokenizer and a chat template, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests import tiny_tokenizers

    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    tokenizer = tiny_tokenizers.byte_level()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_ids[0],
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer._backend.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    settings = {**tiny_tokenizers.SETTINGS, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _children() -> set[int]:
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # the thread has just ended
            found.update(map(int, path.read_text().split()))
    return {pid for pid in found if not _is_gone(pid)}


def _processes_with(run_directory: str) -> set[int]:
    """Processes, whoever their parent is by now, that were started with this run directory or one below it."""
    wanted = f"MII_ZMQ_RUN_DIR={run_directory}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return {pid for pid in found if not _is_gone(pid)}


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _command(pid: int) -> str:
    try:
        return f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return str(pid)


def _wait_until_empty(find: Callable[[], set[int]]) -> set[int]:
    deadline = time.monotonic() + LEAK_GRACE_S
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
