# SPDX-License-Identifier: Apache-2.0
"""`python -m mii_zmq.broker`: command line, signals, start and end of the broker process.

SIGTERM or SIGINT: no new requests, the accepted ones finish within the drain time, exit code 0. A second one: at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import sys

import uvloop

from mii_zmq import logs, transport
from mii_zmq.broker.broker import Broker
from mii_zmq.command_line import add_arguments, from_arguments, parse_arguments
from mii_zmq.config import BrokerConfig
from mii_zmq.errors import StartupError
from mii_zmq.process import ChildLink
from mii_zmq.tracing import start_tracing


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mii_zmq.broker", description="Routes requests from clients to worker groups."
    )
    add_arguments(parser, BrokerConfig)
    ChildLink.add_arguments(parser)
    namespace = parse_arguments(parser)
    link = ChildLink.from_arguments(namespace)
    try:
        logs.setup_logging("broker", getattr(namespace, "log_format", None))
        uvloop.run(_serve(from_arguments(namespace, BrokerConfig), link))
    except StartupError as error:
        link.announce(error=error.message)
        if not link.has_reader:
            logging.getLogger("mii_zmq").error("%s", error.message)
        return 1
    return 0


async def _serve(settings: BrokerConfig, link: ChildLink) -> None:
    log = logging.getLogger("mii_zmq")
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            stop_now.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    context = transport.make_context()
    with contextlib.ExitStack() as at_end:
        at_end.callback(transport.close_context, context)
        tracing = start_tracing(settings, "broker")
        if tracing is not None:
            at_end.callback(tracing.close)
        broker = Broker(settings, context, tracing)
        at_end.callback(broker.close)
        # Messages make no cycles that outlive them: full collections over the start-up's objects would be pauses only.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        log.info("ready: clients at %s, workers at %s", broker.client_endpoint, broker.worker_endpoint)
        link.announce(ready=True, client_endpoint=broker.client_endpoint, worker_endpoint=broker.worker_endpoint)
        await stop.wait()
        log.info("stopping: %d requests are unfinished", broker.state.num_unfinished)
        await broker.drain(stop_now)


if __name__ == "__main__":
    sys.exit(main())
