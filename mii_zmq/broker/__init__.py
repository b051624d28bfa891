# SPDX-License-Identifier: Apache-2.0
"""The broker: requests of clients to worker groups and their output back."""
