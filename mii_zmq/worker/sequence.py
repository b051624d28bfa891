# SPDX-License-Identifier: Apache-2.0
"""The state of one sequence inside the scheduler, and what is remembered of the steps planned for it.

Token counts under the overlapped loop: `token_ids` holds what the host knows; `num_in_flight` tokens more have been
planned (the executor has or will have them in its slot) and are learnt when their step's result is read.
`num_computed_tokens` runs ahead likewise: it counts the tokens whose KV is written once every planned step has run.
Knows nothing of budgets or blocks beyond its own table.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from mii_zmq.errors import InvalidRequest, PromptTooLong
from mii_zmq.worker.plan import (
    POOLINGS,
    EngineLimits,
    NewSequence,
    SamplingSpec,
    SequenceOutput,
    SequenceRequest,
    StepPlan,
    StepRow,
    TokenLogprobs,
)

PRIORITY_STEP_S = 10.0
"""One level of priority counts as much as having arrived this much earlier, so that every wait is bounded."""
MAX_PRIORITY = 16
"""Priorities beyond +-16 count as +-16."""

OrderKey = tuple[float, int]


class SequenceState(Enum):
    WAITING = "waiting"
    """Holds no slot and no block: new, or preempted."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream. Mutated by the scheduler only."""

    seq_id: int
    sampling: SamplingSpec
    token_ids: list[int]
    """Known tokens: prompt, resumed and produced ones."""
    num_prompt_tokens: int
    max_tokens: int
    """Length at which the sequence ends: prompt and `max_new_tokens`."""
    stop_token_ids: frozenset[int]
    min_new_tokens: int
    arrival: float
    deadline: float | None
    order_key: OrderKey
    """Smaller is served first: arrival, moved by priority; the second part breaks ties."""
    cache_salt: str = ""
    rope_regime: int = -1
    """Sequences of one regime compute the same KV from the same tokens; settled whenever the sequence is queued."""
    root_hash: bytes = b""
    """Parent of the first block's hash in this regime."""
    recompute_at: int | None = None
    """Position that must not be computed in this regime: from there on the whole sequence belongs to another one."""
    state: SequenceState = SequenceState.WAITING
    in_prefill: bool = False
    """Running, with known tokens left to compute before the next one can be drawn."""
    slot: int = -1
    is_held: bool = False
    """The executor holds the slot, so it must be told when the slot is freed."""
    block_ids: list[int] = field(default_factory=list)
    released_block_ids: list[int] = field(default_factory=list)
    """What it held before it ended or was last preempted; others may have these blocks by now."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of `token_ids`, as far as they were needed."""
    num_registered_blocks: int = 0
    """Leading blocks of the table that have been offered to the prefix cache."""
    num_reserved_blocks: int = 0
    """Blocks that the rest of a partly computed prompt will need; set aside in the pool."""
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_expected_tokens: int = 0
    """While waiting: prompt tokens to compute, as estimated from the prefix cache when it was queued."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache, until the first output has reported them."""
    prompt_scores: list[TokenLogprobs] | None = None
    """Of prompt tokens 1, 2, ..., as far as they are known; None: not asked for."""
    has_emitted: bool = False
    has_borrowed: bool = False
    """Since its last admission it has used blocks that another sequence computed."""
    is_apart: bool = False
    """It must compute everything by itself, since what it borrowed may have been wrong."""
    started_at: float = 0.0
    """When a step was first planned for it."""
    num_setbacks: int = 0
    """How often it was preempted or restarted."""
    has_run: bool = False
    """It was preempted or restarted: nobody may be admitted before it."""
    has_grammar: bool = False
    is_awaiting_mask: bool = False
    """Running, and out of every plan until it is known what its next token may be."""
    mask: bytes | None = None
    """Of a sequence with a grammar: what the token behind the known ones may be; None: not known yet."""

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    @property
    def num_tokens(self) -> int:
        """Known and in-flight tokens."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def lacks_mask(self) -> bool:
        """Its next token cannot be drawn yet."""
        return self.has_grammar and self.mask is None

    @property
    def lacks_scores(self) -> bool:
        """Its prompt is still to be scored, so it has to be computed whatever is cached of it."""
        return self.prompt_scores is not None and len(self.prompt_scores) < self.num_prompt_tokens - 1

    @property
    def may_borrow(self) -> bool:
        """Blocks that others computed may stand for its tokens. Nothing is known of the hidden states behind them."""
        return not self.is_apart and not self.lacks_scores and self.sampling.pooling in ("", "last")

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens, resumed ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Of a prompt (or a preempted sequence): known tokens that no step has been planned for."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def timing(self) -> tuple[float, int]:
        """See SequenceOutput."""
        return self.started_at, self.num_setbacks

    def finish_reason(self) -> str | None:
        """Why the known tokens end the sequence: 'stop', 'length' or None."""
        # The last token counts as an end only if enough others existed when it was drawn.
        if self.num_output_tokens > self.min_new_tokens and self.token_ids[-1] in self.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None


def make_sequence(request: SequenceRequest, limits: EngineLimits, now: float, number: int) -> Sequence:
    """Check a request against what the engine can ever hold and make its sequence.

    Raises:
        PromptTooLong: prompt, or prompt plus output, exceeds the model's context or the whole KV pool.
        InvalidRequest: empty prompt, token ids outside the vocabulary, impossible counts.
    """
    prompt, resumed = request.prompt_token_ids, request.resumed_token_ids
    if not prompt:
        raise InvalidRequest("the prompt holds no tokens; send at least one", param="prompt")
    if request.sampling.pooling:
        _check_pooling(request, limits)
    elif request.max_new_tokens < 1:
        raise InvalidRequest(f"max_new_tokens is {request.max_new_tokens}, allowed: at least 1", param="max_new_tokens")
    if len(resumed) > request.max_new_tokens:
        raise InvalidRequest(
            f"resume holds {len(resumed)} tokens, more than max_new_tokens ({request.max_new_tokens})", param="resume"
        )
    if request.score_prompt and not limits.scores_prompts:
        raise InvalidRequest("this engine does not score prompts yet; leave score_prompt out", param="score_prompt")
    _check_lengths(request, limits)
    _check_token_ids(prompt, limits.vocab_size, "prompt")
    _check_token_ids(resumed, limits.vocab_size, "resume")
    level = max(-MAX_PRIORITY, min(MAX_PRIORITY, request.priority))
    sampling = request.sampling
    return Sequence(
        seq_id=request.seq_id,
        sampling=sampling,
        token_ids=[*prompt, *resumed],
        num_prompt_tokens=len(prompt),
        max_tokens=len(prompt) + request.max_new_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        min_new_tokens=sampling.min_new_tokens,
        arrival=now,
        deadline=None if request.deadline_s is None else now + request.deadline_s,
        order_key=(now + level * PRIORITY_STEP_S, number),
        cache_salt=request.cache_salt,
        prompt_scores=[] if request.score_prompt else None,
        has_grammar=request.grammar is not None,
    )


def _check_pooling(request: SequenceRequest, limits: EngineLimits) -> None:
    if not limits.hidden_size:
        raise InvalidRequest("this engine does not give the model's hidden states, so it cannot embed", param="task")
    if request.sampling.pooling not in POOLINGS:
        shown = request.sampling.pooling[:40]
        raise InvalidRequest(f"pooling is {shown!r}, allowed: {', '.join(POOLINGS)}", param="pooling")
    if request.max_new_tokens or request.resumed_token_ids or request.score_prompt:
        raise InvalidRequest("a prompt that is pooled has no output tokens and no scores", param="pooling")


def _check_lengths(request: SequenceRequest, limits: EngineLimits) -> None:
    pool_tokens = limits.num_blocks * limits.block_size
    num_prompt, num_new = len(request.prompt_token_ids), request.max_new_tokens
    room = "" if request.sampling.pooling else " with room for one output token"
    for limit, name in ((limits.max_model_len, "the model's context"), (pool_tokens, "the whole KV pool")):
        if num_prompt + bool(room) > limit:
            raise PromptTooLong(
                f"the prompt has {num_prompt} tokens, but {name} holds {limit}{room}; shorten the prompt",
                param="prompt",
            )
        if num_prompt + num_new > limit:
            raise PromptTooLong(
                f"{num_prompt} prompt tokens and max_new_tokens {num_new} make {num_prompt + num_new}, but {name} "
                f"holds {limit}; ask for at most {limit - num_prompt} output tokens",
                param="max_new_tokens",
            )


def _check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    try:
        packed = array("i", token_ids)
    except (TypeError, OverflowError):
        raise InvalidRequest(f"{param} must hold token ids from 0 to {vocab_size - 1}", param=param) from None
    if packed and not 0 <= min(packed) <= max(packed) < vocab_size:
        wrong = next(token_id for token_id in packed if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{param} holds token id {wrong}, allowed: 0 to {vocab_size - 1}", param=param)


@dataclass(slots=True)
class Chunk:
    """A prompt's share of the step in the making; it may grow while the step is planned."""

    sequence: Sequence
    row: StepRow
    block_ids: list[int]
    """Where the plan tells the executor of new blocks: in the row, or in the whole table of a new sequence."""


