# SPDX-License-Identifier: Apache-2.0
"""Structured output through the real worker, on a tiny random model: every answer has its form, others are untouched.

A random model draws any token, so that an answer of the right form comes from the grammar alone.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

import mii_zmq as mii
from mii_zmq.errors import InvalidRequest
from tests.e2e.structured_schemas import SCHEMAS

pytestmark = pytest.mark.slow

DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 300}
PLAIN: dict[str, Any] = {"do_sample": True, "seed": 5, "max_new_tokens": 16, "ignore_eos": True}
PLAIN_PROMPTS = ["The quick brown fox", "1 2 3 4 5", "naïve café"]


def of_schema(schema: Any) -> dict[str, str]:
    return {"kind": "json_schema", "value": json.dumps(schema)}


def check(schema: Any, response: Any) -> None:
    assert response.finish_reason == "stop", response.generated_text
    jsonschema.Draft202012Validator(schema).validate(json.loads(response.generated_text))


@pytest.fixture(scope="module")
def pipe(tiny_model: Path) -> Iterator[Any]:
    """One for all tests, since its grammar process takes seconds to start: the first test is given it anew."""
    with mii.pipeline(str(tiny_model), device="cpu", num_threads=1, num_blocks=256, block_size=8) as pipe:
        yield pipe


def answers_have_their_form(pipe: Any, plain: list[str]) -> None:
    """25 schemas and plain requests at the same time."""
    wanted = [
        pipe.submit("answer:", seed=number, structured_output=of_schema(schema), **DRAWN)
        for number, schema in enumerate(SCHEMAS)
    ]
    assert wanted
    assert plain
