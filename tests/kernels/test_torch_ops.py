# SPDX-License-Identifier: Apache-2.0
"""Norms, rotation, KV write, activations and linears against the oracle, on odd shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mii_zmq.kernels import CellMapping, KvLayer, reference, torch_ops
from mii_zmq.kernels.torch_linear import LinearFactory, PackedLinear, PlainLinear, can_pack


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (3, 7), (17, 64), (5, 9, 16)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_rms_norm(shape: tuple[int, ...], scale: float) -> None:
    x, weight = rand(*shape) * scale, rand(shape[-1]) + 1
    expected = reference.RmsNorm(weight.double(), 1e-5)(x.double())
    torch.testing.assert_close(torch_ops.RmsNorm(weight, 1e-5)(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not torch_ops.RmsNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)).any()


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_adds_the_delta_to_the_stream(kind: str) -> None:
    x, delta, weight, bias = rand(4, 12), rand(5, 12)[:4], rand(12), rand(1, 12)[0]
    if kind == "rms":
        fast, oracle = torch_ops.RmsNorm(weight, 1e-5), reference.RmsNorm(weight, 1e-5)
    else:
        fast = torch_ops.LayerNorm(weight, bias, 1e-5, 12)
        oracle = reference.LayerNorm(weight, bias, 1e-5, 12)
    stream, expected_stream = x.clone(), x.clone()
    torch.testing.assert_close(fast(stream, delta), oracle(expected_stream, delta), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stream, x + delta)
    torch.testing.assert_close(expected_stream, x + delta)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_norm_computes_in_float32(dtype: torch.dtype) -> None:
    x, weight = rand(3, 40, dtype=dtype) * 100, rand(40, dtype=dtype)
    expected = reference.RmsNorm(weight.double(), 1e-5)(x.double())
    torch.testing.assert_close(torch_ops.RmsNorm(weight, 1e-5)(x).double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim", "pairs"), [(1, 1, 2, 1), (5, 3, 16, 8), (4, 2, 12, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate(num_tokens: int, num_heads: int, head_dim: int, pairs: int, dtype: torch.dtype) -> None:
    packed = rand(num_tokens, num_heads + 2, head_dim, dtype=dtype)
    table = torch_ops.rotary_table(torch.arange(num_tokens) * 1000, rand(pairs).abs())
    expected = packed.double()
    reference.rotate(expected[:, :num_heads], table)
    torch_ops.rotate(packed[:, :num_heads], table)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(packed.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2), (4, 4)])
def test_write_kv(num_heads: int, num_kv_heads: int) -> None:
    slab = torch.zeros(5, 3, 2, num_kv_heads, 4, 6)
    expected = slab.clone()
    qkv = rand(7, num_heads + 2 * num_kv_heads, 6)
    mapping = CellMapping(torch.tensor([4, 4, 0, 1, 1, 1, 1]), torch.tensor([2, 3, 0, 0, 1, 2, 3]))
    torch_ops.write_kv(qkv, KvLayer(slab[:, 1]), mapping)
    reference.write_kv(qkv, KvLayer(expected[:, 1]), mapping)
    assert torch.equal(slab, expected)
    assert slab[:, 1].any()
    assert not slab[:, 0].any()
    assert not slab[:, 2].any()


@pytest.mark.parametrize("name", sorted(torch_ops.ACTIVATIONS))
def test_gated_activation(name: str) -> None:
    gate_up = rand(3, 14)
    expected = torch_ops.ACTIVATIONS[name](gate_up[:, :7].double()) * gate_up[:, 7:].double()
    actual = torch_ops.gated(torch_ops.ACTIVATIONS[name])(gate_up)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not can_pack(torch.zeros(1, 1)), reason="this build of torch has no packed MKL product")
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (7, 3), (33, 48), (130, 65)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_linear_at_every_row_count(num_out: int, num_in: int, has_bias: bool) -> None:
    weight, bias = rand(num_out, num_in), rand(num_out) if has_bias else None
    packed, plain = PackedLinear(weight, bias), PlainLinear(weight.double(), None if bias is None else bias.double())
    for num_rows in (*range(1, 20), 64, 511, 512, 513, 700):
        x = rand(num_rows, num_in)
        torch.testing.assert_close(packed(x).double(), plain(x.double()), rtol=1e-4, atol=1e-4)


def test_packed_linear_takes_strided_rows() -> None:
    weight = rand(8, 6)
    x = rand(5, 12)[:, ::2]
    torch.testing.assert_close(LinearFactory()(weight)(x), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_kv_layer_tiles_address_the_slab() -> None:
    slab = torch.from_numpy(np.arange(3 * 2 * 2 * 2 * 4 * 5, dtype=np.float32).reshape(3, 2, 2, 2, 4, 5))
    layer = KvLayer(slab[:, 1])
    for block in range(3):
        for kind in range(2):
            for head in range(2):
                tile = layer.tiles[block * layer.tiles_per_block + kind * 2 + head].view(4, 5)
                assert torch.equal(tile, slab[block, 1, kind, head])
