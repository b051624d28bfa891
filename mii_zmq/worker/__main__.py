# SPDX-License-Identifier: Apache-2.0
"""`python -m mii_zmq.worker --model M --deployment D`: one worker group, an actor (this process) and its engine."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

import uvloop

from mii_zmq.command_line import add_arguments, from_arguments, parse_arguments
from mii_zmq.config import EngineConfig, WorkerConfig
from mii_zmq.errors import ConfigError, StartupError
from mii_zmq.logs import setup_logging
from mii_zmq.process import ChildLink
from mii_zmq.worker.group import run_group

log = logging.getLogger(__name__)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the options")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="python -m mii_zmq.worker", description="Serve one copy of a model to the brokers.")
    add_arguments(parser, EngineConfig)
    add_arguments(parser, WorkerConfig)
    ChildLink.add_arguments(parser)
    parent = ChildLink()
    try:
        setup_logging("worker")
        options = parse_arguments(parser, argv)
        parent = ChildLink.from_arguments(options)
        setup_logging("worker", getattr(options, "log_format", None))
        engine_config = from_arguments(options, EngineConfig)
        worker_config = from_arguments(options, WorkerConfig)
        return uvloop.run(run_group(engine_config, worker_config, parent))
    except StartupError as error:
        parent.announce(error=error.message)
        if not parent.has_reader:
            log.error("%s", error.message)
        return 1


if __name__ == "__main__":
    sys.exit(main())
