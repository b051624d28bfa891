# SPDX-License-Identifier: Apache-2.0
"""The address at which a deployment's gateways listen: found free before anything starts, shown as clients type it."""

from __future__ import annotations

import logging
import socket

from mii_zmq.config import DEFAULT_REST_PORT
from mii_zmq.errors import ConfigError

log = logging.getLogger(__name__)


def choose_port(host: str, port: int | None) -> int:
    """The port for the gateway, checked before minutes go into loading a model.

    Raises:
        ConfigError: it is taken, or no address of this host has that name.
    """
    if port == 0:
        return 0
    wanted = DEFAULT_REST_PORT if port is None else port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host}: {error}; choose another host") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if port is None:
                log.info("port %d is taken; using a free one", wanted)
                return 0
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for a free one"
            ) from None
    return wanted


def reachable_host(host: str) -> str:
    """What a client on this host types to reach an address that may be a wildcard."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown
