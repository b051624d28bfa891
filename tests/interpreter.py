# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter for tests: the environment that it needs, and half of its time saved."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

INTERPRETED = {
    "TRITON_INTERPRET": "1",
    # The interpreter multiplies tiles with NumPy, whose BLAS has kernels for newer processors (Haswell's, Zen's) that
    # round a row according to its place in the tile. This one's, which every x86-64 processor can run, do not.
    "OPENBLAS_CORETYPE": "Nehalem",
}
"""To be set before Triton and NumPy are imported."""


def hasten() -> None:
    """Have triton.language replaced once per launch.

    The interpreter looks through all members of triton.language again at every call of a device function, of which a
    launch makes thousands; it never restores what such a call replaced, so that all but the first find nothing to do.
    Leaves a Triton alone that works otherwise.
    """
    import triton.language as tl
    from triton.runtime import interpreter

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
