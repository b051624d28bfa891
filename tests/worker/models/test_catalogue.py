# SPDX-License-Identifier: Apache-2.0
"""The table of models says what the architectures say, and README.md holds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mii_zmq.errors import ConfigError
from mii_zmq.worker.models import catalogue
from mii_zmq.worker.models.archs import ARCHITECTURES, FALLBACK_TESTED, VARIANTS, find_spec

README = Path(__file__).parents[3] / "README.md"


def test_every_architecture_is_in_one_row() -> None:
    named = [name for row in catalogue.rows() for name in row.architectures.split(", ")]
    assert sorted(named) == sorted([*ARCHITECTURES, *FALLBACK_TESTED.values()])
    assert len({row.family for row in catalogue.rows()}) == len(catalogue.rows())
    assert not ARCHITECTURES.keys() & set(FALLBACK_TESTED.values())


def test_layouts_of_a_function_are_listed_and_differ() -> None:
    assert VARIANTS.keys() == {name for name, entry in ARCHITECTURES.items() if callable(entry)}
    for name, settings in VARIANTS.items():
        specs = [find_spec({"architectures": [name], **raw}) for raw in settings]
        assert len({repr(spec) for spec in specs}) == len(specs)


def test_what_find_spec_does_not_know() -> None:
    for names in (None, [], ["T5Model"], "LlamaForCausalLM", [None], [["LlamaForCausalLM"]]):
        assert find_spec({"architectures": names}) is None


def test_features() -> None:
    rows = {row.family: row for row in catalogue.rows()}
    assert rows["falcon"].positions == "rotary, scaled, ALiBi"
    assert rows["gemma2"].positions == "rotary, scaled, windows by layer, soft-caps"
    assert rows["qwen2_moe"].positions.endswith("experts and a shared one")
    assert (rows["granite"].runs_on, rows["granite"].tensor_parallel) == ("transformers", "no")
    assert "mixtral" in catalogue.text_table()


def test_readme_holds_the_table() -> None:
    assert f"{catalogue.BEGIN}\n{catalogue.markdown_table()}\n{catalogue.END}" in README.read_text(encoding="utf-8"), (
        "run: python -m mii_zmq models --write README.md"
    )


def test_writing_between_the_markers(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"before\n{catalogue.BEGIN}\nold\n{catalogue.END}\nafter\n")
    assert catalogue.write_table(file)
    assert not catalogue.write_table(file)
    text = file.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    file.write_text("no markers")
    with pytest.raises(ConfigError, match="lacks the lines"):
        catalogue.write_table(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        catalogue.write_table(tmp_path / "nowhere.md")


@pytest.mark.slow
def test_the_command_needs_no_torch() -> None:
    code = (
        "import sys\nfrom mii_zmq.cli import main\nassert main(['models']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "GPTNeoXForCausalLM" in done.stdout
