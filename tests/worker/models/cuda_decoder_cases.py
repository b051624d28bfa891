# SPDX-License-Identifier: Apache-2.0
"""Tiny models that cover every choice of an architecture: `python cuda_decoder_cases.py GROUP` runs a group of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

# First: it chooses the interpreter.
from tests.worker.models.cuda_decoder_driver import Steps, Twins, borders, ragged  # isort: skip

from mii_zmq.worker.models.archs_llama import LLAMA
from mii_zmq.worker.models.random_weights import SHAPES
from mii_zmq.worker.models.spec import (
    ArchSpec,
    MlpKind,
    ModelConfig,
    MoeConfig,
    NormKind,
    PositionKind,
    ResidualKind,
    Role,
    RopeConfig,
)
from tests.interpreter import adjust_interpreter

EVERY = {Role.EMBED, Role.QKV, Role.O, Role.GATE, Role.UP, Role.DOWN}
PRE, POST = {Role.ATTN_NORM, Role.MLP_NORM}, {Role.ATTN_POST_NORM, Role.MLP_POST_NORM}
QK = {Role.Q_NORM, Role.K_NORM}
FINAL = {Role.FINAL_NORM}
ROPE = RopeConfig(10000.0, 16)


def spec(roles: Iterable[Role], **choices: Any) -> ArchSpec:
    return replace(LLAMA, names=dict.fromkeys(EVERY.union(roles), ""), **choices)


def model(roles: Iterable[Role] = PRE | FINAL, choices: dict[str, Any] | None = None, **numbers: Any) -> ModelConfig:
    """A tiny Llama with other roles, choices of its spec, and numbers."""
    base = replace(
        SHAPES["tiny"], vocab_size=51, hidden_size=32, intermediate_size=40, num_heads=4, num_kv_heads=2, head_dim=16,
        max_position_embeddings=64, ropes=(ROPE, ROPE), scale=0.25,
    )  # fmt: skip
    return replace(base, spec=spec(roles, **(choices or {})), **numbers)


def experts(shared: int, layers: tuple[bool, bool], renormalise: bool) -> MoeConfig:
    return MoeConfig(5, 2, 24, renormalise=renormalise, shared_intermediate_size=shared, layers=layers)


BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
CLASSIC = {"norm": NormKind.LAYER, "norm_bias": True, "mlp": MlpKind.PLAIN}
NO_ROPE = {"ropes": (None, None)}
PARALLEL = {**CLASSIC, "residual": ResidualKind.PARALLEL}
ALIBI = {**CLASSIC, "position": PositionKind.ALIBI}

LLAMA_LIKE = model()
QWEN_LIKE = model(PRE | FINAL | QK, tie_word_embeddings=True, windows=(None, 7), qkv_bias=True)
OPT_LIKE = model(
    choices={**CLASSIC, "position": PositionKind.LEARNED, "position_offset": 2}, activation="relu", **NO_ROPE, **BIASES
)
OPT_350M = model(
    POST | {Role.PROJECT_IN, Role.PROJECT_OUT, Role.POSITIONS},
    {
        **CLASSIC, "position": PositionKind.LEARNED, "position_offset": 2, "residual": ResidualKind.POST_NORM,
    },
    activation="relu", embed_dim=20, tie_word_embeddings=True, **NO_ROPE, **BIASES,
)  # fmt: skip
GEMMA2_LIKE = model(
    PRE | POST | FINAL, {"norm_offset": 1.0, "scales_embedding": True}, activation="gelu_tanh", windows=(7, None),
    attn_softcap=3.0, logit_softcap=4.0, scale=0.4, tie_word_embeddings=True,
)  # fmt: skip
GEMMA3_LIKE = model(
    PRE | POST | FINAL | QK, {"norm_offset": 1.0}, activation="gelu_tanh", windows=(9, None), num_kv_heads=1,
    ropes=(ROPE, RopeConfig(1e6, 16, kind="linear", factor=8.0)),
)  # fmt: skip
EXAONE_LIKE = model(POST | FINAL | QK, ropes=(ROPE, None), windows=(7, None))
PHI_LIKE = model(
    {Role.ATTN_NORM} | FINAL, {**PARALLEL, "head_bias": True}, activation="gelu_tanh",
    ropes=(replace(ROPE, rotary_dim=6),) * 2, **BIASES,
)  # fmt: skip
NEOX_LIKE = model(
    choices=PARALLEL, activation="gelu", head_dim=24, num_kv_heads=4, ropes=(replace(ROPE, rotary_dim=8),) * 2, **BIASES
)
BLOOM_LIKE = model(
    PRE | FINAL | {Role.EMBED_NORM}, ALIBI, activation="gelu_tanh", tie_word_embeddings=True, **NO_ROPE, **BIASES
)
FALCON_LIKE = model(
    {Role.ATTN_NORM} | FINAL, {**ALIBI, "residual": ResidualKind.PARALLEL}, activation="gelu", num_heads=17,
    num_kv_heads=1, hidden_size=40, alibi_scale=0.25, **NO_ROPE,
)  # fmt: skip
MIXTRAL_LIKE = model(PRE | FINAL, moe=experts(0, (True, True), renormalise=True), windows=(7, 7))
QWEN_MOE_LIKE = model(
    PRE | FINAL | {Role.SHARED_SWITCH}, moe=experts(28, (True, False), renormalise=False), qkv_bias=True
)
SHARED_MOE = model(PRE | FINAL, moe=experts(56, (False, True), renormalise=True))
YARN = model(
    ropes=(
        RopeConfig(10000.0, 16, "yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.2),
        RopeConfig(10000.0, 16, "llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=16),
    )
)
LONGROPE = model(
    ropes=(
        RopeConfig(
            10000.0, 16, "longrope", original_max_position_embeddings=12, attention_factor=1.1,
            short_factors=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7),
            long_factors=(2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
        ),
    ) * 2,
)  # fmt: skip
DYNAMIC = model(ropes=(RopeConfig(10000.0, 12, "dynamic", 3.0, original_max_position_embeddings=12), ROPE))
WIDE = model(head_dim=256, num_heads=2, num_kv_heads=1, hidden_size=48, ropes=(RopeConfig(10000.0, 64),) * 2)

GROUPS: dict[str, list[tuple[Steps, ModelConfig, dict[str, Any]]]] = {
    "plain": [(ragged, config, {}) for config in (LLAMA_LIKE, QWEN_LIKE, OPT_LIKE, WIDE)],
    "norms": [(ragged, config, {}) for config in (GEMMA2_LIKE, GEMMA3_LIKE, EXAONE_LIKE, OPT_350M)],
    "parallel": [(ragged, config, {}) for config in (PHI_LIKE, NEOX_LIKE, BLOOM_LIKE, FALCON_LIKE)],
    "experts": [(ragged, config, {}) for config in (MIXTRAL_LIKE, QWEN_MOE_LIKE, SHARED_MOE)],
    "ropes": [(ragged, YARN, {}), (borders, LONGROPE, {}), (borders, DYNAMIC, {})],
    "ranks": [(ragged, config, {"num_ranks": 2}) for config in (GEMMA2_LIKE, PHI_LIKE, OPT_350M, QWEN_MOE_LIKE)],
    "deterministic": [
        (ragged, QWEN_LIKE, {"deterministic": True}), (ragged, QWEN_MOE_LIKE, {"deterministic": True, "num_ranks": 2}),
    ],
}  # fmt: skip


def main(group: str) -> None:
    for steps, config, options in GROUPS[group]:
        steps(Twins(config, **options))


if __name__ == "__main__":
    adjust_interpreter()
    for name in sys.argv[1:] or GROUPS:
        main(name)
        print(name, "ok")
