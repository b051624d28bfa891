# SPDX-License-Identifier: Apache-2.0
"""What only a built model shows: windows from its masks, and everything about its attention that cannot be paged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import masking_utils

from mii_zmq.errors import ModelUnsupported
from mii_zmq.worker.models.fallback_probe import UnusualMask, find_window
from tests.worker.models.fallback_checkpoints import load, make_config, save_random

NO_PADDING = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("visible", "window"),
    [
        (masking_utils.causal_mask_function, None),
        (masking_utils.sliding_window_causal_mask_function(1), 1),
        (masking_utils.sliding_window_causal_mask_function(13), 13),
        (masking_utils.sliding_window_causal_mask_function(99), 99),
        (masking_utils.sliding_window_causal_mask_function(100), None),
        (masking_utils.sliding_window_causal_mask_function(5000), None),
    ],
)
def test_window_of_a_mask(visible: Callable[..., Any], window: int | None) -> None:
    assert find_window(visible, 100) == window


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        (masking_utils.bidirectional_mask_function, "looks ahead"),
        (masking_utils.sliding_window_bidirectional_mask_function(7), "looks ahead"),
        (masking_utils.chunked_causal_mask_function(8, NO_PADDING), "depends on absolute positions"),
        (masking_utils.chunked_causal_mask_function(64, NO_PADDING), "depends on absolute positions"),
        (lambda batch, head, query, key: (key <= query) & (key % 2 == query % 2), "has gaps"),
        (lambda batch, head, query, key: key < 0, "has gaps"),
        (masking_utils.padding_mask_function(torch.ones(1, 5, dtype=torch.bool)), "depends on more than positions"),
    ],
)
def test_other_masks_are_refused(visible: Callable[..., Any], message: str) -> None:
    with pytest.raises(UnusualMask, match=message):
        find_window(visible, 100)


SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gpt_oss", SINKS, "the gpt_oss model has attention sinks"),
        ("deepseek_v3", MLA, "the deepseek_v3 model has keys of 24 and values of 16 elements per head"),
        ("diffllama", {}, "calls attention twice in one layer"),
        ("bert", {"is_decoder": False}, r"look ahead \(bidirectional"),
        ("roberta", {"is_decoder": True}, "computes something else with paged attention"),
        ("doge", {}, "builds its own attention masks"),
    ],
)
def test_what_cannot_be_paged_is_refused(family: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_random(make_config(family, **fields), tmp_path)
    with pytest.raises(ModelUnsupported, match=message) as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)
