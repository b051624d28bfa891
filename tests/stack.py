# SPDX-License-Identifier: Apache-2.0
"""Real processes for end-to-end tests: a broker, worker groups that can come and go, and a gateway."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mii_zmq.client import AsyncClient, BackgroundLoop
from mii_zmq.process import Child, spawn

LOOPBACK = "tcp://127.0.0.1:0"
PATIENCE_S = 60.0


_given_ports: set[int] = set()


def unused_port() -> int:
    """A TCP port for a server that starts later: not one that the kernel could meanwhile give to a connection, nor one
    that this process, or another one of the same pytest-xdist, gives to somebody else."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = range(lowest - 10_000 + number, lowest, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    while True:
        port = random.choice(own)
        if port not in _given_ports:
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                _given_ports.add(port)
                return port


def unused_endpoint() -> str:
    """For a broker that is to come back after its end: its port goes to no connection in the meantime."""
    return f"tcp://127.0.0.1:{unused_port()}"


@dataclass
class Stack:
    """Started piece by piece; `close` ends everything that still runs."""

    deployment: str = "m"
    broker_options: list[str] = field(default_factory=list)
    groups: dict[str, Child] = field(default_factory=dict)
    gateway: Child | None = None
    url: str = ""

    client_endpoint: str = field(default_factory=unused_endpoint)
    worker_endpoint: str = field(default_factory=unused_endpoint)

    def __post_init__(self) -> None:
        self.start_broker()

    def start_broker(self) -> None:
        """A later one, after a kill, takes the same ports."""
        endpoints = ["--client-endpoint", self.client_endpoint, "--worker-endpoint", self.worker_endpoint]
        self.broker = spawn("mii_zmq.broker", [*endpoints, *self.broker_options], "broker")
        facts = self.broker.wait_ready(PATIENCE_S)
        self.client_endpoint, self.worker_endpoint = facts["client_endpoint"], facts["worker_endpoint"]

    def start_group(self, name: str, model: str, *options: str, wait: bool = True) -> Child:
        arguments = ["--model", model, "--deployment", self.deployment, "--brokers", self.worker_endpoint]
        child = spawn("mii_zmq.worker", [*arguments, "--group", name, *options], name)
        self.groups[name] = child
        if wait:
            child.wait_ready(180)
            self.wait_for(lambda: name in self.group_states())
        return child

    def start_gateway(self, *options: str) -> str:
        arguments = ["--port", "0", "--brokers", self.client_endpoint, *options]
        self.gateway = spawn("mii_zmq.gateway", arguments, "gateway")
        self.url = self.gateway.wait_ready(PATIENCE_S)["url"].rstrip("/")
        self.wait_for(lambda: http(self.url + "/health/ready")[0] == 200)
        return self.url

    def groups_status(self) -> dict[str, dict[str, Any]]:
        async def ask() -> dict[str, Any]:
            client = AsyncClient([self.client_endpoint])
            try:
                await client.connect(PATIENCE_S)
                return await client.status(PATIENCE_S)
            finally:
                await client.close()

        loop = BackgroundLoop()
        try:
            status = loop.run(ask())
        finally:
            loop.close()
        found = status["deployments"].get(self.deployment, {"groups": []})["groups"]
        return {group["group"]: group for group in found}

    def group_states(self) -> dict[str, str]:
        return {name: group["state"] for name, group in self.groups_status().items()}

    def used_blocks(self) -> int:
        return sum(group["load"].get("used_blocks", 0) for group in self.groups_status().values())

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> float:
        """Poll until `condition` holds; returns the seconds it took."""
        start = time.monotonic()
        while not condition():
            if time.monotonic() - start > timeout_s:
                raise AssertionError(f"the condition did not hold within {timeout_s:g} s")
            time.sleep(0.02)
        return time.monotonic() - start

    def close(self) -> None:
        children = [self.gateway, *self.groups.values(), self.broker]
        for child in children:
            if child is not None:
                child.stop(PATIENCE_S)


def http(url: str, body: Any = None, timeout_s: float = 300.0) -> tuple[int, bytes]:
    """One request; POST with JSON when there is a body. Returns status and body, also of errors."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def generate(url: str, deployment: str, prompts: Any, **params: Any) -> list[dict[str, Any]]:
    """MII's REST call; asserts success."""
    status, body = http(f"{url}/mii/{deployment}", {"prompts": prompts, **params})
    assert status == 200, body
    result: list[dict[str, Any]] = json.loads(body)
    return result


def stream_events(url: str, path: str, body: dict[str, Any], timeout_s: float = 300.0) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent stream, up to [DONE]."""
    request = urllib.request.Request(
        url + path, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        for line in response:
            if line.startswith(b"data: "):
                if line.strip() == b"data: [DONE]":
                    return
                yield json.loads(line[6:])
    raise AssertionError("the stream ended without [DONE]")
