# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.errors import PromptTooLong, ProtocolError
from mii_zmq.protocol import Load
from mii_zmq.worker.engine_channel import (
    AddSequence,
    CancelSequences,
    EngineFailed,
    EngineReady,
    ModelResolved,
    OutputRow,
    PrefixCacheReset,
    Progress,
    ResetPrefixCache,
    Shutdown,
    StepReport,
    decode_from_engine,
    decode_to_engine,
    encode,
    ids_from_bytes,
    ids_to_bytes,
    load_from_values,
    load_values,
)
from mii_zmq.worker.plan import EngineLimits, SamplingSpec, SequenceRequest, TokenLogprobs

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(prompt=IDS, resumed=IDS, stop=IDS, salt=st.text(max_size=10), deadline=st.none() | st.floats(0, 1e6))
@settings(max_examples=30, deadline=None)
def test_sequences_survive_the_channel(
    prompt: list[int], resumed: list[int], stop: list[int], salt: str, deadline: float | None
) -> None:
    sampling = SamplingSpec(
        seed=2**63 - 1, top_p=0.9, stop_token_ids=tuple(stop), bad_words=((1, 2), (3,)),
        logit_bias=tuple((token_id, 1.5) for token_id in stop), allowed_token_ids=tuple(stop), num_logprobs=len(stop),
        num_prompt_logprobs=2,
    )  # fmt: skip
    request = SequenceRequest(
        7, prompt, 5, sampling, resumed, -3, deadline, salt, score_prompt=bool(prompt),
        grammar=("regex", salt) if stop else None, grammar_lead=salt,
    )  # fmt: skip
    assert decode_to_engine(encode(AddSequence(request))) == AddSequence(request)


@pytest.mark.parametrize("message", [CancelSequences([1, 2**40]), CancelSequences([]), ResetPrefixCache(7), Shutdown()])
def test_messages_to_the_engine(message: CancelSequences | Shutdown) -> None:
    assert decode_to_engine(encode(message)) == message


def test_messages_from_the_engine() -> None:
    limits = EngineLimits(257, 512, 8, 64, 4, 64, (256,))
    bordered = EngineLimits(257, 512, 8, 64, 4, 64, rope_border=256, recomputes_at_border=True)
    messages = (
        Progress("weights", 0.5), ModelResolved("/m"), EngineReady(limits, {"device": "cpu"}), EngineReady(bordered),
        PrefixCacheReset(7),
    )  # fmt: skip
    for message in messages:
        assert decode_from_engine(encode(message)) == message


def test_step_reports_keep_rows_and_load() -> None:
    load = Load(step=3, running=2, step_ms=1.25)
    error = PromptTooLong("too long", param="prompt").to_wire()
    found = TokenLogprobs(-0.5, 2, [8, 6], [-0.25, -0.5])
    rows = [
        OutputRow(1, [5, 6], None, 4, None),
        OutputRow(2, [], "error", 0, error),
        OutputRow(3, [6], None, 0, None, [found], [found, found], (12.5, 1)),
        OutputRow(4, [], "stop", 0, None, pooled=bytes(8)),
    ]
    report = decode_from_engine(encode(StepReport(3, rows, load_values(load), awaits_masks=True)))
    assert isinstance(report, StepReport)
    assert report.awaits_masks
    assert load_from_values(report.load) == load
    plain = (-0.5, 2, (8, 6), (-0.25, -0.5))
    assert [OutputRow(*row) for row in report.rows] == [
        (1, (5, 6), None, 4, None, None, None, None, None),
        (2, (), "error", 0, error, None, None, None, None),
        (3, (6,), None, 0, None, (plain,), (plain, plain), (12.5, 1), None),
        (4, (), "stop", 0, None, None, None, None, bytes(8)),
    ]


def test_errors_keep_their_class() -> None:
    message = decode_from_engine(encode(EngineFailed(PromptTooLong("too long", param="prompt"))))
    assert isinstance(message, EngineFailed)
    assert isinstance(message.error, PromptTooLong)
    assert message.error.param == "prompt"


@pytest.mark.parametrize(
    "frames", [[], [b"A"], [b"A", b"\xc1"],
               [b"A", b"\x01"], [b"?", b"\xc0"], [b"s", b"\x91\x01"], [b"r", b"\x92\x80\x80"]]
)  # fmt: skip
def test_what_does_not_decode_is_a_protocol_error(frames: list[bytes]) -> None:
    for decode in (decode_to_engine, decode_from_engine):
        with pytest.raises(ProtocolError):
            decode(frames)


def test_ids_are_little_endian_int32() -> None:
    assert ids_to_bytes([1, 258]) == b"\1\0\0\0\2\1\0\0"
    assert ids_from_bytes(b"\1\0\0\0\2\1\0\0") == [1, 258]
