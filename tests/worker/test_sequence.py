# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from mii_zmq.errors import InvalidRequest, PromptTooLong
from mii_zmq.worker.plan import EngineLimits, SamplingSpec, SequenceRequest
from mii_zmq.worker.sequence import MAX_PRIORITY, Sequence, make_sequence

LIMITS = EngineLimits(
    vocab_size=100, max_model_len=40, num_blocks=8, block_size=4, max_sequences=4, token_budget=16, eos_token_ids=(0,)
)


def make(prompt: list[int] | None = None, max_new_tokens: int = 4, now: float = 0.0, **fields: Any) -> Sequence:
    request = SequenceRequest(1, [5, 6, 7] if prompt is None else prompt, max_new_tokens, **fields)
    return make_sequence(request, LIMITS, now, 0)


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "fields", "error", "message"),
    [
        ([], 4, {}, InvalidRequest, "holds no tokens"),
        ([100], 4, {}, InvalidRequest, "token id 100, allowed: 0 to 99"),
        ([-1], 4, {}, InvalidRequest, "token id -1"),
        ([2**40], 4, {}, InvalidRequest, "token ids from 0 to 99"),
        ([1.5], 4, {}, InvalidRequest, "token ids from 0 to 99"),
        ([1], 0, {}, InvalidRequest, "max_new_tokens is 0"),
        ([1], 4, {"resumed_token_ids": [1, 100]}, InvalidRequest, "resume holds token id 100"),
        ([1], 1, {"resumed_token_ids": [1, 1]}, InvalidRequest, "resume holds 2 tokens, more than"),
        ([1] * 40, 1, {}, PromptTooLong, "prompt has 40 tokens, but the model's context holds 40"),
        ([1] * 32, 1, {}, PromptTooLong, "the whole KV pool holds 32"),
        ([1] * 30, 3, {}, PromptTooLong, "ask for at most 2 output tokens"),
        ([1] * 30, 11, {}, PromptTooLong, "the model's context"),
    ],
)
def test_refuses_what_can_never_run(
    prompt: list[int], max_new_tokens: int, fields: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message) as caught:
        make(prompt, max_new_tokens, **fields)
    assert caught.value.param in ("prompt", "max_new_tokens", "resume")  # type: ignore[attr-defined]


def test_takes_what_just_fits():
    assert make([99] * 30, 2).max_tokens == 32


def test_resumed_tokens_are_output():
    sequence = make([5, 6], 4, resumed_token_ids=[7, 8])
    assert sequence.token_ids == [5, 6, 7, 8]
    assert (sequence.num_output_tokens, sequence.max_tokens) == (2, 6)


def test_deadline_counts_from_arrival():
    assert make(now=10.0, deadline_s=2.5).deadline == 12.5
    assert make().deadline is None


def test_priority_is_a_bounded_head_start():
    urgent, normal, late = make(priority=-1), make(), make(now=1.0)
    assert urgent.order_key < normal.order_key < late.order_key
    assert make(now=100.0, priority=-1).order_key > normal.order_key
    assert make(priority=10**9).order_key == make(priority=MAX_PRIORITY).order_key


def test_finish_reason_honours_min_new_tokens():
    sampling = SamplingSpec(stop_token_ids=(9,), min_new_tokens=2)
    sequence = make([9], 4, sampling=sampling)
    assert sequence.finish_reason() is None
    reasons = []
    for token_id in (9, 9, 9):
        sequence.token_ids.append(token_id)
        reasons.append(sequence.finish_reason())
    assert reasons == [None, None, "stop"]
    sequence.token_ids[-1:] = [1, 1]
    assert sequence.finish_reason() == "length"
