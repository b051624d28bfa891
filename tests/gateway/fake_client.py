# SPDX-License-Identifier: Apache-2.0
"""A broker client without a broker: the interface of AsyncClient, with answers that a test decides."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from mii_zmq.client import Completion
from mii_zmq.errors import BrokerUnavailable, Cancelled, MiiError, UnknownDeployment
from mii_zmq.generation import SentAgain
from mii_zmq.protocol import Aborted, FinalBody, GenerateBody, PrefixCacheReset, TokenDelta, new_request_id
from mii_zmq.telemetry import LONG_S
from mii_zmq.trace_context import TraceContext
from mii_zmq.worker.embedding import shape_vector
from mii_zmq.worker.fake_model import FakeModel


class FakeGeneration:
    """Records what was asked. `push`, `finish` and `fail` play the broker."""

    def __init__(
        self,
        deployment: str,
        body: GenerateBody,
        stream: bool,
        tenant: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        name: str = "",
    ) -> None:
        self.name = name
        self.request_id = new_request_id()
        self.deployment = deployment
        self.body = body
        self.stream = stream
        self.tenant = tenant
        self.priority = priority
        self.deadline_s = deadline_s
        self.final: FinalBody | None = None
        self.says_prompt_length = True
        self.is_cancelled = asyncio.Event()
        self.texts: list[str] = []
        self.logprobs = b""
        self.embedding = b""
        self._deltas: list[TokenDelta] = []
        self._error: MiiError | None = None
        self._changed = asyncio.Event()
        self.sent_again: list[SentAgain] = []
        self.name = ""
        self.trace: TraceContext | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.texts)

    def push(self, *texts: str, logprobs: bytes = b"") -> None:
        """One token per text; `logprobs` come with each."""
        for text in texts:
            offset = len(self.texts)
            self.texts.append(text)
            token_ids = array("i", [offset]).tobytes()
            length = self.prompt_length if offset == 0 and self.says_prompt_length else 0
            row = TokenDelta(self.request_id, offset, offset, token_ids, text.encode(), None, logprobs, length)
            self._deltas.append(row)
            self.logprobs += logprobs
        self._changed.set()

    def finish(
        self, finish_reason: str = "length", *, num_cached_tokens: int = 0, matched_stop: str | None = None
    ) -> None:
        self.final = FinalBody(
            finish_reason=finish_reason,
            prompt_length=self.prompt_length,
            generated_length=len(self.texts),
            num_cached_tokens=num_cached_tokens,
            matched_stop=matched_stop,
        )
        self._changed.set()

    @property
    def is_running(self) -> bool:
        return self.final is None and self._error is None

    @property
    def has_deltas(self) -> bool:
        """The reader has not taken all."""
        return bool(self._deltas)

    def fail(self, error: MiiError) -> None:
        self._error = error
        self._changed.set()

    @property
    def prompt_length(self) -> int:
        if self.body.prompt_token_ids is not None:
            return len(self.body.prompt_token_ids)
        texts = [self.body.prompt or ""] + [m["content"] for m in self.body.messages or ()]
        return sum(len(text.split()) for text in texts)

    def cancel(self) -> None:
        if self.final is None and self._error is None:
            self.is_cancelled.set()
            self.fail(Cancelled("the request was cancelled"))

    def __aiter__(self) -> FakeGeneration:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.final is not None:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        deltas, self._deltas = self._deltas, []
        return deltas

    async def result(self) -> Completion:
        async for _ in self:
            pass
        assert self.final is not None
        return Completion(
            text="".join(self.texts),
            token_ids=list(range(len(self.texts))),
            finish_reason=self.final.finish_reason,
            prompt_length=self.final.prompt_length,
            generated_length=self.final.generated_length,
            num_cached_tokens=self.final.num_cached_tokens,
            matched_stop=self.final.matched_stop,
            logprobs=self.logprobs,
            embedding=self.embedding,
        )


def embedding_of(body: GenerateBody) -> bytes:
    """What the fake worker would say."""
    token_ids = list((body.prompt or "").encode()) or body.prompt_token_ids or [0]
    pooling = {"cls": "first", None: "last"}.get(body.pooling, body.pooling)
    assert pooling is not None
    return shape_vector(FakeModel().pool(token_ids, pooling, 16), body.dimensions, body.normalize)


def echo(generation: FakeGeneration) -> None:
    """The default answer: the prompt's words, in brackets, a token each."""
    body = generation.body
    if body.task == "embed":
        generation.embedding = embedding_of(body)
        generation.finish("stop")
        return
    text = body.prompt or " ".join(m["content"] for m in body.messages or ()) or str(body.prompt_token_ids)
    generation.push(*(f"[{word}]" for word in text.split()))
    generation.finish("length")


