# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest

from mii_zmq.errors import ConfigError
from mii_zmq.mii_settings import UnknownArgument, default_deployment_name, pipeline_settings, serve_settings


class DeploymentType(enum.Enum):
    LOCAL = "local"
    AML = "aml"


def test_the_originals_settings_reach_ours() -> None:
    engine, launch = serve_settings(
        "org/model",
        None,
        None,
        {
            "tensor_parallel": 1,
            "replica_num": 2,
            "max_length": 1024,
            "tokenizer": "org/tokenizer",
            "deployment_name": "mistral-deployment",
            "enable_restful_api": True,
            "restful_api_port": 28080,
            "restful_api_host": "localhost",
            "port_number": 50050,
            "deployment_type": DeploymentType.LOCAL,
            "inference_engine_config": {
                "state_manager": {
                    "max_ragged_batch_size": 256,
                    "max_ragged_sequence_count": 64,
                    "memory_config": {"mode": "allocate", "size": 100},
                },
                "tensor_parallel": {"tp_size": 1},
            },
        },
    )
    assert (engine.model, engine.tokenizer, engine.max_model_len) == ("org/model", "org/tokenizer", 1024)
    assert (engine.token_budget, engine.max_sequences, engine.num_blocks) == (256, 64, 100)
    assert (launch.deployment, launch.replicas, launch.rest) == ("mistral-deployment", 2, True)
    assert (launch.host, launch.port, launch.broker_port) == ("localhost", 28080, 50050)


def test_defaults() -> None:
    engine, launch = serve_settings("org/model", None, None, {})
    assert (launch.deployment, launch.replicas, launch.rest) == ("org/model-mii-deployment", 1, False)
    assert (launch.port, launch.broker_port, engine.tensor_parallel) == (None, 0, 1)


def test_dictionaries_and_keywords_are_merged() -> None:
    engine, launch = serve_settings(
        "",
        {"model_name_or_path": "m", "replica_num": 2},
        {"deployment_name": "d", "model_conf": {"max_length": 99}},
        {"block_size": 32, "drain_timeout_s": 5.0},
    )
    assert (engine.model, engine.max_model_len, engine.block_size) == ("m", 99, 32)
    assert (launch.deployment, launch.replicas, launch.drain_timeout_s) == ("d", 2, 5.0)


@pytest.mark.parametrize(
    ("model_config", "arguments"),
    [
        ({"replica_num": 2}, {"replica_num": 3}),
        ({"model_name_or_path": "other"}, {}),
        ({}, {"max_length": 10, "max_model_len": 20}),
        ({}, {"tensor_parallel": 1, "inference_engine_config": {"tp": {"tp_size": 2}}}),
    ],
)
def test_two_values_for_one_thing_are_an_error(model_config: dict[str, Any], arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"given twice|mean the same"):
        serve_settings("m", model_config, None, arguments)


def test_one_value_given_twice_is_none() -> None:
    _, launch = serve_settings("m", {"replica_num": 2, "model_name_or_path": "m"}, None, {"replica_num": 2})
    assert launch.replicas == 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"quantization_mode": "wf6af16"},
        {"device_map": [[0, 1]]},
        {"replica_configs": [{"hostname": "a"}]},
        {"task": "fill-mask"},
        {"deployment_type": DeploymentType.AML},
        {"tensor_parallel": 0},
        {"inference_engine_config": {"state_manager": {"offload": True}}},
        {"inference_engine_config": {"quantization": {"quantization_mode": "wf6af16"}}},
        {"inference_engine_config": {"state_manager": {"memory_config": {"mode": "odd"}}}},
        {"inference_engine_config": 5},
        {"restful_api_host": "0.0.0.0"},
        {"replica_num": 0},
        {"replica_num": "two"},
        {"tokenizer": object()},
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        serve_settings("m", None, None, arguments)
    assert not isinstance(caught.value, UnknownArgument)


@pytest.mark.parametrize(
    "arguments",
    [
        {"torch_dist_port": 30000},
        {"zmq_port_number": 1},
        {"hostfile": "/job/hosts"},
        {"restful_processes": 8},
        {"profile_model_time": True},
        {"inference_engine_config": {"state_manager": {"max_tracked_sequences": 5}}},
        {"inference_engine_config": {"state_manager": {"memory_config": {"mode": "reserve", "size": 5}}}},
    ],
)
def test_what_has_no_meaning_here_is_warned_about(arguments: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="has no effect"):
        serve_settings("m", None, None, arguments)


def test_neutral_values_pass_silently() -> None:
    pipeline_settings("m", None, {"task": "text-generation", "device_map": "auto", "quantization_mode": None})
    serve_settings("m", None, None, {"torch_dist_port": 29500, "restful_processes": 32, "version": 1})


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"replica_number": 2}, "did you mean 'replica_num'"),
        ({"inference_engine_config": {"state_manager": {"max_ragged_batch": 1}}}, "did you mean 'max_ragged_batch_siz"),
        ({"zzz": 1}, "unknown argument 'zzz'"),
    ],
)
def test_unknown_names_are_refused(arguments: dict[str, Any], hint: str) -> None:
    with pytest.raises(UnknownArgument, match=hint):
        serve_settings("m", None, None, arguments)


def test_a_pipeline_has_no_settings_of_a_service() -> None:
    with pytest.raises(UnknownArgument, match="deployment_name"):
        pipeline_settings("m", None, {"deployment_name": "d"})
    assert pipeline_settings("", {"model_name_or_path": "m"}, {"max_length": 7}).max_model_len == 7


@pytest.mark.parametrize("settings", [pipeline_settings, lambda *args: serve_settings(args[0], args[1], None, args[2])])
def test_a_model_must_be_named(settings: Any) -> None:
    with pytest.raises(ConfigError, match="no model is named"):
        settings("", None, {})
    with pytest.raises(ConfigError, match="model_config must be a dict"):
        settings("m", ["x"], {})


def test_default_names(tmp_path: Path) -> None:
    assert default_deployment_name("org/model") == "org/model-mii-deployment"
    assert default_deployment_name(str(tmp_path)) == f"{tmp_path.name}-mii-deployment"
    assert default_deployment_name(str(tmp_path) + "/") == f"{tmp_path.name}-mii-deployment"
    assert default_deployment_name("demo") == "demo-mii-deployment"
    assert default_deployment_name("fake:step_ms=1") == "fake-mii-deployment"
