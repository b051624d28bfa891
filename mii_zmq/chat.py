# SPDX-License-Identifier: Apache-2.0
"""A chat in the terminal, or over a pipe: one line in, one streamed answer out.

Knows three ways to a model, each a function from messages to pieces of text: a deployment of this host, an HTTP
address with an OpenAI door, or an engine in this process.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TextIO

from mii_zmq.errors import MiiError, ServiceError
from mii_zmq.mii_client import Chat
from mii_zmq.response import Response

HELP = "Type a message; /reset starts over, /exit or Ctrl-D ends."
HTTP_TIMEOUT_S = 600.0

Answer = Callable[[Chat], Iterator[str]]


class Streamer(Protocol):
    """What `Pipeline` and `MIIClient` have in common."""

    def stream(self, prompt: str | Chat, **generate_kwargs: Any) -> Iterator[Response]: ...


def answer_by(streamer: Streamer, options: dict[str, Any]) -> Answer:
    """Answers of a pipeline or of a deployment."""

    def answer(messages: Chat) -> Iterator[str]:
        return (response.generated_text for response in streamer.stream(messages, **options))

    return answer


def answer_over_http(url: str, model: str | None, options: dict[str, Any]) -> Answer:
    """Answers of an OpenAI door at `url`; `model` None takes the first that it lists.

    Raises:
        ServiceError: nothing answers there, or it serves no model.
    """
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    fields = {{"max_new_tokens": "max_tokens"}.get(name, name): value for name, value in options.items()}
    if model is None:
        with _open(f"{base}/models") as reply:
            models = json.load(reply).get("data") or []
        if not models:
            raise ServiceError(f"{url} serves no model now")
        model = models[0]["id"]

    def answer(messages: Chat) -> Iterator[str]:
        body = json.dumps({"model": model, "messages": messages, "stream": True, **fields}).encode()
        with _open(f"{base}/chat/completions", body) as reply:
            try:
                yield from _pieces(reply)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServiceError(f"the answer broke off: {error or type(error).__name__}") from None

    return answer


def _pieces(reply: Iterable[bytes]) -> Iterator[str]:
    for line in reply:
        if line.strip() == b"data: [DONE]":
            return
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise ServiceError(str(event["error"].get("message", event["error"])))
            for choice in event.get("choices", ()):
                yield choice.get("delta", {}).get("content") or ""
    raise ServiceError("the answer broke off before its end")


def run_chat(answer: Answer, system: str | None, source: TextIO | None = None, sink: TextIO | None = None) -> int:
    """Read messages from `source` until its end. Returns 1 when an answer failed and nobody was there to see it."""
    source, sink = source or sys.stdin, sink or sys.stdout
    is_interactive = source.isatty()
    opening: Chat = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    code = 0
    if is_interactive:
        print(HELP, file=sink)
    for line in _lines(source, sink, is_interactive):
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        text, error = _print_answer(answer(messages), sink)
        if error is not None:
            print(f"error: {error}", file=sys.stderr, flush=True)
            messages.pop()
            code = 0 if is_interactive else 1
        else:
            messages.append({"role": "assistant", "content": text})
    return code


def _lines(source: TextIO, sink: TextIO, is_interactive: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> ") if is_interactive and source is sys.stdin else source.readline()
        except (EOFError, KeyboardInterrupt):
            print(file=sink)
            return
        if not line and not is_interactive:
            return
        if line.strip():
            yield line.strip()


def _print_answer(pieces: Iterator[str], sink: TextIO) -> tuple[str, MiiError | None]:
    """Print while it comes; Ctrl-C ends this answer only."""
    text = ""
    try:
        for piece in pieces:
            text += piece
            print(piece, end="", file=sink, flush=True)
    except KeyboardInterrupt:
        pass
    except MiiError as error:
        return text, error
    finally:
        print(file=sink, flush=True)
    return text, None


def _open(url: str, body: bytes | None = None) -> Any:
    try:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        raise ServiceError(f"{url} answers {error.code}: {_error_text(error.read())}") from None
    except (OSError, ValueError) as error:
        raise ServiceError(f"cannot reach {url}: {getattr(error, 'reason', error)}") from None


def _error_text(body: bytes) -> str:
    """The message in an error body of either door."""
    try:
        value = json.loads(body)
        return str(value.get("message") or value["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:200].decode("utf-8", "replace")
