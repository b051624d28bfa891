# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mii_zmq import config, telemetry_config
from mii_zmq.config import (
    BrokerConfig,
    EngineConfig,
    GatewayConfig,
    LaunchConfig,
    WorkerConfig,
    build,
)
from mii_zmq.errors import ConfigError

ALL = (EngineConfig, WorkerConfig, BrokerConfig, GatewayConfig, LaunchConfig)


def test_build_takes_what_the_class_has() -> None:
    engine = build(EngineConfig, {"model": "m", "block_size": 32, "prefix_cache": False})
    assert (engine.model, engine.block_size, engine.prefix_cache, engine.max_sequences) == ("m", 32, False, 256)
    with pytest.raises(dataclasses.FrozenInstanceError):
        engine.model = "other"  # type: ignore[misc]


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'blocksize' for EngineConfig; did you mean 'block_size'\?"):
        build(EngineConfig, {"model": "m", "blocksize": 32})
    with pytest.raises(ConfigError, match="known: host, port"):
        build(GatewayConfig, {"zzz": 1})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "model"),
        ({"model": ""}, "model is empty"),
        ({"model": 5}, "model: Expected `str`, got `int`"),
        ({"model": "m", "block_size": 48}, "block_size is 48; it must be a power of two"),
        ({"model": "m", "block_size": 0}, "block_size is 0"),
        ({"model": "m", "max_sequences": -1}, "max_sequences is -1"),
        ({"model": "m", "token_budget": 1.5}, "token_budget"),
        ({"model": "m", "gpu_memory_fraction": 1.5}, "gpu_memory_fraction is 1.5"),
        ({"model": "m", "dtype": "int4"}, "dtype"),
        ({"model": "m", "tensor_parallel": 0}, "tensor_parallel is 0; it must be more than 0"),
        ({"model": "m", "device_index": -1}, "device_index is -1; it must be 0 or more"),
    ],
)
def test_engine_settings_are_checked(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace("(", r"\(")):
        build(EngineConfig, values)


@pytest.mark.parametrize("cls", ALL)
def test_every_setting_has_help(cls: type[Any]) -> None:
    for field in dataclasses.fields(cls):
        assert field.metadata.get("help"), field.name


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "x" * 201])
def test_deployment_names_are_short_printable_words(name: str) -> None:
    with pytest.raises(ConfigError, match="deployment name"):
        WorkerConfig(deployment=name)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///run/x"])
def test_private_endpoints_are_allowed(endpoint: str) -> None:
    assert config.check_endpoint(endpoint, insecure=False) == endpoint


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "tcp://example.org:1", "tcp://127.example.org:1"]
)
def test_endpoints_for_strangers_need_consent(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        config.check_endpoint(endpoint, insecure=False)
    assert config.check_endpoint(endpoint, insecure=True) == endpoint


@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:1", "ipc://", "tcp://"])
def test_other_endpoints_are_malformed(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="must be tcp"):
        config.check_endpoint(endpoint, insecure=True)


@pytest.mark.parametrize("brokers", [(), ("nowhere",), ("tcp://h",), ("tcp://h:0",), ("tcp://h:\N{SUPERSCRIPT TWO}",)])
def test_brokers_are_named_and_can_be_connected_to(brokers: tuple[str, ...]) -> None:
    for cls, values in ((GatewayConfig, {}), (WorkerConfig, {"deployment": "d"})):
        with pytest.raises(ConfigError, match="brokers is empty|must be tcp"):
            build(cls, {**values, "brokers": brokers})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_times_are_numbers_above_0(value: float) -> None:
    for cls, values in (
        (GatewayConfig, {"shutdown_timeout_s": value}),
        (BrokerConfig, {"quarantine_s": value}),
        (LaunchConfig, {"deployment": "d", "drain_timeout_s": value}),
        (WorkerConfig, {"deployment": "d", "load_timeout_s": value}),
        (EngineConfig, {"model": "m", "step_timeout_s": value}),
    ):
        with pytest.raises(ConfigError, match=f"is {value}; it must be more than 0"):
            build(cls, values)


def test_a_gateway_for_strangers_needs_consent() -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        LaunchConfig(deployment="d", host="0.0.0.0")
    with pytest.raises(ConfigError, match="port is 70000"):
        LaunchConfig(deployment="d", port=70000)


def test_the_run_directory_must_be_private(run_directory: Path) -> None:
    assert config.run_dir() == run_directory
    run_directory.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        config.run_dir()


def test_the_run_directory_is_made_private(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MII_ZMQ_RUN_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_directory))
    assert stat.S_IMODE(config.run_dir().stat().st_mode) == 0o700


def test_the_cache_directory_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MII_ZMQ_CACHE_DIR", str(tmp_path / "here"))
    assert config.cache_dir() == tmp_path / "here"
    monkeypatch.delenv("MII_ZMQ_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.cache_dir() == tmp_path / "mii_zmq"


@pytest.mark.parametrize(
    ("variable", "directory"), [("MII_ZMQ_CACHE_DIR", config.cache_dir), ("MII_ZMQ_RUN_DIR", config.run_dir)]
)
def test_a_directory_that_cannot_be_made_is_a_clear_error(
    variable: str, directory: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=variable):
        directory()


def test_a_log_level_that_does_not_exist_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MII_ZMQ_LOG_LEVEL", "debug")
    assert telemetry_config.log_level() == "DEBUG"
    monkeypatch.setenv("MII_ZMQ_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="MII_ZMQ_LOG_LEVEL is 'loud'; it must be DEBUG, INFO"):
        telemetry_config.log_level()


def test_a_deployment_s_gateways_have_its_admin_endpoints() -> None:
    for value in (False, True):
        launch = config.build(config.LaunchConfig, {"deployment": "d", "admin_endpoints": value})
        assert launch.gateway(("tcp://127.0.0.1:5",), 0).admin_endpoints is value
