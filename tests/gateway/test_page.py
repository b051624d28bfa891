# SPDX-License-Identifier: Apache-2.0
"""The page's files as a browser gets them, what they promise about safety, and the JSON that the page shows."""

from __future__ import annotations

import asyncio
import re
from importlib import resources

import aiohttp
import pytest

from mii_zmq.errors import ServiceError
from mii_zmq.gateway.page import CONTENT_TYPES, page_files
from mii_zmq.top import status_of_gateway
from tests.gateway.fake_client import FakeClient

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
DIRECTORY = resources.files("mii_zmq.gateway") / "page_files"
SCRIPTS = sorted(name for name in page_files() if name.endswith(".js"))


async def test_a_browser_gets_the_page_and_a_program_the_index(http: aiohttp.ClientSession) -> None:
    async with http.get("/", headers=BROWSER) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        assert response.headers["Vary"] == "Accept"
        assert (await response.text()).startswith("<!doctype html>")
    async with http.get("/") as response:
        assert response.headers["Vary"] == "Accept"
        assert "GET /status" in (await response.json())["endpoints"]


@pytest.mark.parametrize("name", sorted(page_files()))
async def test_every_file_is_served_with_its_type_and_the_policy(name: str, http: aiohttp.ClientSession) -> None:
    async with http.get(f"/page/{name}") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == CONTENT_TYPES[name[name.rindex(".") :]]
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert not re.search("unsafe|data:|blob:|http|[*]", response.headers["Content-Security-Policy"])
        assert await response.read() == (DIRECTORY / name).read_bytes()
        etag = response.headers["ETag"]
    async with http.get(f"/page/{name}", headers={"If-None-Match": etag}) as response:
        assert (response.status, await response.read()) == (304, b"")
        assert response.headers["ETag"] == etag
    async with http.get(f"/page/{name}", headers={"If-None-Match": '"older"'}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/nothing.js",
        "/page/../page.py",
        "/page/..%2fpage.py",
        "/page/%2e%2e/page.py",
        "/page/..%5cpage.py",
        "/page/%2fetc%2fpasswd",
        "/page//etc/passwd",
        "/page/main.js%00.css",
        "/page/main.js/",
        "/page/./../../state.py",
    ],
)
async def test_nothing_else_is_reachable(path: str, address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)  # as it stands: a client library would tidy the path up
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept: text/html\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"application/json" in answer
    assert b"SPDX" not in answer


async def test_other_methods_are_refused(http: aiohttp.ClientSession) -> None:
    for path in ("/", "/status", "/page/main.js"):
        async with http.post(path, json={}) as response:
            assert response.status == 405
    async with http.head("/page/main.js") as response:
        assert (response.status, await response.read()) == (200, b"")


def test_the_page_refers_to_nothing_but_its_own_files() -> None:
    page = page_files()["page.html"].body.decode()
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert {link for link in links if not link.startswith(("#", "/page/"))} == set()
    assert {link.removeprefix("/page/") for link in links if link.startswith("/page/")} <= set(page_files())
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|<script(?![^>]*\ssrc=)", page)
    for name in SCRIPTS:
        imported = re.findall(r'from "\./([^"]+)"', page_files()[name].body.decode())
        assert set(imported) <= set(SCRIPTS)
    for name in ("page.css", "status.css"):
        assert not re.search(r"url\(|@import", page_files()[name].body.decode())


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse_no_markup_and_evaluate_no_text(name: str) -> None:
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|srcdoc"
    assert not re.search(banned, page_files()[name].body.decode())


def test_every_label_and_script_finds_its_element() -> None:
    page = page_files()["page.html"].body.decode()
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'\sfor="([^"]+)"', page)) | set(re.findall(r'aria-labelledby="([^"]+)"', page))
    for name in SCRIPTS:
        wanted |= set(re.findall(r'byId\("([^"]+)"\)', page_files()[name].body.decode()))
    assert wanted <= set(ids)


async def test_status_is_the_brokers_and_the_gateways(http: aiohttp.ClientSession) -> None:
    async with http.get("/status") as response:
        assert response.status == 200
        assert response.headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in response.headers
        body = await response.json()
    assert set(body) == {"age_ms", "gateway", "broker"}
    assert 0 <= body["age_ms"] < 5000
    assert (body["gateway"]["num_in_flight"], body["gateway"]["is_leaving"]) == (0, False)
    assert body["broker"]["epoch"] == "00" * 16
    (group,) = body["broker"]["deployments"]["org/fake-7b"]["groups"]
    assert (group["load"]["used_blocks"], group["load"]["total_blocks"], group["info"]["pid"]) == (16, 64, 1)


async def test_status_without_a_broker(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.is_connected = False
    async with http.get("/status") as response:
        assert response.status == 503
        assert "no broker" in (await response.json())["message"]


async def test_status_is_what_top_reads(address: tuple[str, int]) -> None:
    url = f"http://{address[0]}:{address[1]}/"
    status = await asyncio.to_thread(status_of_gateway, url)
    assert set(status["deployments"]) == {"fake", "org/fake-7b"}
    with pytest.raises(ServiceError, match="does not answer as a gateway"):
        await asyncio.to_thread(status_of_gateway, url + "?status=")


async def test_top_says_what_the_gateway_says(address: tuple[str, int], broker: FakeClient) -> None:
    broker.is_connected = False
    with pytest.raises(ServiceError, match=r"answers 503: no broker answers"):
        await asyncio.to_thread(status_of_gateway, f"http://{address[0]}:{address[1]}")
