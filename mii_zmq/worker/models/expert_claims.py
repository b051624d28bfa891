# SPDX-License-Identifier: Apache-2.0
"""The claims of a mixture of experts: one layer's router, experts and shared expert.

Experts are stored one by one, as all published checkpoints do, or stacked under the names that transformers gives them
in memory, as `save_pretrained(..., save_original_format=False)` writes them. Either way the same names count as
provided, so that a checkpoint with both is a doubled one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mii_zmq.worker.models.claims import Claim, Part
from mii_zmq.worker.models.model_weights import Affine, MoeWeights
from mii_zmq.worker.models.spec import Role

if TYPE_CHECKING:
    from mii_zmq.worker.models.claim_table import ClaimTable


def claim_experts(table: ClaimTable, names: dict[Role, str]) -> MoeWeights:
    """Allocate one layer's part of this rank and claim what fills it; `names` are the layer's."""
    moe, hidden = table.config.moe, table.config.hidden_size
    assert moe is not None
    first, last = table.shard.experts
    width = moe.intermediate_size
    router_name = f"{names[Role.ROUTER]}.weight"
    weights = MoeWeights(
        router=table.whole(router_name, moe.num_experts, hidden),
        up=table.empty(last - first, 2 * width, hidden),
        down=table.empty(last - first, hidden, width),
        first_expert=first,
    )
    stored_up, stored_down = [], []
    everything = (slice(None),)
    for expert in range(moe.num_experts):
        held = expert - first if first <= expert < last else None
        gate, up, down = (
            f"{names[role].replace('{e}', str(expert))}.weight"
            for role in (Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN)
        )
        stored_up += [gate, up]
        stored_down.append(down)
        for name, half in ((gate, slice(0, width)), (up, slice(width, 2 * width))):
            parts = () if held is None else (Part(weights.up[held, half], everything),)
            table.claims[name] = Claim((width, hidden), parts, (name,))
        parts = () if held is None else (Part(weights.down[held], everything),)
        table.claims[down] = Claim((hidden, width), parts, (down,))
    stacked = f"{names[Role.ROUTER].rsplit('.', 2)[0]}.mlp"
    ours = (slice(first, last),)
    for name, destination, shape, fills in (
        ("experts.gate_up_proj", weights.up, (2 * width, hidden), stored_up),
        ("experts.down_proj", weights.down, (hidden, width), stored_down),
    ):
        parts = (Part(destination, ours),) if last > first else ()
        table.claims[f"{stacked}.{name}"] = Claim((moe.num_experts, *shape), parts, tuple(fills))
    table.claims[f"{stacked}.gate.weight"] = table.claims[router_name]
    if moe.shared_intermediate_size:
        _claim_shared_expert(table, names, weights)
    return weights


def _claim_shared_expert(table: ClaimTable, names: dict[Role, str], weights: MoeWeights) -> None:
    moe, hidden, channels = table.config.moe, table.config.hidden_size, table.shard.shared_channels
    assert moe is not None
    width, count = moe.shared_intermediate_size, channels[1] - channels[0]
    fused = Affine(table.empty(2 * count, hidden))
    for role, target in ((Role.SHARED_GATE, 0), (Role.SHARED_UP, count)):
        table.rows(names[role], (width, hidden), [(target, channels, 0)], fused, is_transposed=False)
    weights.shared_up = fused.weight
    down = table.columns(names[Role.SHARED_DOWN], (hidden, width), channels, has_bias=False, is_transposed=False)
    weights.shared_down = down.weight
    weights.shared_switch = table.whole(f"{names[Role.SHARED_SWITCH]}.weight", 1, hidden)
