# SPDX-License-Identifier: Apache-2.0
"""What is done to requests and caches rather than asked of a model: /abort_request and /reset_prefix_cache.

Both go through the brokers, so that it does not matter which gateway of a shared port is asked: an abort reaches the
request wherever it waits or runs, and its own connection is told. Who knows the id of a request of its tenant's may
abort that one; what concerns others (every request of a tenant, a deployment's cache) is for gateways with
`admin_endpoints` only.
"""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from mii_zmq.errors import InvalidRequest, NoWorkers, ServiceError, UnknownDeployment
from mii_zmq.gateway.field_rules import Honoured, Rule, apply_rules
from mii_zmq.gateway.generations import check_model
from mii_zmq.gateway.http_errors import JSON, EndpointDisabled
from mii_zmq.gateway.request_body import read_fields
from mii_zmq.gateway.sse import encode
from mii_zmq.gateway.state import GATEWAY
from mii_zmq.gateway.terms import terms_of

MAX_IDS = 1024
"""Of one request to abort."""
MAX_ID_CHARS = 200
ABORT_FIELDS: dict[str, Rule] = {
    "request_id": Honoured(str | list[str] | None),
    "rid": Honoured(str | list[str] | None),
    "abort_all": Honoured(bool | None),
}
RESET_FIELDS: dict[str, Rule] = {"model": Honoured(str | None)}
_ANSWER_ID = re.compile(r"(?:[a-z]+[-_])?([0-9a-f]{32})")
"""How answers name themselves: the door's prefix and the id by which the brokers know the request."""


async def abort_request(request: web.Request) -> web.Response:
    """Handler of POST /abort_request."""
    gateway, tenant = request.app[GATEWAY], terms_of(request).tenant
    values = apply_rules(await read_fields(request), ABORT_FIELDS).values
    ids, everything = _ids(values), values.get("abort_all", False)
    if everything:
        _check_admin(request, "abort_all")
    elif not ids:
        raise InvalidRequest(
            "request_id is missing; send the id of an answer, or of its header X-Request-ID, or a list of them",
            param="request_id",
        )
    by_id = {bytes.fromhex(found.group(1)): name for name in ids if (found := _ANSWER_ID.fullmatch(name))}
    ended = await gateway.client.abort(names=ids, request_ids=list(by_id), everything=everything, tenant=tenant)
    known = {*ended.names, *(by_id[request_id] for request_id in ended.request_ids)}
    body = {
        "aborted": [name for name in ids if name in known],
        "not_found": [name for name in ids if name not in known],
        "num_requests": ended.num_requests,
    }
    return web.Response(body=encode(body), content_type=JSON)


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Handler of POST /reset_prefix_cache."""
    _check_admin(request, request.path)
    gateway = request.app[GATEWAY]
    values = apply_rules(await read_fields(request), RESET_FIELDS).values if request.body_exists else {}
    model = values.get("model") or _only((await gateway.status()).deployments)
    check_model(model)
    try:
        answer = await gateway.client.reset_prefix_cache(model)
    except UnknownDeployment as error:
        raise UnknownDeployment(error.message, param="model") from None
    if answer.failed:
        failed = "; ".join(f"group {name!r}: {why}" for name, why in sorted(answer.failed.items()))
        done = ", ".join(answer.done) or "none"
        raise ServiceError(f"not every group has reset its prefix cache. {failed}. Groups that have: {done}")
    return web.Response(body=encode({"model": model, "groups": answer.done}), content_type=JSON)


def _ids(values: dict[str, Any]) -> list[str]:
    given = [values[name] for name in ("request_id", "rid") if name in values]
    ids = [name for value in given for name in ([value] if isinstance(value, str) else value)]
    if len(ids) > MAX_IDS:
        raise InvalidRequest(f"request_id holds {len(ids)} ids; the limit is {MAX_IDS}", param="request_id")
    for name in ids:
        if not 0 < len(name) <= MAX_ID_CHARS:
            raise InvalidRequest(
                f"request_id holds an id of {len(name)} characters, allowed: 1 to {MAX_ID_CHARS}", param="request_id"
            )
    return list(dict.fromkeys(ids))


def _only(deployments: Any) -> str:
    names = sorted(deployments)
    if not names:
        raise NoWorkers("no deployment is served", retry_after_ms=1000)
    if len(names) > 1:
        raise InvalidRequest(f"model is missing; served: {', '.join(names)[:400]}", param="model")
    found: str = names[0]
    return found


def _check_admin(request: web.Request, what: str) -> None:
    if not request.app[GATEWAY].config.admin_endpoints:
        raise EndpointDisabled(
            f"{what} concerns requests of others; start the gateway with --admin-endpoints to have it"
        )
