# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
from typing import Any

import pytest

from mii_zmq.command_line import add_arguments, from_arguments, parse_arguments, to_arguments
from mii_zmq.config import BrokerConfig, EngineConfig, GatewayConfig, LaunchConfig, WorkerConfig


def parse(cls: type[Any], arguments: list[str]) -> Any:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, cls)
    return from_arguments(parser.parse_args(arguments), cls)


@pytest.mark.parametrize(
    "config_object",
    [
        EngineConfig(model="-odd name", num_blocks=7, prefix_cache=False, gpu_memory_fraction=0.25, dtype="bfloat16"),
        EngineConfig(model="m"),
        WorkerConfig(deployment="org/model", brokers=("ipc:///a", "tcp://127.0.0.1:5"), drain_timeout_s=2.5),
        BrokerConfig(client_endpoint="tcp://127.0.0.1:0", worker_endpoint="ipc:///run/w", insecure=True),
        GatewayConfig(host="0.0.0.0", port=0, insecure=True),
        LaunchConfig(deployment="d", replicas=3, rest=False, port=81),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_command_line_carries_a_config_unchanged(config_object: Any) -> None:
    assert parse(type(config_object), to_arguments(config_object)) == config_object


def test_defaults_stay_off_the_command_line() -> None:
    assert to_arguments(EngineConfig(model="m")) == ["--model=m"]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--client-endpont=x", "unknown argument '--client-endpont=x'; did you mean --client-endpoint?"),
        ("endpoint", "unknown argument 'endpoint'; see `broker --help`"),
    ],
)
def test_what_is_not_understood_is_named_with_the_nearest_option(
    argument: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser(prog="broker")
    add_arguments(parser, BrokerConfig)
    assert parse_arguments(parser, ["--insecure"]).insecure
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(parser, ["--insecure", argument])
    assert capsys.readouterr().err == f"broker: error: {said}\n"


def test_a_required_option_is_missed() -> None:
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parse(EngineConfig, [])
