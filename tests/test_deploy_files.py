# SPDX-License-Identifier: Apache-2.0
"""What docs/deploy holds names modules, options and routes that exist."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from mii_zmq.cli import _parser
from mii_zmq.command_line import add_arguments, from_arguments
from mii_zmq.config import BrokerConfig, EngineConfig, GatewayConfig, WorkerConfig

DEPLOY = Path(__file__).resolve().parents[1] / "docs" / "deploy"
CONFIGS: dict[str, tuple[type, ...]] = {
    "mii_zmq.broker": (BrokerConfig,),
    "mii_zmq.gateway": (GatewayConfig,),
    "mii_zmq.worker": (EngineConfig, WorkerConfig),
}


def check_command(command: list[str]) -> None:
    assert command[:2] == ["python", "-m"]
    module, *options = command[2:]
    if module == "mii_zmq":
        _parser().parse_args(options)
        return
    parser = argparse.ArgumentParser(exit_on_error=False)
    for cls in CONFIGS[module]:
        add_arguments(parser, cls)
    namespace = parser.parse_args(options)
    for cls in CONFIGS[module]:
        from_arguments(namespace, cls)


def containers(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pods = [d["spec"]["template"]["spec"] for d in documents if "template" in d["spec"]]
    return [container for pod in pods for container in pod["containers"]]


def test_manifests() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    found = containers(documents)
    for container in found:
        check_command(container["command"])
    assert [container["name"] for container in found] == ["broker", "gateway", "worker"]
    probes = [probe["httpGet"]["path"] for c in found for probe in c.values() if "httpGet" in probe]
    assert set(probes) == {"/health/live", "/health/ready"}


def test_unit() -> None:
    lines = (DEPLOY / "mii_zmq.service").read_text().splitlines()
    (command,) = [line.partition("=")[2].split() for line in lines if line.startswith("ExecStart=")]
    check_command(["python", *command[1:]])


def test_image() -> None:
    pairs = [line.split(" ", 1) for line in (DEPLOY / "Dockerfile").read_text().splitlines() if " " in line]
    words = {name: yaml.safe_load(rest) for name, rest in pairs if name in ("CMD", "ENTRYPOINT")}
    assert words["ENTRYPOINT"] == ["python", "-m", "mii_zmq"]
    check_command([*words["ENTRYPOINT"], *words["CMD"]])
