# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.errors import InternalError
from mii_zmq.worker.blocks import BlockManager


def hashes_of(blocks: BlockManager, token_ids: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    blocks.extend_hashes(hashes, blocks.root_hash(salt), token_ids)
    return hashes


def fill(blocks: BlockManager, token_ids: list[int], salt: str = "") -> list[int]:
    hashes = hashes_of(blocks, token_ids, salt)
    table = blocks.allocate(len(hashes))
    for block_id, block_hash in zip(table, hashes, strict=True):
        blocks.register(block_id, block_hash)
    return table


def test_allocates_every_block_once_and_takes_them_back():
    blocks = BlockManager(4, 2)
    table = blocks.allocate(4)
    assert sorted(table) == [0, 1, 2, 3]
    assert (blocks.num_free, blocks.num_used) == (0, 4)
    blocks.check([table])
    with pytest.raises(InternalError, match="1 KV blocks were asked for, but only 0"):
        blocks.allocate(1)
    blocks.release(table)
    blocks.check([])
    assert blocks.num_used == 0


def test_released_content_is_found_again_and_shared():
    blocks = BlockManager(4, 2)
    table = fill(blocks, [1, 2, 3, 4, 5])
    assert len(table) == 2
    blocks.release(table)
    assert blocks.num_free == 4
    found = blocks.match(hashes_of(blocks, [1, 2, 3, 4, 9, 9]))
    assert found == table
    blocks.share(found)
    blocks.share(found)
    blocks.check([found, found])
    assert [blocks.refs(block_id) for block_id in found] == [2, 2]
    assert blocks.num_used == 2


@pytest.mark.parametrize(
    ("model", "salt", "token_ids"),
    [("other", "", [1, 2, 3, 4]), ("m", "tenant", [1, 2, 3, 4]), ("m", "", [9, 2, 3, 4])],
    ids=["other model", "other salt", "other parent"],
)
def test_equal_blocks_behind_another_root_have_other_hashes(model: str, salt: str, token_ids: list[int]):
    ours = hashes_of(BlockManager(1, 2, model="m"), [1, 2, 3, 4])
    theirs = hashes_of(BlockManager(1, 2, model=model), token_ids, salt)
    assert ours[1] != theirs[1]


def test_model_name_salt_and_rope_regime_do_not_run_into_each_other():
    assert BlockManager(1, 2, model="ab").root_hash("c") != BlockManager(1, 2, model="a").root_hash("bc")
    blocks = BlockManager(1, 2, model="m")
    roots = {blocks.root_hash(salt, regime) for salt in ("", "\1", "1") for regime in (0, 1, 300)}
    assert len(roots) == 9
    assert blocks.root_hash("a", 0) == blocks.root_hash("a")


def test_hashes_can_be_extended_in_parts():
    blocks = BlockManager(1, 2)
    hashes = hashes_of(blocks, [1, 2, 3])
    blocks.extend_hashes(hashes, blocks.root_hash(""), [1, 2, 3, 4, 5, 6])
    assert hashes == hashes_of(blocks, [1, 2, 3, 4, 5, 6])


def test_evicts_least_recently_used_and_the_tail_before_its_prefix():
    blocks = BlockManager(4, 1)
    old = fill(blocks, [1, 2])
    young = fill(blocks, [7, 8])
    blocks.release(old)
    blocks.release(young)
    blocks.share(old)
    blocks.release(old)
    assert [blocks.allocate_one() for _ in range(4)] == [young[1], young[0], old[1], old[0]]
    assert blocks.num_evictions == 4
    assert blocks.num_cached == 0


def test_free_blocks_are_used_before_cached_ones():
    blocks = BlockManager(3, 1)
    cached = fill(blocks, [1])
    blocks.release(cached)
    assert not set(blocks.allocate(2)) & set(cached)
    assert blocks.num_evictions == 0


def test_second_block_with_the_same_content_is_not_registered():
    blocks = BlockManager(2, 1)
    first = fill(blocks, [5])
    (second,) = blocks.allocate(1)
    assert not blocks.register(second, hashes_of(blocks, [5])[0])
    blocks.release([second])
    assert blocks.match(hashes_of(blocks, [5])) == first


def test_invalidated_content_is_gone_for_holders_and_idle_blocks_alike():
    blocks = BlockManager(4, 1)
    held, idle = fill(blocks, [1, 2]), fill(blocks, [8, 9])
    blocks.release(idle)
    blocks.invalidate([held[0], idle[1]])
    assert blocks.match(hashes_of(blocks, [1, 2])) == []
    assert blocks.match(hashes_of(blocks, [8, 9])) == idle[:1]
    blocks.check([held])
    blocks.reset_prefix_cache()
    assert blocks.num_cached == 0
    blocks.check([held])


def test_without_prefix_cache_nothing_is_registered():
    blocks = BlockManager(2, 1, prefix_cache=False)
    blocks.release(fill(blocks, [1, 2]))
    assert blocks.num_cached == 0


def test_check_finds_double_ownership_lost_blocks_and_double_release():
    blocks = BlockManager(3, 1)
    table = blocks.allocate(2)
    with pytest.raises(InternalError, match="1 references, 2 holders"):
        blocks.check([table, table[:1]])
    with pytest.raises(InternalError, match="free \\+ idle \\+ used is 2"):
        blocks.check([table[:1]])
    with pytest.raises(InternalError, match="twice"):
        blocks.check([[*table, table[0]]])
    blocks.release(table)
    with pytest.raises(InternalError, match="more often"):
        blocks.release(table[:1])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_sequence_of_operations_keeps_the_accounting(data: st.DataObject):
    blocks = BlockManager(data.draw(st.integers(1, 12)), data.draw(st.sampled_from([1, 2, 4])))
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["take", "release", "invalidate", "reset"]))
        if action == "take":
            token_ids = data.draw(st.lists(st.integers(0, 1), max_size=16))
            hashes = hashes_of(blocks, token_ids)
            table = blocks.match(hashes)
            blocks.share(table)
            if len(hashes) - len(table) > blocks.num_free:
                blocks.release(table)
            else:
                for block_hash in hashes[len(table) :]:
                    table.append(blocks.allocate_one())
                    blocks.register(table[-1], block_hash)
                tables.append(table)
        elif action == "release" and tables:
            blocks.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        elif action == "invalidate":
            blocks.invalidate({block_id for table in tables for block_id in table[::2]})
        elif action == "reset":
            blocks.reset_prefix_cache()
        blocks.check(tables)
    for table in tables:
        blocks.release(table)
    blocks.check([])
    assert blocks.num_used == 0
