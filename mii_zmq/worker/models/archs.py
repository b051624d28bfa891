# SPDX-License-Identifier: Apache-2.0
"""The table of architectures: config.json's `architectures[0]` -> `ArchSpec`, or a function that picks one for a
config. To add a family, add an entry and a parity case in tests/worker/models. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mii_zmq.worker.models import archs_classic as classic
from mii_zmq.worker.models import archs_gemma as gemma
from mii_zmq.worker.models import archs_gpt as gpt
from mii_zmq.worker.models import archs_llama as llama
from mii_zmq.worker.models.spec import ArchSpec

ARCHITECTURES: dict[str, ArchSpec | Callable[[dict[str, Any]], ArchSpec]] = {
    "LlamaForCausalLM": llama.LLAMA,
    "MistralForCausalLM": llama.MISTRAL,
    "MixtralForCausalLM": llama.MIXTRAL,
    "Qwen2ForCausalLM": llama.QWEN2,
    "Qwen2MoeForCausalLM": llama.QWEN2_MOE,
    "Qwen3ForCausalLM": llama.QWEN3,
    "Qwen3MoeForCausalLM": llama.QWEN3_MOE,
    "SeedOssForCausalLM": llama.SEED_OSS,
    "Phi3ForCausalLM": llama.PHI3,
    "Exaone4ForCausalLM": llama.EXAONE4,
    "GemmaForCausalLM": gemma.GEMMA,
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "Gemma3ForConditionalGeneration": gemma.GEMMA3_MULTIMODAL,
    "OPTForCausalLM": classic.opt,
    "GPT2LMHeadModel": gpt.GPT2,
    "GPTJForCausalLM": gpt.GPTJ,
    "GPTNeoXForCausalLM": gpt.gpt_neox,
    "PhiForCausalLM": gpt.PHI,
    "BloomForCausalLM": classic.BLOOM,
    "FalconForCausalLM": classic.falcon,
    "QWenLMHeadModel": classic.QWEN,
}

VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "OPTForCausalLM": ({}, {"do_layer_norm_before": False, "word_embed_proj_dim": 512, "hidden_size": 1024}),
    "GPTNeoXForCausalLM": ({}, {"use_parallel_residual": False}),
    "FalconForCausalLM": (
        {},
        {"new_decoder_architecture": True},
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        {"alibi": True, "multi_query": False, "parallel_attn": False},
    ),
}
"""For each function in the table, settings that make it pick each of its layouts."""

FALLBACK_TESTED: dict[str, str] = {
    "starcoder2": "Starcoder2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "cohere": "CohereForCausalLM",
    "granite": "GraniteForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""Families without an entry, run by transformers' own code and tested so: family -> `architectures[0]`."""


def find_spec(raw: dict[str, Any]) -> ArchSpec | None:
    """The spec of a checkpoint with this config.json; None: its architecture has none."""
    names = raw.get("architectures")
    entry = ARCHITECTURES.get(names[0]) if isinstance(names, list) and names and isinstance(names[0], str) else None
    return entry(raw) if callable(entry) else entry


def specs_by_architecture() -> dict[str, list[ArchSpec]]:
    """Every layout of every architecture."""
    return {
        name: [entry(raw) for raw in VARIANTS[name]] if callable(entry) else [entry]
        for name, entry in ARCHITECTURES.items()
    }
