# SPDX-License-Identifier: Apache-2.0
"""Where an engine's memory went, for the operator: printed once when it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class MemoryBill:
    """Bytes by purpose, and what the KV pool holds for them."""

    weight_bytes: int
    kv_bytes: int
    num_blocks: int
    num_tokens: int
    """Tokens that the KV pool holds."""
    graph_bytes: int = 0
    """Captured CUDA graphs and what came with them; 0 on a CPU."""

    def __str__(self) -> str:
        graphs = f", graphs {self.graph_bytes / GIB:.2f} GiB" if self.graph_bytes else ""
        return (
            f"weights {self.weight_bytes / GIB:.2f} GiB, KV pool {self.kv_bytes / GIB:.2f} GiB "
            f"({self.num_blocks} blocks, {self.num_tokens} tokens){graphs}"
        )
