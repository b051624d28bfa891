# SPDX-License-Identifier: Apache-2.0
"""Streamed and whole chats from as many users as `locust` is told: `docs/benchmarking.md` has the command.

    locust --locustfile docs/locustfile.py --host http://localhost:28080 --headless --users 4 --run-time 30s

Of a stream, locust's own figure is the time until its headers come; `first token`, `last token` and `time per output
token` (by the usage that the server tells) stand beside it. The model is the first that is served, or what MODEL names.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

from locust import HttpUser, between, task

OUTPUT_TOKENS = 16
QUESTIONS = ("Name a colour.", "What is the capital of France?", "Count to five.", "Write a line about the sea.")


class Reader(HttpUser):
    """Asks, reads the answer, waits for a moment, asks again."""

    wait_time = between(0.1, 0.5)

    def on_start(self) -> None:
        self.model = os.environ.get("MODEL") or self.client.get("/v1/models").json()["data"][0]["id"]

    def body(self, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": random.choice(QUESTIONS)}]
        return {"model": self.model, "messages": messages, "max_tokens": OUTPUT_TOKENS, "temperature": 0, **more}

    @task
    def whole(self) -> None:
        with self.client.post("/v1/chat/completions", json=self.body(), name="chat", catch_response=True) as response:
            if response.ok and not response.json()["choices"][0]["message"]["content"]:
                response.failure("an answer without text")

    @task(3)
    def streamed(self) -> None:
        body = self.body(stream=True, stream_options={"include_usage": True})
        begin = time.perf_counter()
        first, last, usage = 0.0, 0.0, None
        with self.client.post(
            "/v1/chat/completions", json=body, name="chat, streamed", stream=True, catch_response=True
        ) as response:
            for line in response.iter_lines():
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if "error" in event:
                    response.failure(event["error"]["message"])
                elif event["choices"] and event["choices"][0]["delta"].get("content"):
                    last = time.perf_counter()
                    first = first or last
            if response.ok and not (usage and first):
                response.failure("a stream without text or usage")
        if usage and first:
            self.report("first token", first - begin)
            self.report("last token", last - begin)
            if usage["completion_tokens"] > 1:
                self.report("time per output token", (last - first) / (usage["completion_tokens"] - 1))

    def report(self, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="stream",
            name=name,
            response_time=1000 * seconds,
            response_length=0,
            exception=None,
            context={},
        )
