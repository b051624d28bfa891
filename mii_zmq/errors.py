# SPDX-License-Identifier: Apache-2.0
"""The one exception tree of the project; every error says what was wrong, with which value, and what to do.

    MiiError
    |- StartupError           the process cannot serve: ConfigError, ModelUnsupported, CheckpointError
    |- RequestError           the caller's fault: InvalidRequest, PromptTooLong, UnknownDeployment, RequestTooLarge,
    |                         Overloaded, TenantOverloaded, DeadlineExceeded, Cancelled, SlowConsumer
    |- ServiceError           ours, and often worth a retry: NoWorkers, WorkerLost, BrokerUnavailable, Draining;
    |                         and PoisonRequest and NumericError, which are not
    |- ProtocolError          a peer broke the wire contract
    |- InternalError          a bug; please report

A class fixes the stable wire `code`, the HTTP status and whether a retry of the same request can succeed.
`to_wire` / `from_wire` carry an error over ZeroMQ without losing its class.
"""

from __future__ import annotations

from typing import Any, ClassVar


class MiiError(Exception):
    """Base of every error raised on purpose. `param` names the offending request field, where there is one."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_ms: int | None = None,
        emitted_tokens: int = 0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms
        self.emitted_tokens = emitted_tokens

    def to_wire(self) -> dict[str, Any]:
        """The header map of an ERROR message (plain msgpack types, string keys)."""
        wire: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
            "emitted_tokens": self.emitted_tokens,
        }
        if self.param is not None:
            wire["param"] = self.param
        if self.retry_after_ms is not None:
            wire["retry_after_ms"] = self.retry_after_ms
        return wire


class StartupError(MiiError):
    """The process cannot start serving; the message is one clear line for the operator."""

    code = "startup"


class ConfigError(StartupError):
    """A setting is unknown, malformed or contradicts another one."""

    code = "config"


class ModelUnsupported(StartupError):
    """The checkpoint's architecture, or a field of its config that changes the text, is not implemented."""

    code = "model_unsupported"


class CheckpointError(StartupError):
    """The checkpoint is missing, incomplete, malformed or in a refused format."""

    code = "checkpoint"


class RequestError(MiiError):
    """The caller asked for something that cannot be done as asked."""

    code = "invalid_request"
    http_status = 400


class InvalidRequest(RequestError):
    """A field has the wrong type, an impossible value or an unknown name."""


class PromptTooLong(RequestError):
    """The prompt, or prompt plus requested output, exceeds the model's context or the whole KV pool."""

    code = "context_length_exceeded"


class UnknownDeployment(RequestError):
    """No worker group has ever registered under this deployment name."""

    code = "unknown_deployment"
    http_status = 404


class RequestTooLarge(RequestError):
    """The encoded request exceeds the size limit; it was not decoded."""

    code = "request_too_large"
    http_status = 413


class Overloaded(RequestError):
    """A bounded queue is full; `retry_after_ms` says when to come back."""

    code = "overloaded"
    http_status = 503
    retryable = True


class TenantOverloaded(Overloaded):
    """The tenant has as much waiting as one may have beside others."""

    code = "tenant_overloaded"
    http_status = 429


class DeadlineExceeded(RequestError):
    """The request's own deadline passed before it finished."""

    code = "deadline_exceeded"
    http_status = 504


class Cancelled(RequestError):
    """The client cancelled the request or vanished."""

    code = "cancelled"
    http_status = 499


class SlowConsumer(RequestError):
    """The client did not read its output; the request was ended so that nobody else has to wait or to make room."""

    code = "slow_consumer"
    http_status = 499


class ServiceError(MiiError):
    """The service, not the request, is at fault."""

    code = "service"
    http_status = 503
    retryable = True


class NoWorkers(ServiceError):
    """The deployment is known, but no group can take a request now."""

    code = "no_workers"


class WorkerLost(ServiceError):
    """The group serving this request died, and no other one could take it over."""

    code = "worker_lost"
    http_status = 502


class PoisonRequest(ServiceError):
    """Worker groups die of this request, as far as can be told; it is not tried again, and refused for a while."""

    code = "poison_request"
    http_status = 500
    retryable = False


class NumericError(ServiceError):
    """The model computed no finite number for this request, also without anything that others had computed."""

    code = "numeric_error"
    http_status = 500
    retryable = False


class BrokerUnavailable(ServiceError):
    """No broker answers at the configured endpoint."""

    code = "broker_unavailable"


class Draining(ServiceError):
    """The process is shutting down and takes no new work."""

    code = "draining"


class ProtocolError(MiiError):
    """A message breaks the wire contract (frame count, tag, version, verb, types, sizes)."""

    code = "protocol"
    http_status = 400


class InternalError(MiiError):
    """A bug on our side; the request it happened to ends, others go on."""

    code = "internal"


_BY_CODE: dict[str, type[MiiError]] = {
    cls.code: cls
    for cls in (
        ConfigError, ModelUnsupported, CheckpointError, StartupError, InvalidRequest, PromptTooLong,
        UnknownDeployment, RequestTooLarge, Overloaded, TenantOverloaded, DeadlineExceeded, Cancelled, SlowConsumer,
        NoWorkers, WorkerLost, PoisonRequest, NumericError, BrokerUnavailable, Draining, ServiceError, ProtocolError,
        InternalError,
    )
}  # fmt: skip


def from_wire(wire: dict[str, Any]) -> MiiError:
    """Rebuild the error that `to_wire` described; an unknown code becomes `ServiceError` or `InternalError`."""
    fallback = ServiceError if wire.get("retryable") else InternalError
    cls = _BY_CODE.get(str(wire.get("code")), fallback)
    param = wire.get("param")
    retry_after_ms = wire.get("retry_after_ms")
    emitted_tokens = wire.get("emitted_tokens")
    return cls(
        str(wire.get("message", "the peer gave no reason")),
        param=param if isinstance(param, str) else None,
        retry_after_ms=retry_after_ms if isinstance(retry_after_ms, int) else None,
        emitted_tokens=emitted_tokens if isinstance(emitted_tokens, int) else 0,
    )
