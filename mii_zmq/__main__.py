# SPDX-License-Identifier: Apache-2.0
"""`python -m mii_zmq`: the command line."""

import sys

from mii_zmq.cli import main

if __name__ == "__main__":
    sys.exit(main())
