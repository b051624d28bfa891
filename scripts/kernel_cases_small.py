# SPDX-License-Identifier: Apache-2.0
"""Cases of `bench_kernels` around the big kernels: norms, activations, embedding, gather, changes of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
from kernel_case import (
    DEVICE,
    DTYPE,
    HAS_PDL,
    I32,
    SHAPE,
    Build,
    Builds,
    Case,
    Check,
    error,
    ints,
    num_sets,
    pick,
    poisoned,
    randn,
)
from torch import Tensor
from torch.nn import functional

from mii_zmq.kernels.triton.elementwise import embed_kernel, gather_rows_kernel
from mii_zmq.kernels.triton.updates import TILE as UPDATE_TILE
from mii_zmq.kernels.triton.updates import UPDATE_WORDS, apply_updates_kernel, copy_blocks_kernel
from mii_zmq.worker.models.cuda_gemm import launch_options
from mii_zmq.worker.models.cuda_linear import Norm, run_activation

EPS = 1e-5


def small_cases() -> Builds:
    builds: list[Build] = []
    for tokens in pick((1, 64, 256, 4096), (1, 3)):
        builds += [partial(norm_case, tokens, kind) for kind in ("rms", "layer")]
    for tokens in pick((64, 2048), (3,)):
        builds += [partial(absorb_case, tokens), partial(add_to_case, tokens), partial(norm_case, tokens, "offset")]
    for tokens in pick((1, 64, 256, 4096), (2,)):
        builds.append(partial(activation_case, "silu", tokens))
    builds += [partial(activation_case, kind, pick((64,), (2,))[0]) for kind in ("gelu", "gelu_tanh", "relu")]
    for tokens in pick((1, 64, 4096), (3,)):
        builds += [partial(embed_case, tokens), partial(gather_case, min(tokens, 256))]
    builds += [partial(updates_case, *sizes) for sizes in pick(((64, 1), (8, 512), (1, 8192)), ((3, 5),))]
    builds += [partial(copy_blocks_case, pairs) for pairs in pick((1, 32), (2,))]
    for build in builds:
        yield f"{build.func.__name__.removesuffix('_case')} {build.args}", build  # type: ignore[attr-defined]


def norm_case(tokens: int, kind: str) -> Case:
    """RMSNorm, LayerNorm, or RMSNorm with a float32 scale (Gemma)."""
    width, is_layer = SHAPE.hidden, kind == "layer"
    num_bytes = 2 * tokens * width * DTYPE.itemsize
    sets = num_sets(num_bytes)
    x, out = randn(sets, tokens, width), poisoned(tokens, width)
    weight = randn(width, dtype=torch.float32 if kind == "offset" else DTYPE)
    norm = Norm(weight, randn(width) if is_layer else None, EPS, is_layer)

    def launch(index: int) -> None:
        norm.run(x[index], out, HAS_PDL)

    def check() -> Check:
        out.fill_(float("nan"))
        launch(0)
        ref = reference_norm(norm, x[0].double())
        own = torch_norm(norm, x[0])
        return Check(error(out, ref), error(own, ref))

    return Case("norm", f"{kind} {tokens} x {width}", launch, sets, check, num_bytes, memory="copy")


def reference_norm(norm: Norm, x: Tensor) -> Tensor:
    weight = norm.weight.double()
    if norm.is_layer_norm:
        assert norm.bias is not None
        return functional.layer_norm(x, x.shape[-1:], weight, norm.bias.double(), norm.eps)
    return functional.rms_norm(x, x.shape[-1:], weight, norm.eps)


def torch_norm(norm: Norm, x: Tensor) -> Tensor:
    """As torch computes it in the dtype of `x`."""
    if norm.is_layer_norm:
        return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    if norm.weight.dtype != x.dtype:
        return functional.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.eps).to(x.dtype)
    return functional.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def absorb_case(tokens: int) -> Case:
    """x += delta; out = norm(x)."""
    width = SHAPE.hidden
    num_bytes = 4 * tokens * width * DTYPE.itemsize
    sets = num_sets(num_bytes)
    x, delta, out = randn(sets, tokens, width), randn(sets, tokens, width), poisoned(tokens, width)
    norm = Norm(randn(width), None, EPS, False)

    def launch(index: int) -> None:
        norm.absorb(delta[index], x[index], out, HAS_PDL)

    def check() -> Check:
        before = x[0].clone()
        out.fill_(float("nan"))
        launch(0)
        total = before.double() + delta[0].double()
        ref = reference_norm(norm, total)
        own = torch_norm(norm, before + delta[0])
        return Check(max(error(out, ref), error(x[0], total)), error(own, ref))

    return Case("norm.absorb", f"{tokens} x {width}", launch, sets, check, num_bytes, memory="copy")


def add_to_case(tokens: int) -> Case:
    """x += norm(delta); out = following(x)."""
    width = SHAPE.hidden
    num_bytes = 4 * tokens * width * DTYPE.itemsize
    sets = num_sets(num_bytes)
    x, delta, out = randn(sets, tokens, width), randn(sets, tokens, width), poisoned(tokens, width)
    norm, following = Norm(randn(width), None, EPS, False), Norm(randn(width), None, EPS, False)

    def launch(index: int) -> None:
        norm.add_to(delta[index], x[index], following, out, HAS_PDL)

    def check() -> Check:
        before = x[0].clone()
        out.fill_(float("nan"))
        launch(0)
        total = before.double() + reference_norm(norm, delta[0].double())
        ref = reference_norm(following, total)
        own_total = before + torch_norm(norm, delta[0])
        return Check(max(error(out, ref), error(x[0], total)), error(torch_norm(following, own_total), ref))

    return Case("norm.add_to", f"{tokens} x {width}", launch, sets, check, num_bytes, memory="copy")


def activation_case(kind: str, tokens: int) -> Case:
    width = SHAPE.ffn
    num_bytes = 3 * tokens * width * DTYPE.itemsize
    sets = num_sets(num_bytes)
    x, out = randn(sets, tokens, 2 * width), poisoned(tokens, width)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
        "relu": torch.relu,
    }

    def launch(index: int) -> None:
        run_activation(x[index], out, kind, True, HAS_PDL)

    def check() -> Check:
        out.fill_(float("nan"))
        launch(0)
        gate, up = x[0].chunk(2, -1)
        ref = functions[kind](gate.double()) * up.double()
        return Check(error(out, ref), error(functions[kind](gate) * up, ref))

    return Case("activation", f"{kind} {tokens} x {width}", launch, sets, check, num_bytes, memory="copy")


def embed_case(tokens: int) -> Case:
    width, vocab = SHAPE.hidden, SHAPE.vocab
    table, out = randn(vocab, width), poisoned(tokens, width)
    ids = torch.randint(0, vocab, (16, tokens), dtype=I32, device=DEVICE)

    def launch(index: int) -> None:
        embed_kernel[(tokens,)](
            ids[index], ids[index], table, None, out, 0,
            D=width, D_PAD=triton.next_power_of_2(width), HAS_POSITIONS=False, SCALE=1.0,
        )  # fmt: skip

    def check() -> Check:
        out.fill_(float("nan"))
        launch(0)
        return Check(share_wrong(out, table[ids[0].long()]))

    return Case("embed", f"{tokens} x {width}", launch, 16, check, 2 * tokens * width * DTYPE.itemsize, memory="copy")


def gather_case(rows: int) -> Case:
    """The rows that want logits, of residual stream and attended heads."""
    tokens, width, heads_width = pick((4096,), (40,))[0], SHAPE.hidden, SHAPE.heads * SHAPE.head_dim
    a, b = randn(tokens, width), randn(tokens, heads_width)
    a_out, b_out = poisoned(rows, width), poisoned(rows, heads_width)
    index = torch.randperm(tokens, device=DEVICE)[:rows].int()

    def launch(_: int) -> None:
        gather_rows_kernel[(rows,)](
            count, index, a, b, a_out, b_out, A=width, B=heads_width,
            PAD=triton.next_power_of_2(max(width, heads_width)), PDL=HAS_PDL, **launch_options(HAS_PDL),
        )  # fmt: skip

    def check() -> Check:
        a_out.fill_(float("nan"))
        b_out.fill_(float("nan"))
        launch(0)
        return Check(share_wrong(a_out, a[index.long()]) + share_wrong(b_out, b[index.long()]))

    count = ints([rows])
    num_bytes = 2 * rows * (width + heads_width) * DTYPE.itemsize
    return Case("gather_rows", f"{rows} of {tokens}", launch, 1, check, num_bytes, memory="copy")


def updates_case(num_updates: int, length: int) -> Case:
    """Half of the updates change token histories, half of them block tables."""
    stride = triton.next_power_of_2(length)
    histories, tables = poisoned(num_updates, stride, dtype=I32), poisoned(num_updates, stride, dtype=I32)
    data = torch.randint(0, SHAPE.vocab, (num_updates, length), dtype=I32)
    records = [
        [index % 2, index * stride, length, UPDATE_WORDS * num_updates + index * length] for index in range(num_updates)
    ]
    packed = torch.cat([torch.tensor(records, dtype=I32).flatten(), data.flatten()]).to(DEVICE)

    def launch(_: int) -> None:
        grid = (num_updates, triton.cdiv(length, UPDATE_TILE))
        apply_updates_kernel[grid](packed, histories, tables, TILE=UPDATE_TILE)

    def check() -> Check:
        histories.fill_(-9)
        tables.fill_(-9)
        launch(0)
        wrong = 0.0
        for parity, found in enumerate((histories, tables)):
            want = torch.full_like(found, -9)
            want[parity::2, :length] = data.to(DEVICE)[parity::2]
            wrong += share_wrong(found, want)
        return Check(wrong)

    num_bytes = 2 * num_updates * length * 4
    return Case("updates", f"{num_updates} x {length}", launch, 1, check, num_bytes, memory="copy")


def copy_blocks_case(pairs: int) -> Case:
    """Blocks of every layer, layers outermost as in the pool."""
    layers, blocks = pick((32,), (2,))[0], 2 * pairs + 1
    elements = 2 * SHAPE.kv_heads * SHAPE.block * SHAPE.head_dim
    slab = randn(layers, blocks, elements)
    order = torch.randperm(blocks)[: 2 * pairs].view(pairs, 2)
    packed = ints(order.flatten().contiguous())
    tile = pick((8192,), (128,))[0]

    def launch(_: int) -> None:
        copy_blocks_kernel[(pairs, triton.cdiv(elements, tile), layers)](
            packed, slab, elements, slab.stride(0), TILE=tile, num_warps=8
        )

    def check() -> Check:
        want = slab.clone()
        want[:, order[:, 1]] = want[:, order[:, 0]]
        slab[:, order[:, 1]] = float("nan")
        launch(0)
        return Check(share_wrong(slab, want))

    num_bytes = 2 * pairs * layers * elements * DTYPE.itemsize
    return Case("copy_blocks", f"{pairs} blocks x {layers} layers", launch, 1, check, num_bytes, memory="copy")


def share_wrong(found: Tensor, want: Tensor) -> float:
    return (found != want).double().mean().item()
