# SPDX-License-Identifier: Apache-2.0
"""What running sequences hold: a slot, a block table, and blocks set aside for the rest of their prompt.

The scheduler decides who runs; this class takes and returns slots and blocks, finds and offers prefix blocks, and
writes down in the `PlannedStep` what the executor must be told. Knows no budget, order or clock.

Prefix blocks are offered as soon as the step that fills them is planned, even to other sequences of that step: in
every layer a step's KV writes precede its attention reads.
"""

from __future__ import annotations

from collections.abc import Iterable

from mii_zmq.errors import InternalError
from mii_zmq.worker.blocks import BlockManager
from mii_zmq.worker.plan import EngineLimits, NewSequence, StepRow
from mii_zmq.worker.sequence import Chunk, PlannedStep, Sequence

WATERMARK_FRACTION = 0.01
"""Share of the pool that admissions leave to the growth of running sequences."""


class Residency:
    """Slots and blocks of the running sequences of one engine."""

    def __init__(self, limits: EngineLimits, model: str, prefix_cache: bool) -> None:
        self.blocks = BlockManager(limits.num_blocks, limits.block_size, model=model, prefix_cache=prefix_cache)
        self.num_reserved_blocks = 0
        """Free blocks set aside for the rest of started prompts."""
        self.num_computed_tokens = 0
        """Over all running sequences, planned ones included."""
        self._limits = limits
        self._block_size = limits.block_size
        self._max_sequences = limits.max_sequences
        # With no more sequences than budget, every decode is in every step and nothing has to rotate.
        self.max_running = min(limits.max_sequences, limits.token_budget)
        self._watermark = max(1, int(limits.num_blocks * WATERMARK_FRACTION))
        self._free_slots = list(range(limits.max_sequences - 1, -1, -1))
        self._freed_slots: list[int] = []
        """Slots that the executor must still be told to free; they may be in use again."""

    @property
    def num_running(self) -> int:
        return self._max_sequences - len(self._free_slots)

    @property
    def has_free_block(self) -> bool:
        """A decode can have a block without touching what is set aside."""
        return self.blocks.num_free > self.num_reserved_blocks

    def estimate(self, sequence: Sequence) -> int:
        """Tokens to compute if the waiting sequence were admitted now; settles the rotary regime that this is under."""
        self._settle_regime(sequence)
        self._extend_hashes(sequence)
        matched = self.blocks.match(sequence.block_hashes) if sequence.may_borrow else []
        return max(1, len(sequence.token_ids) - len(matched) * self._block_size)

    def admit(self, planned: PlannedStep, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and the cached part of its table, and set the rest aside. False: no room."""
        if self.num_running >= self.max_running:
            return False
        blocks, size, num_tokens = self.blocks, self._block_size, len(sequence.token_ids)
        matched = blocks.match(sequence.block_hashes) if sequence.may_borrow else []
        has_borrowed = bool(matched)
        copy_source, rewritten, num_computed = None, None, len(matched) * size
        if matched and num_computed == num_tokens:
            # All is cached, yet the last token must be computed for its logits, which writes into the last block.
            num_computed -= 1
            if not blocks.refs(matched[-1]):
                rewritten = matched[-1]
            elif matched[-1] in planned.fresh_block_ids:
                matched.pop()  # nothing to copy before this step has run
                num_computed = len(matched) * size
            else:
                copy_source = matched.pop()
        num_blocks = -(-num_tokens // size)
        num_idle = sum(not blocks.refs(block_id) for block_id in matched)
        num_needed = num_blocks - len(matched) + num_idle
        if self.num_running and blocks.num_free - self.num_reserved_blocks - num_needed < self._watermark:
            return False
        blocks.share(matched)
        sequence.block_ids = matched
        sequence.num_registered_blocks = len(matched)
        if copy_source is not None:
            matched.append(blocks.allocate_one())
            planned.copies.append((copy_source, matched[-1]))
        if rewritten is not None:
            planned.registered.append(rewritten)
        sequence.has_borrowed = has_borrowed
        sequence.num_reserved_blocks = num_blocks - len(matched)
        self.num_reserved_blocks += sequence.num_reserved_blocks
        sequence.num_computed_tokens = num_computed
        self.num_computed_tokens += num_computed
        sequence.num_cached_tokens = min(num_computed, sequence.num_prompt_tokens)
        blocks.count_query(num_tokens, num_computed)
        sequence.slot = self._free_slots.pop()
        return True

    def open_chunk(self, planned: PlannedStep, sequence: Sequence) -> Chunk:
        """Start the row of a running prompt; skips what others have computed of it since its last chunk."""
        if sequence.is_held:
            block_ids = self._adopt(sequence)
        else:
            block_ids = list(sequence.block_ids)
            planned.new.append(
                NewSequence(
                    sequence.slot,
                    list(sequence.token_ids),
                    sequence.num_prompt_tokens,
                    block_ids,
                    sequence.sampling,
                )
            )
            planned.new_sequences.append(sequence)
        row = StepRow(sequence.slot, sequence.num_computed_tokens, 0, False, score=sequence.lacks_scores)
        if sequence.is_held:
            row.new_block_ids = block_ids
        planned.rows.append(row)
        planned.sequences.append(sequence)
        return Chunk(sequence, row, block_ids)

    def _adopt(self, sequence: Sequence) -> list[int]:
        table, size = sequence.block_ids, self._block_size
        if not sequence.may_borrow or sequence.num_computed_tokens != len(table) * size:
            return []
        # The last token is computed here in any case, so its block is not looked for.
        last = (len(sequence.token_ids) - 1) // size
        matched = self.blocks.match(sequence.block_hashes[:last], len(table))
        if matched:
            self.blocks.share(matched)
            table += matched
            sequence.has_borrowed = True
            sequence.num_registered_blocks = len(table)
            sequence.num_reserved_blocks -= len(matched)
            self.num_reserved_blocks -= len(matched)
            num_hits = len(matched) * size
            sequence.num_computed_tokens += num_hits
            self.num_computed_tokens += num_hits
            sequence.num_cached_tokens = min(sequence.num_cached_tokens + num_hits, sequence.num_prompt_tokens)
            self.blocks.count_query(0, num_hits)
        return matched

    def grow_chunk(self, planned: PlannedStep, chunk: Chunk, max_tokens: int) -> int:
        """Add up to `max_tokens` tokens to the chunk's row. Returns how many; sets `sample`, or `pool` where nothing is
        drawn, at the last known one."""
        sequence, row = chunk.sequence, chunk.row
        num_tokens = min(max_tokens, sequence.num_uncomputed_tokens)
        end = sequence.num_computed_tokens + num_tokens
        num_blocks = -(-end // self._block_size) - len(sequence.block_ids)
        if num_blocks > 0:
            added = self.blocks.allocate(num_blocks)
            sequence.num_reserved_blocks -= num_blocks
            self.num_reserved_blocks -= num_blocks
            sequence.block_ids += added
            chunk.block_ids += added
        row.num_tokens += num_tokens
        if end == len(sequence.token_ids):
            row.pool = bool(sequence.sampling.pooling)
            row.sample = not row.pool
        sequence.num_computed_tokens = end
        self.num_computed_tokens += num_tokens
        planned.fresh_block_ids.update(self.register_known_blocks(sequence, planned))
        return num_tokens

    def register_known_blocks(self, sequence: Sequence, planned: PlannedStep | None) -> list[int]:
        """Offer the sequence's full blocks of known tokens to others. `planned`: the last step that writes to them."""
        if not self.blocks.prefix_cache:
            return []
        first = sequence.num_registered_blocks
        last = min(len(sequence.token_ids), sequence.num_computed_tokens) // self._block_size
        if last <= first:
            return []
        self._extend_hashes(sequence)
        sequence.num_registered_blocks = last
        registered = []
        for index in range(first, last):
            block_id = sequence.block_ids[index]
            if self.blocks.register(block_id, sequence.block_hashes[index]):
                registered.append(block_id)
        if planned is not None:
            planned.registered += registered
        return registered

    def allocate_for_decode(self, sequence: Sequence) -> int:
        """Append one block to a table; the caller has checked `has_free_block`."""
        block_id = self.blocks.allocate_one()
        sequence.block_ids.append(block_id)
        return block_id

    def release(self, sequence: Sequence) -> None:
        """Take back slot and blocks. Steps in flight may still use them: later steps run after those."""
        self.blocks.release(sequence.block_ids)
        self.num_reserved_blocks -= sequence.num_reserved_blocks
        self.num_computed_tokens -= sequence.num_computed_tokens
        self._free_slots.append(sequence.slot)
        if sequence.is_held:
            self._freed_slots.append(sequence.slot)
        sequence.released_block_ids, sequence.block_ids = sequence.block_ids, []
        sequence.num_registered_blocks = sequence.num_reserved_blocks = sequence.num_computed_tokens = 0
        sequence.slot = -1
        sequence.is_held = False

    def condemn(self, sequence: Sequence) -> None:
        """Let nobody use what is known of this sequence; what it holds alone is zeroed before it is used again."""
        blocks = self.blocks
        released = [block_id for block_id in sequence.released_block_ids if not blocks.refs(block_id)]
        blocks.condemn({*sequence.block_ids, *released, *blocks.match(sequence.block_hashes)})

    def seal(self, planned: PlannedStep) -> None:
        """The plan is final: from here on the executor counts as told."""
        for sequence in planned.new_sequences:
            sequence.is_held = True
        planned.freed_slots, self._freed_slots = self._freed_slots, []
        planned.zeroed = self.blocks.take_zeroed()

    def unseal(self, planned: PlannedStep) -> None:
        """The executor never took the plan."""
        for sequence in planned.new_sequences:
            sequence.is_held = False
        self._freed_slots = planned.freed_slots + self._freed_slots

    def distrust(self, planned: PlannedStep) -> None:
        """The step failed or never ran: what it was to write may be anything, and what it was to zero not zeroed."""
        blocks = self.blocks
        blocks.invalidate(planned.registered)
        for sequence in planned.sequences:
            if sequence is not None:
                blocks.condemn(block_id for block_id in sequence.block_ids if not blocks.is_registered(block_id))
        blocks.put_back_zeroed(planned.zeroed)

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Drop everything that `sequences`, all there are, hold, trusting no count."""
        self._freed_slots += [sequence.slot for sequence in sequences if sequence.is_held]
        self._free_slots = list(range(self._max_sequences - 1, -1, -1))
        self.num_reserved_blocks = self.num_computed_tokens = 0
        self.blocks.reset()

    def _settle_regime(self, sequence: Sequence) -> None:
        """Choose the regime that the known tokens ask for; cells of different regimes must never be shared.

        Without recomputation, a prompt of at most `border` tokens leaves no trace: what is rotated at a position then
        depends on the position alone. In a longer prompt it depends on the prompt's length.
        """
        limits, regime = self._limits, 0
        sequence.recompute_at = None
        if limits.rope_border is not None:
            if limits.recomputes_at_border:
                if len(sequence.token_ids) > limits.rope_border:
                    regime = 1
                else:
                    sequence.recompute_at = limits.rope_border
            elif sequence.num_prompt_tokens > limits.rope_border:
                regime = sequence.num_prompt_tokens
        if regime != sequence.rope_regime:
            sequence.rope_regime = regime
            sequence.root_hash = self.blocks.root_hash(sequence.cache_salt, regime)
            sequence.block_hashes = []

    def _extend_hashes(self, sequence: Sequence) -> None:
        if self.blocks.prefix_cache:
            self.blocks.extend_hashes(sequence.block_hashes, sequence.root_hash, sequence.token_ids)

    def check(self, running: list[Sequence]) -> None:
        """Verify slots, tables and set-aside blocks against the running sequences.

        Raises:
            InternalError: with the first violation found.
        """
        self.blocks.check([sequence.block_ids for sequence in running])
        slots = [sequence.slot for sequence in running]
        if sorted(slots + self._free_slots) != list(range(self._max_sequences)):
            raise InternalError(f"slots {sorted(slots)} are in use, {sorted(self._free_slots)} are free")
        reserved = 0
        for sequence in running:
            needed = -(-len(sequence.token_ids) // self._block_size) if sequence.in_prefill else len(sequence.block_ids)
            if sequence.num_reserved_blocks != needed - len(sequence.block_ids):
                raise InternalError(
                    f"sequence {sequence.seq_id} set {sequence.num_reserved_blocks} blocks aside, "
                    f"needs {needed} and has {len(sequence.block_ids)}"
                )
            reserved += sequence.num_reserved_blocks
            if len(sequence.block_ids) * self._block_size < sequence.num_computed_tokens:
                raise InternalError(f"sequence {sequence.seq_id} has computed tokens outside its table")
        if self.num_computed_tokens != sum(sequence.num_computed_tokens for sequence in running):
            raise InternalError(f"{self.num_computed_tokens} computed tokens, sequences say otherwise")
        if reserved != self.num_reserved_blocks or reserved > self.blocks.num_free:
            raise InternalError(
                f"{self.num_reserved_blocks} blocks are set aside, sequences say {reserved}, "
                f"{self.blocks.num_free} are free"
            )
