# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter for tests and dry runs: the environment that it needs, half of its time saved, and products
whose bits do not depend on where in a tile a row stands, nor on NumPy's BLAS."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

INTERPRETED = {"TRITON_INTERPRET": "1"}
"""To be set before Triton is imported."""


def adjust_interpreter() -> None:
    """Have triton.language replaced once per launch, and tiles multiplied the same way on every processor.

    The interpreter looks through all members of triton.language again at every call of a device function, of which a
    launch makes thousands; it never restores what such a call replaced, so that all but the first find nothing to do.

    It multiplies with NumPy's BLAS, which has kernels for newer processors that round a row according to its place in
    the tile. `einsum` without BLAS treats every row alike, so that what kernels promise of equal bits can be tested.

    Leaves a Triton alone that works otherwise.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder: type | None = getattr(interpreter, "InterpreterBuilder", None)
    if hasattr(builder, "create_dot"):
        builder.create_dot = _dot
    replace: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    scope: type | None = getattr(interpreter, "_LangPatchScope", None)
    if replace is None or scope is None:
        return

    @functools.cache
    def languages(fn: Any) -> list[ModuleType]:
        return [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]

    def replace_once(fn: Any) -> Any:
        is_replaced = not any(tl.core.is_builtin(language.load) for language in languages(fn))
        return scope() if is_replaced else replace(fn)

    interpreter._patch_lang = replace_once


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """`InterpreterBuilder.create_dot` for elements of 16 bits and more, which are all that our kernels multiply."""
    kind = d.data.dtype
    product = np.einsum("...ij,...jk->...ik", a.data.astype(kind), b.data.astype(kind), optimize=False)
    return type(d)(product + d.data, d.dtype.scalar)
