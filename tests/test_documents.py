# SPDX-License-Identifier: Apache-2.0
"""Every command in the documents: run as it stands, or marked as in need of a GPU, Docker, systemd or Kubernetes."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mii_zmq.cli import _parser
from mii_zmq.config import EngineConfig, LaunchConfig
from mii_zmq.config_reference import read_settings
from tests.documents import PAGES, ROOT, Block, Reader, blocks, own_ports, without_blocks

pytestmark = [pytest.mark.timeout(600)]

COMMANDS = ("bash", "python", "javascript")
OTHERS = ("toml", "json", "hex", "text")
MARKS = ("gpu", "docker", "systemd", "kubernetes")
EXTRAS = {"fuzz": "schemathesis"}
"""Marks of blocks that are run where an extra of ours is installed, and the module that tells."""
NAME = "demo-mii-deployment"
ENGINE = "fake:alphabet=letters"
"""Stands for the demo model where its weights do not matter."""
BLOCKS = list(blocks())
RUN_HERE = [
    block
    for block in BLOCKS
    if block.language in COMMANDS and not set(block.needs) & set(MARKS) and block.runner is None
]
FAST = (("endpoints.md", "bash"), ("PROTOCOL.md", "python"))
"""What is run in the fast tier: requests to a deployment that is there already."""
WITH_DEMO = [block for block in RUN_HERE if re.search(r'"demo"|serve demo\b', block.text)]
_SYNOPSIS = re.compile(r"(?:^    |`)((?:python -m mii_zmq|scripts/|python scripts/)[^`\n]*)", re.M)


def in_tiers(chosen: list[Block]) -> list[object]:
    tier = {True: (), False: pytest.mark.long}
    return [pytest.param(block, id=str(block), marks=tier[(block.page, block.language) in FAST]) for block in chosen]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents")


@pytest.fixture(scope="module")
def site(base: Path) -> Iterator[tuple[str, str, str]]:
    """A deployment that is there already: its address, its ZeroMQ endpoint, its run directory."""
    run_directory = base / "run"
    reader = Reader(base / "site", own_ports, {"MII_ZMQ_RUN_DIR": str(run_directory)})
    try:
        text = own_ports(f"python -m mii_zmq serve {ENGINE} --deployment-name {NAME}")
        printed = reader.start(text)
        url = re.findall(r"^  HTTP    (http://\S+)", printed, re.M)[0].rstrip("/")
        yield url, re.findall(r"^  ZeroMQ  (tcp://\S+)", printed, re.M)[0], str(run_directory)
    finally:
        reader.close()


@pytest.fixture
def checkpoints(tiny_model: Path, tmp_path: Path) -> Path:
    """A directory with pickled weights, and a stand-in for the script that DeepSpeed leaves in it."""
    import torch
    from safetensors.torch import load_file

    directory = tmp_path / "DIR"
    shutil.copytree(tiny_model, directory)
    weights = directory / "model.safetensors"
    torch.save(load_file(weights), directory / "pytorch_model.bin")
    weights.rename(tmp_path / "converted.safetensors")
    (directory / "zero_to_fp32.py").write_text(
        "import os, shutil, sys\n"
        "source, out, option = sys.argv[1:]\n"
        "assert option == '--safe_serialization' and os.path.isdir(source)\n"
        "os.makedirs(out)\n"
        f"shutil.copy({str(tmp_path / 'converted.safetensors')!r}, os.path.join(out, 'model.safetensors'))\n"
    )
    return directory


def test_every_block_is_run_or_says_what_it_needs() -> None:
    for block in BLOCKS:
        assert block.language in (*COMMANDS, *OTHERS), f"{block} is {block.language or 'in no language'}"
        assert set(block.needs) <= {*MARKS, *EXTRAS}, f"{block} needs {block.needs}"
        if block.runner is not None:
            assert block.page in (ROOT / block.runner).read_text(), f"{block.runner} does not read {block.page}"
    assert {block.page for block in RUN_HERE} >= {"README.md", "PROTOCOL.md", "endpoints.md", "benchmarking.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_running_text_name_what_exists(page: Path) -> None:
    """Synopses and commands in sentences: the script is there, the subcommand and its options are known."""
    (subparsers,) = [action.choices for action in _parser()._actions if isinstance(action.choices, dict)]
    for command in _SYNOPSIS.findall(without_blocks(page)):
        words = re.sub(r"[\[\]]", " ", command.split("    ")[0]).split()
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        if words[:3] == ["python", "-m", "mii_zmq"]:
            if len(words) > 3:
                assert words[3] in subparsers, command
                assert set(options) <= set(subparsers[words[3]]._option_string_actions), command
        elif not words[2:] or not words[2].startswith("mii_zmq."):
            script = ROOT / next(word for word in words if word.startswith("scripts/"))
            assert script.exists() or (ROOT / "tests" / words[0].partition("::")[0]).exists(), command
            assert all(option in script.read_text() for option in options), command


def test_settings_files_can_be_read(tmp_path: Path) -> None:
    found = [block for block in BLOCKS if block.language == "toml"]
    assert found
    for block in found:
        path = tmp_path / "serve.toml"
        path.write_text(block.text)
        settings = read_settings(path, LaunchConfig, EngineConfig)
        for cls in (LaunchConfig, EngineConfig):
            cls(**{name: value for name, value in settings.items() if name in cls.__dataclass_fields__})


@pytest.mark.slow
@pytest.mark.parametrize("block", in_tiers(RUN_HERE))
def test_blocks(block: Block, site: tuple[str, str, str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url, endpoint, run_directory = site
    for mark in block.needs:
        pytest.importorskip(EXTRAS[mark])
    if block.page == "loading.md":
        request.getfixturevalue("checkpoints")
    own_site = re.search(r"(mii_zmq |mii\.)serve\b|scripts/|mii_zmq\.(broker|gateway)", block.text) is not None
    environment = {} if own_site else {"MII_ZMQ_RUN_DIR": run_directory, "MODEL": NAME}

    def substitute(text: str) -> str:
        text = re.sub(r'"demo"', f'"{ENGINE}"', text)
        text = re.sub(r"serve demo\b", f"serve {ENGINE} --deployment-name {NAME}", text)
        text = re.sub(r"--model DIR\b", f"--model {ENGINE}", text)
        text = text.replace("enable_restful_api=True", "enable_restful_api=True, restful_api_port=0")
        text = re.sub(r"^(scripts/test( full)?)( .*)?$", r"\1 tests/test_errors.py\3", text, flags=re.M)
        text = text.replace("fuzz_doors.py --minutes 5", "fuzz_doors.py --minutes 0.2")
        text = text.replace("--run-time 20s", "--run-time 3s")
        if "TOKENIZER" in text:
            text = text.replace("TOKENIZER", str(request.getfixturevalue("tiny_model")))
        text = re.sub(r"\b(DIR|OUT)\b", rf"{tmp_path}/\1", text)
        if own_site:
            return own_ports(text)
        text = text.replace("http://localhost:28080", url).replace("http://HOST:PORT", url)
        text = text.replace("localhost:28080", url).replace("tcp://127.0.0.1:50050", endpoint)
        return re.sub(r"\b(MODEL|NAME|my-model)\b", NAME, text)

    reader = Reader(tmp_path / "reader", substitute, environment)
    try:
        assert reader.run(block) or own_site
    finally:
        reader.close()


@pytest.mark.long
@pytest.mark.parametrize("block", WITH_DEMO, ids=str)
def test_blocks_that_name_the_demo_model(block: Block, tmp_path: Path) -> None:
    """With its weights."""

    def substitute(text: str) -> str:
        return own_ports(text.replace("enable_restful_api=True", "enable_restful_api=True, restful_api_port=0"))

    reader = Reader(tmp_path / "reader", substitute)
    try:
        reader.run(block)
    finally:
        reader.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "curl -s localhost:28080/v1/nothing",
        "python -c 'raise SystemExit(3)'",
        "false && true",
        "python -m mii_zmq serve fake:bogus=1 --port 0",
    ],
)
def test_what_does_not_work_is_noticed(text: str, site: tuple[str, str, str], tmp_path: Path) -> None:
    reader = Reader(tmp_path / "reader", lambda found: found.replace("localhost:28080", site[0]))
    block = Block("x.md", 1, "bash", (), text, None)
    with pytest.raises(AssertionError), contextlib.closing(reader):
        reader.run(block)
