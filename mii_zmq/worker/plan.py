# SPDX-License-Identifier: Apache-2.0
"""What flows between scheduler, executor and ranks: sequence requests, numbered step plans and their results.

Pure data, standard library only. A `StepPlan` carries full data for sequences that are new to the executor and only
differences for known ones, so that it can be sent to other ranks as bytes (`StepPlan.to_wire`). The executor keeps
one row of state per slot: token ids, block table, sampling state. A plan is applied in this order: `freed_slots`,
`zeroed`, `copies`, `new`, then the forward pass over `rows`. After a step that raised, every slot is freed or given a
new sequence before it is used again; when `Executor.submit` itself raises, nothing was applied and the next plan
carries the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

from mii_zmq.errors import MiiError

NOT_FINITE = "the model's logits are not finite"
"""The reason in `StepResult.failed` that says so; others are exceptions."""
POOLINGS = ("last", "mean", "first")
"""What a prompt's hidden states can be made one vector by."""


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """The numeric part of a request's sampling options, as the executor needs it."""

    seed: int = 0
    """0 <= seed < 2**63; with (position, token id) it keys every random draw."""
    temperature: float = 0.0
    """0: greedy."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    """`stop_token_ids` are masked while fewer output tokens exist."""
    stop_token_ids: tuple[int, ...] = ()
    """End-of-sequence and stop ids, merged; empty when they are to be ignored."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences of which the last token is masked when the history ends with the others."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); every id once."""
    allowed_token_ids: tuple[int, ...] = ()
    """All others are masked; empty: none is."""
    num_logprobs: int | None = None
    """Report the log-probability of every token drawn, and of this many of the most probable ones. None: report
    nothing."""
    num_prompt_logprobs: int = 0
    """So many of the most probable tokens beside each scored prompt token."""
    is_masked: bool = False
    """Its rows sample only with a mask in `StepPlan.masks`, which allows at least one token."""
    pooling: str = ""
    """Empty: tokens are drawn. Else none is: the prompt's final hidden states (behind the last norm) are pooled into
    one vector, which is the 'last' token's, the 'first' one's, or the 'mean' of all."""

    @property
    def needs_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> SamplingSpec:
        fields = dict(wire)
        fields["stop_token_ids"] = tuple(fields.get("stop_token_ids", ()))
        fields["bad_words"] = tuple(tuple(word) for word in fields.get("bad_words", ()))
        fields["logit_bias"] = tuple((token_id, bias) for token_id, bias in fields.get("logit_bias", ()))
        fields["allowed_token_ids"] = tuple(fields.get("allowed_token_ids", ()))
        return cls(**fields)


class TokenLogprobs(NamedTuple):
    """How probable one token was, and which ones were most probable in its place. Natural logarithms, by the model's
    own logits: before penalties, biases, masks and temperature."""

    logprob: float
    rank: int
    """1 + the number of tokens more probable than this one."""
    top_ids: Sequence[int]
    """Descending by probability."""
    top_logprobs: Sequence[float]


@dataclass(slots=True)
class SequenceRequest:
    """A sequence as the engine receives it (from the actor or from `pipeline`): token ids in, token ids out."""

    seq_id: int
    """Unique while the engine lives, chosen by the sender."""
    prompt_token_ids: list[int]
    max_new_tokens: int
    """Output tokens at most, resumed ones included; 0 with `SamplingSpec.pooling`."""
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    resumed_token_ids: list[int] = field(default_factory=list)
    """Output tokens produced earlier (here or elsewhere); generation goes on behind them, none is sent again."""
    priority: int = 0
    """Smaller is served first."""
    deadline_s: float | None = None
    """Seconds from arrival at the engine after which the sequence ends with finish_reason 'deadline'."""
    cache_salt: str = ""
    """Sequences share prefix blocks only with the same salt (tenant isolation)."""
    score_prompt: bool = False
    """Report how probable each prompt token is behind those before it, with `SamplingSpec.num_prompt_logprobs`."""
    grammar: tuple[str, str] | None = None
    """Kind and text of the grammar that the output follows (`structured_output.StructuredOutput`), with
    `SamplingSpec.is_masked`."""
    grammar_lead: str = ""
    """Text that the grammar reads before the first output token: what of the prompt counts as the answer's."""

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> SequenceRequest:
        fields = dict(wire)
        fields["sampling"] = SamplingSpec.from_wire(fields.get("sampling") or {})
        if fields.get("grammar") is not None:
            fields["grammar"] = tuple(fields["grammar"])
        return cls(**fields)