class FakeClient:
    """`answer` is called for each generation; set it to a function that does nothing to play the broker by hand."""

    def __init__(self, deployments: tuple[str, ...] = ("fake", "org/fake-7b")) -> None:
        self.deployments = deployments
        self.answer: Callable[[FakeGeneration], None] = echo
        self.sent: list[FakeGeneration] = []
        self.is_connected = False
        self.is_closed = False
        self.has_broker = True
        self.says_prompt_length = True
        """As brokers of earlier versions do not."""
        self.tool_format: str | None = None
        self.resets: list[str] = []
        self.failed_resets: dict[str, str] = {}
        self.offers_grammars = True
        self.has_groups = True
        self.answers_status = True
        self.reasons = False
        self._new: asyncio.Queue[FakeGeneration] = asyncio.Queue()

    async def connect(self, timeout_s: float = 10.0) -> None:
        if not self.has_broker:
            await asyncio.Event().wait()
        self.is_connected = True

    def generate(
        self,
        deployment: str,
        body: GenerateBody,
        *,
        stream: bool,
        tenant: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        name: str = "",
        trace: TraceContext | None = None,
    ) -> FakeGeneration:
        assert body.params.get("n", 1) == 1
        if not self.is_connected:
            raise BrokerUnavailable("no broker answers; is it running?", retry_after_ms=1000)
        generation = FakeGeneration(deployment, body, stream, tenant, priority, deadline_s)
        generation.name, generation.trace = name, trace
        generation.says_prompt_length = self.says_prompt_length
        self.sent.append(generation)
        self._new.put_nowait(generation)
        if deployment in self.deployments:
            self.answer(generation)
        else:
            generation.fail(UnknownDeployment(f"there is no deployment {deployment!r}"))
        return generation

    async def next_generation(self) -> FakeGeneration:
        """The oldest one not yet handed out by this method."""
        return await self._new.get()

    async def status(self, timeout_s: float = 2.0) -> dict[str, Any]:
        if not self.is_connected or not self.answers_status:
            raise BrokerUnavailable("no broker answers")
        load = {"running": 3, "waiting": 1, "used_blocks": 16, "total_blocks": 64, "generated_tokens": 50}
        load |= {"prompt_tokens": 100, "cached_tokens": 30}
        phase = {"bounds": list(LONG_S), "counts": [1] * (len(LONG_S) + 1), "total": 7.5}
        group = {
            "state": "ready",
            "max_model_len": 2048,
            "heartbeat_age_ms": 100,
            "load": load,
            "histograms": dict.fromkeys(("step_plan", "step_wait", "tokenize", "prefill", "per_token"), phase),
            "info": {
                "pid": 1,
                "tool_format": self.tool_format,
                "structured_output": ["json_schema", "structural_tag"] if self.offers_grammars else [],
                "reasoning": self.reasons,
            },
        }
        return {
            "epoch": bytes(16),
            "is_draining": False,
            "num_unfinished": 6,
            "deployments": {
                name: {
                    "is_ready": True,
                    "num_waiting": 2,
                    "waiting_tokens": 500,
                    "queue_time": {"bounds": [0.1, 1.0], "counts": [3, 2, 1], "total": 9.5},
                    "groups": [{"group": f"{name}-0", **group}] if self.has_groups else [],
                }
                for name in self.deployments
            },
            "event_loop_lag_s": 0.25,
            "counters": {
                "accepted": 10,
                "retries": 1,
                "slow_consumers": 2,
                "errors": {"overloaded": 4},
                "finished": {"stop": 5},
                "rejections": {"tenant": 3},
                "cancellations": {"running": 1},
            },
        }

    async def abort(
        self, *, names: Sequence[str], request_ids: Sequence[bytes], everything: bool, tenant: str
    ) -> Aborted:
        """As the broker does it."""
        if not self.is_connected:
            raise BrokerUnavailable("no broker answers")
        ended = [
            generation
            for generation in self.sent
            if generation.is_running
            and generation.tenant == tenant
            and (everything or generation.name in names or generation.request_id in request_ids)
        ]
        for generation in ended:
            generation.fail(Cancelled("the request was aborted"))
        return Aborted(
            num_requests=len(ended),
            request_ids=[g.request_id for g in ended if g.request_id in request_ids],
            names=sorted({g.name for g in ended} & set(names)),
        )

    async def reset_prefix_cache(self, deployment: str) -> PrefixCacheReset:
        if deployment not in self.deployments:
            raise UnknownDeployment(f"deployment {deployment!r} is unknown", param="deployment")
        self.resets.append(deployment)
        return PrefixCacheReset(done=[f"{deployment}-0"], failed=self.failed_resets)

    async def close(self) -> None:
        self.is_closed = True
