# SPDX-License-Identifier: Apache-2.0
"""The written reference is what the classes say, and a settings file is checked like a command line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from mii_zmq import config_reference
from mii_zmq.cli import main
from mii_zmq.config import BrokerConfig, EngineConfig, GatewayConfig, LaunchConfig, WorkerConfig
from mii_zmq.errors import ConfigError
from mii_zmq.telemetry_config import TelemetryConfig

ROOT = Path(__file__).resolve().parents[1]


def test_document_is_up_to_date() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == config_reference.markdown(), "run: python -m mii_zmq config --write docs/configuration.md"


def test_every_setting_has_a_row_with_a_meaning() -> None:
    rows = [line.split(" | ") for line in config_reference.markdown().splitlines() if line.startswith("| `")]
    names = [row[0].strip("| `") for row in rows]
    classes = (LaunchConfig, EngineConfig, WorkerConfig, BrokerConfig, GatewayConfig)
    telemetry = [f.name for f in fields(TelemetryConfig)]
    own = [f.name for cls in classes for f in fields(cls) if f.name not in telemetry]
    assert names == own + telemetry
    assert all(len(row) == 4 and len(row[3]) > 8 for row in rows)


def test_command_writes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "configuration.md"
    assert main(["config", "--write", str(path)]) == 0
    assert path.read_text() == config_reference.markdown()
    assert main(["config", "--write", str(path)]) == 0
    assert "up to date" in capsys.readouterr().out
    assert main(["config"]) == 0
    assert "token_budget" in capsys.readouterr().out


def test_settings_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('model = "demo"\nreplicas = 2\n')
    assert config_reference.read_settings(path, LaunchConfig, EngineConfig) == {"model": "demo", "replicas": 2}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("replica = 2", "did you mean 'replicas'"),
        ("replicas = ", "no TOML file"),
        ("a = " + "[" * 100_000, "no TOML file"),
        ("x = 1", "unknown setting 'x'; known: deployment"),
    ],
)
def test_bad_settings_file(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        config_reference.read_settings(path, LaunchConfig, EngineConfig)


def test_missing_settings_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        config_reference.read_settings(tmp_path / "none.toml", LaunchConfig)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("replicas = 0\n", "replicas is 0"),
        ('replicas = "two"\n', "replicas"),
        ("[replicas]\n", "replicas"),
        ('brokers = 1\nmodel = ""\n', "model is empty"),
    ],
)
def test_serve_refuses_what_the_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 1
    assert error in capsys.readouterr().err
