# SPDX-License-Identifier: Apache-2.0
"""Turns the command line of `bench` into checked options. Errors name the option, its value and what is allowed."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from mii_zmq.bench_client import ServerOptions, api_base
from mii_zmq.bench_datasets import DatasetOptions, PrefixOptions, RandomOptions, ShareGPTOptions
from mii_zmq.bench_metrics import parse_goodput
from mii_zmq.errors import ConfigError
from mii_zmq.registry import DeploymentNotFoundError, Registry
from mii_zmq.serving_bench import BenchOptions, LoadOptions


def bench_options(options: argparse.Namespace) -> BenchOptions:
    """What was asked for, checked.

    Raises:
        ConfigError: an impossible value; names the option.
        DeploymentNotFoundError: no --url, and not exactly one deployment to take its place.
    """
    _check_numbers(options)
    if options.save_result is not None and not options.save_result.parent.is_dir():
        raise ConfigError(f"--save-result {options.save_result} is in no existing directory; make it first")
    url = options.url or _local_url(options.model)
    api_base(url)
    server = ServerOptions(
        url=url,
        endpoint=options.endpoint,
        api_key=_api_key(options.api_key_env),
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        extra_body=_extra_body(options.extra_body),
        timeout_s=options.timeout_s,
    )
    load = LoadOptions(
        levels=tuple(options.concurrency or [options.max_concurrency]),
        num_prompts=options.num_prompts,
        prompts_per_client=options.prompts_per_client,
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        num_warmups=options.num_warmups,
        seed=options.seed,
    )
    return BenchOptions(
        server=server,
        dataset=_dataset(options),
        load=load,
        model=options.model,
        vocab_size=options.vocab_size,
        ready_timeout_s=options.ready_timeout_s,
        percentiles=tuple(options.percentiles),
        objectives=parse_goodput(options.goodput),
        sla_rates=tuple(options.sla_rates),
    )


def _check_numbers(options: argparse.Namespace) -> None:
    positive = (
        "num_prompts", "prompts_per_client", "request_rate", "burstiness", "max_concurrency", "concurrency",
        "timeout_s", "input_len", "output_len", "max_input_len", "suffix_len", "num_prefixes", "sla_rates",
    )  # fmt: skip
    for name in positive:
        _check(options, name, lambda value: value > 0, "above 0")
    for name in ("num_warmups", "prefix_len", "temperature", "ready_timeout_s"):
        _check(options, name, lambda value: value >= 0, "at least 0")
    _check(options, "range_ratio", lambda value: 0 <= value < 1, "at least 0 and below 1")
    _check(options, "percentiles", lambda value: 0 <= value <= 100, "from 0 to 100")
    _check(options, "vocab_size", lambda value: value >= 64, "at least 64")
    if options.max_input_len is not None and options.max_input_len <= (options.prefix_len or 0):
        raise ConfigError(f"--max-input-len {options.max_input_len} leaves no room behind --prefix-len")


def _check(options: argparse.Namespace, name: str, is_allowed: Callable[[float], bool], allowed: str) -> None:
    value = getattr(options, name)
    for number in value if isinstance(value, Sequence) else [value]:
        if number is not None and not is_allowed(number):
            raise ConfigError(f"--{name.replace('_', '-')} is {number:g}; it must be {allowed}")


def _dataset(options: argparse.Namespace) -> DatasetOptions:
    if options.dataset == "sharegpt":
        if options.dataset_path is None:
            raise ConfigError("--dataset sharegpt needs --dataset-path FILE, a JSON file in ShareGPT's format")
        return ShareGPTOptions(options.dataset_path, options.output_len)
    output_len = 128 if options.output_len is None else options.output_len
    if options.dataset == "prefix-repetition":
        prefix_len = 256 if options.prefix_len is None else options.prefix_len
        return PrefixOptions(prefix_len, options.suffix_len, options.num_prefixes, output_len)
    return RandomOptions(
        input_tokens=options.input_len,
        output_tokens=output_len,
        prefix_tokens=options.prefix_len or 0,
        range_ratio=options.range_ratio,
        distribution=options.length_distribution,
        max_input_tokens=options.max_input_len,
    )


def _local_url(model: str | None) -> str:
    """The gateway of the deployment named `model`, or of the only one that runs here."""
    records = [record for record in Registry().list_all() if record.ready and record.rest_url]
    found = [record for record in records if model is None or record.deployment == model]
    if len(found) != 1:
        names = ", ".join(record.deployment for record in records) or "none"
        raise DeploymentNotFoundError(
            f"which server? Name it with --url, or one of the deployments of this host with --model; running: {names}"
        )
    return str(found[0].rest_url)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"--api-key-env {variable}: that environment variable is not set; export it first")
    return key


def _extra_body(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"--extra-body {text[:80]} is no JSON object; use one like '{{\"top_k\": 20}}'")
    return fields
