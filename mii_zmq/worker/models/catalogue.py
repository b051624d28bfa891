# SPDX-License-Identifier: Apache-2.0
"""The table of models for people: `python -m mii_zmq models` and the matrix in README.md, made from the architectures.

Imports no torch, so that it prints at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from mii_zmq.errors import ConfigError
from mii_zmq.worker.models.archs import FALLBACK_TESTED, specs_by_architecture
from mii_zmq.worker.models.rope_config import ROPE_KINDS
from mii_zmq.worker.models.spec import ArchSpec, PositionKind, Role, WindowKind

BEGIN, END = "<!-- models:begin -->", "<!-- models:end -->"
NOTES = (
    "Every row is tested against transformers in float32: whole prompts, prompts in chunks, decodes, mixed batches "
    f"beyond windows and rotary borders. Rotary scaling: {', '.join(ROPE_KINDS[1:])}. Any other causal model that "
    "transformers supports with its attention interface runs on transformers' code over the paged attention here, as "
    "the last rows do."
)


@dataclass(frozen=True)
class Row:
    """One family."""

    family: str
    architectures: str
    models: str
    runs_on: str
    tensor_parallel: str
    gpu_kernels: str
    positions: str


HEADINGS = Row("family", "architectures", "models", "code", "tensor parallel", "GPU kernels", "positions, windows, MLP")


def rows() -> list[Row]:
    """Families with a spec in the order of the table of architectures, then those that run on transformers' code."""
    families: dict[str, dict[str, list[ArchSpec]]] = {}
    for architecture, specs in specs_by_architecture().items():
        families.setdefault(specs[0].family, {})[architecture] = specs
    own = [
        Row(
            family=family,
            architectures=", ".join(members),
            models="; ".join(dict.fromkeys(spec.published for specs in members.values() for spec in specs)),
            runs_on="spec",
            tensor_parallel="yes",
            gpu_kernels="yes",
            positions=", ".join(dict.fromkeys(f for specs in members.values() for s in specs for f in _features(s))),
        )
        for family, members in families.items()
    ]
    others = [
        Row(family, architecture, "", "transformers", "no", "no", "as in transformers")
        for family, architecture in FALLBACK_TESTED.items()
    ]
    return own + others


def text_table() -> str:
    """For a terminal."""
    cells = [astuple(HEADINGS), *map(astuple, rows())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join(lines)


def markdown_table() -> str:
    """For README.md."""
    lines = [astuple(HEADINGS), ("---",) * len(astuple(HEADINGS)), *map(astuple, rows())]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", NOTES])


def write_table(path: Path) -> bool:
    """Replace what stands between the two markers of a file; returns whether anything changed.

    Raises:
        ConfigError: the file cannot be read or has no markers.
    """
    try:
        old = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{path} lacks the lines {BEGIN} and {END}, between which the table is written")
    new = f"{before}{BEGIN}\n{markdown_table()}\n{END}{after}"
    if new != old:
        path.write_text(new, encoding="utf-8")
    return new != old


def _features(spec: ArchSpec) -> Iterator[str]:
    if spec.position is PositionKind.ROPE:
        is_partial = "partial_rotary_factor" in spec.fields or "rotary_dim" in spec.fields
        scaled = "rotary, scaled" if "rope_scaling" in spec.fields else "rotary"
        yield f"partly {scaled}" if is_partial else scaled
    else:
        yield {PositionKind.LEARNED: "learned", PositionKind.ALIBI: "ALiBi"}[spec.position]
    if spec.window is not WindowKind.NONE:
        yield "window" if spec.window is WindowKind.ALL_LAYERS else "windows by layer"
    if "attn_softcap" in spec.fields or "logit_softcap" in spec.fields:
        yield "soft-caps"
    if spec.has(Role.ROUTER):
        yield "experts and a shared one" if spec.has(Role.SHARED_UP) else "experts"
