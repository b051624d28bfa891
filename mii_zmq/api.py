# SPDX-License-Identifier: Apache-2.0
"""The Python interface: `pipeline`, `serve` and `client` with the names, arguments and results of DeepSpeed-MII.

`pipeline` runs an engine in this process and imports the worker for it, lazily; `serve` and `client` talk to a
deployment's broker and import neither torch nor transformers. Every object but the asynchronous client may be used
from many threads at once, and from inside a running event loop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mii_zmq.embeddings import Embeddable, embedding_bodies, values_of
from mii_zmq.errors import ConfigError, ServiceError
from mii_zmq.launcher import start_detached
from mii_zmq.mii_client import (
    AsyncMIIClient,
    Chat,
    MIIClient,
    StreamingFn,
    check_streamable,
    check_streaming_fn,
    checked_prompts,
)
from mii_zmq.mii_settings import default_deployment_name, pipeline_settings, serve_settings
from mii_zmq.progress import Progress
from mii_zmq.registry import DeploymentNotFoundError, DeploymentRecord, Registry
from mii_zmq.response import GenerationFinishReason as GenerationFinishReason
from mii_zmq.response import Response
from mii_zmq.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mii_zmq.worker.pipeline import LocalEngine, LocalRequest


class PipelineDestroyedError(ServiceError, RuntimeError):
    """A pipeline was called after `destroy`."""


def pipeline(
    model_name_or_path: str = "",
    model_config: Mapping[str, Any] | None = None,
    all_rank_output: bool = False,
    **kwargs: Any,
) -> Pipeline:
    """An engine inside this process.

    Args:
        model_name_or_path: a local directory, a hub id, or "demo".
        model_config: settings of MII's ModelConfig; they may as well be given as keywords, as may our own.
        all_rank_output: for MII's sake; with one rank the result is the same.

    Raises:
        UnknownArgument: a keyword that is no setting.
        StartupError: a setting or the checkpoint does not do; one line says why.
    """
    engine = pipeline_settings(model_name_or_path, model_config, kwargs)
    from mii_zmq.worker.pipeline import LocalEngine

    progress = Progress()
    try:
        return Pipeline(LocalEngine(engine, progress))
    finally:
        progress.close()


def serve(
    model_name_or_path: str = "",
    model_config: Mapping[str, Any] | None = None,
    mii_config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> MIIClient:
    """Start a deployment that outlives this process, wait until it is ready, and return a client of it.

    Args:
        model_name_or_path: a local directory, a hub id, or "demo".
        model_config, mii_config: settings of MII's ModelConfig and MIIConfig; they may as well be given as keywords
            (`replica_num`, `deployment_name`, `enable_restful_api`, `restful_api_port` ...), as may our own.

    Raises:
        UnknownArgument: a keyword that is no setting.
        StartupError: why the deployment cannot start; nothing of it is left running.
    """
    engine, launch = serve_settings(model_name_or_path, model_config, mii_config, kwargs)
    progress = Progress()
    try:
        record = start_detached(launch, engine, progress)
    finally:
        progress.close()
    return MIIClient(record)


def client(model_or_deployment_name: str) -> MIIClient:
    """A client of a deployment that runs on this host, by its name or by its model's.

    Raises:
        DeploymentNotFoundError: there is none.
        BrokerUnavailable: it does not answer.
    """
    return MIIClient(find_deployment(model_or_deployment_name))


def async_client(model_or_deployment_name: str) -> AsyncMIIClient:
    """As `client`, for use inside one event loop; it connects at its first use."""
    return AsyncMIIClient(find_deployment(model_or_deployment_name))


def find_deployment(name: str) -> DeploymentRecord:
    """The record of a ready deployment, by its name or by its model's.

    Raises:
        ConfigError: that is no name.
        DeploymentNotFoundError: no deployment of this host bears it.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a deployment's name is a string, not {name!r:.60}")
    registry = Registry()
    record = registry.find(name) or registry.find(default_deployment_name(name))
    if record is None:
        names = ", ".join(other.deployment for other in registry.list_all())
        raise DeploymentNotFoundError(
            f"no deployment {name!r} runs on this host; running: {names or 'none'}. Start one with serve()"
        )
    if not record.ready:
        raise DeploymentNotFoundError(f"deployment {record.deployment!r} is still loading its model; try again later")
    return record


class Pipeline:
    """An engine in this process; call it with prompts. Concurrent calls share its batches."""

    is_rank_0 = True
    local_rank = 0

    def __init__(self, engine: LocalEngine) -> None:
        self._engine: LocalEngine | None = engine
        self._pid = os.getpid()
        self.tokenizer = engine.tokenizer

    @property
    def inference_engine(self) -> LocalEngine:
        if os.getpid() != self._pid:
            raise PipelineDestroyedError("this pipeline stayed behind when the process forked; make one in the child")
        if self._engine is None:
            raise PipelineDestroyedError("this pipeline was destroyed; make a new one")
        return self._engine

    def __call__(
        self, prompts: str | Sequence[str], streaming_fn: StreamingFn | None = None, **generate_kwargs: Any
    ) -> list[Response]:
        """Generate for each prompt; the responses come in the order of the prompts, `n` in a row for each.

        With `streaming_fn` (one prompt only) it is called with a list of one Response per token; the last one has an
        empty text and the finish reason, and the result is an empty list.

        Raises:
            RequestError: what is wrong with an option or a prompt; then nothing is generated.
        """
        engine = self.inference_engine
        texts, params = checked_prompts(prompts, generate_kwargs)
        if streaming_fn is not None:
            check_streaming_fn(streaming_fn)
            check_streamable(texts, params)
            for response in self.stream(texts[0], **generate_kwargs):
                streaming_fn([response])
            return []
        with contextlib.ExitStack() as stack:
            requests = engine.submit([(text, params, choice) for text in texts for choice in range(params.n)])
            for request in requests:
                # Left by an error or by Ctrl-C: what still runs is of no use to anybody.
                stack.callback(request.cancel)
            return [_response(request, "".join(request)) for request in requests]

    def stream(self, prompt: str | Chat, **generate_kwargs: Any) -> Iterator[Response]:
        """The parts of one answer as they are generated; a list of chat messages is rendered by the model's template.

        Leaving the iterator early cancels the request.
        """
        params = SamplingParams.from_mapping(generate_kwargs)
        check_streamable([prompt], params)
        (request,) = self.inference_engine.submit([(prompt, params, 0)])
        with contextlib.closing(request):
            for text in request:
                if text:
                    yield request.reader.response(text, request.prompt_length, request.num_tokens)
            yield _response(request, "")

    def embed(
        self,
        inputs: Embeddable,
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> list[list[float]]:
        """The embeddings of one text (or list of token ids), or of each of several; as `MIIClient.embed`."""
        engine = self.inference_engine
        bodies = embedding_bodies(inputs, pooling=pooling, dimensions=dimensions, normalize=normalize)
        with contextlib.ExitStack() as stack:
            requests = engine.embed(bodies)
            for request in requests:
                stack.callback(request.cancel)
            return [values_of(request.result()) for request in requests]

    def destroy(self) -> None:
        """Cancel what runs and free the engine's memory; the pipeline cannot be used afterwards."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()


def _response(request: LocalRequest, text: str) -> Response:
    return request.reader.response(text, request.prompt_length, request.num_tokens, request.finish_reason)
