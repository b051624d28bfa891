# SPDX-License-Identifier: Apache-2.0
"""Structural tags for formats of tool calls that frame a section, or write arguments as pairs of tags. Pure.

`SECTIONS` is a table like the one of the readers (`tool_formats`): what opens the calls, what stands around each of
them, and what ends them. Spelled as the families' chat templates spell it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mii_zmq.gateway.call_formats import Format, Schemas, arguments, call_list, const, either, regex, sequence

_LIST = ('{"name": "NAME", "arguments": ', "}", ", ")


@dataclass(frozen=True, slots=True)
class Section:
    """How the calls of one answer are written. `begin` of each call has the tool's name in place of NAME."""

    opening: str
    begin: str
    end: str
    separator: str
    closing: str
    style: str = "json"
    bracket: str = ""
    """Stands behind the opening."""
    number: bool = False
    """A number stands between `begin` and `behind_number`."""
    behind_number: str = ""
    is_repeated: bool = False
    """Each call has a section of its own."""
    others: tuple[str, ...] = ()
    """Marks by which its reader finds calls as well; an answer that is guarded never holds them."""

    def behind_opening(self, schemas: Schemas, is_parallel: bool) -> Format:
        """The section but for its opening; where each call has its own, of one call."""
        tags = [self._tag(name, schema) for name, schema in schemas.items()]
        if self.is_repeated:
            return sequence(either(tags), const(self.closing))
        calls = call_list(tags, self.separator, is_parallel)
        bracket = [const(self.bracket)] if self.bracket else []
        return sequence(*bracket, calls, const(self.closing))

    def calls(self, schemas: Schemas, is_parallel: bool) -> Format:
        """The whole answer."""
        body = self.behind_opening(schemas, is_parallel)
        if not self.is_repeated:
            return sequence(const(self.opening), body)
        tag = {"type": "tag", "begin": self.opening, "content": body, "end": ""}
        return call_list([tag], self.separator, is_parallel)

    def _tag(self, name: str, schema: Mapping[str, Any] | None) -> Format:
        content = arguments(schema, self.style)
        if self.number:
            content = sequence(regex("[0-9]{1,3}"), const(self.behind_number), content)
        return {"type": "tag", "begin": self.begin.replace("NAME", name), "content": content, "end": self.end}


_DEEPSEEK_MARK = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_END, _DEEPSEEK_CLOSING = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_BEGIN = "<｜tool▁call▁begin｜>"
SECTIONS: dict[str, tuple[Section, ...]] = {
    "qwen3_coder": (
        Section("<tool_call>", "\n<function=NAME>\n", "</function>", "\n", "\n</tool_call>", "qwen_xml",
                is_repeated=True, others=("<function=",)),
    ),
    "glm4": (Section("<tool_call>", "NAME\n", "", "\n", "</tool_call>", "glm_xml", is_repeated=True),),
    "minimax_m2": (
        Section("<minimax:tool_call>", '\n<invoke name="NAME">\n', "</invoke>", "", "\n</minimax:tool_call>",
                "minimax_xml"),
    ),
    # DeepSeek V3.1, and V3 and R1 before it.
    "deepseek": (
        Section(_DEEPSEEK_MARK, f"{_DEEPSEEK_BEGIN}NAME<｜tool▁sep｜>", _DEEPSEEK_END, "", _DEEPSEEK_CLOSING,
                others=(_DEEPSEEK_BEGIN,)),
        Section(_DEEPSEEK_MARK, f"{_DEEPSEEK_BEGIN}function<｜tool▁sep｜>NAME\n```json\n",
                f"\n```{_DEEPSEEK_END}", "\n", _DEEPSEEK_CLOSING, others=(_DEEPSEEK_BEGIN,)),
    ),
    "kimi_k2": (
        Section("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.NAME:", "<|tool_call_end|>", "",
                "<|tool_calls_section_end|>", number=True, behind_number="<|tool_call_argument_begin|>",
                others=("<|tool_call_begin|>",)),
    ),
    "granite": (Section("<|tool_call|>", *_LIST, "]", bracket="[", others=("<tool_call>",)),),
    "lfm2": (Section("<|tool_call_start|>", *_LIST, "]<|tool_call_end|>", bracket="["),),
}  # fmt: skip
"""A family's spellings, of which a model shows by itself which one it has learned."""


def forced_section(name: str) -> Callable[[Schemas, bool], Format]:
    return lambda schemas, is_parallel: either([form.calls(schemas, is_parallel) for form in SECTIONS[name]])


def guarded_section(name: str) -> Callable[[Schemas, bool], Format]:
    """Any text, in which the opening goes on as calls."""

    def make(schemas: Schemas, is_parallel: bool) -> Format:
        forms = SECTIONS[name]
        content = either([form.behind_opening(schemas, is_parallel) for form in forms])
        return {
            "type": "dispatch",
            "rules": [[forms[0].opening, content]],
            "loop": is_parallel,
            "excludes": list(forms[0].others),
        }

    return make
