# SPDX-License-Identifier: Apache-2.0
"""KV blocks: who holds which, and which ones hold a known prefix.

Owns the ids of the pool's blocks, their reference counts and the prefix cache (chained hash of full blocks -> block).
Knows neither sequences nor memory: callers keep block tables and hand ids back. A block is in exactly one of three
states: free (no content worth keeping), idle (no holder, but its content is registered and may be found again) or
used (at least one holder). Free and idle blocks can be allocated, idle ones in least-recently-used order. Content may
be condemned: nobody finds it any more, and it must be zeroed before the block is written again. Every operation costs
O(1) per block touched.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from mii_zmq.errors import InternalError


class BlockManager:
    """Reference counts and prefix cache over `num_blocks` block ids."""

    def __init__(self, num_blocks: int, block_size: int, *, model: str = "", prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_evictions = 0
        self._model = model.encode()
        self._free: list[int]
        self._idle: OrderedDict[int, None]
        self._refs: list[int]
        self._hash_of: list[bytes | None]
        self._block_of: dict[bytes, int]
        self._condemned: set[int] = set()
        """Blocks in use of which the content is not to be trusted."""
        self._to_zero: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget all holders and all content; the counters stay."""
        # Popped from the end, so that a fresh pool hands out 0, 1, 2 ...
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._idle = OrderedDict()
        self._refs = [0] * self.num_blocks
        self._hash_of = [None] * self.num_blocks
        self._block_of = {}
        self._to_zero += self._condemned
        self._condemned.clear()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix match can find, used or idle."""
        return len(self._block_of)

    def refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def root_hash(self, cache_salt: str, rope_regime: int = 0) -> bytes:
        """The parent of a sequence's first block: nothing is shared between models, salts or rotary regimes."""
        digest = blake2b(len(self._model).to_bytes(8, "little") + self._model, digest_size=32)
        digest.update(rope_regime.to_bytes(8, "little"))
        digest.update(cache_salt.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def extend_hashes(self, hashes: list[bytes], root: bytes, token_ids: Sequence[int]) -> None:
        """Append the hashes of the full blocks of `token_ids` that `hashes` lacks; each covers everything before."""
        size = self.block_size
        parent = hashes[-1] if hashes else root
        for start in range(len(hashes) * size, len(token_ids) - size + 1, size):
            content = array("i", token_ids[start : start + size]).tobytes()
            parent = blake2b(parent + content, digest_size=32).digest()
            hashes.append(parent)

    def match(self, hashes: Sequence[bytes], start: int = 0) -> list[int]:
        """Registered blocks that continue a table at index `start`. Takes no reference and counts nothing."""
        found = []
        lookup = self._block_of.get
        for index in range(start, len(hashes)):
            block_id = lookup(hashes[index])
            if block_id is None:
                break
            found.append(block_id)
        return found

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for one holder; their content is undefined.

        Raises:
            InternalError: fewer are allocatable; callers check `num_free` first.
        """
        if count > self.num_free:
            raise InternalError(f"{count} KV blocks were asked for, but only {self.num_free} can be allocated")
        return [self.allocate_one() for _ in range(count)]

    def allocate_one(self) -> int:
        """As `allocate(1)`, without the check."""
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._idle.popitem(last=False)
            self._unregister(block_id)
            self.num_evictions += 1
        self._refs[block_id] = 1
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """One more holder for each block (matched ones)."""
        for block_id in block_ids:
            if not self._refs[block_id]:
                del self._idle[block_id]
            self._refs[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One holder less for each block of a table. The tail goes first, so that it is evicted before its prefix."""
        for block_id in reversed(block_ids):
            refs = self._refs[block_id] - 1
            self._refs[block_id] = refs
            if refs == 0:
                if self._hash_of[block_id] is None:
                    self._free.append(block_id)
                    if block_id in self._condemned:
                        self._condemned.remove(block_id)
                        self._to_zero.append(block_id)
                else:
                    self._idle[block_id] = None
            elif refs < 0:
                raise InternalError(f"KV block {block_id} was released more often than it was taken")

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Make a used, full block findable. False: another block with this content is registered already."""
        if not self.prefix_cache or block_hash in self._block_of or block_id in self._condemned:
            return False
        self._unregister(block_id)
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id
        return True

    def invalidate(self, block_ids: Iterable[int]) -> None:
        """Forget the content of blocks; their holders keep them."""
        for block_id in block_ids:
            self._unregister(block_id)
            if block_id in self._idle:
                del self._idle[block_id]
                self._free.append(block_id)

    def condemn(self, block_ids: Iterable[int]) -> None:
        """As `invalidate`; besides, each block is to be zeroed as soon as nobody holds it."""
        for block_id in block_ids:
            self.invalidate((block_id,))
            if self._refs[block_id]:
                self._condemned.add(block_id)
            else:
                self._to_zero.append(block_id)

    def is_registered(self, block_id: int) -> bool:
        return self._hash_of[block_id] is not None

    def take_zeroed(self) -> list[int]:
        """Blocks that the next step must fill with zeros before anything else; they count as zeroed from here on."""
        block_ids, self._to_zero = self._to_zero, []
        return block_ids

    def put_back_zeroed(self, block_ids: list[int]) -> None:
        """The step that was to zero them did not, or may not have."""
        self._to_zero += block_ids

    def reset_prefix_cache(self) -> None:
        """Forget all content (after new weights, or on request); sequences that hold blocks go on."""
        self.invalidate(list(self._block_of.values()))

    def count_query(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Count one admission for the hit rate."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hit_tokens

    def _unregister(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            self._hash_of[block_id] = None
            del self._block_of[block_hash]

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Verify every invariant against the block tables of all holders.

        Raises:
            InternalError: with the first violation found.
        """
        holders: Counter[int] = Counter()
        for table in tables:
            _require(len(set(table)) == len(table), f"a block table lists a block twice: {list(table)}")
            holders.update(table)
        free, idle = set(self._free), set(self._idle)
        _require(len(free) == len(self._free), "a block is free twice")
        _require(not free & idle, f"blocks {sorted(free & idle)} are free and idle")
        _require(not (free | idle) & holders.keys(), f"held blocks {sorted((free | idle) & holders.keys())} are free")
        total = len(free) + len(idle) + len(holders)
        _require(total == self.num_blocks, f"free + idle + used is {total}, the pool has {self.num_blocks}")
        for block_id, refs in enumerate(self._refs):
            _require(refs == holders[block_id], f"block {block_id}: {refs} references, {holders[block_id]} holders")
            block_hash = self._hash_of[block_id]
            _require(block_hash is None or self._block_of.get(block_hash) == block_id, f"block {block_id}: stale hash")
            _require(block_id not in idle or block_hash is not None, f"idle block {block_id} has no content")
            _require(block_id not in free or block_hash is None, f"free block {block_id} has content")
            is_condemned = block_id in self._condemned
            _require(not is_condemned or (refs > 0 and block_hash is None), f"block {block_id} is condemned for ever")
        registered = sum(block_hash is not None for block_hash in self._hash_of)
        _require(registered == len(self._block_of), "the prefix index and the blocks' hashes differ")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InternalError(f"KV block accounting: {message}")
