# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import asdict

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.worker.plan import NewSequence, SamplingSpec, SequenceRequest, StepPlan, StepRow

ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
samplings = st.builds(
    SamplingSpec,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 1000),
    stop_token_ids=ids.map(tuple),
    bad_words=st.lists(ids.map(tuple), max_size=3).map(tuple),
    is_masked=st.booleans(),
)
plans = st.builds(
    StepPlan,
    step=st.integers(1, 2**40),
    rows=st.lists(st.builds(StepRow, st.integers(0, 99), st.integers(0, 99), st.integers(1, 99), st.booleans(), ids)),
    new=st.lists(
        st.builds(NewSequence, st.integers(0, 9), ids, st.integers(1, 99), ids, samplings),
        max_size=3,
    ),
    freed_slots=ids,
    copies=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3),
    masks=st.dictionaries(st.integers(0, 99), st.binary(max_size=12), max_size=3),
)


@settings(max_examples=50, deadline=None)
@given(plans)
def test_a_plan_survives_the_wire(plan: StepPlan):
    assert StepPlan.from_wire(msgpack.unpackb(msgpack.packb(plan.to_wire()))) == plan


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        SequenceRequest,
        st.integers(0, 2**63 - 1),
        ids,
        st.integers(1, 2**31),
        samplings,
        ids,
        st.integers(-5, 5),
        st.none() | st.floats(0, 1e6),
        st.text(max_size=8).filter(lambda text: text.isprintable()),
        grammar=st.none() | st.tuples(st.just("regex"), st.text(max_size=8)),
    )
)
def test_a_request_survives_the_wire(request: SequenceRequest):
    wire = msgpack.unpackb(msgpack.packb(request.to_wire()))
    assert asdict(SequenceRequest.from_wire(wire)) == asdict(request)


def test_a_plan_counts_its_tokens():
    assert StepPlan(1, [StepRow(0, 0, 7, False), StepRow(1, 3, 1, True)]).num_tokens == 8


def test_penalties_are_needed_only_when_set():
    assert not SamplingSpec(temperature=1.0).needs_penalties
    assert SamplingSpec(presence_penalty=0.5).needs_penalties
