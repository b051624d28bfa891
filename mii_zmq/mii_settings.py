# SPDX-License-Identifier: Apache-2.0
"""The settings of DeepSpeed-MII, translated into ours: one table says which are honoured, warned about or refused.

Also takes our own settings by their own names. A setting given twice with different values is an error, whether under
one name in two places or under an old and a new name. Starts nothing.
"""

from __future__ import annotations

import difflib
import enum
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mii_zmq.config import EngineConfig, LaunchConfig, build
from mii_zmq.errors import ConfigError


class UnknownArgument(ConfigError):
    """A keyword argument that is no setting of MII's and none of ours."""


@dataclass(frozen=True, slots=True)
class MiiSetting:
    """How one of MII's settings is treated. Values that equal `neutral` are always accepted."""

    treatment: str
    """'honoured', 'warned' (accepted, without effect) or 'refused'."""
    target: str = ""
    """Of an honoured one: 'engine.FIELD', 'launch.FIELD', or '' where the code below translates it."""
    neutral: tuple[Any, ...] = (None,)
    reason: str = ""
    """Of the others: why, and what to do."""


def _honoured(target: str = "", neutral: tuple[Any, ...] = (None,)) -> MiiSetting:
    return MiiSetting("honoured", target, neutral)


def _warned(reason: str, *neutral: Any) -> MiiSetting:
    return MiiSetting("warned", neutral=(None, *neutral), reason=reason)


def _refused(reason: str, *neutral: Any) -> MiiSetting:
    return MiiSetting("refused", neutral=(None, *neutral), reason=reason)


_PORTS = "ports between processes are chosen automatically"

MODEL_SETTINGS: dict[str, MiiSetting] = {
    "model_name_or_path": _honoured("engine.model", (None, "")),
    "tokenizer": _honoured("engine.tokenizer"),
    "tensor_parallel": _honoured("engine.tensor_parallel"),
    "max_length": _honoured("engine.max_model_len"),
    "replica_num": _honoured("launch.replicas"),
    "inference_engine_config": _honoured(),
    "task": _refused("only text-generation is served", "text-generation"),
    "provider": _refused("only Hugging Face checkpoints are served", "hugging-face"),
    "quantization_mode": _refused("quantised weights are not supported; choose the dtype instead"),
    "replica_configs": _refused("replicas run on this host, so give replica_num alone", [], ()),
    "device_map": _refused("choose devices with CUDA_VISIBLE_DEVICES", "auto"),
    "torch_dist_port": _warned(_PORTS, 29500),
    "zmq_port_number": _warned(_PORTS, 25555),
    "sync_debug": _warned("there is no such debugging mode", False),
    "profile_model_time": _warned("step times are in the status and the metrics", False),
}
"""Fields of MII's ModelConfig."""

SERVICE_SETTINGS: dict[str, MiiSetting] = {
    "deployment_name": _honoured("launch.deployment", (None, "")),
    "port_number": _honoured("launch.broker_port"),
    "enable_restful_api": _honoured("launch.rest"),
    "restful_api_host": _honoured("launch.host"),
    "restful_api_port": _honoured("launch.port"),
    "deployment_type": _refused("only local deployments exist", "local"),
    "restful_processes": _warned("one gateway process serves all connections", 32),
    "hostfile": _warned("a deployment starts on this host; add worker groups elsewhere with scripts/worker"),
    "version": _warned("it belongs to cloud deployments", 1),
    "instance_type": _warned("it belongs to cloud deployments", "Standard_NC12s_v3"),
}
"""Fields of MII's MIIConfig; `model_conf` and `model_config` in it are merged with the model's settings."""

STATE_MANAGER_SETTINGS: dict[str, MiiSetting] = {
    "max_ragged_batch_size": _honoured("engine.token_budget"),
    "max_ragged_sequence_count": _honoured("engine.max_sequences"),
    "memory_config": _honoured(),
    "max_tracked_sequences": _warned("waiting sequences need no slot", 2048),
    "max_context": _warned("use max_length", 8192),
    "offload": _refused("KV blocks stay on the device", False),
}
"""Fields of `inference_engine_config["state_manager"]`."""

OWN_LAUNCH_SETTINGS = (
    "drain_timeout_s", "load_timeout_s", "access_log", "insecure", "log_format", "otlp_endpoint", "trace_ratio",
)  # fmt: skip
_OWN_ENGINE_SETTINGS = tuple(f.name for f in fields(EngineConfig) if f.name not in ("model", "tokenizer"))


@dataclass(slots=True)
class _Collected:
    """Values by target, with the name that each was given under."""

    values: dict[str, dict[str, Any]] = field(default_factory=lambda: {"engine": {}, "launch": {}})
    names: dict[str, str] = field(default_factory=dict)

    def put(self, target: str, value: Any, name: str) -> None:
        part, _, key = target.partition(".")
        known = self.values[part]
        if key in known and known[key] != value:
            other = self.names[target]
            raise ConfigError(f"{name} is {value!r}, but {other} is {known[key]!r}, and both mean the same; give one")
        known[key] = value
        self.names[target] = name

    def take(self, name: str, value: Any, setting: MiiSetting) -> None:
        shown = _shown(value)
        if shown in setting.neutral:
            return
        if setting.treatment == "refused":
            raise ConfigError(f"{name}={shown!r} is not supported: {setting.reason}")
        if setting.treatment == "warned":
            warnings.warn(f"{name}={shown!r} has no effect: {setting.reason}", UserWarning, stacklevel=5)
        elif setting.target:
            self.put(setting.target, value, name)


def pipeline_settings(
    model_name_or_path: str, model_config: Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> EngineConfig:
    """The engine's settings from the arguments of `pipeline`.

    Raises:
        UnknownArgument: a keyword that is no setting.
        ConfigError: a setting is refused, malformed, or given twice with different values.
    """
    collected = _Collected()
    _collect_model(collected, model_name_or_path, model_config, arguments)
    _require_model(collected)
    return build(EngineConfig, collected.values["engine"])


def serve_settings(
    model_name_or_path: str,
    model_config: Mapping[str, Any] | None,
    mii_config: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
) -> tuple[EngineConfig, LaunchConfig]:
    """The settings of engine and deployment from the arguments of `serve`. Raises as `pipeline_settings`."""
    collected = _Collected()
    service = dict(_mapping(mii_config, "mii_config"))
    nested = [_mapping(service.pop(name, None), name) for name in ("model_conf", "model_config")]
    rest = dict(arguments)
    for name in (*SERVICE_SETTINGS, *OWN_LAUNCH_SETTINGS):
        if name in rest:
            _put_once(service, name, rest.pop(name))
    for name, value in service.items():
        if name in OWN_LAUNCH_SETTINGS:
            collected.put(f"launch.{name}", value, name)
        elif name in SERVICE_SETTINGS:
            collected.take(name, value, SERVICE_SETTINGS[name])
        else:
            raise _unknown(name, (*SERVICE_SETTINGS, *OWN_LAUNCH_SETTINGS))
    model = dict(_mapping(model_config, "model_config"))
    for settings in nested:
        for name, value in settings.items():
            _put_once(model, name, value)
    _collect_model(collected, model_name_or_path, model, rest, also=tuple(SERVICE_SETTINGS))
    _require_model(collected)
    launch = collected.values["launch"]
    launch.setdefault("rest", False)
    launch.setdefault("deployment", default_deployment_name(collected.values["engine"]["model"]))
    return build(EngineConfig, collected.values["engine"]), build(LaunchConfig, launch)


def default_deployment_name(model: str) -> str:
    """As in MII: the hub id, or the last part of a local path, with "-mii-deployment" behind it."""
    path = Path(model).expanduser()
    base = path.resolve().name if path.is_dir() else model.partition(":")[0]
    return f"{base}-mii-deployment"


def _collect_model(
    collected: _Collected,
    model_name_or_path: str,
    model_config: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
    also: tuple[str, ...] = (),
) -> None:
    merged = dict(_mapping(model_config, "model_config"))
    for name, value in arguments.items():
        _put_once(merged, name, value)
    if model_name_or_path:
        _put_once(merged, "model_name_or_path", model_name_or_path)
    for name, value in merged.items():
        if name in _OWN_ENGINE_SETTINGS:
            collected.put(f"engine.{name}", value, name)
        elif name in MODEL_SETTINGS:
            collected.take(name, value, MODEL_SETTINGS[name])
        else:
            raise _unknown(name, (*MODEL_SETTINGS, *_OWN_ENGINE_SETTINGS, *also))
    _collect_engine_config(collected, _mapping(merged.get("inference_engine_config"), "inference_engine_config"))


def _collect_engine_config(collected: _Collected, engine: Mapping[str, Any]) -> None:
    """MII's RaggedInferenceEngineConfig."""
    for name, value in engine.items():
        where = f"inference_engine_config.{name}"
        if name in ("tensor_parallel", "tp"):
            for key, size in _mapping(value, where).items():
                if key != "tp_size":
                    raise _unknown(f"{where}.{key}", ("tp_size",))
                collected.put("engine.tensor_parallel", size, f"{where}.tp_size")
        elif name == "quantization":
            for key, mode in _mapping(value, where).items():
                collected.take(f"{where}.{key}", mode, MODEL_SETTINGS["quantization_mode"])
        elif name in ("state_manager", "manager"):
            for key, item in _mapping(value, where).items():
                if key not in STATE_MANAGER_SETTINGS:
                    raise _unknown(f"{where}.{key}", tuple(STATE_MANAGER_SETTINGS))
                collected.take(f"{where}.{key}", item, STATE_MANAGER_SETTINGS[key])
                if key == "memory_config":
                    _collect_memory(collected, _mapping(item, f"{where}.{key}"))
        else:
            raise _unknown(where, ("tensor_parallel", "state_manager", "quantization"))


def _collect_memory(collected: _Collected, memory: Mapping[str, Any]) -> None:
    """'allocate' counts KV blocks; 'reserve' names bytes to leave free, which gpu_memory_fraction does here."""
    mode = str(_shown(memory.get("mode", "reserve")))
    if mode == "allocate":
        collected.put("engine.num_blocks", memory.get("size"), "memory_config.size")
    elif mode == "reserve":
        _Collected().take("memory_config.size", memory.get("size"), _warned("use gpu_memory_fraction", 1_000_000_000))
    else:
        raise ConfigError(f"memory_config.mode is {mode!r}; it must be 'reserve' or 'allocate'")


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a dict, got {type(value).__name__}")
    return value


def _put_once(values: dict[str, Any], name: str, value: Any) -> None:
    if name in values and values[name] != value:
        raise ConfigError(f"{name} is given twice, as {values[name]!r} and as {value!r}; give it once")
    values[name] = value


def _shown(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _require_model(collected: _Collected) -> None:
    if not collected.values["engine"].get("model"):
        raise ConfigError("no model is named; give a local directory, a hub id, or 'demo'")


def _unknown(name: str, known: tuple[str, ...]) -> UnknownArgument:
    near = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UnknownArgument(f"unknown argument {name!r}{hint}")