@dataclass(slots=True)
class SequenceOutput:
    """What one step produced for one sequence."""

    seq_id: int
    token_ids: list[int]
    finish_reason: str | None = None
    """None while running; 'stop' (an end-of-sequence or stop id, which is the last of `token_ids`, or nothing more
    that a grammar allows, without one), 'length', 'cancelled', 'deadline' or 'error'."""
    error: MiiError | None = None
    """With finish_reason 'error'."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache; set on the first output."""
    prompt_scores: list[TokenLogprobs] | None = None
    """With `score_prompt`, on the first output: for prompt tokens 1, 2, ..."""
    logprobs: list[TokenLogprobs] | None = None
    """With `SamplingSpec.num_logprobs`: one for each of `token_ids`."""
    timing: tuple[float, int] | None = None
    """On the first output and on the last: when the prompt was begun, by the engine's clock (0: never), and how often
    the sequence has been set back since, to be computed again."""
    pooled: bytes | None = None
    """With `SamplingSpec.pooling`, on the only output: float32, little endian, `EngineLimits.hidden_size` of them."""


@dataclass(slots=True)
class NewSequence:
    """A sequence that the executor does not hold (new, resumed or preempted before)."""

    slot: int
    token_ids: list[int]
    """Everything known: prompt and output so far."""
    num_prompt_tokens: int
    block_ids: list[int]
    """The whole block table at this step."""
    sampling: SamplingSpec

    def fixed_rope_length(self, recomputes_at_border: bool) -> int:
        """The sequence length that decides how its token at position p is rotated is max(this, p + 1), for a model with
        a `rope_border` (see EngineLimits)."""
        return len(self.token_ids) if recomputes_at_border else self.num_prompt_tokens


@dataclass(slots=True)
class StepRow:
    """One sequence's share of a step: tokens [start, start + num_tokens) of its slot are computed.

    `start` is where the slot's earlier rows ended, or a later block boundary: then the first of `new_block_ids` hold
    the tokens between, computed for another sequence with the same prefix (possibly in this very step, whose KV writes
    precede its attention reads in every layer).
    """

    slot: int
    start: int
    num_tokens: int
    sample: bool
    """True: draw the token at position start + num_tokens, append it to the slot, report it."""
    new_block_ids: list[int] = field(default_factory=list)
    """Appended to the slot's block table before the forward pass (empty for a sequence listed in `new`)."""
    score: bool = False
    """True: report how probable the token behind each of these is (but for the one that `sample` draws)."""
    pool: bool = False
    """True: the last row of a prompt that is pooled (`SamplingSpec.pooling`); report the vector."""


