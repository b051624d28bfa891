# SPDX-License-Identifier: Apache-2.0
"""Triton kernels. One file per operation; every kernel has an oracle in `kernels/reference.py`.

Conventions: pointers into the KV pool are 64-bit; the pool is [layer][block][k or v][kv head][token][dim], so one
(block, head) tile of K or V is contiguous; grids are fixed and the work is read from device memory, so that every
kernel can be captured in a CUDA graph; programs without work return at once.
"""
