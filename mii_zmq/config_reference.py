# SPDX-License-Identifier: Apache-2.0
"""The configuration reference, docs/configuration.md, written from the config classes; settings from a TOML file."""

from __future__ import annotations

import difflib
import tomllib
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal

from mii_zmq.config import (
    BrokerConfig,
    EngineConfig,
    GatewayConfig,
    LaunchConfig,
    WorkerConfig,
    settings_of,
)
from mii_zmq.errors import ConfigError
from mii_zmq.telemetry_config import TelemetryConfig

MAX_FILE_BYTES = 2**20

_SECTIONS: tuple[tuple[type, str, str], ...] = (
    (
        LaunchConfig,
        "Launcher",
        "`python -m mii_zmq serve MODEL`, keyword arguments of `serve()`. `--deployment-name` sets `deployment`.",
    ),
    (
        EngineConfig,
        "Engine",
        "`serve`, `scripts/worker` and `python -m mii_zmq.worker`; keyword arguments of `pipeline()` and `serve()`.",
    ),
    (WorkerConfig, "Worker group", "`scripts/worker` and `python -m mii_zmq.worker`, beside the engine's settings."),
    (BrokerConfig, "Broker", "`python -m mii_zmq.broker`."),
    (GatewayConfig, "Gateway", "`python -m mii_zmq.gateway`."),
    (
        TelemetryConfig,
        "Logs and traces",
        "Every process; `serve` passes them on. [deployment.md](deployment.md) says what they give.",
    ),
)

_INTRODUCTION = """\
# Configuration

Written by `python -m mii_zmq config --write docs/configuration.md` from the classes in `mii_zmq/config.py`; a test
fails when it is out of date. A setting `some_name` is the option `--some-name` on the command line (a switch that is
on by default is put out with `--no-some-name`). Unknown settings are errors that name the nearest known one.

`python -m mii_zmq serve --config FILE` reads the launcher's and the engine's settings from a TOML file, so that a
command line fits into a unit file; what stands on the command line wins:

```toml
model = "demo"
deployment = "chat"
replicas = 2
port = 28080
max_model_len = 2048
```

Environment variables: `MII_ZMQ_CACHE_DIR` (converted models, compiled kernels; default: `mii_zmq` in `XDG_CACHE_HOME`
or `~/.cache`), `MII_ZMQ_RUN_DIR` (sockets and the registry of running deployments; a private directory with a short
path), `MII_ZMQ_LOG_LEVEL` (default: INFO; WARNING under `serve`), `MII_ZMQ_LOG_FORMAT` (`text` or `json`), and
OpenTelemetry's own (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_TRACES_SAMPLER`,
`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_BSP_...`, `OTEL_SDK_DISABLED`), which hold where no setting says
otherwise.
"""


def markdown() -> str:
    """The whole document."""
    parts = [_INTRODUCTION]
    for cls, title, where in _SECTIONS:
        lines = [f"## {title}", "", where, "", "| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
        lines.extend(_rows(cls))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def write(path: Path) -> bool:
    """Write the document; returns whether anything changed. Raises ConfigError when the file cannot be written."""
    new = markdown()
    try:
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if new != old:
            path.write_text(new, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return new != old


def read_settings(path: Path, *classes: type, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Settings from a TOML file whose keys are fields of `classes`; values are checked when the configs are built.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or has a key that no class knows.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the settings in {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes; that is no file of settings")
    try:
        settings = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML file: {error}") from None
    known = [f.name for cls in classes for f in settings_of(cls) if f.name not in skip]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"{path}: unknown setting {key!r}{hint}")
    return settings


def _rows(cls: type) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    inherited = () if cls is TelemetryConfig else [f.name for f in fields(TelemetryConfig)]
    for f in fields(cls):
        if f.name in inherited:
            continue  # they have a table of their own
        cells = (f"`{f.name}`", _type_name(hints[f.name]), _default(f), f.metadata.get("help", ""))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _type_name(hint: Any) -> str:
    arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
    if typing.get_origin(hint) is tuple:
        return "list of text"
    is_literal = typing.get_origin(hint) is Literal
    plain = hint if is_literal or not arms else arms[0]
    if typing.get_origin(plain) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(plain))
    return {str: "text", int: "integer", float: "number", bool: "yes or no"}[plain]


def _default(f: Field[Any]) -> str:
    if f.default is MISSING:
        return "required"
    if f.default is None:
        return ""
    if isinstance(f.default, bool):
        return "yes" if f.default else "no"
    return f"`{','.join(f.default) if isinstance(f.default, tuple) else f.default}`"
