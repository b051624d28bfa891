# SPDX-License-Identifier: Apache-2.0
"""The body of the STATUS reply: what the gateway's readiness, model list and metrics are made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import msgspec

from mii_zmq.broker.admission import has_room
from mii_zmq.broker.records import Deployment, Group

if TYPE_CHECKING:
    from mii_zmq.broker.state import BrokerState


def make_status(state: BrokerState, now: float) -> dict[str, Any]:
    """Plain msgpack types only; no routing ids, no request ids, no text of requests."""
    requests = state.requests
    # Not `asdict`, which would rebuild each Counter from pairs and count the pairs.
    values = {field.name: getattr(state.counters, field.name) for field in fields(state.counters)}
    counters = {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}
    clients = state.clients
    return {
        "epoch": state.epoch,
        "uptime_s": now - state.started_at,
        "is_draining": clients.is_draining,
        "event_loop_lag_s": state.loop_lag_s,
        "num_clients": len(clients.by_address),
        "num_unfinished": state.num_unfinished,
        "num_waiting": sum(len(deployment.queue) for deployment in requests.deployments.values()),
        "held_bytes": requests.held_bytes,
        "num_quarantined": len(requests.quarantine),
        "deployments": {name: _deployment(state, d, now) for name, d in requests.deployments.items()},
        "counters": counters,
    }


def _deployment(state: BrokerState, deployment: Deployment, now: float) -> dict[str, Any]:
    return {
        "is_ready": deployment.is_ready,
        "takes_requests": not state.clients.is_draining and has_room(state.requests.limits, deployment),
        "num_running": sum(len(group.requests) for group in deployment.groups.values()),
        "num_waiting": len(deployment.queue),
        "queue_time": deployment.queue_time.to_map(),
        "waiting_tokens": deployment.queue.num_tokens,
        "drained_tokens_per_s": deployment.drain_rate.per_s,
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
        "histograms": {name: msgspec.structs.asdict(values) for name, values in group.histograms.items()},
        "info": group.info,
    }
