# SPDX-License-Identifier: Apache-2.0
"""Which files of a checkpoint directory are read, and which are refused with the command that converts them.

Imports neither torch nor numpy and opens nothing but the index, so that a launcher can ask it before anything starts.
The commands stand in docs/loading.md too.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from mii_zmq.errors import CheckpointError
from mii_zmq.worker.models.checkpoint_json import read_json

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 2**20
CONVERT_ZERO = (
    "python DIR/zero_to_fp32.py DIR OUT --safe_serialization && cp DIR/*.json OUT/ && python -m mii_zmq serve OUT"
)
CONVERT_PICKLED = (
    "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('DIR').save_pretrained('OUT')\""
    " && cp DIR/tokenizer* OUT/ && python -m mii_zmq serve OUT"
)
_TRAINING_PATTERNS = ("global_step*", "zero_to_fp32.py", "mp_rank_*", "zero_pp_rank_*", "bf16_zero_pp_rank_*")


def find_safetensors(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in a fixed order.

    Raises:
        CheckpointError: there is none, some are missing, or the checkpoint is in a refused format.
    """
    index = read_json(directory / INDEX_FILE)
    if index is not None:
        return _indexed_files(directory, index)
    paths = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
    if directory / "model.safetensors" in paths:
        return [directory / "model.safetensors"]
    if len(paths) > 1:
        raise CheckpointError(f"{directory} holds {len(paths)} safetensors files but no {INDEX_FILE}")
    if not paths:
        refuse_other_formats(directory)
        raise CheckpointError(f"{directory} holds no .safetensors file")
    return paths


def refuse_other_formats(directory: Path) -> None:
    """Raises CheckpointError: what a directory without safetensors holds has to be converted first."""
    if any(directory.glob("*.safetensors")):
        return
    if any(any(directory.glob(pattern)) for pattern in _TRAINING_PATTERNS):
        root = directory.parent if directory.name.startswith("global_step") else directory
        raise CheckpointError(
            f"{directory} is a DeepSpeed training checkpoint, whose pickled ZeRO shards are not read here; convert it "
            f"once: {command(CONVERT_ZERO, root)} (config.json and the tokenizer come from the base model if the "
            "checkpoint lacks them)"
        )
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise CheckpointError(
            f"{directory} holds pickled weights only (.bin or .pt), which can run code when loaded and are refused; "
            f"convert them on a machine you can spare: {command(CONVERT_PICKLED, directory)}"
        )


def command(template: str, directory: Path) -> str:
    """One of the commands above for a directory."""
    return template.replace("DIR", shlex.quote(str(directory)))


def check_header(path: Path) -> None:
    """Refuse a file whose length or header length cannot be right, before anything is mapped."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    header = int.from_bytes(head, "little")
    if len(head) < 8 or not 2 <= header <= min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{path} is not a complete safetensors file ({size} bytes); download it again")


def _indexed_files(directory: Path, index: dict[str, object]) -> list[Path]:
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{directory / INDEX_FILE} has no weight_map from tensor names to file names")
    paths = []
    for name in sorted(set(names.values())):
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise CheckpointError(f"{directory / INDEX_FILE} names {name!r}, which is no file of its directory")
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory} lacks {name}, which its index names; download it again")
        paths.append(directory / name)
    return paths
