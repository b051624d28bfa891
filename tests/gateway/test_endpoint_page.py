# SPDX-License-Identifier: Apache-2.0
"""docs/endpoints.md against the gateway: every path is listed with tests that exist, and no field of an example is
ignored. `tests/test_documents.py` runs the examples as they stand."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "endpoints.md").read_text(encoding="utf-8")
EXAMPLES = [example for example in re.findall(r"```bash\n(curl .*?)\n```", PAGE, re.DOTALL) if " -d " in example]


def test_every_path_is_listed(app: web.Application) -> None:
    listed = set(re.findall(r"`(GET|POST) ([^`]+)`", PAGE))
    served = {
        (route.method, re.sub(r":[^}]*}", "}", route.resource.canonical))
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert served == listed


def test_tests_that_it_names_exist() -> None:
    named = set(re.findall(r"`(tests/[^`]+)`", PAGE))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
async def test_examples(example: str, http: aiohttp.ClientSession) -> None:
    words = shlex.split(example)
    [url] = [word for word in words if word.startswith("localhost:28080/")]
    body = json.loads(words[words.index("-d") + 1])
    if "abort" not in url:
        assert body["model"] == "MODEL"
        body["model"] = "fake"
    async with http.post(url.removeprefix("localhost:28080"), json=body) as response:
        assert response.status == 200, await response.text()
        assert "x-ignored-fields" not in response.headers
        await response.read()
