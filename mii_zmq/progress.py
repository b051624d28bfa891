# SPDX-License-Identifier: Apache-2.0
"""Shows how far the children of a deployment are with loading: bars on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any, TextIO


class Progress:
    """Takes announcements (`name`, `progress`, `fraction`); `close` before anything else is printed."""

    def __init__(self, stream: TextIO | None = None, prefix: str = "") -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._prefix = prefix
        self._bars: dict[str, Any] = {}
        self._texts: dict[str, str] = {}

    def __call__(self, facts: dict[str, Any]) -> None:
        text = facts.get("progress")
        if not isinstance(text, str):
            return
        name = self._prefix + str(facts.get("name", ""))
        if self._is_terminal:
            self._draw(name, text, facts.get("fraction"))
        elif self._texts.get(name) != text:
            self._texts[name] = text
            print(f"{name}: {text}" if name else text, file=self._stream, flush=True)

    def close(self) -> None:
        for bar in self._bars.values():
            bar.close()
        self._bars.clear()

    def _draw(self, name: str, text: str, fraction: Any) -> None:
        # Imported here: only a terminal needs it.
        from tqdm import tqdm

        if name not in self._bars:
            self._bars[name] = tqdm(
                total=1.0,
                file=self._stream,
                position=len(self._bars),
                leave=False,
                bar_format="{desc} {bar} {percentage:3.0f}% [{elapsed}]",
            )
        bar = self._bars[name]
        bar.set_description_str(f"{name}: {text}" if name else text, refresh=False)
        if isinstance(fraction, int | float):
            bar.n = min(1.0, max(0.0, float(fraction)))
        bar.refresh()
