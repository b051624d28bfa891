# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mii_zmq.protocol import FinalBody, Verb, parse_body
from mii_zmq.worker.engine_channel import ids_from_bytes, ids_to_bytes
from tests.stack import unused_endpoint
from tests.worker.scripted_broker import PATIENCE_S, ScriptedBroker, Stage, open_context, staged, worker_process

pytestmark = pytest.mark.slow


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def wait_gone(pid: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while is_running(pid):
            await asyncio.sleep(0.005)


async def test_stream_answer_and_resume_agree() -> None:
    async with staged() as stage:
        broker = stage.broker
        assert (stage.ready["group"], stage.ready["deployment"]) == ("g", "d")
        assert "in_flight" not in stage.ready
        broker.generate(1, max_new_tokens=40, seed=1)
        deltas, final = await broker.collect((1).to_bytes(16, "big"))
        assert final.verb is Verb.FINAL
        ids = [token_id for delta in deltas for token_id in ids_from_bytes(delta.token_ids)]
        assert [delta.seq for delta in deltas] == list(range(len(deltas)))
        assert [delta.token_offset for delta in deltas] == list(range(len(ids)))
        body = parse_body(final, FinalBody)
        assert (body.generated_length, body.finish_reason) == (len(ids), deltas[-1].finish_reason)

        broker.generate(2, max_new_tokens=40, seed=1, stream=False)
        deltas_2, final = await broker.collect((2).to_bytes(16, "big"))
        assert deltas_2 == []
        assert ids_from_bytes(final.raw[0]) == ids
        text = "".join(delta.text.decode() for delta in deltas)
        assert parse_body(final, FinalBody).text == text

        broker.generate(3, max_new_tokens=40, seed=1, resume=ids_to_bytes(ids[:7]))
        deltas_3, final = await broker.collect((3).to_bytes(16, "big"))
        assert [i for delta in deltas_3 for i in ids_from_bytes(delta.token_ids)] == ids[7:]
        assert deltas_3[0].token_offset == 7
        assert parse_body(final, FinalBody).generated_length == len(ids)


async def test_cancelled_requests_free_their_blocks() -> None:
    async with staged("fake:step_ms=5") as stage:
        broker = stage.broker
        ids = [broker.generate(number, ignore_eos=True, max_new_tokens=4000) for number in range(1, 21)]
        await broker.heartbeat_with(running=20)
        broker.send(Verb.CANCEL, header={"request_ids": ids})
        ended = {}
        while len(ended) < len(ids):
            message = await broker.skip_to(Verb.ERROR)
            ended[message.request_id] = message.header["code"]
        assert ended == dict.fromkeys(ids, "cancelled")
        await broker.heartbeat_with(running=0, waiting=0, used_blocks=0, outstanding_tokens=0)
        broker.generate(30, max_new_tokens=2, ignore_eos=True)
        await broker.skip_to(Verb.FINAL)


async def test_deadline_and_refusals_reach_only_their_request() -> None:
    async with staged("fake:step_ms=20,num_blocks=4,max_model_len=4096") as stage:
        broker = stage.broker
        broker.generate(1, deadline_ms=200, ignore_eos=True, max_new_tokens=200)
        _, error = await broker.collect((1).to_bytes(16, "big"))
        assert error.header["code"] == "deadline_exceeded"
        broker.generate(2, "x" * 300)
        _, error = await broker.collect((2).to_bytes(16, "big"))
        assert (error.header["code"], error.header["param"]) == ("context_length_exceeded", "prompt")
        broker.generate(3, max_new_tokens=2, ignore_eos=True)
        _, final = await broker.collect((3).to_bytes(16, "big"))
        assert final.verb is Verb.FINAL


async def test_sigterm_drains() -> None:
    # Long enough for all that has to happen before it ends by itself.
    async with staged("fake:step_ms=20") as stage:
        broker = stage.broker
        broker.generate(1, ignore_eos=True, max_new_tokens=100)
        await broker.take(Verb.TOKENS)
        stage.terminate()
        await broker.skip_to(Verb.DRAIN)
        broker.generate(2)
        refusal = await broker.skip_to(Verb.ERROR)
        assert (refusal.request_id[-1], refusal.header["code"], refusal.header["retryable"]) == (2, "draining", True)
        async with asyncio.timeout(PATIENCE_S):
            while (await broker.heartbeats.get())["state"] != "draining":
                pass
        final = await broker.skip_to(Verb.FINAL)
        assert parse_body(final, FinalBody).generated_length == 100
        await broker.take(Verb.DISCONNECT)
        assert await stage.exit_code() == 0
        await wait_gone(stage.engine_pid)


async def test_drain_ends_after_its_timeout_and_gives_requests_back() -> None:
    async with staged("fake:step_ms=5", "--drain-timeout-s=0.3") as stage:
        stage.broker.generate(1, ignore_eos=True, max_new_tokens=8000)
        await stage.broker.take(Verb.TOKENS)
        stage.terminate()
        await stage.broker.skip_to(Verb.DISCONNECT)
        assert await stage.exit_code() == 0


async def test_second_signal_ends_at_once() -> None:
    async with staged("fake:step_ms=5") as stage:
        stage.broker.generate(1, ignore_eos=True, max_new_tokens=8000)
        await stage.broker.take(Verb.TOKENS)
        stage.worker.process.send_signal(signal.SIGINT)
        await stage.broker.skip_to(Verb.DRAIN)
        stage.worker.process.send_signal(signal.SIGINT)
        await stage.broker.skip_to(Verb.DISCONNECT)
        assert await stage.exit_code() == 1
        await wait_gone(stage.engine_pid)


async def test_broker_can_ask_for_a_drain() -> None:
    async with staged() as stage:
        stage.broker.send(Verb.DRAIN)
        await stage.broker.skip_to(Verb.DISCONNECT)
        assert await stage.exit_code() == 0


async def test_killed_engine_ends_the_group() -> None:
    async with staged("fake:step_ms=5") as stage:
        stage.broker.generate(1, ignore_eos=True, max_new_tokens=8000)
        await stage.broker.take(Verb.TOKENS)
        os.kill(stage.engine_pid, signal.SIGKILL)
        message = await stage.broker.skip_to(Verb.DISCONNECT)
        assert "SIGKILL" in message.header["reason"]
        assert await stage.exit_code() == 1
        announced = list(stage.worker.announcements(1))
        assert "SIGKILL" in announced[-1]["error"]


async def test_killed_actor_takes_its_engine_along() -> None:
    async with staged("fake:step_ms=5") as stage:
        stage.broker.generate(1, ignore_eos=True, max_new_tokens=8000)
        await stage.broker.take(Verb.TOKENS)
        os.kill(stage.worker.pid, signal.SIGKILL)
        await wait_gone(stage.engine_pid)


@pytest.mark.parametrize(("how", "liveness"), [("silence", 4), ("disconnect", 600)])
async def test_group_registers_again_and_lists_what_runs(how: str, liveness: int) -> None:
    async with staged("fake:step_ms=20", liveness=liveness) as stage:
        broker = stage.broker
        request_id = broker.generate(1, ignore_eos=True, max_new_tokens=8000)
        await broker.skip_to(Verb.TOKENS)
        if how == "silence":
            broker.answers_heartbeats = False
        else:
            broker.send(Verb.DISCONNECT, header={"reason": "who are you"})
        ready = await broker.skip_to(Verb.READY)
        assert ready.header["in_flight"] == [request_id]
        assert ready.header["incarnation"] == stage.ready["incarnation"]
        broker.answers_heartbeats = True
        broker.send(Verb.CANCEL, request_id)
        assert (await broker.skip_to(Verb.ERROR)).header["code"] == "cancelled"


async def test_restarted_broker_finds_a_group_without_leftovers() -> None:
    async with staged("fake:step_ms=5", endpoint=unused_endpoint()) as stage:
        with open_context() as context:
            stage.broker.generate(1, ignore_eos=True, max_new_tokens=8000)
            await stage.broker.take(Verb.TOKENS)
            stage.end_broker()
            successor = ScriptedBroker(context, stage.broker.endpoint)
            try:
                ready = await successor.skip_to(Verb.READY)
                while "in_flight" in ready.header:
                    ready = await successor.skip_to(Verb.READY)
                await successor.heartbeat_with(running=0, used_blocks=0)
                successor.generate(2, ignore_eos=True, max_new_tokens=3)
                _, final = await successor.collect((2).to_bytes(16, "big"))
                assert parse_body(final, FinalBody).generated_length == 3
            finally:
                successor.close()


async def test_two_brokers_are_served_side_by_side() -> None:
    with open_context() as context:
        brokers = [ScriptedBroker(context) for _ in range(2)]
        try:
            endpoints = ",".join(broker.endpoint for broker in brokers)
            with worker_process("--model=fake:", "--deployment=d", f"--brokers={endpoints}"):
                for broker in brokers:
                    await broker.take(Verb.READY)
                    broker.generate(1, max_new_tokens=3, ignore_eos=True)
                for broker in brokers:
                    deltas, final = await broker.collect((1).to_bytes(16, "big"))
                    assert (len(deltas), final.verb) == (3, Verb.FINAL)
        finally:
            for broker in brokers:
                broker.close()


async def test_idle_group_uses_no_cpu_and_reports_on() -> None:
    """It may have something to do yet when it has just begun, but not for ever."""
    async with staged(heartbeat_ms=200) as stage:
        pids = (stage.worker.pid, stage.engine_pid)
        stage.broker.generate(1, max_new_tokens=3, ignore_eos=True)
        await stage.broker.skip_to(Verb.FINAL)
        await stage.broker.heartbeat_with(running=0, used_blocks=0)
        async with asyncio.timeout(PATIENCE_S):
            while await share_of_cpu(stage, pids, num_heartbeats=10) > 0.05:
                pass


async def share_of_cpu(stage: Stage, pids: Sequence[int], num_heartbeats: int) -> float:
    """Of one processor, by the busiest of the processes."""
    before, started = [cpu_seconds(pid) for pid in pids], time.monotonic()
    for _ in range(num_heartbeats):
        await stage.broker.heartbeats.get()
    used = [cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True)]
    return max(used) / (time.monotonic() - started)
