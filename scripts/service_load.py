# SPDX-License-Identifier: Apache-2.0
"""Load for `bench_service`: client processes that send the requests of one level together, as one closed loop.

The clients share a queue, a pipe with one number per request, so that each request is sent by whichever client has a
place free and the level ends everywhere at once. A client is this file as a script: jobs come on its standard input,
one JSON line each, and their records go to its standard output. It ends with its parent, or with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from service_stack import die_with_parent

from mii_zmq.bench_client import BenchClient, ServerOptions
from mii_zmq.bench_datasets import RandomOptions, make_prompts
from mii_zmq.bench_metrics import RequestRecord

TICKET = struct.Struct("=I")
MAX_REQUESTS = 2**16 // TICKET.size
"""What the pipe holds."""
LINE_BYTES = 2**28
START_DELAY_S = 0.2
"""From the last client's being ready to the first request, so that all of them start together."""
REQUEST_S = 60.0
"""For one request."""


class Job(msgspec.Struct, kw_only=True):
    """One client's part of a level."""

    url: str
    model: str
    dataset: RandomOptions
    vocab_size: int
    seed: str
    num_requests: int
    """Of the whole level; which of them are sent here is a matter of tickets."""
    concurrency: int
    """Of this client."""
    endpoint: Literal["completions", "chat"] = "completions"
    bodies: list[dict[str, Any]]
    """Further fields of requests; request n gets those of n modulo their number."""
    takes_tickets: bool = True
    """False: this client sends requests 0, 1, ... by itself."""


class Start(msgspec.Struct):
    """Times of the monotonic clock, which is one for all processes of a machine."""

    start_at: float
    stop_at: float | None = None
    """No request is sent from then on."""


class Answer(msgspec.Struct):
    records: list[RequestRecord]
    cpu_s: float


class Level(msgspec.Struct):
    """What the clients saw."""

    records: list[RequestRecord]
    """Of the shared queue."""
    beside: list[RequestRecord]
    start_at: float
    seconds: float
    client_cpu: list[float]
    """Cores, by client."""


class LoadPool:
    """The client processes. An asynchronous context manager."""

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self._processes: list[asyncio.subprocess.Process] = []
        self._tickets_read, self._tickets_write = os.pipe()
        os.set_blocking(self._tickets_read, False)

    @property
    def pids(self) -> dict[str, int]:
        return {f"client {index + 1}": process.pid for index, process in enumerate(self._processes)}

    async def __aenter__(self) -> LoadPool:
        for _ in range(self.num_clients):
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, __file__, str(self._tickets_read), stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE, limit=LINE_BYTES, pass_fds=(self._tickets_read,),
                    preexec_fn=die_with_parent,
                )
            )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        os.close(self._tickets_read)
        os.close(self._tickets_write)

    async def run(self, job: Job, limit_s: float, duration_s: float | None = None, beside: Job | None = None) -> Level:
        """Send a level's requests; `job.concurrency` is divided among the clients.

        With `duration_s` no request is sent after so many seconds. `beside` is a load of its own at the same time,
        from the last client, which then takes no part in the other one.

        Raises:
            SystemExit: a client failed, or the level took longer than `limit_s`.
        """
        clients = self._processes if beside is None else self._processes[:-1]
        clients = clients[: job.concurrency]
        jobs = [
            (process, msgspec.structs.replace(job, concurrency=places))
            for process, places in zip(clients, shares(job.concurrency, len(clients)), strict=True)
        ]
        if beside is not None:
            jobs.append((self._processes[-1], msgspec.structs.replace(beside, takes_tickets=False)))
        self._fill(job.num_requests)
        try:
            async with asyncio.timeout(limit_s):
                for process, part in jobs:
                    self._write(process, part)
                for process, _ in jobs:
                    await self._read(process)
                start_at = time.perf_counter() + START_DELAY_S
                start = Start(start_at, None if duration_s is None else start_at + duration_s)
                for process, _ in jobs:
                    self._write(process, start)
                lines = [await self._read(process) for process, _ in jobs]
        except TimeoutError:
            raise SystemExit(
                f"a level of {job.concurrency} requests at a time took more than {limit_s:.0f} s"
            ) from None
        answers = [msgspec.json.decode(line, type=Answer) for line in lines]
        own = answers if beside is None else answers[:-1]
        records = [record for answer in own for record in answer.records]
        seconds = max((record.ended_at for record in records), default=start_at) - start_at
        return Level(
            records,
            [] if beside is None else answers[-1].records,
            start_at,
            seconds,
            [answer.cpu_s / seconds if seconds > 0 else 0.0 for answer in answers],
        )

    def _fill(self, num_requests: int) -> None:
        """Tickets for a level; what an earlier one left is thrown away."""
        while take_ticket(self._tickets_read) is not None:
            pass
        if num_requests > MAX_REQUESTS:
            raise ValueError(f"{num_requests} requests in one level; at most {MAX_REQUESTS} fit into the queue")
        os.write(self._tickets_write, b"".join(TICKET.pack(index) for index in range(num_requests)))

    def _write(self, process: asyncio.subprocess.Process, message: Job | Start) -> None:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise SystemExit(f"a load client ended with exit code {await process.wait()}; its output above says more")
        return line


def shares(total: int, parts: int) -> list[int]:
    """`total` in parts that differ by one at most."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def take_ticket(fd: int) -> int | None:
    """The number of the next request; None: there is none left."""
    try:
        data = os.read(fd, TICKET.size)
    except BlockingIOError:
        return None
    return int(TICKET.unpack(data)[0]) if data else None


class Client:
    """The child's side: one job after the other."""

    def __init__(self, tickets: int) -> None:
        self._tickets = tickets

    async def serve(self) -> None:
        reader = asyncio.StreamReader(limit=LINE_BYTES)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            job = msgspec.json.decode(line, type=Job)
            as_text = job.endpoint == "chat"
            prompts = make_prompts(job.dataset, job.num_requests, job.seed, job.vocab_size, as_text=as_text)
            # Millions of integers that stay: the collector need not look at them while requests run.
            gc.collect()
            gc.freeze()
            self._say({"ready": True})
            start = msgspec.json.decode(await reader.readline(), type=Start)
            self._say(await self._run(job, prompts, start))
            gc.unfreeze()

    async def _run(self, job: Job, prompts: Sequence[Any], start: Start) -> Answer:
        own = iter(range(job.num_requests))
        records: list[RequestRecord] = []
        options = [
            ServerOptions(job.url, job.endpoint, temperature=0.0, extra_body=body, timeout_s=REQUEST_S)
            for body in job.bodies
        ]

        async def place(clients: Sequence[BenchClient]) -> None:
            while start.stop_at is None or time.perf_counter() < start.stop_at:
                number = take_ticket(self._tickets) if job.takes_tickets else next(own, None)
                if number is None:
                    return
                records.append(await clients[number % len(clients)].send(prompts[number]))

        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(BenchClient(fields, job.model)) for fields in options]
            await asyncio.sleep(max(0.0, start.start_at - time.perf_counter()))
            cpu_before = time.process_time()
            async with asyncio.TaskGroup() as group:
                for _ in range(job.concurrency):
                    group.create_task(place(clients))
            return Answer(records, time.process_time() - cpu_before)

    def _say(self, message: Any) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    import uvloop

    uvloop.run(Client(int(sys.argv[1])).serve())


if __name__ == "__main__":
    main()
