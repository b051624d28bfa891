# SPDX-License-Identifier: Apache-2.0
"""What the GPU decoder keeps in device memory beside weights and KV pool: the slots' state, and a step's activations.

Everything is allocated once, so that captured graphs find it again. Sizes are this rank's. Knows no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mii_zmq.worker.cuda_batch import PackedLayout
from mii_zmq.worker.models.cuda_linear import Scratch, split_sizes
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.spec import MlpKind, ModelConfig


@dataclass(frozen=True)
class DeviceState:
    """What lives on the device from step to step."""

    packed: Tensor
    """The step's int32 buffer, laid out by `PackedLayout`."""
    token_ids: Tensor
    """[slots, max_model_len + 1] int32."""
    block_tables: Tensor
    """[slots, blocks] int32."""
    rope_lengths: Tensor
    """[slots] int32, behind the last row of `token_ids`: the length that decides a sequence's rotary embedding until
    it has grown longer. Zero where the model has no `rope_border`."""

    @classmethod
    def create(
        cls, layout: PackedLayout, update_words: int, max_model_len: int, block_size: int, device: torch.device
    ) -> DeviceState:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        # Rows are padded to whole 16 byte lines; one more token than the longest sequence, for the one drawn behind it.
        slots, stride = layout.max_sequences, (max_model_len + 4) // 4 * 4
        histories = zeros(slots * stride + slots)
        return cls(
            packed=zeros(layout.fixed_words + update_words),
            token_ids=histories[: slots * stride].view(slots, stride),
            block_tables=zeros(slots, (-(-max_model_len // block_size) + 3) // 4 * 4),
            rope_lengths=histories[slots * stride :],
        )


@dataclass(frozen=True)
class Card:
    """What the choice of kernels depends on."""

    num_processors: int
    is_hopper: bool
    """Compute capability 9.0 or later: programmatic dependent launch and the tensor copy engine."""
    shared_bytes: int = 163 * 1024
    """Shared memory that one program can have."""

    @classmethod
    def of(cls, device: torch.device) -> Card:
        properties: Any = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, properties.major >= 9, properties.shared_memory_per_block_optin)


@dataclass(frozen=True, slots=True)
class Rows:
    """Activations of a step's tokens, or of the rows that want logits: views of the buffers."""

    x: Tensor
    """The residual stream."""
    normed: Tensor
    delta: Tensor
    """What waits to be added to `x`; empty where nothing ever waits."""
    qkv: Tensor
    attended: Tensor
    inner: Tensor
    """The MLP between its matrices."""
    shared: Tensor
    """The shared expert's result; empty where there is none."""
    narrow: Tensor
    """[T, embedding width]; empty where it is the hidden size."""
    live: Tensor
    """[1] int32: rows that are no padding."""


class Buffers:
    """The activations of up to `max_tokens` tokens and `max_rows` rows with logits."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        state: DeviceState,
        max_tokens: int,
        max_rows: int,
        has_delta: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        def buffer(num_rows: int, width: int) -> Tensor:
            return torch.zeros(num_rows, width, dtype=dtype, device=device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        hidden, heads_width = config.hidden_size, shard.num_heads * config.head_dim
        shared = shard.shared_channels[1] - shard.shared_channels[0]
        has_dense = config.moe is None or not all(config.moe.layers)
        inner = max(shard.num_channels if has_dense else 0, shared)
        up_rows = max(2 * inner if config.spec.mlp is MlpKind.GATED else inner, 2 * shared)
        self.inner_width = inner
        num_sums, num_counters = split_sizes()
        self.scratch = Scratch(
            normed=buffer(max_tokens, hidden),
            wide=buffer(max_tokens, up_rows),
            partial=torch.zeros(num_sums, dtype=torch.float32, device=device),
            counters=integers(num_counters),
        )
        self.tokens = Rows(
            x=buffer(max_tokens, hidden),
            normed=self.scratch.normed,
            delta=buffer(max_tokens if has_delta else 0, hidden),
            qkv=buffer(max_tokens, (shard.num_heads + 2 * shard.num_kv_heads) * config.head_dim),
            attended=buffer(max_tokens, heads_width),
            inner=buffer(max_tokens, inner),
            shared=buffer(max_tokens if shared else 0, hidden),
            narrow=buffer(max_tokens if config.embed_dim else 0, config.embed_dim),
            live=state.packed[2:3],
        )
        self._head_x, self._head_attended = buffer(max_rows, hidden), buffer(max_rows, heads_width)
        self._num_samples = state.packed[3:4]
        self.input_ids, self.positions = integers(max_tokens), integers(max_tokens)
        self.cells = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.local_logits = buffer(max_rows, shard.vocab[1] - shard.vocab[0])
        self.logits = self.local_logits
        if shard.rank.world_size > 1:
            self.logits = buffer(max_rows, config.vocab_size)

    def trunk(self, num_tokens: int) -> Rows:
        whole = self.tokens
        return Rows(
            whole.x[:num_tokens], whole.normed[:num_tokens], whole.delta[:num_tokens], whole.qkv[:num_tokens],
            whole.attended[:num_tokens], whole.inner[:num_tokens], whole.shared[:num_tokens],
            whole.narrow[:num_tokens], whole.live,
        )  # fmt: skip

    def head(self, num_rows: int) -> Rows:
        """Rows with logits; apart from `x` and `attended` they share the tokens' memory."""
        whole = self.tokens
        return Rows(
            self._head_x[:num_rows], whole.normed[:num_rows], whole.delta[:num_rows], whole.qkv[:num_rows],
            self._head_attended[:num_rows], whole.inner[:num_rows], whole.shared[:num_rows],
            whole.narrow[:num_rows], self._num_samples,
        )  # fmt: skip
