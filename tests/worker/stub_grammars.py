# SPDX-License-Identifier: Apache-2.0
"""Stands in for the grammar process where it has to hang or die: grammars of kind 'regex' are orders for that.

Every mask allows everything. A grammar's text is what to do and at how many output tokens: `hang@2`, `die@0`; anything
else goes well. Starts may be told to hang, too. Started as the real process is.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
from pathlib import Path

from mii_zmq.process import ChildLink
from mii_zmq.worker.grammar_channel import GrammarChannel
from mii_zmq.worker.mask_table import NOBODY, MaskTable


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int)
    parser.add_argument("--memory-fd", type=int)
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--die-at-once", action="store_true")
    parser.add_argument("--hang-once", help="the first start hangs, and makes this file")
    parser.add_argument("--spin", action="store_true", help="starting takes for ever")
    ChildLink.add_arguments(parser)
    options = parser.parse_args()
    ChildLink.from_arguments(options)
    if options.die_at_once:
        sys.exit(3)
    while options.spin:
        pass
    if options.hang_once is not None and not Path(options.hang_once).exists():
        Path(options.hang_once).touch()
        signal.pause()
    channel = GrammarChannel(socket.socket(fileno=options.channel_fd))
    table = MaskTable(options.memory_fd, options.vocab_size)
    sequences: dict[int, tuple[str, int]] = {}
    channel.send("ready")
    while not channel.is_closed:
        select.select([channel], [], [])
        for kind, *values in channel.receive():
            if kind == "open":
                seq_id, _, _, text, _, token_ids = values
                sequences[seq_id] = (text, len(token_ids))
                answer(channel, table, sequences, seq_id)
            elif kind == "advance":
                for seq_id, _ in values[0]:
                    text, number = sequences[seq_id]
                    sequences[seq_id] = (text, number + 1)
                    answer(channel, table, sequences, seq_id)
            elif kind == "ping":
                channel.send("pong")


def answer(channel: GrammarChannel, table: MaskTable, sequences: dict[int, tuple[str, int]], seq_id: int) -> None:
    text, number = sequences[seq_id]
    table.note(seq_id)
    what, _, at = text.partition("@")
    if at and int(at) == number:
        if what == "hang":
            signal.pause()
        os._exit(4)
    channel.send("masks", [(seq_id, number, b"\xff" * 36)])
    table.note(NOBODY)


if __name__ == "__main__":
    main()
