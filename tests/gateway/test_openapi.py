# SPDX-License-Identifier: Apache-2.0
"""GET /openapi.json: valid, complete, and true of the doors as far as examples, limits and words can show it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mii_zmq import __version__
from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.openapi import describe, routes_of
from mii_zmq.gateway.openapi_answers import ANSWERS
from mii_zmq.gateway.openapi_operations import OPERATIONS, operation_of
from mii_zmq.gateway.openapi_requests import CHOICES, FIELD_LIMITS, PARAM_LIMITS, component_schemas
from mii_zmq.sampling_params import SamplingParams
from tests.gateway.fake_client import FakeClient

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
METHODS = {"get", "post"}


@pytest.fixture
def document(app: web.Application) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(describe(routes_of(app), "fake")))
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method, path, operation


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from refs(item)


async def test_it_is_served_and_names_a_deployment(http: aiohttp.ClientSession, document: dict[str, Any]) -> None:
    async with http.get("/openapi.json") as response:
        assert (response.status, response.content_type) == (200, "application/json")
        assert await response.json() == document


async def test_it_is_served_without_a_broker(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.is_connected = False
    async with http.get("/openapi.json") as response:
        assert response.status == 200


def test_structure(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    assert document["info"]["version"] == __version__ == tomllib.loads(PROJECT.read_text())["project"]["version"]
    ids = []
    for method, path, operation in operations(document):
        assert method in METHODS
        assert path.startswith("/")
        ids.append(operation["operationId"])
        in_path = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
        assert in_path == {part.strip("{}") for part in path.split("/") if part.startswith("{")}
        assert all(p["in"] in ("path", "query", "header") and "schema" in p for p in operation["parameters"])
        assert all(status.isdigit() and answer["description"] for status, answer in operation["responses"].items())
        assert {"200", "403", "500"} <= operation["responses"].keys()
    assert len(ids) == len(set(ids))


def test_every_reference_leads_to_a_schema_and_every_schema_is_used(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    named = {name.removeprefix("#/components/schemas/") for name in refs(document)}
    assert named == schemas.keys()


def test_every_route_is_listed_and_every_entry_has_a_route(app: web.Application, document: dict[str, Any]) -> None:
    routes = {(route.method, route.path) for route in routes_of(app)}
    assert {(method.upper(), path) for method, path, _ in operations(document)} == routes
    assert OPERATIONS.keys() <= routes


async def test_a_route_without_an_entry_is_described_from_its_handler() -> None:
    async def handler(request: web.Request) -> web.Response:
        """Handler of POST /v1/new: does something new."""
        return web.Response()

    operation = operation_of("POST", "/v1/new", handler)
    assert operation.summary == "does something new"
    assert operation.request == {"type": "object"}
    assert {kind.http_status for kind in operation.errors} >= {400, 404, 413, 415, 429, 500, 502, 503, 504}


def test_errors_have_the_door_s_shape(document: dict[str, Any]) -> None:
    shapes = {
        "/v1/messages": "AnthropicErrorAnswer",
        "/v1/completions": "OpenAIErrorAnswer",
        "/tokenize": "OpenAIErrorAnswer",
        "/mii/{deployment}": "MiiErrorAnswer",
    }
    for path, shape in shapes.items():
        answers = document["paths"][path]["post"]["responses"]
        assert {"400", "403", "404", "408", "413", "415", "429", "499", "500", "502", "503", "504"} <= answers.keys()
        for status, answer in answers.items():
            if status not in ("200", "417"):
                assert answer["content"]["application/json"]["schema"]["$ref"].endswith(f"/{shape}")


async def test_every_example_is_answered_as_described(http: aiohttp.ClientSession, document: dict[str, Any]) -> None:
    num_sent = 0
    for method, path, operation in operations(document):
        url = path.replace("{deployment}", "fake").replace("{model}", "fake").replace("{name}", "page.html")
        contents = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        for body in [e["value"] for e in contents.get("examples", {}).values()] or [None]:
            async with http.request(method, url, json=body) as response:
                num_sent += 1
                described = operation["responses"].get(str(response.status))
                assert described is not None, (url, response.status)
                assert body is None or response.status == 200, (url, body, await response.text())
                kinds = described.get("content", {}).keys()
                assert response.content_type in kinds or "*/*" in kinds, (url, response.content_type)
    assert num_sent > len(document["paths"])


async def test_what_the_server_answers_by_itself_is_described(
    http: aiohttp.ClientSession, document: dict[str, Any]
) -> None:
    for headers, status in (({"Expect": "the unexpected"}, "417"), ({"X-Long": "x" * 9000}, "400")):
        async with http.get("/health/live", headers=headers) as response:
            assert (str(response.status), response.content_type) == (status, "text/plain")
        for _, _, operation in operations(document):
            assert "text/plain" in operation["responses"][status]["content"]


@pytest.mark.parametrize("name", sorted(PARAM_LIMITS))
def test_limits_are_those_of_the_validator(name: str) -> None:
    limits = PARAM_LIMITS[name]
    low, high = limits.get("minimum"), limits.get("maximum")
    good: list[Any] = [value for value in (low, high) if value is not None]
    bad: list[Any] = [value + step for value, step in ((low, -1), (high, 1)) if value is not None]
    if "exclusiveMinimum" in limits:
        bad.append(limits["exclusiveMinimum"])
    if "maxItems" in limits:
        item: Any = "x" if "maxLength" in limits else 1
        good.append([item] * limits["maxItems"])
        bad.append([item] * (limits["maxItems"] + 1))
    if "maxLength" in limits:
        good += ["x" * limits["maxLength"], ["x" * limits["items"]["maxLength"]]]
        bad += ["x" * (limits["maxLength"] + 1), [""]]
    for value in good:
        # min_new_tokens may not exceed max_new_tokens, which has no limit where it is not given.
        SamplingParams.from_mapping({name: value})
    for value in bad:
        with pytest.raises(InvalidRequest, match=name):
            SamplingParams.from_mapping({name: value})


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "priority"])
async def test_limits_are_those_of_the_doors(http: aiohttp.ClientSession, name: str) -> None:
    low, high = FIELD_LIMITS[name]["minimum"], FIELD_LIMITS[name]["maximum"]
    for value, status in ((low, 200), (high, 200), (low - 1, 400), (high + 1, 400)):
        body = {"model": "fake", "prompt": "a", name: value}
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == status, (value, await response.text())


def test_words_belong_to_fields_that_exist() -> None:
    schemas = component_schemas(ANSWERS)
    for (name, field), words in CHOICES.items():
        assert set(words) <= set(schemas[name]["properties"][field]["enum"])
