# SPDX-License-Identifier: Apache-2.0
"""One worker group: an actor process (text, sockets) and an engine process per rank (scheduler, model)."""
