# SPDX-License-Identifier: Apache-2.0
"""A child process for test_process.py; its first argument says what it does."""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from mii_zmq.process import ChildLink, spawn


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    ChildLink.add_arguments(parser)
    namespace = parser.parse_args()
    link = ChildLink.from_arguments(namespace)
    if namespace.what == "fail":
        link.announce(progress="half way", fraction=0.5)
        link.announce(error="the disk is on fire")
        return 3
    if namespace.what == "exit":
        return 7
    if namespace.what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if namespace.what == "parent":
        child = spawn("tests.process_child", ["serve"], "grandchild")
        child.wait_ready(60)
        link.announce(ready=True, grandchild=child.pid)
    elif namespace.what != "silent":
        link.announce(progress="half way", fraction=0.5)
        link.announce(ready=True, answer=42)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