@dataclass(slots=True)
class StepPlan:
    """The scheduler's order for one step."""

    step: int
    """Consecutive from 1; a gap is fatal to a rank."""
    rows: list[StepRow]
    new: list[NewSequence] = field(default_factory=list)
    freed_slots: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block), before any write of this step."""
    zeroed: list[int] = field(default_factory=list)
    """Blocks to fill with zeros, before anything is copied or written: they held numbers that are not finite."""
    masks: dict[int, bytes] = field(default_factory=dict)
    """Slot -> the tokens that its row may draw, one bit per token id, the lowest bit of the first byte first, in whole
    int32 words; for exactly the rows with `sample` whose `SamplingSpec.is_masked` is set."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def to_wire(self) -> dict[str, Any]:
        """Plain msgpack types for the plan channel to other ranks."""
        return {
            "step": self.step,
            "rows": [[r.slot, r.start, r.num_tokens, r.sample, r.new_block_ids, r.score, r.pool] for r in self.rows],
            # Not as `asdict` does it, which copies every token id by itself.
            "new": [
                {
                    "slot": new.slot,
                    "token_ids": new.token_ids,
                    "num_prompt_tokens": new.num_prompt_tokens,
                    "block_ids": new.block_ids,
                    "sampling": asdict(new.sampling),
                }
                for new in self.new
            ],
            "freed_slots": self.freed_slots,
            "copies": [list(pair) for pair in self.copies],
            "zeroed": self.zeroed,
            "masks": list(self.masks.items()),
        }

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> StepPlan:
        return cls(
            step=wire["step"],
            rows=[StepRow(*row) for row in wire["rows"]],
            new=[NewSequence(**{**new, "sampling": SamplingSpec.from_wire(new["sampling"])}) for new in wire["new"]],
            freed_slots=wire["freed_slots"],
            copies=[(source, destination) for source, destination in wire["copies"]],
            zeroed=wire["zeroed"],
            masks=dict(wire["masks"]),
        )


@dataclass(slots=True)
class StepResult:
    """The executor's answer to one plan."""

    step: int
    token_ids: list[int]
    """One per row with `sample`, in row order; the value at a failed row is meaningless."""
    failed: dict[int, str] = field(default_factory=dict)
    """Slot -> one-line reason, for rows whose result must not be used (non-finite logits, exception)."""
    scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By slot, for rows with `score`."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Of the drawn token by slot, for slots with `SamplingSpec.num_logprobs`; meaningless for failed rows."""
    pooled: dict[int, bytes] = field(default_factory=dict)
    """By slot, for rows with `pool`: float32, little endian; meaningless for failed rows."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Facts that an executor reports once it is loaded."""

    vocab_size: int
    """Width of the logits; every token id is below it."""
    max_model_len: int
    """Tokens per sequence, prompt and output, that the model supports."""
    num_blocks: int
    block_size: int
    max_sequences: int
    """Slots, i.e. sequences that can run at the same time."""
    token_budget: int
    """Tokens per step at most."""
    eos_token_ids: tuple[int, ...] = ()
    scores_prompts: bool = False
    """The executor computes `StepRow.score`."""
    hidden_size: int = 0
    """Numbers in a final hidden state, and so in a pooled vector; 0: the executor does not pool."""
    rope_border: int | None = None
    """Sequence length above which the model rotates positions differently; None: it never does."""
    recomputes_at_border: bool = False
    """True (longrope): a sequence longer than the border is rotated differently at all of its positions, so that one
    that grows past it is computed again. False (dynamic): only from there on."""
    takes_grammars: bool = False
    """The engine around the executor makes masks from grammars."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for heartbeats and metrics; counters run since the engine started."""

    step: int
    """The last planned step."""
    num_running: int
    num_waiting: int
    num_outstanding_tokens: int
    """Prompt tokens to compute and output tokens to produce, at most, over all unfinished sequences."""
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_prefix_evictions: int
    num_failed_steps: int = 0
    num_numeric_errors: int = 0
    token_budget: int = 0
    """Tokens per step at most; less than the limit after a step that did not fit into memory."""


class PendingStep(Protocol):
    """A submitted step; results become readable in submission order."""

    def done(self) -> bool: ...

    def result(self) -> StepResult:
        """Block until the step has run; raises what the step raised."""
        ...


class Executor(Protocol):
    """Runs step plans. `submit` returns at once; steps run in submission order."""

    limits: EngineLimits

    def submit(self, plan: StepPlan) -> PendingStep: ...

    def close(self) -> None: ...
