# SPDX-License-Identifier: Apache-2.0
"""Language-model serving as a ZeroMQ actor pipeline: `pipeline`, `serve` and `client`, as in DeepSpeed-MII."""
