# SPDX-License-Identifier: Apache-2.0
"""Frozen settings, one dataclass per process, with one way in: `build(cls, mapping)`.

Unknown keys are refused with the nearest known one, values are checked once, nothing mutates afterwards. Field
metadata holds the help text from which command lines and the configuration reference are generated. The environment
variables MII_ZMQ_CACHE_DIR and MII_ZMQ_RUN_DIR are read only here, those of logs in `telemetry_config`.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from mii_zmq.errors import ConfigError
from mii_zmq.telemetry_config import TelemetryConfig, setting

T = TypeVar("T")

DEFAULT_BROKER_PORT = 50050
DEFAULT_REST_PORT = 28080
MAX_BODY_BYTES = 8 * 2**20
"""Largest request body at any door; checked before decoding."""
MAX_MESSAGES = 4096
"""Of one chat, at any door."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine: model, memory and batch limits."""

    model: str = setting(
        "local directory or hub id of a Hugging Face checkpoint; 'random:SHAPE': random weights; 'fake:': test engine"
    )
    tokenizer: str | None = setting("directory or hub id of the tokenizer (default: the model's)", None)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "dtype of weights and activations; auto: the checkpoint's on a GPU, float32 on a CPU", "auto"
    )
    device: Literal["auto", "cpu", "cuda"] = setting("where the model runs; auto: cuda if there is one", "auto")
    max_model_len: int | None = setting("tokens per sequence at most (default: the model's context)", None)
    token_budget: int | None = setting("tokens per step at most (default: 512 on a CPU, by the card on a GPU)", None)
    max_sequences: int = setting("sequences that run at the same time", 256)
    block_size: int = setting("tokens per KV block", 64)
    num_blocks: int | None = setting("KV blocks (default: what fits into memory)", None)
    gpu_memory_fraction: float = setting("share of the GPU's memory for weights, KV blocks and graphs", 0.9)
    kv_cache_gb: float | None = setting("KV pool in GB (default: 4 on a CPU, what fits on a GPU)", None)
    prefix_cache: bool = setting("reuse KV blocks of equal prompt prefixes", True)
    num_threads: int | None = setting("CPU threads of each rank (default: the cores available, divided)", None)
    tensor_parallel: int = setting("ranks (processes, on a GPU one per card) that share one copy of the model", 1)
    peer_memory: bool = setting(
        "exchange between a group's GPUs through each other's memory where that beats NCCL; no: NCCL does all of it",
        True,
    )
    device_index: int = setting("first GPU of this group among the visible ones; further ranks take the next", 0)
    deterministic: bool = setting(
        "results do not depend on what else is in the batch (slower; on a GPU, in bfloat16 or float16)", False
    )
    pooling: Literal["last", "mean", "first", "cls"] = setting(
        "which of a prompt's final hidden states is its embedding, where a request does not say", "last"
    )
    step_timeout_s: float = setting(
        "seconds without progress after which an engine is killed; 10 times its usual step, if that is more", 30.0
    )
    grammar_timeout_s: float = setting("seconds that compiling the grammar of one structured output may take", 10.0)
    grammar_memory_mb: int = setting("MB of memory that this may take", 1024)
    grammar_cache_mb: int = setting(
        "MB of memory in compiled grammars up to which unused ones are kept; those of running requests always are", 256
    )
    step_trace: str | None = setting("file for one JSON line per event of a step: plan, submit, read, sent", None)

    def __post_init__(self) -> None:
        _positive(self, "max_model_len", "token_budget", "max_sequences", "block_size", "num_blocks", "num_threads")
        _positive(self, "tensor_parallel", "kv_cache_gb", "step_timeout_s")
        _positive(self, "grammar_timeout_s", "grammar_memory_mb", "grammar_cache_mb")
        if not self.model:
            raise ConfigError("model is empty; give a local directory or a hub id")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}; it must be a power of two")
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ConfigError(f"gpu_memory_fraction is {self.gpu_memory_fraction}; it must be in (0, 1]")
        if self.device_index < 0:
            raise ConfigError(f"device_index is {self.device_index}; it must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(TelemetryConfig):
    """One worker group: which deployment it serves, and where its brokers are."""

    deployment: str = setting("name under which clients reach this model")
    brokers: tuple[str, ...] = setting(
        "broker endpoints for workers, comma separated", (f"tcp://127.0.0.1:{DEFAULT_BROKER_PORT + 1}",)
    )
    group: str | None = setting("name of this group (default: host, pid and a random part)", None)
    drain_timeout_s: float = setting("seconds that running requests get after SIGTERM", 120.0)
    tokenizer_threads: int = setting("threads for tokenizing", 2)
    load_timeout_s: float = setting("seconds the engine may take to load", 1800.0)

    def __post_init__(self) -> None:
        TelemetryConfig.__post_init__(self)
        _positive(self, "drain_timeout_s", "tokenizer_threads", "load_timeout_s")
        check_deployment_name(self.deployment)
        _check_brokers(self.brokers)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig(TelemetryConfig):
    """The broker: its two sockets, liveness and queue bounds."""

    client_endpoint: str = setting("where clients connect", f"tcp://127.0.0.1:{DEFAULT_BROKER_PORT}")
    worker_endpoint: str = setting("where workers connect", f"tcp://127.0.0.1:{DEFAULT_BROKER_PORT + 1}")
    heartbeat_ms: int = setting("interval of worker and client heartbeats", 500)
    liveness: int = setting("missed intervals after which a peer counts as dead", 6)
    max_queued_requests: int = setting(
        "requests waiting for a group, per deployment, before new ones are refused", 2048
    )
    max_queued_tokens: int = setting("the same in tokens, prompt and output together, as estimated", 2**22)
    tenant_share: float = setting(
        "share of the queue, and of the requests that run, that one tenant may have beside others", 0.5
    )
    max_client_requests: int = setting("unfinished requests of one client connection", 8192)
    max_attempts: int = setting(
        "groups that may die with a request, in turn and without its getting on, before it is ended", 3
    )
    resume: bool = setting(
        "keep the output that clients have, so that a stream whose group dies goes on with another one", True
    )
    quarantine_s: float = setting("seconds for which a request of which groups have died is refused", 300.0)
    group_wait_s: float = setting("seconds that requests wait for a group when a deployment's last one is gone", 10.0)
    slow_reader_s: float = setting("seconds for which a client may grant no credit while output waits for it", 30.0)
    slow_reader_bytes: int = setting("bytes of one request's output that may wait for credit", 2**20)
    drain_timeout_s: float = setting("seconds that accepted requests get after SIGTERM", 60.0)
    insecure: bool = setting("allow endpoints other than loopback and ipc without keys", False)

    def __post_init__(self) -> None:
        TelemetryConfig.__post_init__(self)
        _positive(self, "heartbeat_ms", "liveness", "max_queued_requests", "max_client_requests", "max_attempts")
        _positive(
            self,
            "drain_timeout_s",
            "quarantine_s",
            "group_wait_s",
            "slow_reader_s",
            "slow_reader_bytes",
            "max_queued_tokens",
        )
        if not 0 < self.tenant_share <= 1:
            raise ConfigError(f"tenant_share is {self.tenant_share}; it must be in (0, 1]")
        for endpoint in (self.client_endpoint, self.worker_endpoint):
            check_endpoint(endpoint, self.insecure)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(TelemetryConfig):
    """The HTTP gateway."""

    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("port to listen on; 0: any free one", DEFAULT_REST_PORT)
    share_port: bool = setting("let further gateways of this user listen on the same port", False)
    brokers: tuple[str, ...] = setting(
        "broker endpoints for clients, comma separated", (f"tcp://127.0.0.1:{DEFAULT_BROKER_PORT}",)
    )
    shutdown_timeout_s: float = setting("seconds that running requests get after SIGTERM", 60.0)
    admin_endpoints: bool = setting(
        "let clients reset prefix caches and abort all requests of a tenant; to abort by id is always allowed",
        False,
    )
    access_log: bool = setting("log one line per HTTP request, at level INFO (probes: DEBUG)", True)
    insecure: bool = setting("allow an address other than loopback", False)

    def __post_init__(self) -> None:
        TelemetryConfig.__post_init__(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be 0 to 65535")
        _positive(self, "shutdown_timeout_s")
        _check_brokers(self.brokers)
        check_endpoint(f"tcp://{self.host}:{self.port}", self.insecure)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig(TelemetryConfig):
    """The launcher: one deployment on this host."""

    deployment: str = setting("name under which clients reach the model")
    replicas: int = setting("worker groups, each with its own copy of the model", 1)
    brokers: int = setting("brokers; with several, losing one costs no request", 1)
    gateways: int = setting("HTTP gateways, which share one port", 1)
    rest: bool = setting("start the HTTP gateways", True)
    host: str = setting("address that the HTTP gateway listens on", "127.0.0.1")
    port: int | None = setting(
        f"port of the HTTP gateway; 0: any free one (default: {DEFAULT_REST_PORT} if free)", None
    )
    broker_port: int = setting(
        "port of the broker for ZeroMQ clients, further brokers take the next ones; 0: any free ones", 0
    )
    drain_timeout_s: float = setting("seconds that running requests get at the end", 30.0)
    load_timeout_s: float = setting("seconds that loading the model may take", 1800.0)
    admin_endpoints: bool = setting("let HTTP clients reset the prefix cache and abort all requests of a tenant", False)
    access_log: bool = setting("the gateways log one line per HTTP request, at level INFO", True)
    insecure: bool = setting("allow a host other than loopback", False)

    def __post_init__(self) -> None:
        TelemetryConfig.__post_init__(self)
        check_deployment_name(self.deployment)
        _positive(self, "replicas", "brokers", "gateways", "drain_timeout_s", "load_timeout_s")
        for name in ("port", "broker_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 to 65535")
        check_endpoint(f"tcp://{self.host}:0", self.insecure)

    def gateway(self, brokers: tuple[str, ...], port: int) -> GatewayConfig:
        return GatewayConfig(
            host=self.host,
            port=port,
            share_port=True,
            brokers=brokers,
            shutdown_timeout_s=self.drain_timeout_s,
            admin_endpoints=self.admin_endpoints,
            access_log=self.access_log,
            insecure=self.insecure,
            **self.telemetry,
        )


def settings_of(cls: type) -> list[Field[Any]]:
    """The fields of a config class; those that all processes share come last."""
    shared = {f.name for f in fields(TelemetryConfig)}
    return sorted(fields(cls), key=lambda f: f.name in shared)


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make a config from a mapping (JSON, keyword arguments, command line).

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type, or a value the class refuses.
    """
    known = [f.name for f in settings_of(cls)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown setting {key!r} for {cls.__name__}{hint}")
    try:
        return msgspec.convert(dict(values), cls)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        reason, _, path = str(error).partition(" - at `$.")
        where = f"{path.rstrip('`')}: " if path else ""
        raise ConfigError(f"{cls.__name__}: {where}{reason}") from None


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; it must be more than 0" + ", and finite" * (value == math.inf))


def check_deployment_name(name: str) -> str:
    """Names are routing keys, never paths: 1 to 200 printable characters without spaces; '/' as in hub ids is fine."""
    if not 0 < len(name) <= 200 or not name.isprintable() or any(c.isspace() for c in name):
        raise ConfigError(f"deployment name {name[:60]!r} must be 1 to 200 printable characters without spaces")
    return name


def check_endpoint(endpoint: str, insecure: bool) -> str:
    """Refuse endpoints that strangers can reach, unless `insecure` is set."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        return endpoint
    if scheme != "tcp" or not rest:
        raise ConfigError(f"endpoint {endpoint!r} must be tcp://HOST:PORT or ipc://PATH")
    if not _is_loopback(rest.rsplit(":", 1)[0].strip("[]")) and not insecure:
        raise ConfigError(
            f"{endpoint} can be reached from other hosts and carries no keys; use 127.0.0.1, or pass --insecure on a "
            "network that you trust"
        )
    return endpoint


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_broker_endpoint(endpoint: str) -> str:
    """Refuse an endpoint that no socket could connect to."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if (scheme == "ipc" and rest) or (scheme == "tcp" and host and is_port):
        return endpoint
    raise ConfigError(f"broker endpoint {endpoint!r} must be tcp://HOST:PORT or ipc://PATH")


def _check_brokers(endpoints: tuple[str, ...]) -> None:
    if not endpoints:
        raise ConfigError("brokers is empty; name at least one endpoint, as in tcp://127.0.0.1:50050")
    for endpoint in endpoints:
        check_broker_endpoint(endpoint)


def cache_dir() -> Path:
    """Where converted models and compiled kernels live; raises ConfigError when it cannot be made."""
    base = os.environ.get("MII_ZMQ_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    path = root if os.environ.get("MII_ZMQ_CACHE_DIR") else root / "mii_zmq"
    _make_directory(path, 0o777, "the cache directory", "MII_ZMQ_CACHE_DIR")
    return path


def run_dir() -> Path:
    """The user's private directory (mode 0700) for sockets and the registry of running deployments.

    Raises:
        ConfigError: the directory belongs to somebody else or is open to others.
    """
    configured = os.environ.get("MII_ZMQ_RUN_DIR") or os.environ.get("XDG_RUNTIME_DIR")
    root = Path(configured) if configured else Path(tempfile.gettempdir())
    path = root if os.environ.get("MII_ZMQ_RUN_DIR") else root / f"mii_zmq-{os.getuid()}"
    _make_directory(path, 0o700, "the run directory", "MII_ZMQ_RUN_DIR")
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"the run directory {path} must belong to you with mode 0700; set MII_ZMQ_RUN_DIR to one")
    return path


def _make_directory(path: Path, mode: int, what: str, variable: str) -> None:
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be made: {error.strerror}; set {variable} to another one") from None
