# SPDX-License-Identifier: Apache-2.0
"""Makes schemathesis' requests go past the front door: most of them name the deployment that is there."""

from __future__ import annotations

import random
from typing import Any

import schemathesis

DEPLOYMENT = "m"
SHARE = 0.9
DEADLINE = "X-MII-Deadline-Ms"
LONG_MS = "600000"


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Deadlines that are right but short become long: the 504 that they ask for would count as a server's error."""
    draw = random.Random(repr((case.body, case.path_parameters)))
    if draw.random() < SHARE:
        _name_deployment(case.body, "model")
        _name_deployment(case.path_parameters, "deployment")
    deadline = (case.headers or {}).get(DEADLINE)
    if deadline is not None and str(deadline).lstrip("+").isdigit() and int(deadline) > 0:
        case.headers[DEADLINE] = max(str(deadline), LONG_MS, key=int)


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Headers that nobody knows are no violation: HTTP lets anybody send them."""
    return "x-schemathesis-unknown-property" not in (case.headers or {})


def _name_deployment(values: Any, name: str) -> None:
    if isinstance(values, dict) and isinstance(values.get(name), str):
        values[name] = DEPLOYMENT
