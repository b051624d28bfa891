# SPDX-License-Identifier: Apache-2.0
"""Makes a checkpoint directory out of a GGUF file: config and tokenizer from its metadata, the weights by reference.

The directory lies in the cache under a name that depends on the file's path, size and time, and appears by one rename,
so that one which exists is complete. The weights stay in the GGUF file, to
which the directory holds a link. A vocabulary that cannot be converted is no error here, because the user may give
another tokenizer: the reason is left in `NO_TOKENIZER_FILE`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from mii_zmq.config import cache_dir
from mii_zmq.errors import CheckpointError
from mii_zmq.tokenizer import NO_TOKENIZER_FILE
from mii_zmq.worker.models.cached_directory import Progress, made_once
from mii_zmq.worker.models.gguf_config import model_config
from mii_zmq.worker.models.gguf_file import GgufFile
from mii_zmq.worker.models.gguf_tokenizer import write_tokenizer

IMPORT_VERSION = 1
"""Goes up when what is written changes, so that older directories are not used."""


def import_gguf(path: Path, progress: Progress | None = None) -> Path:
    """The checkpoint directory of a GGUF file; the first call writes it.

    Raises:
        CheckpointError: the file is damaged, incomplete or lacks metadata.
        ModelUnsupported: an architecture that is not imported.
    """
    path = Path(os.path.realpath(path))
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    identity = f"{IMPORT_VERSION}\0{path}\0{status.st_size}\0{status.st_mtime_ns}"
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem)[:60]
    directory = cache_dir() / "gguf" / f"{stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    say = progress or (lambda _: None)

    def make(target: Path) -> None:
        say(f"importing {path.name}")
        write_metadata(GgufFile(path), target)
        (target / "model.gguf").symlink_to(path)

    return made_once(directory, make, say)


def write_metadata(file: GgufFile, directory: Path, **overrides: Any) -> dict[str, Any]:
    """config.json (with `overrides`), generation_config.json and the tokenizer; returns the config."""
    config = model_config(file) | overrides
    _write_json(directory / "config.json", config)
    ids = [file.fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": ends[0] if len(ends) == 1 else ends}
    _write_json(directory / "generation_config.json", generation | {"pad_token_id": config["pad_token_id"]})
    try:
        write_tokenizer(file.fields, directory, config["max_position_embeddings"])
    except CheckpointError as error:
        (directory / NO_TOKENIZER_FILE).write_text(error.message, encoding="utf-8")
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
