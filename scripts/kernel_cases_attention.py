# SPDX-License-Identifier: Apache-2.0
"""Cases of `bench_kernels`: attention over the paged pool and what prepares it, one layer after the other."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from functools import cache, partial

import torch
from attention_setup import NUM_BLOCKS, NUM_LAYERS, AttentionSetup
from kernel_case import (
    DEVICE,
    DTYPE,
    I32,
    IS_INTERPRETED,
    NAN,
    SHAPE,
    Build,
    Builds,
    Case,
    Check,
    Goal,
    error,
    ints,
    pick,
    randn,
    row_error,
)
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from mii_zmq.worker.models.rotary import inverse_frequencies

GOALS = {("decode", 64, 4096): Goal("TB/s", 0.88 * 4.4), ("chunk", 8192): Goal("TFLOP/s", 400.0)}
NUM_CHECKED = 8
DECODES = (
    (1, 640),
    (8, 576),
    (16, 576),
    (32, 576),
    (64, 576),
    (128, 576),
    (256, 576),
    (256, 1000),
    (64, 4096),
    (1, 8192),
)

setup = cache(AttentionSetup)


def attention_cases() -> Builds:
    builds: list[Build] = [partial(decode_case, *sizes) for sizes in pick(DECODES, ((1, 40), (3, 33)))]
    builds.append(partial(ragged_decode_case, pick((64,), (5,))[0]))
    builds += [
        partial(chunk_case, *sizes)
        for sizes in pick(((0, 512), (0, 2048), (4096, 512), (0, 8192)), ((0, 40), (21, 13)))
    ]
    for tokens in pick((1, 64, 256, 4096), (1, 5)):
        builds += [partial(rope_case, tokens, has_norm) for has_norm in (False, True)]
    builds += [partial(inputs_case, *sizes) for sizes in pick(((1, 0), (64, 0), (256, 0), (63, 1985)), ((3, 20),))]
    for build in builds:
        yield f"{build.func.__name__.removesuffix('_case')} {build.args}", build  # type: ignore[attr-defined]


def decode_case(batch: int, length: int) -> Case:
    case = _decode_case([length] * batch, f"{batch} x {length}")
    return replace(case, goal=GOALS.get(("decode", batch, length)))


def ragged_decode_case(batch: int) -> Case:
    """Rows of all lengths, the rest of their last blocks NaN."""
    longest = NUM_BLOCKS * SHAPE.block // (2 * batch)
    return _decode_case([random.randint(1, longest) for _ in range(batch)], f"{batch} x 1..{longest}")


def _decode_case(lengths: list[int], shape: str) -> Case:
    bench = setup()
    bench.prepare([(length - 1, 1) for length in lengths])
    order = sorted(range(len(lengths)), key=lambda slot: -lengths[slot])
    rows, num_items, attention = bench.rows, bench.num_items, bench.attention

    def launch(index: int) -> None:
        # The parts of `CudaAttention.run`, which are timed apart.
        attention._attend_decodes(bench.places[index % NUM_LAYERS], rows.qkv, rows.attended, num_items)

    def check() -> Check:
        rows.attended.fill_(NAN)
        with bench.stale_cells(layer=0):
            launch(0)
        checked = range(0, len(lengths), max(1, len(lengths) // NUM_CHECKED))
        found, refs, owns = [], [], []
        for row in checked:
            keys, values = bench.keys_values(order[row], 0, lengths[order[row]])
            query = rows.qkv[row, : SHAPE.heads * SHAPE.head_dim].view(SHAPE.kv_heads, -1, SHAPE.head_dim)
            found.append(rows.attended[row])
            refs.append(attend(query.double(), keys.double(), values.double()).flatten())
            with torch_attention():
                owns.append(attend(query[None], keys[None], values[None]).flatten())
        wrong, own = row_error(torch.stack(found), torch.stack(refs)), row_error(torch.stack(owns), torch.stack(refs))
        return Check(NAN if rows.attended.isnan().any() else wrong, own)

    num_bytes = sum(lengths) * 2 * SHAPE.kv_heads * SHAPE.head_dim * DTYPE.itemsize
    return Case("decode_attention", shape, launch, NUM_LAYERS, check, num_bytes)


attend = functional.scaled_dot_product_attention


def torch_attention() -> contextlib.AbstractContextManager[None]:
    """FlashAttention in the tensors' own dtype: torch's plain path computes in float32."""
    if IS_INTERPRETED:
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)  # type: ignore[no-any-return]


def chunk_case(start: int, tokens: int) -> Case:
    bench = setup()
    step = bench.prepare([(start, tokens)])
    length, rows, attention, num_tiles = start + tokens, bench.rows, bench.attention, step.num_tiles

    def launch(index: int) -> None:
        attention._attend_chunks(bench.places[index % NUM_LAYERS], rows.qkv, rows.attended, num_tiles)

    def check() -> Check:
        rows.attended.fill_(NAN)
        with bench.stale_cells(layer=0):
            launch(0)
        group = SHAPE.heads // SHAPE.kv_heads
        keys, values = (part.repeat_interleave(group, 0) for part in bench.keys_values(0, 0, length))
        query = rows.qkv[:, : SHAPE.heads * SHAPE.head_dim].view(tokens, SHAPE.heads, SHAPE.head_dim).transpose(0, 1)
        picked = torch.randint(0, tokens, (126,), device=DEVICE)
        picked = torch.cat([ints([0, tokens - 1], torch.int64), picked])
        visible = torch.arange(length, device=DEVICE) <= start + picked[:, None]
        ref = attend(query[:, picked].double(), keys.double(), values.double(), visible)
        # Queries of the tokens before, so that torch's causal mask has the same diagonal.
        before = randn(SHAPE.heads, start, SHAPE.head_dim)
        with torch_attention():
            own = attend(torch.cat([before, query], 1)[None], keys[None], values[None], is_causal=True)[0]
        own = own[:, start + picked]
        found = rows.attended.view(tokens, SHAPE.heads, SHAPE.head_dim)[picked].transpose(0, 1)
        wrong, theirs = (row_error(part.transpose(0, 1), ref.transpose(0, 1)) for part in (found, own))
        return Check(NAN if rows.attended.isnan().any() else wrong, theirs)

    flops = 4 * SHAPE.heads * SHAPE.head_dim * (tokens * start + tokens * (tokens + 1) / 2)
    goal = GOALS.get(("chunk", length)) if start == 0 else None
    return Case("chunk_attention", f"{tokens} behind {start}", launch, NUM_LAYERS, check, flops=flops, goal=goal)


def rope_case(tokens: int, has_norm: bool) -> Case:
    bench = setup()
    bench.prepare([(0, tokens)])
    rows, attention, heads, rotated = bench.rows, bench.attention, SHAPE.qkv_heads, SHAPE.heads + SHAPE.kv_heads
    q_norm, k_norm = randn(SHAPE.head_dim), randn(SHAPE.head_dim)
    places = [replace(place, q_norm=q_norm, k_norm=k_norm) if has_norm else place for place in bench.places]

    def launch(index: int) -> None:
        attention._rotate_and_store(places[index % NUM_LAYERS], rows.qkv)

    def turned(x: Tensor) -> Tensor:
        """Heads [T, q and k heads, D], each as the dtype of `x` has it."""
        if has_norm:
            normed = functional.rms_norm(x, x.shape[-1:], None, bench.eps)
            weight = torch.cat([q_norm.expand(SHAPE.heads, -1), k_norm.expand(SHAPE.kv_heads, -1)])
            x = normed * weight.to(x.dtype)
        positions = bench.buffers.positions[:tokens].double()
        angles = torch.outer(positions, inverse_frequencies(bench.rope).double().to(DEVICE))[:, None]
        real, imaginary = angles.cos(), angles.sin()
        a, b = x.double().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * real - b * imaginary, b * real + a * imaginary], -1).flatten(-2).to(x.dtype)

    def check() -> Check:
        rows.qkv.normal_()
        source = rows.qkv.view(tokens, heads, SHAPE.head_dim).clone()
        layer, blocks = bench.pool.slab[:, 0], torch.tensor(bench.tables[0], device=DEVICE)
        layer[blocks] = NAN
        launch(0)
        keys, values = bench.keys_values(0, 0, tokens)
        q = rows.qkv.view(tokens, heads, SHAPE.head_dim)[:, : SHAPE.heads]
        out = torch.cat([q, keys.transpose(0, 1), values.transpose(0, 1)], 1)
        ref, own = (torch.cat([turned(x[:, :rotated]), x[:, rotated:]], 1) for x in (source.double(), source))
        layer[blocks] = torch.randn_like(layer[blocks])
        return Check(error(out, ref), error(own, ref))

    name = f"{tokens} x {heads} heads{', q and k normed' if has_norm else ''}"
    num_bytes = 2 * tokens * heads * SHAPE.head_dim * DTYPE.itemsize
    return Case("rope_kv", name, launch, NUM_LAYERS, check, num_bytes, memory="copy")


def inputs_case(decodes: int, chunk: int) -> Case:
    bench = setup()
    longest = NUM_BLOCKS * SHAPE.block // (decodes + 1) // 2
    lengths = [random.randint(0, min(longest, 4000)) for _ in range(decodes)]
    bench.prepare([(length, 1) for length in lengths] + ([(0, chunk)] if chunk else []))
    order = [*sorted(range(decodes), key=lambda slot: -lengths[slot]), *([decodes] if chunk else [])]
    starts, counts = [*lengths, 0], [1] * decodes + [chunk]
    tokens, buffers, state = bench.step.num_tokens, bench.buffers, bench.state

    def launch(_: int) -> None:
        bench.make_inputs()

    def check() -> Check:
        outputs = [tensor[:tokens] for tensor in (buffers.input_ids, buffers.positions, buffers.cells)]
        for tensor in (*outputs, bench.attention.items):
            tensor.fill_(-9)
        launch(0)
        position = torch.cat([starts[slot] + torch.arange(counts[slot]) for slot in order]).to(DEVICE)
        slots = torch.cat([torch.full((counts[slot],), slot) for slot in order]).to(DEVICE)
        cell = state.block_tables[slots, position // SHAPE.block].long() * SHAPE.block + position % SHAPE.block
        wanted = (state.token_ids[slots, position], position, cell)
        wrong = sum(int((found != want).sum()) for found, want in zip(outputs, wanted, strict=True))
        items = bench.attention.items[: bench.num_items]
        items = items[items[:, 0] >= 0].long()
        splits = torch.bincount(items[:, 0], minlength=decodes)
        wrong += int((splits[items[:, 0]] != items[:, 2]).sum()) + int((splits == 0).sum())
        wrong += int((items[:, 3] != ints([lengths[slot] + 1 for slot in order[:decodes]], I32)[items[:, 0]]).sum())
        wrong += int((items[:, 4] != ints(order[:decodes])[items[:, 0]]).sum())
        return Check(wrong / tokens)

    return Case("batch_inputs", f"{decodes} decodes + {chunk}", launch, 1, check, tokens * 24, memory="copy")
