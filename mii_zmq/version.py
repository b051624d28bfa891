# SPDX-License-Identifier: Apache-2.0
"""The version of this package, where every layer may read it."""

__version__ = "0.1.0"
