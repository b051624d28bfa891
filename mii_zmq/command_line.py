# SPDX-License-Identifier: Apache-2.0
"""Command lines made from the dataclasses of `config`, and configs from command lines: one `--option` per setting."""

from __future__ import annotations

import argparse
import difflib
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, TypeVar

from mii_zmq.config import build, settings_of

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser, cls: type, skip: tuple[str, ...] = ()) -> None:
    """Add one `--option` per field of `cls`; unset options stay out of the namespace."""
    hints = typing.get_type_hints(cls)
    for f in settings_of(cls):
        if f.name not in skip:
            _add_argument(parser, f, hints[f.name])


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """As `parse_args`, but what is not understood is named with the nearest option that is.

    A parser of commands sets `parser`, its own one, among the defaults of each.
    """
    namespace, rest = parser.parse_known_args(argv)
    if rest:
        command: argparse.ArgumentParser = getattr(namespace, "parser", parser)
        known = re.findall(r"--[\w-]+", command.format_help()) if rest[0].startswith("-") else []
        near = difflib.get_close_matches(rest[0].partition("=")[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; see `{command.prog} --help`"
        # Dozens of options would hide the line that matters.
        command.usage = argparse.SUPPRESS
        command.error(f"unknown argument {rest[0]!r}{hint}")
    return namespace


def from_arguments(namespace: argparse.Namespace, cls: type[T], **extra: Any) -> T:
    """Build `cls` from the options that `add_arguments` made."""
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    values = {name: value for name, value in vars(namespace).items() if name in names}
    return build(cls, {**values, **extra})


def to_arguments(config: Any) -> list[str]:
    """The command line from which `from_arguments` builds `config` again; defaults are left out."""
    arguments: list[str] = []
    for f in fields(config):
        value = getattr(config, f.name)
        option = "--" + f.name.replace("_", "-")
        if value is None or value == f.default or (f.default_factory is not MISSING and value == f.default_factory()):
            continue
        if isinstance(value, bool):
            arguments.append(option if value else option.replace("--", "--no-", 1))
        else:
            # One word, so that a value may begin with a dash.
            arguments.append(f"{option}={_show(value)}")
    return arguments


def _add_argument(parser: argparse.ArgumentParser, f: Field[Any], hint: Any) -> None:
    option = "--" + f.name.replace("_", "-")
    common: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS}
    has_default = f.default is not MISSING or f.default_factory is not MISSING
    shown = "" if f.default in (MISSING, None) else f" (default: {_show(f.default)})"
    common["help"] = (f.metadata.get("help", "") + shown).replace("%", "%%")
    arms = [arm for arm in typing.get_args(hint) if arm is not types.NoneType] if _is_union(hint) else [hint]
    kind = arms[0]
    if kind is bool:
        parser.add_argument(option, action=argparse.BooleanOptionalAction, **common)
    elif typing.get_origin(kind) is Literal:
        parser.add_argument(option, choices=typing.get_args(kind), required=not has_default, **common)
    elif typing.get_origin(kind) is tuple:
        parser.add_argument(option, type=_comma_separated, metavar="A,B", required=not has_default, **common)
    else:
        parser.add_argument(option, type=kind, metavar=kind.__name__.upper(), required=not has_default, **common)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _show(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
