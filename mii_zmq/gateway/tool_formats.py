# SPDX-License-Identifier: Apache-2.0
"""How families of models write tool calls: a table of what opens a call, what its value is and what closes it.

    llama3       {"name": "f", "parameters": {...}} as the whole answer or behind <|python_tag|>, several with ; between
    llama4       [f(x=1), g()] or llama3's JSON, either as the whole answer or behind <|python_start|>
    pythonic     [f(x=1), g()] as the whole answer
    hermes       <tool_call>{"name": "f", "arguments": {...}}</tool_call>               (Hermes, Qwen2.5, Qwen3)
    qwen3_coder  <tool_call><function=f><parameter=x>1</parameter></function></tool_call>       (Qwen3-Coder, Qwen3.5)
    glm4         <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>             (GLM-4.5 and later)
    minimax_m2   <minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke></minimax:tool_call>
    mistral      [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...] or [TOOL_CALLS]f[ARGS]{...}
    deepseek     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
                 (V3.1), with function<｜tool▁sep｜>f and the object in a ```json block before that (V3, R1)
    kimi_k2      <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}
    granite      <|tool_call|>[{"name": "f", "arguments": {...}}, ...]                                  (Granite 3)
    olmo3        <function_calls>, a call f(x=1) per line, </function_calls>
    lfm2         <|tool_call_start|>[f(x=1), g()]<|tool_call_end|>
    any          all of these, for a deployment that does not say which

Pure. Reading a stream is `tool_calls`' business, reading what stands in a call `tool_values`'.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mii_zmq.gateway.tool_values import JsonValue, PythonValue, TaggedValue, Tags, Value

MAX_HEAD_CHARS = 256
"""Between a marker and the value behind it: spaces, or a name with its marks."""
NAME = r"(?P<name>[\w.-]{1,128}?)"
Begin = Callable[[int, str | None], Value]


@dataclass(frozen=True, slots=True)
class Found:
    """Where a value begins, and the name that stands before it."""

    start: int
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """One way in which calls begin: a marker, the head behind it, and a value."""

    marker: str
    """Empty: it begins the answer."""
    begin: Begin
    """Makes the reader of the value that begins at an index."""
    starts: str = "{"
    """The head ends at one of these characters."""
    head: str = r"\s*"
    """What may stand between marker and value. A group `name`: of the tool; `first`: where the value begins, the group
    `of`: of the first tool in it."""
    within: str = r"\s"
    """The characters of heads: anything else shows at once that there is no call."""
    closings: Sequence[str] = ()
    """Texts that may stand behind the call, in this order, and belong to it."""
    repeats: bool = False
    """Another head may follow without a marker."""

    def find_value(self, text: str, start: int, names: Collection[str], is_end: bool) -> Found | bool:
        """The value whose head begins at `start`; False: there is none, True: more text will tell."""
        stop = min(len(text), start + MAX_HEAD_CHARS)
        behind = _inside(self.within).match(text, start, stop)
        end = behind.end() if behind else start
        if end == stop:
            return not is_end and end < start + MAX_HEAD_CHARS
        head = _compiled(self.head).fullmatch(text, start, end) if text[end] in self.starts else None
        if head is None:
            return False
        groups = head.groupdict()
        if any(groups[group] not in names for group in ("name", "of") if group in groups):
            return False
        return Found(head.start("first") if "first" in groups else end, groups.get("name"))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    openings: tuple[Opening, ...]
    has_short_ids: bool = False
    """Its templates take only ids of nine letters and digits."""


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@functools.cache
def _inside(characters: str) -> re.Pattern[str]:
    return re.compile(f"[{characters}]*")


def _tagged(tags: Tags) -> Begin:
    return functools.partial(TaggedValue, tags)


def _list_of_calls(marker: str, closings: Sequence[str] = ()) -> Opening:
    head = r"\s*(?P<first>\[)\s*(?P<of>[\w.-]{1,128})\s*"
    return Opening(marker, PythonValue, "(", head, r"\s\w.\-\[", closings)


_QWEN_TAGS = Tags("<parameter=", ">", "", "</parameter>", "</function>", start=">", has_own_lines=True)
_GLM_TAGS = Tags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
_MINIMAX_TAGS = Tags('<parameter name="', '">', "", "</parameter>", "</invoke>", start=">")
_DEEPSEEK_HEAD = (
    rf"\s*(?:<｜tool▁call▁begin｜>)?\s*(?:function<｜tool▁sep｜>)?{NAME}(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*"
)
_KIMI_HEAD = rf"\s*(?:<\|tool_call_begin\|>)?\s*(?:functions\.)?{NAME}:\d{{1,9}}\s*<\|tool_call_argument_begin\|>\s*"
_MISTRAL_HEAD = rf"\s*{NAME}(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?\s*"

_BARE_JSON = Opening("", JsonValue, repeats=True)
_BARE_CALLS = _list_of_calls("")
_HERMES = (Opening("<tool_call>", JsonValue, "{[", closings=("</tool_call>",)),)
_QWEN3_CODER = (
    Opening("<tool_call>", _tagged(_QWEN_TAGS), ">", rf"\s*<function={NAME}", r"\s\w.\-<=", ("</tool_call>",)),
    # The model often leaves the outer tag out.
    Opening("<function=", _tagged(_QWEN_TAGS), ">", NAME, r"\w.\-", ("</tool_call>",)),
)
_FORMATS = (
    ToolFormat("llama3", (Opening("<|python_tag|>", JsonValue, "{[", repeats=True), _BARE_JSON)),
    ToolFormat("pythonic", (_BARE_CALLS,)),
    ToolFormat(
        "llama4",
        (
            _list_of_calls("<|python_start|>", ("<|python_end|>",)),
            Opening("<|python_start|>", JsonValue, "{[", closings=("<|python_end|>",), repeats=True),
            Opening("<|python_end|>", JsonValue, repeats=True),
            _BARE_CALLS,
            _BARE_JSON,
        ),
    ),
    ToolFormat("hermes", _HERMES),
    ToolFormat("qwen3_coder", (*_HERMES, *_QWEN3_CODER)),
    ToolFormat("glm4", (Opening("<tool_call>", _tagged(_GLM_TAGS), "<", rf"\s*{NAME}\s*", r"\s\w.\-"),)),
    ToolFormat(
        "minimax_m2",
        (
            Opening(
                "<minimax:tool_call>",
                _tagged(_MINIMAX_TAGS),
                ">",
                rf'\s*<invoke name="{NAME}"',
                r'\s\w.\-<="',
                ("</minimax:tool_call>",),
                repeats=True,
            ),
        ),
    ),
    ToolFormat(
        "mistral",
        (
            Opening("[TOOL_CALLS]", JsonValue, "{["),
            Opening("[TOOL_CALLS]", JsonValue, "{", _MISTRAL_HEAD, r"\s\w.\-\[\]"),
        ),
        has_short_ids=True,
    ),
    ToolFormat(
        "deepseek",
        tuple(
            Opening(
                marker,
                JsonValue,
                "{",
                _DEEPSEEK_HEAD,
                r"\s\w.\-<>｜▁`",
                ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            )
            for marker in ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
        ),
    ),
    ToolFormat(
        "kimi_k2",
        tuple(
            Opening(
                marker,
                JsonValue,
                "{",
                _KIMI_HEAD,
                r"\s\w.\-<>|:",
                ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            )
            for marker in ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
        ),
    ),
    ToolFormat(
        "granite",
        (
            Opening("<|tool_call|>", JsonValue, "{[", r"\s*(?:<tool_call>)?\s*", r"\s\w<>"),
            Opening("<tool_call>", JsonValue, "{[", closings=("</tool_call>",)),
        ),
    ),
    ToolFormat(
        "olmo3",
        (
            Opening(
                "<function_calls>",
                PythonValue,
                "(",
                rf"\s*{NAME}\s*",
                r"\s\w.\-",
                ("</function_calls>",),
                repeats=True,
            ),
        ),
    ),
    ToolFormat(
        "lfm2",
        (
            _list_of_calls("<|tool_call_start|>", ("<|tool_call_end|>",)),
            Opening("<|tool_call_start|>", JsonValue, "{[", closings=("<|tool_call_end|>",)),
        ),
    ),
)
ANY = ToolFormat("any", tuple({opening: None for entry in _FORMATS for opening in entry.openings}), has_short_ids=True)
FORMATS = {entry.name: entry for entry in (*_FORMATS, ANY)}
