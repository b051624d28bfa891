# SPDX-License-Identifier: Apache-2.0
"""More runs of what stands behind the trunk, for tokens that the step's own list does not name.

The head reads from device memory which tokens it is for. Between trunk and head that list is replaced, as often as it
takes to get through many tokens, and put back. Queues work on the current stream only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from mii_zmq.worker.cuda_batch import NUM_SAMPLES, PackedLayout, decode_buckets, row_bucket
from mii_zmq.worker.models.cuda_buffers import DeviceState


class ListedTokens:
    """The list of one executor's state."""

    def __init__(self, state: DeviceState, layout: PackedLayout) -> None:
        self._packed, self._layout = state.packed, layout
        self._rows_per_run = min(layout.max_rows, layout.token_budget)
        self._buckets = decode_buckets(self._rows_per_run)

    def run(self, tokens: np.ndarray, launch: Callable[[int], Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """For the tokens, some at a time: which of them, and what `launch` (given a number of rows) makes of them.

        Its result is overwritten by the next run. Exhaust the iterator: then the list is put back.
        """
        packed, layout = self._packed, self._layout
        count = packed[NUM_SAMPLES : NUM_SAMPLES + 1]
        listed = packed[layout.sample_tokens : layout.sample_tokens + layout.max_rows]
        saved = count.clone(), listed.clone()
        on_device = upload(tokens.astype(np.int64), packed.device)
        for begin in range(0, len(tokens), self._rows_per_run):
            some = slice(begin, min(begin + self._rows_per_run, len(tokens)))
            num_rows = some.stop - begin
            listed[:num_rows].copy_(on_device[some])
            count.fill_(num_rows)
            # Padded, so that kernels run in the shapes that they have been compiled for.
            yield some, launch(row_bucket(num_rows, self._buckets))[:num_rows]
        count.copy_(saved[0])
        listed.copy_(saved[1])


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy through pinned memory, which torch keeps until the copy is done; nobody waits for it."""
    return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """A copy in pinned memory, to be read once the step's event has passed."""
    host = torch.zeros(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
