#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every family on the GPU's kernels: error of the logits against transformers in float32, beside transformers' own.

    python scripts/verify_families.py [--only NAME ...]

The checkpoints are those of the parity tests, random and enlarged to heads of 64 elements or more. Prompts whole and in
chunks cross every window and border, decodes follow; our error in bfloat16 may be 1.1 times that of transformers in
bfloat16. One JSON line per family. `--interpret` leaves them tiny and runs them in float32 in Triton's interpreter, on
any machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from kernel_case import DEVICE, DTYPE, F32, IS_INTERPRETED
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import AutoModelForCausalLM
from verify_engine import WORST_RATIO, Driver, collect, make_executor, reference_logits, relative

from tests.worker.models import checkpoints

logger = logging.getLogger(__name__)
FACTOR = 1 if IS_INTERPRETED else 8
WIDTHS = (
    "hidden_size", "intermediate_size", "n_embd", "ffn_dim", "word_embed_proj_dim", "head_dim", "ffn_hidden_size",
    "moe_intermediate_size", "shared_expert_intermediate_size", "rotary_dim", "query_pre_attn_scalar",
)  # fmt: skip
"""Config keys that grow with the model."""
LENGTHS = (5, 40) if IS_INTERPRETED else (1, 2, 5, 17, 31, 33, 63, 64, 65, 100, 130, 200)
MAX_LEN, CHUNK = (64, 16) if IS_INTERPRETED else (256, 50)
NUM_DECODES = 2 if IS_INTERPRETED else 6
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings under which transformers computes a whole sequence unlike one that grows: only prompts compare."""
Logits = dict[tuple[int, int], Tensor]
"""By slot and position."""
NAMES = tuple(name for name in checkpoints.CONFIGS if name not in ("qwen", "gemma3_multimodal"))
"""The others are stored in ways of their own; their computation is that of qwen2 and gemma3."""


def enlarged(name: str) -> Any:
    """The family's config with every width times FACTOR."""
    config = checkpoints.CONFIGS[name]
    fields = config.to_dict()
    for key in WIDTHS:
        if isinstance(fields.get(key), int):
            fields[key] *= FACTOR
    rope = fields.get("rope_parameters") or {}
    for key in ("short_factor", "long_factor"):
        if key in rope:
            rope[key] = [value for value in rope[key] for _ in range(FACTOR)]
    return type(config).from_dict(fields)


def save_random(name: str, config: Any, directory: Path) -> None:
    """Random in every parameter, in the dtype that is served, of a size at which layers matter and logits differ."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=F32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.4 * parameter.shape[-1] ** -0.5)
            else:
                is_around_zero = parameter_name.endswith("bias") or name.startswith("gemma")
                parameter.normal_(0.0 if is_around_zero else 1.0, 0.2)
    model.to(DTYPE).save_pretrained(directory)


def load(name: str, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    # Only the eager attention has Gemma's soft-caps; Falcon's adds its bias twice.
    attention = "sdpa" if name.startswith("falcon") else "eager"
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
    return model.to(DEVICE).eval()


def executor(directory: Path) -> Any:
    sizes = {"block_size": 16, "num_blocks": 12, "max_sequences": 3, "kv_cache_gb": None} if IS_INTERPRETED else {}
    # That graphs give the bits of eager runs is `verify_engine`'s matter.
    return make_executor(directory, use_graphs=False, max_len=MAX_LEN, **{"max_sequences": 16, **sizes})


def check(name: str, directory: Path) -> dict[str, Any]:
    config = enlarged(name)
    save_random(name, config, directory)
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    is_dependent = kind in LENGTH_DEPENDENT
    num_decodes = 0 if is_dependent else NUM_DECODES
    draw = random.Random(1)
    prompts = [[draw.randrange(3, checkpoints.VOCAB) for _ in range(length)] for length in LENGTHS]
    whole = collect(executor(directory), prompts, MAX_LEN, num_decodes)
    chunked = collect(executor(directory), prompts, CHUNK, 0)
    exact, half = load(name, directory, F32), load(name, directory, DTYPE)
    wanted, theirs = (
        prompt_logits(model, prompts) if is_dependent else reference_logits(model, whole, prompts)
        for model in (exact, half)
    )
    ends = [(slot, len(prompt)) for slot, prompt in enumerate(prompts)]
    keys = list(wanted)

    def error(found: Logits, keys: list[tuple[int, int]]) -> float:
        measure = typical if has_experts(config) else relative
        return measure([found[key] for key in keys], [wanted[key] for key in keys])

    ours, own = error(whole.logits, keys), error(theirs, keys)
    in_chunks, own_ends = error(chunked.logits, ends), error(theirs, ends)
    worst = max(ours / max(own, 1e-12), in_chunks / max(own_ends, 1e-12))
    passed = max(ours, in_chunks) < 1e-4 if IS_INTERPRETED else worst <= WORST_RATIO
    figures = {"error": ours, "transformers_error": own, "chunked_error": in_chunks, "ratio": worst}
    return {
        "family": name, **{key: float(f"{value:.3g}") for key, value in figures.items()},
        "logits": len(keys), "agree": agreement(whole, wanted, keys), "passed": passed,
    }  # fmt: skip


@torch.inference_mode()
def prompt_logits(model: PreTrainedModel, prompts: list[list[int]]) -> Logits:
    """Behind each prompt."""
    wanted = {}
    for slot, prompt in enumerate(prompts):
        # transformers keeps the frequencies of the longest sequence so far until it sees a short one.
        model(torch.tensor([prompt[:1]], device=DEVICE), use_cache=False)
        logits = model(torch.tensor([prompt], device=DEVICE), use_cache=False).logits
        wanted[slot, len(prompt)] = logits[0, -1].float().cpu()
    return wanted


def has_experts(config: Any) -> bool:
    return bool(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None))


def typical(found: list[Tensor], expected: list[Tensor]) -> float:
    """Median over positions: where rounding sends a token to another expert, its error says nothing more."""
    errors = [relative([one], [other]) for one, other in zip(found, expected, strict=True)]
    return statistics.median(errors)


def agreement(driver: Driver, wanted: Logits, keys: list[tuple[int, int]]) -> float:
    """Share of positions where ours and the exact logits have the same largest one."""
    return round(sum(int(driver.logits[k].argmax()) == int(wanted[k].argmax()) for k in keys) / len(keys), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--interpret", action="store_true", help="tiny, in Triton's interpreter, without a GPU")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if IS_INTERPRETED:
        from tests.worker.cuda_engine_on_cpu import replace_cuda

        replace_cuda()
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.only:
            try:
                result = check(name, Path(scratch) / name)
            except Exception as failure:
                # One family that cannot be loaded or compiled must not hide the others.
                logger.exception("%s failed", name)
                result = {"family": name, "passed": False, "raised": repr(failure)[:300]}
            print(json.dumps(result), flush=True)
            if not result["passed"]:
                failed.append(name)
    print(json.dumps({"families": len(args.only), "failed": failed}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
