# SPDX-License-Identifier: Apache-2.0
"""The page's pure modules are tested in JavaScript, by node's own runner, from page_modules.test.mjs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mii_zmq.gateway.page import page_files

CASES = Path(__file__).with_name("page_modules.test.mjs")


@pytest.mark.slow
def test_pure_modules(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    version = subprocess.check_output([node, "--version"], text=True, timeout=60)
    if tuple(map(int, version.removeprefix("v").split(".")[:2])) < (20, 6):
        pytest.skip(f"needs node 20.6 or newer, this is {version.strip()}")
    shutil.copy(CASES, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "page").mkdir()
    for name, file in page_files().items():
        (tmp_path / "page" / name).write_bytes(file.body)
    done = subprocess.run(
        [node, "--test", CASES.name], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
