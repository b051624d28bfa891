# SPDX-License-Identifier: Apache-2.0
"""`python -m mii_zmq.gateway`: the HTTP gateway's process.

It listens before a broker is there and becomes ready when one answers. The first SIGTERM or SIGINT drains, a second
one ends the process at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

import uvloop

from mii_zmq.client import AsyncClient
from mii_zmq.command_line import add_arguments, from_arguments, parse_arguments
from mii_zmq.config import GatewayConfig
from mii_zmq.errors import BrokerUnavailable, StartupError
from mii_zmq.gateway.app import listen, make_app, make_runner, open_door
from mii_zmq.gateway.door import Door
from mii_zmq.gateway.state import GATEWAY
from mii_zmq.logs import setup_logging
from mii_zmq.process import ChildLink
from mii_zmq.tracing import start_tracing

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mii_zmq.gateway", description="HTTP gateway of mii_zmq.")
    add_arguments(parser, GatewayConfig)
    ChildLink.add_arguments(parser)
    arguments = parse_arguments(parser, argv)
    link = ChildLink.from_arguments(arguments)
    try:
        setup_logging("gateway", getattr(arguments, "log_format", None))
        config = from_arguments(arguments, GatewayConfig)
        uvloop.run(serve(config, listen(config.host, config.port, share=config.share_port), link))
    except StartupError as error:
        link.announce(error=str(error))
        if not link.has_reader:
            log.error("%s", error)
        return 1
    return 0


BROKER_WAIT_S = 2.0
"""Before it opens and says ready the gateway waits this long for a broker: the first request shall find it."""
LAST_REQUESTS_S = 0.2
"""For requests on connections that were made just before the door was closed."""


async def serve(config: GatewayConfig, listener: socket.socket, link: ChildLink) -> None:
    """Serve on `listener` until a signal, then drain."""
    stop = _stop_at_signals()
    tracing = start_tracing(config, "gateway")
    client = AsyncClient(config.brokers, name="gateway")
    app = make_app(config, client, tracing)
    runner = make_runner(app)
    await runner.setup()
    try:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        with contextlib.suppress(BrokerUnavailable):
            await client.connect(BROKER_WAIT_S)
        door = await open_door(runner, listener)
        # Requests leave few cycles: full collections over the start-up's objects would be pauses only.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        log.info("ready: %s, brokers %s", url, ", ".join(config.brokers))
        link.announce(ready=True, url=url)
        await stop.wait()
        log.info("draining: running requests have %g s", config.shutdown_timeout_s)
        app[GATEWAY].is_leaving = True
        await _close(door)
        if not await app[GATEWAY].drain(config.shutdown_timeout_s):
            log.warning("some requests were not finished in time and got an error")
    finally:
        await runner.cleanup()
        if tracing is not None:
            tracing.close()


async def _close(door: Door) -> None:
    """No new connections, and an end to idle ones: clients find another gateway by connecting anew, without an error.

    Requests that are under way on the last connections are still served.
    """
    await door.close()
    await asyncio.sleep(LAST_REQUESTS_S)
    door.close_idle()


def _stop_at_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


if __name__ == "__main__":
    sys.exit(main())
