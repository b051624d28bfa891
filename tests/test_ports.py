# SPDX-License-Identifier: Apache-2.0
"""The gateway's port is found before anything starts."""

from __future__ import annotations

import socket

import pytest

from mii_zmq.errors import ConfigError
from mii_zmq.ports import choose_port, reachable_host


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            choose_port("127.0.0.1", port)
    assert choose_port("127.0.0.1", 0) == 0


@pytest.mark.parametrize("host", ["no such host", "a..b", "x" * 100])
def test_a_host_without_an_address_is_refused_in_words(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        choose_port(host, None)


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("localhost", "localhost")]
)
def test_a_wildcard_is_shown_as_what_can_be_typed(host: str, shown: str) -> None:
    assert reachable_host(host) == shown
