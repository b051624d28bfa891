# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from mii_zmq.errors import ProtocolError
from mii_zmq.worker.plan import NewSequence, SamplingSpec, StepPlan, StepResult, StepRow
from mii_zmq.worker.plan_channel import (
    decode_invitation,
    decode_plan,
    encode_invitation,
    encode_plan,
    result_digest,
)

PLAN = StepPlan(
    step=7,
    rows=[StepRow(0, 0, 3, True), StepRow(2, 64, 1, False, [5, 6])],
    new=[NewSequence(0, [1, 2, 3], 2, [4], SamplingSpec(seed=9, stop_token_ids=(2,), bad_words=((1, 2), (3,))))],
    freed_slots=[1],
    copies=[(3, 4)],
)


def test_messages_survive_the_channel() -> None:
    assert decode_plan(encode_plan(PLAN)) == PLAN
    assert decode_invitation(encode_invitation({"backend": "gloo", "port": 1})) == {"backend": "gloo", "port": 1}


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"P"],
        [b"P", b"\xc1"],
        [b"P", b"\xd4\x01\x00"],
        [b"P", msgpack.packb({"step": 1})],
        [b"P", msgpack.packb(5)],
        [b"J", msgpack.packb({})],
        [b"P", b"", b""],
    ],
)
def test_anything_else_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode_plan(frames)


def test_a_plan_is_no_invitation() -> None:
    with pytest.raises(ProtocolError, match="kind b'P'"):
        decode_invitation(encode_plan(PLAN))


def test_digests_differ_where_results_do() -> None:
    result = StepResult(3, [5, 6], {1: "not finite"})
    assert result_digest(result) == result_digest(replace(result, failed={1: "in other words"}))
    others = [
        replace(result, step=4),
        replace(result, token_ids=[6, 5]),
        replace(result, token_ids=[5]),
        replace(result, failed={2: "not finite"}),
        replace(result, failed={}),
    ]
    assert len({result_digest(other) for other in [result, *others]}) == 1 + len(others)
