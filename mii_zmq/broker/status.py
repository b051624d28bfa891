# SPDX-License-Identifier: Apache-2.0
"""The body of the STATUS reply: what the gateway's readiness, model list and metrics are made of."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import msgspec

from mii_zmq.broker.records import Deployment, Group

if TYPE_CHECKING:
    from mii_zmq.broker.state import BrokerState


def make_status(state: BrokerState, now: float) -> dict[str, Any]:
    """Plain msgpack types only; no routing ids, no request ids, no text of requests."""
    requests = state.requests
    # Not `asdict`, which would rebuild each Counter from pairs and count the pairs.
    counters = {field.name: getattr(state.counters, field.name) for field in fields(state.counters)}
    clients = state.clients
    return {
        "epoch": state.epoch,
        "uptime_s": now - state.started_at,
        "is_draining": clients.is_draining,
        "num_clients": len(clients.by_address),
        "num_unfinished": state.num_unfinished,
        "num_waiting": sum(len(deployment.queue) for deployment in requests.deployments.values()),
        "held_bytes": requests.held_bytes,
        "num_quarantined": len(requests.quarantine),
        "deployments": {name: _deployment(d, now) for name, d in requests.deployments.items()},
        "counters": {**counters, "finished": dict(counters["finished"]), "errors": dict(counters["errors"])},
    }


def _deployment(deployment: Deployment, now: float) -> dict[str, Any]:
    return {
        "is_ready": deployment.is_ready,
        "num_waiting": len(deployment.queue),
        "finished_per_s": deployment.finished_per_s,
        "groups": [_group(group, now) for group in deployment.groups.values()],
    }


def _group(group: Group, now: float) -> dict[str, Any]:
    return {
        "group": group.name,
        "incarnation": group.incarnation.hex(),
        "state": "draining" if group.is_draining else "ready",
        "num_requests": len(group.requests),
        "max_requests": group.max_requests,
        "max_model_len": group.max_model_len,
        "outstanding_tokens": group.outstanding_tokens,
        "heartbeat_age_ms": int((now - group.last_seen) * 1000),
        "uptime_s": now - group.registered_at,
        "load": msgspec.structs.asdict(group.load),
        "info": group.info,
    }
