# SPDX-License-Identifier: Apache-2.0
"""config.json is understood completely or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mii_zmq.errors import CheckpointError, ModelUnsupported, StartupError
from mii_zmq.worker.models.archs import specs_by_architecture
from mii_zmq.worker.models.hf_config import has_spec, load_model_config
from mii_zmq.worker.models.rotary import inverse_frequencies
from mii_zmq.worker.models.spec import ArchSpec, MlpKind, ModelConfig, PositionKind, QkvKind, ResidualKind, Role
from tests.worker.models.checkpoints import CONFIGS
from tests.worker.models.conftest import Checkpoints
from tests.worker.models.published_configs import PUBLISHED

SMOL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {}}, "transformers_version": "4.42.3", "use_cache": True,
    "vocab_size": 49152,
}  # fmt: skip


def load(directory: Path, raw: dict[str, Any], **files: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(raw))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return load_model_config(directory)


def test_a_published_llama_config(tmp_path: Path) -> None:
    config = load(tmp_path, SMOL)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert {(rope.kind, rope.theta, rope.rotary_dim) for rope in config.ropes if rope} == {("default", 100000.0, 64)}
    assert (config.dtype, config.tie_word_embeddings, config.eos_token_ids) == ("bfloat16", True, (2,))
    assert config.windows == (None,) * 30


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_is_understood(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    config = load_model_config(directory)
    theirs = model.config.get_text_config()
    assert config.vocab_size == theirs.vocab_size
    assert config.num_heads == theirs.num_attention_heads
    assert len(config.windows) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5Model"]}, "T5Model.*supported are BloomForCausalLM"),
        ({"architectures": []}, "None"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_act": "mish"}, "mish"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}, "mrope"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "mrope_section": [8, 12, 12]}}, "mrope_section"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_key_value_heads": 4}, "9 heads cannot be shared by 4"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "not a multiple"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"sliding_window": 4096}, "sliding_window"),
    ],
)
def test_settings_that_would_change_the_text_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        load(tmp_path, {**SMOL, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": -2.0}}, "factor = -2.0"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "32 numbers"),
        ({"rope_scaling": "linear"}, "must be an object"),
    ],
)
def test_malformed_numbers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, {**SMOL, **changes})


NONSENSE: tuple[Any, ...] = (True, -1, 0, 0.5, 1, 10**400, math.inf, "x", [[]], {"a": 1})
ABSENT = ("max_window_layers", "mlp_only_layers", "max_sequence_length", "original_max_position_embeddings")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-2-9b", "phi-4-mini", "qwen1.5-moe-a2.7b", "qwen2.5-7b-yarn"])
def test_nonsense_in_any_key_is_taken_or_refused_in_one_line(tmp_path: Path, name: str) -> None:
    raw = PUBLISHED[name]
    nested = {key: value for key, value in raw.items() if isinstance(value, dict)}
    for junk in NONSENSE:
        changes = [{key: junk} for key in (*raw, *ABSENT)]
        changes += [{key: value | {inner: junk}} for key, value in nested.items() for inner in value]
        for change in changes:
            try:
                config = load(tmp_path, {**raw, **change})
            except StartupError as error:
                message = error.message
            else:
                message = ""
                assert all(isinstance(value, float) for value in (config.scale, config.norm_eps, config.logit_softcap))
                assert all(len(inverse_frequencies(rope)) for rope in set(config.ropes) if rope is not None)
            assert "\n" not in message


@pytest.mark.parametrize("junk", [3, "x", [1], {"a": 1}])
def test_nonsense_beside_the_tokenizer_names_no_end(tmp_path: Path, junk: object) -> None:
    settings = {"eos_token": "</s>", "added_tokens_decoder": junk}
    config = load(tmp_path, SMOL, tokenizer_config=settings, tokenizer={"added_tokens": junk})
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize("content", ["", "{", "[1]", '"x"'])
def test_malformed_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model_config(tmp_path)


def test_auto_map_is_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    load(tmp_path, {**SMOL, "auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    assert not marker.exists()


QWEN2 = {key: value for key, value in SMOL.items() if key not in ("attention_bias", "mlp_bias", "is_llama_config")}
QWEN2["architectures"] = ["Qwen2ForCausalLM"]
QWEN2["num_hidden_layers"] = 4


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2}, (None,) * 4),
        ({"sliding_window": 64}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}, (None, None, None, 64)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
    ],
)
def test_windows_by_layer(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert load(tmp_path, {**QWEN2, **changes}).windows == windows


def test_windows_of_mistral(tmp_path: Path) -> None:
    mistral = {**QWEN2, "architectures": ["MistralForCausalLM"]}
    assert load(tmp_path, {**mistral, "sliding_window": 32}).windows == (32,) * 4
    assert load(tmp_path, {**mistral, "sliding_window": None}).windows == (None,) * 4
    assert load(tmp_path, mistral).windows == (4096,) * 4, "the published default"


def test_end_ids_are_merged_from_all_files(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        SMOL,
        generation_config={"eos_token_id": [7, 5, 99999]},
        tokenizer_config={"eos_token": "<end>"},
        tokenizer={"added_tokens": [{"id": 0, "content": "<pad>"}, {"id": 11, "content": "<end>"}]},
    )
    assert config.eos_token_ids == (7, 5, 2, 11)


def test_end_id_from_the_decoder_table(tmp_path: Path) -> None:
    raw = {**SMOL, "eos_token_id": None}
    tokenizer = {"eos_token": {"content": "</s>"}, "added_tokens_decoder": {"3": {"content": "</s>"}}}
    assert load(tmp_path, raw, tokenizer_config=tokenizer).eos_token_ids == (3,)


def all_specs() -> list[ArchSpec]:
    return [spec for specs in specs_by_architecture().values() for spec in specs]


@pytest.mark.parametrize("spec", all_specs(), ids=lambda spec: spec.family)
def test_every_spec_names_the_roles_it_needs(spec: ArchSpec) -> None:
    assert {Role.EMBED, Role.HEAD, Role.O} <= set(spec.names)
    assert spec.has(Role.QKV) == (spec.qkv is not QkvKind.SEPARATE)
    assert all(spec.has(role) != spec.has(Role.QKV) for role in (Role.Q, Role.K, Role.V))
    assert spec.has(Role.POSITIONS) == (spec.position is PositionKind.LEARNED)
    assert spec.has(Role.Q_NORM) == spec.has(Role.K_NORM)
    assert spec.has(Role.PROJECT_IN) == spec.has(Role.PROJECT_OUT)
    assert spec.has(Role.ATTN_NORM) or spec.has(Role.ATTN_POST_NORM)
    assert spec.has(Role.FINAL_NORM) != (spec.residual is ResidualKind.POST_NORM)
    gate = {Role.GATE, Role.GATE_UP} & set(spec.names)
    assert bool(gate) == (spec.mlp is MlpKind.GATED and spec.has(Role.DOWN))
    experts = [spec.has(role) for role in (Role.ROUTER, Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN)]
    assert len(set(experts)) == 1
    assert spec.has(Role.DOWN) or spec.has(Role.ROUTER)
    assert len(set(spec.names.values())) == len(spec.names)
    assert spec.published, "people look for model names"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name: str, tmp_path: Path) -> None:
    config = load(tmp_path, PUBLISHED[name])
    assert has_spec(tmp_path)
    assert len(config.windows) == len(config.ropes) == config.num_layers
    assert config.eos_token_ids or name == "qwen-7b"


def published(name: str, tmp_path: Path, **changes: Any) -> ModelConfig:
    return load(tmp_path, {**PUBLISHED[name], **changes})


def test_context_counts_what_scaling_adds(tmp_path: Path) -> None:
    assert published("llama-3.1-8b", tmp_path).max_position_embeddings == 131072
    assert published("qwen2.5-7b-yarn", tmp_path).max_position_embeddings == 131072
    assert published("vicuna-7b-16k", tmp_path).max_position_embeddings == 16384
    assert published("phi-4-mini", tmp_path).max_position_embeddings == 131072
    assert published("gemma-3-4b", tmp_path).max_position_embeddings == 131072
    assert published("qwen-7b", tmp_path).max_position_embeddings == 8192, "beyond it the first Qwen scales"
    assert published("bloom-560m", tmp_path).max_position_embeddings == 2048
    assert published("bloom-560m", tmp_path, seq_length=4096).max_position_embeddings == 4096
    dynamic = published(
        "llama-3.1-8b", tmp_path, max_position_embeddings=4096, rope_scaling={"type": "dynamic", "factor": 2.0}
    )
    assert (dynamic.max_position_embeddings, dynamic.rope_border) == (8192, 4096)


def test_longrope_and_partial_rotation(tmp_path: Path) -> None:
    config = published("phi-4-mini", tmp_path)
    rope = config.ropes[0]
    assert rope is not None
    assert (rope.kind, rope.rotary_dim, len(rope.long_factors), config.rope_border) == ("longrope", 96, 48, 4096)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert config.windows == (None,) * 32, "a window wider than the context is none"
    phi = published("phi-2", tmp_path)
    assert {rope.rotary_dim for rope in phi.ropes if rope} == {32}
    assert {rope.rotary_dim for rope in published("gpt-neox-20b", tmp_path).ropes if rope} == {24}
    assert {rope.rotary_dim for rope in published("gpt-j-6b", tmp_path).ropes if rope} == {64}
    su = {**PUBLISHED["phi-4-mini"]["rope_scaling"], "type": "su"}
    assert published("phi-4-mini", tmp_path, rope_scaling=su).ropes == config.ropes


def test_yarn_attention_factors(tmp_path: Path) -> None:
    def factor(**settings: Any) -> float:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **settings}
        rope = published("qwen2.5-7b-yarn", tmp_path, rope_scaling=scaling).ropes[0]
        assert rope is not None
        return rope.attention_factor

    assert factor() == pytest.approx(0.1 * math.log(4) + 1)
    assert factor(attention_factor=1.7) == 1.7
    assert factor(mscale=0.5, mscale_all_dim=0.5) == pytest.approx(1.0)
    assert factor(factor=0.5) == 1.0


def test_layers_with_windows_and_rotation(tmp_path: Path) -> None:
    gemma3 = published("gemma-3-1b", tmp_path)
    assert gemma3.windows[:7] == (512, 512, 512, 512, 512, None, 512)
    assert [rope.theta for rope in gemma3.ropes[4:7] if rope] == [10000.0, 1000000.0, 10000.0]
    larger = published("gemma-3-4b", tmp_path)
    assert [(rope.kind, rope.factor) for rope in larger.ropes[4:6] if rope] == [("default", 1.0), ("linear", 8.0)]
    assert (larger.num_heads, larger.head_dim, larger.vocab_size) == (8, 256, 262208)
    assert published("gemma-2-9b", tmp_path).windows[:3] == (4096, None, 4096)
    exaone = published("exaone-4.0-32b", tmp_path)
    assert exaone.windows[:5] == (4096, 4096, 4096, None, 4096)
    assert [rope is None for rope in exaone.ropes[:5]] == [False, False, False, True, False]
    whole = published("exaone-4.0-32b", tmp_path, sliding_window=None, sliding_window_pattern=None)
    assert None not in whole.ropes
    assert set(whole.windows) == {None}
    assert published("phi-3-mini-4k", tmp_path).windows == (2047,) * 32


def test_scales_and_soft_caps(tmp_path: Path) -> None:
    gemma2 = published("gemma-2-9b", tmp_path, query_pre_attn_scalar=144, attn_logit_softcapping=None)
    assert (gemma2.scale, gemma2.attn_softcap, gemma2.logit_softcap) == (1 / 12, 0.0, 30.0)
    missing = {k: v for k, v in PUBLISHED["gemma-2-9b"].items() if k != "attn_logit_softcapping"}
    assert load(tmp_path, missing).attn_softcap == 50.0
    assert published("gemma-3-1b", tmp_path).logit_softcap == 0.0
    assert published("falcon-rw-1b", tmp_path).alibi_scale == 64**-0.5
    assert published("bloom-560m", tmp_path).alibi_scale == 1.0
    assert published("llama-3.1-8b", tmp_path).scale == 128**-0.5


def test_layouts_of_one_class(tmp_path: Path) -> None:
    configs = {size: published(f"falcon-{size}", tmp_path) for size in ("7b", "40b", "11b", "rw-1b")}
    assert {size: config.num_kv_heads for size, config in configs.items()} == {"7b": 1, "40b": 8, "11b": 8, "rw-1b": 32}
    assert [config.spec.qkv for config in configs.values()] == [QkvKind.STACKED, *[QkvKind.GROUPED] * 3]
    assert [config.spec.has(Role.MLP_NORM) for config in configs.values()] == [False, True, False, True]
    assert [config.spec.residual is ResidualKind.PARALLEL for config in configs.values()] == [True, True, True, False]
    assert [config.tie_word_embeddings for config in configs.values()] == [True, True, False, True]
    opt = published("opt-350m", tmp_path)
    assert (opt.embed_dim, opt.spec.residual, opt.spec.has(Role.FINAL_NORM)) == (512, ResidualKind.POST_NORM, False)
    assert published("opt-350m", tmp_path, word_embed_proj_dim=1024).embed_dim == 0
    assert published("gpt-neox-20b", tmp_path, use_parallel_residual=False).spec.residual is ResidualKind.SEQUENTIAL


def test_experts(tmp_path: Path) -> None:
    mixtral = published("mixtral-8x7b", tmp_path).moe
    assert mixtral is not None
    assert (mixtral.num_experts, mixtral.top_k, mixtral.intermediate_size, mixtral.renormalise) == (8, 2, 14336, True)
    qwen2 = published(
        "qwen1.5-moe-a2.7b", tmp_path, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]
    ).moe
    assert qwen2 is not None
    assert (qwen2.shared_intermediate_size, qwen2.renormalise) == (5632, False)
    assert qwen2.layers == (False, True, False, False, False, True)
    qwen3 = published("qwen3-30b-a3b", tmp_path).moe
    assert qwen3 is not None
    assert (qwen3.num_experts, qwen3.top_k, qwen3.intermediate_size, qwen3.renormalise) == (128, 8, 768, True)
    with pytest.raises(CheckpointError, match="9 of 8 experts"):
        published("mixtral-8x7b", tmp_path, num_experts_per_tok=9)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("phi-2", {"qk_layernorm": True}, "qk_layernorm"),
        ("phi-4-mini", {"full_attn_mod": 2}, "full_attn_mod"),
        ("gemma-2b", {"hidden_act": "silu"}, "'gelu' or 'gelu_pytorch_tanh'"),
        ("gemma-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma-3-1b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("bloom-560m", {"apply_residual_connection_post_layernorm": True}, "normed stream"),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("falcon-40b", {"parallel_attn": False}, "parallel_attn"),
        ("qwen-7b", {"no_bias": False}, "no_bias"),
        ("qwen-7b", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("qwen1.5-moe-a2.7b", {"use_sliding_window": True}, "use_sliding_window"),
        ("llama-3.1-8b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama-3.1-8b", {"rope_parameters": {"full_attention": {}, "factor": 2}, "rope_scaling": None}, "beside"),
        ("gpt-j-6b", {"rotary_dim": 33}, "33 rotated elements"),
        ("exaone-4.0-32b", {"layer_types": ["full_attention"]}, "64 layers"),
    ],
)
def test_settings_of_families_that_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        published(name, tmp_path, **changes)


def test_chat_turns_of_the_first_qwen_end_texts(tmp_path: Path) -> None:
    files = {"generation_config": {"chat_format": "chatml", "eos_token_id": 151643}}
    assert load(tmp_path, PUBLISHED["qwen-7b"], **files).eos_token_ids == (151643, 151644, 151645)
    files = {"generation_config": {"chat_format": "raw", "eos_token_id": 151643}}
    assert load(tmp_path, PUBLISHED["qwen-7b"], **files).eos_token_ids == (151643,)


def test_an_architecture_without_a_spec(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GraniteForCausalLM"]}))
    assert not has_spec(tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        has_spec(tmp_path / "nowhere")
