# SPDX-License-Identifier: Apache-2.0
"""The settings of logs and traces, which all processes share, and how a setting is declared.

The environment variables MII_ZMQ_LOG_LEVEL and MII_ZMQ_LOG_FORMAT are read only here.
"""

from __future__ import annotations

import logging
import os
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal
from urllib.parse import urlsplit

from mii_zmq.errors import ConfigError


def setting(help_text: str, default: Any = MISSING, factory: Any = MISSING) -> Any:
    """A dataclass field with help text."""
    metadata = {"help": help_text}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Logs and traces: what every process takes, and who starts others passes on."""

    log_format: Literal["text", "json"] | None = setting(
        "lines for people, or one JSON object per line (default: MII_ZMQ_LOG_FORMAT, or text)", None
    )
    otlp_endpoint: str | None = setting(
        "URL of an OpenTelemetry collector that takes OTLP over HTTP, as http://127.0.0.1:4318 (default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT; without, nothing is traced)",
        None,
    )
    trace_ratio: float | None = setting(
        "share of the requests without a trace of their caller's that are traced (default: OTEL_TRACES_SAMPLER, or 1)",
        None,
    )

    def __post_init__(self) -> None:
        if self.otlp_endpoint is not None:
            check_http_url(self.otlp_endpoint, "otlp_endpoint")
        if self.trace_ratio is not None and not 0 <= self.trace_ratio <= 1:
            raise ConfigError(f"trace_ratio is {self.trace_ratio}; it must be in [0, 1]")

    @property
    def telemetry(self) -> dict[str, Any]:
        """These settings alone, for the configuration of another process."""
        return {f.name: getattr(self, f.name) for f in fields(TelemetryConfig)}


def check_http_url(url: str, name: str) -> str:
    """Refuse what is no http or https URL with a host."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"{name} is {url[:200]!r}; it must be a URL as http://127.0.0.1:4318")
    return url


def log_level() -> str:
    """Raises ConfigError when MII_ZMQ_LOG_LEVEL names none."""
    level = os.environ.get("MII_ZMQ_LOG_LEVEL", "INFO")
    if level.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(f"MII_ZMQ_LOG_LEVEL is {level!r}; it must be DEBUG, INFO, WARNING, ERROR or CRITICAL")
    return level.upper()


def log_format() -> str:
    """Raises ConfigError when MII_ZMQ_LOG_FORMAT names none."""
    name = os.environ.get("MII_ZMQ_LOG_FORMAT", "text")
    if name.lower() not in ("text", "json"):
        raise ConfigError(f"MII_ZMQ_LOG_FORMAT is {name!r}; it must be text or json")
    return name.lower()
