# SPDX-License-Identifier: Apache-2.0
"""The dashboard asks only for metrics and labels that the page has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from mii_zmq.gateway import service_metrics
from tests.gateway.fake_client import FakeClient

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "deploy" / "grafana.json"


async def test_dashboard_matches_the_page(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    async with http.get("/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    known = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    known |= {f.name + end for f in families if f.type == "histogram" for end in ("_bucket", "_sum", "_count")}
    # The fake broker counts only some of what a broker does.
    known |= {f"mii_{name}_total" for name, _, _ in service_metrics._COUNTERS}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"\bmii_\w+", expression)}
    assert asked <= known, sorted(asked - known)
    assert len(panels) >= 10
    assert len({panel["id"] for panel in panels}) == len(panels)


async def test_labels_exist(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    """Those that expressions group by and legends show, of every metric that the page has a sample of."""
    async with http.post("/mii/fake", json={"prompts": "a b c", "stream": True}) as response:
        await response.read()
    async with http.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    num_checked = 0
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            asked = {name for found in re.findall(r"by \(([^)]*)\)", expression) for name in found.split(", ")}
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert not asked or shown <= asked, expression
            for metric in re.findall(r"\bmii_\w+", expression):
                if metric in labels:
                    num_checked += 1
                    assert asked | shown <= labels[metric], (metric, asked | shown, labels[metric])
    assert num_checked >= 15
