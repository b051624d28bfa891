# SPDX-License-Identifier: Apache-2.0
"""The long tail: every other family of transformers that is known to run with paged attention, against its own run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto import CONFIG_MAPPING, AutoConfig

from tests.worker.models.checkpoints import max_relative_difference
from tests.worker.models.fallback_checkpoints import BASE, VOCAB, FallbackDriver, load, save_random

SMALL: dict[str, Any] = {
    **BASE,
    "attn_logit_softcapping": 7.0,
    "dense_intermediate_size": 80,
    "final_logit_softcapping": 9.0,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "moe_intermediate_size": 32,
    "moe_k": 2,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "n_group": 1,
    "n_inner": 80,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "num_shared_experts": 1,
    "rotary_dim": 8,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "sliding_window": 13,
    "topk_group": 1,
}
"""Each family takes the fields that its config has."""
DBRX = {
    "d_model": 48,
    "n_heads": 6,
    "n_layers": 3,
    "max_seq_len": 256,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
}
HYBRID = {
    "layer_types": ["attention"] * 3,
    "position_embedding_type": "rope",
    "num_local_experts": 0,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_expand": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "aria_text": {},
    "biogpt": {},
    "bitnet": {},
    "codegen": {},
    "cohere2": {},
    "cohere2_moe": {},
    "ctrl": {},
    "cwm": {},
    "dbrx": DBRX,
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm": {},
    "glm4_moe": {},
    "gpt_bigcode": {},
    "granitemoe": {},
    "granitemoehybrid": HYBRID,
    "granitemoeshared": {},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hyperclovax": {},
    "jais2": {},
    "jetmoe": {},
    "kolibri1": {},
    "laguna": {},
    "mellum": {},
    "minimax_m2": {},
    "ministral": {},
    "ministral3": {},
    "modernbert-decoder": {},
    "nanochat": {},
    "olmo": {"clip_qkv": 3.0},
    "olmo3": {},
    "olmoe": {},
    "persimmon": {},
    "phimoe": {},
    "sarvam_moe": {},
    "seed_oss": {},
    "solar_open": {},
    "vaultgemma": {},
}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decodes_of_two_sequences(family: str, tmp_path: Path) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know the family")
    config_class = CONFIG_MAPPING[family]
    known = {field.name for field in dataclasses.fields(config_class)} | config_class.attribute_map.keys()
    fields = {key: value for key, value in SMALL.items() if key in known}
    reference = save_random(AutoConfig.for_model(family, **{**fields, **FAMILIES[family]}), tmp_path)
    driver = FallbackDriver(*load(tmp_path))
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (47, 30))
    with torch.inference_mode():
        expected = [reference(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in (first, second)]
    ends = [0, 0]
    for sizes in ((20, 0), (20, 25), (1, 1), (1, 1), (5, 1), (0, 2)):
        parts = []
        for slot, (tokens, size) in enumerate(zip((first, second), sizes, strict=True)):
            if size:
                parts.append((slot, tokens[ends[slot] : ends[slot] + size]))
                ends[slot] += size
        logits = driver.step(parts)
        assert logits is not None
        for row, (slot, _) in enumerate(parts):
            wanted = expected[slot][ends[slot] - 1]
            assert max_relative_difference(logits[row], wanted) <= 1e-4
            assert int(logits[row].argmax()) == int(wanted.argmax())
