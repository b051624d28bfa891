# SPDX-License-Identifier: Apache-2.0
"""What the tasks of asyncio were waiting for, in the report of a test that ran into a time limit: of the main thread
pytest-timeout can only show that its loop waits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Generator, Iterator
from typing import Any

import pytest

MAX_TASKS = 50
FRAMES = ("cr_frame", "gi_frame", "ag_frame")
AWAITED = ("cr_await", "gi_yieldfrom", "ag_await")
"""Of coroutines, generators, and asynchronous generators."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and report.failed and _is_timeout(call.excinfo.value):
        report.sections.append(("Stacks of asyncio tasks", "\n".join(_tasks())))
    return report


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, TimeoutError) or "from pytest-timeout" in str(error)


def _tasks() -> Iterator[str]:
    """Of all loops, in whichever thread."""
    # isinstance would ask the objects for their class, at which proxies of some libraries raise or warn.
    pending = [found for found in gc.get_objects() if issubclass(type(found), asyncio.Task) and not found.done()]
    for task in pending[:MAX_TASKS]:
        yield f"{task.get_name()}\n{_stack(task)}"
    if len(pending) > MAX_TASKS:
        yield f"... and {len(pending) - MAX_TASKS} more"


def _stack(task: asyncio.Task[Any]) -> str:
    """Down to what is awaited; Task.print_stack stops at the outermost coroutine."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = _first(awaited, FRAMES)
        if frame is None:
            lines.append(f"  waits for {awaited!r}")
            break
        lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
        awaited = _first(awaited, AWAITED)
    return "\n".join(lines)


def _first(obj: Any, names: tuple[str, ...]) -> Any:
    return next((getattr(obj, name) for name in names if hasattr(obj, name)), None)
