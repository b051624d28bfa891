# SPDX-License-Identifier: Apache-2.0
"""The broker's STATUS body as the gateway sees it: which deployments serve, and numbers for the metrics page.

Every number of the broker, a deployment, a group or its load becomes a metric of that name, so that a newer broker's
additions show up by themselves; what is missing is simply not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mii_zmq.telemetry import Histogram

ENGINE = "engine_"
"""In front of what a group's engine reports about itself; the rest is the broker's view of the group."""
ENGINE_COUNTERS = frozenset(
    ENGINE + name
    for name in (
        "step", "num_preemptions", "prompt_tokens", "cached_tokens", "generated_tokens", "num_failed_steps",
        "num_numeric_errors",
    )
)  # fmt: skip
"""Numbers that only grow while the group lives."""


@dataclass(frozen=True, slots=True)
class GroupStatus:
    name: str
    is_ready: bool
    max_model_len: int | None
    numbers: dict[str, float]
    tool_format: str | None = None
    """How its model writes tool calls."""
    offers_grammars: bool = False
    """It can hold an output to a grammar."""
    reasons: bool = False
    """Its chat template speaks of <think>: answers may begin with reasoning."""
    histograms: dict[str, Histogram] = field(default_factory=dict)
    """Of its steps and requests."""


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    name: str
    is_ready: bool
    numbers: dict[str, float]
    groups: list[GroupStatus]
    queue_time: Histogram | None = None

    @property
    def has_groups(self) -> bool:
        return bool(self.groups)

    @property
    def max_model_len(self) -> int | None:
        """The smallest context of the groups, into which a request fits wherever it goes."""
        return min((group.max_model_len for group in self.groups if group.max_model_len), default=None)

    @property
    def tool_format(self) -> str | None:
        """How the model writes tool calls; None: nobody says."""
        return next((group.tool_format for group in self.groups if group.tool_format), None)

    @property
    def offers_grammars(self) -> bool:
        """Some group can hold an output to a grammar."""
        return any(group.offers_grammars for group in self.groups)

    @property
    def reasons(self) -> bool:
        return any(group.reasons for group in self.groups)


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    is_draining: bool = False
    deployments: dict[str, DeploymentStatus] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    labelled_counters: dict[str, dict[str, float]] = field(default_factory=dict)
    """Counters by reason: finish reasons, error codes."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """As the broker sent it."""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> BrokerStatus:
        counters = body.get("counters")
        return cls(
            is_draining=bool(body.get("is_draining")),
            deployments={name: _deployment(name, values) for name, values in _maps(body.get("deployments"))},
            numbers=_numbers(body),
            counters=_numbers(counters),
            labelled_counters={name: _numbers(by_reason) for name, by_reason in _maps(counters)},
            body=body,
        )

    def is_ready(self, name: str) -> bool:
        """Whether the deployment would take a request now."""
        deployment = self.deployments.get(name)
        return deployment is not None and deployment.is_ready and not self.is_draining

    def deployment_numbers(self) -> list[str]:
        return _names(deployment.numbers for deployment in self.deployments.values())

    def group_numbers(self) -> list[str]:
        return _names(group.numbers for deployment in self.deployments.values() for group in deployment.groups)


def _deployment(name: str, values: Mapping[str, Any]) -> DeploymentStatus:
    groups = [_group(group) for group in values.get("groups", ()) if isinstance(group, Mapping)]
    # `takes_requests` knows of the queue as well; an older broker does not say it.
    is_ready = bool(values.get("takes_requests", values.get("is_ready")))
    return DeploymentStatus(name, is_ready, _numbers(values), groups, Histogram.from_map(values.get("queue_time")))


def offers_grammars(info: Mapping[str, Any]) -> bool:
    """Whether a group can hold an output to a grammar: READY lists the kinds that it takes, none without a compiler."""
    return bool(info.get("structured_output"))


def reasons(info: Mapping[str, Any]) -> bool:
    """Whether a group's model may begin its answers with <think>, by what it says of itself in READY."""
    return info.get("reasoning") is True


def _group(values: Mapping[str, Any]) -> GroupStatus:
    max_model_len = values.get("max_model_len")
    info = values.get("info")
    info = info if isinstance(info, Mapping) else {}
    tool_format = info.get("tool_format")
    numbers = _numbers(values)
    numbers |= {ENGINE + name: number for name, number in _numbers(values.get("load")).items()}
    total_blocks = numbers.get(ENGINE + "total_blocks")
    if total_blocks:
        numbers["kv_usage_ratio"] = numbers.get(ENGINE + "used_blocks", 0.0) / total_blocks
    return GroupStatus(
        str(values.get("group", "")),
        values.get("state") == "ready",
        max_model_len if isinstance(max_model_len, int) else None,
        numbers,
        tool_format if isinstance(tool_format, str) else None,
        offers_grammars(info),
        reasons(info),
        {name: found for name, of in _maps(values.get("histograms")) if (found := Histogram.from_map(of)) is not None},
    )


def _maps(values: Any) -> list[tuple[str, Mapping[str, Any]]]:
    if not isinstance(values, Mapping):
        return []
    return [(str(name), value) for name, value in values.items() if isinstance(value, Mapping)]


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    return {
        str(name): float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and str(name).isascii() and str(name).isidentifier()
    }


def _names(numbers: Iterable[Mapping[str, float]]) -> list[str]:
    return sorted({name for values in numbers for name in values})
