# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON objects of a checkpoint directory. Knows nothing of what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mii_zmq.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is no such file.

    Raises:
        CheckpointError: the file cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint; the text part of a multi-modal one is lifted to the top.

    Raises:
        CheckpointError: there is none, or it is malformed.
    """
    raw = read_json(directory / "config.json")
    if raw is None:
        raise CheckpointError(f"{directory} has no config.json; give the directory of a Hugging Face checkpoint")
    text = raw.pop("text_config", None)
    if not isinstance(text, dict):
        return raw
    # What names the whole checkpoint is said outside; what shapes the text model, inside.
    outer = ("architectures", "dtype", "eos_token_id", "model_type", "tie_word_embeddings", "torch_dtype")
    merged = {**raw, **{key: value for key, value in text.items() if value is not None}}
    return merged | {key: raw[key] for key in outer if raw.get(key) is not None}
