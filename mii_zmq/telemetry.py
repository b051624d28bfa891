# SPDX-License-Identifier: Apache-2.0
"""Logging set-up of our processes. One line per record: time, level, process name, message."""

from __future__ import annotations

import logging
import sys

from mii_zmq.config import log_level


def setup_logging(process_name: str) -> logging.Logger:
    """Configure the root logger of this process and return the package's logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname).1s [{process_name}] %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level())
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return logging.getLogger("mii_zmq")
