# SPDX-License-Identifier: Apache-2.0
"""Session-wide tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.worker.models.checkpoints import make_checkpoint

Checkpoints = Callable[[str], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """name -> (directory, the transformers model saved there); made once each."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def get(name: str) -> tuple[Path, PreTrainedModel]:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            made[name] = (directory, make_checkpoint(name, directory))
        return made[name]

    return get