@dataclass(slots=True, eq=False)
class PlannedStep:
    """What the scheduler remembers of a plan until its result is read."""

    step: int
    rows: list[StepRow] = field(default_factory=list)
    sequences: list[Sequence | None] = field(default_factory=list)
    """Parallel to `rows`. None: the sequence was restarted since, the row's result belongs to nobody."""
    sampled: list[Sequence | None] = field(default_factory=list)
    """Sequences of the rows with `sample`, in row order; None likewise."""
    new: list[NewSequence] = field(default_factory=list)
    new_sequences: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    registered: list[int] = field(default_factory=list)
    """Blocks that became findable although this step, or one before it, has yet to write them."""
    fresh_block_ids: set[int] = field(default_factory=set)
    """Blocks that this step fills: they cannot be copied in the same step, since copies come before writes."""
    freed_slots: list[int] = field(default_factory=list)
    zeroed: list[int] = field(default_factory=list)
    masks: dict[int, bytes] = field(default_factory=dict)

    def to_plan(self) -> StepPlan:
        return StepPlan(self.step, self.rows, self.new, self.freed_slots, self.copies, self.zeroed, self.masks)

    def forget(self, sequence: Sequence) -> None:
        """The sequence starts over: whatever this step yields for it is void."""
        self.sequences = [None if item is sequence else item for item in self.sequences]
        self.sampled = [None if item is sequence else item for item in self.sampled]

    def take_scores(self, scores: dict[int, list[TokenLogprobs]]) -> None:
        """Give each sequence what its row found, if any did; a row that was computed again finds nothing new."""
        if not scores:
            return
        for row, sequence in zip(self.rows, self.sequences, strict=True):
            if row.score and sequence is not None and sequence.prompt_scores is not None:
                known = sequence.prompt_scores
                known += scores[row.slot][len(known) - row.start : sequence.num_prompt_tokens - 1 - row.start]

    def take_pooled(self, pooled: dict[int, bytes]) -> list[tuple[Sequence, bytes]]:
        """Sequences whose prompt is complete with this step, each with its vector; `pooled` is by slot."""
        if not pooled:
            return []
        rows = zip(self.rows, self.sequences, strict=True)
        return [(item, pooled[row.slot]) for row, item in rows if row.pool and item is not None]

    def give_logprobs(self, logprobs: dict[int, TokenLogprobs], outputs: list[SequenceOutput]) -> None:
        """To this step's outputs, each of one token; `logprobs` is by slot."""
        rows = zip(self.rows, self.sequences, strict=True)
        found = {item.seq_id: logprobs[row.slot] for row, item in rows if item is not None and row.slot in logprobs}
        for output in outputs:
            if output.token_ids and output.seq_id in found:
                output.logprobs = [found[output.seq_id]]

    def ends(self) -> dict[Sequence, int]:
        """Unfinished sequences with a row, and the position at which it ends."""
        rows = zip(self.rows, self.sequences, strict=True)
        return {item: row.start + row.num_tokens for row, item in rows if item is not None and not item.is_finished}
