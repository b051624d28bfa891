# SPDX-License-Identifier: Apache-2.0
"""Splits an answer that begins with <think>...</think> into reasoning and the answer proper, as it arrives.

Only a block at the very start counts; where the chat template has opened it in the prompt, the worker begins the
answer's text with the opening tag (`GenerateBody.return_reasoning_start`), so that this module needs to know nothing of
the model. Spaces around the tags belong to neither part. What comes out depends on the text alone, not on how it was
cut. Pure.
"""

from __future__ import annotations

OPENING = "<think>"
CLOSING = "</think>"


class ReasoningSplitter:
    """One answer."""

    __slots__ = ("_held", "_step", "is_done")

    def __init__(self) -> None:
        self._held = ""
        self._step = self._read_start
        self.is_done = False
        """All that follows is the answer proper, as it is."""

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the text that have become certain."""
        if self.is_done:
            return "", text
        self._held += text
        return self._run(is_end=False)

    def finish(self) -> tuple[str, str]:
        """What is left at the end. Reasoning that was not closed is reasoning."""
        return self._run(is_end=True)

    def _run(self, *, is_end: bool) -> tuple[str, str]:
        parts = ["", ""]
        while not self.is_done and self._step(parts, is_end):
            pass
        if self.is_done:
            parts[1] += self._held
            self._held = ""
        return parts[0], parts[1]

    def _read_start(self, parts: list[str], is_end: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(OPENING):
            self._held = text.removeprefix(OPENING)
            self._step = self._read_opening_space
        elif OPENING.startswith(text) and not is_end:
            return False
        else:
            self.is_done = True
        return True

    def _read_opening_space(self, parts: list[str], is_end: bool) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._read_reasoning
        return bool(self._held)

    def _read_reasoning(self, parts: list[str], is_end: bool) -> bool:
        end = self._held.find(CLOSING)
        if end >= 0:
            parts[0] += self._held[:end].rstrip()
            self._held = self._held[end + len(CLOSING) :]
            self._step = self._read_closing_space
            return True
        certain = len(self._held[: self._tag_start()].rstrip())
        parts[0] += self._held[:certain]
        # Spaces at the end of the answer are dropped like those before the closing tag.
        if is_end:
            parts[0] += self._held[certain:].rstrip()
        self._held = "" if is_end else self._held[certain:]
        return False

    def _read_closing_space(self, parts: list[str], is_end: bool) -> bool:
        self._held = self._held.lstrip()
        self.is_done = bool(self._held)
        return self.is_done

    def _tag_start(self) -> int:
        """Where the held text ends, or a beginning of the closing tag at its end begins."""
        for size in range(min(len(CLOSING) - 1, len(self._held)), 0, -1):
            if self._held.endswith(CLOSING[:size]):
                return len(self._held) - size
        return len(self._held)
