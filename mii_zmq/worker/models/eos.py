# SPDX-License-Identifier: Apache-2.0
"""Which token ids end a text, from all files of a checkpoint: chat tunes often name one in one file only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mii_zmq.worker.models.checkpoint_json import read_json


def eos_token_ids(directory: Path, raw: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Every id that generation_config.json, config.json (`raw`) or the tokenizer calls the end, each once.

    Raises:
        CheckpointError: one of the files is malformed.
    """
    generation = read_json(directory / "generation_config.json") or {}
    found: list[Any] = []
    for value in (generation.get("eos_token_id"), raw.get("eos_token_id"), _tokenizer_eos(directory)):
        found += value if isinstance(value, list) else [value]
    if generation.get("chat_format") == "chatml" and raw.get("model_type") == "qwen":
        # Qwen's first chat models keep the ends of their turns in code: <|im_start|> and <|im_end|>.
        end_of_text = generation.get("eos_token_id")
        found += [end_of_text + 1, end_of_text + 2] if isinstance(end_of_text, int) else []
    ids = [v for v in found if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < vocab_size]
    return tuple(dict.fromkeys(ids))


def _tokenizer_eos(directory: Path) -> int | None:
    settings = read_json(directory / "tokenizer_config.json") or {}
    token = settings.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return None
    added = settings.get("added_tokens_decoder")
    for token_id, entry in added.items() if isinstance(added, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == content and str(token_id).isdecimal():
            return int(token_id)
    added = (read_json(directory / "tokenizer.json") or {}).get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("content") == content:
            return entry.get("id")
    return None
