# SPDX-License-Identifier: Apache-2.0
"""What is kept of compiled grammars, with grammars that are nothing but a name."""

from __future__ import annotations

import random
from collections import Counter

from mii_zmq.errors import InvalidRequest
from mii_zmq.worker.grammar_cache import MAX_REFUSALS, REFUSED_S, GrammarCache, Key
from tests.engine_driver import Clock


def key(name: str) -> Key:
    return ("regex", name)


def kept(cache: GrammarCache[str], names: str) -> str:
    return "".join(name for name in names if cache.get(key(name)) is not None)


def test_the_least_recently_used_go_first() -> None:
    cache = GrammarCache[str](10)
    for name in "abc":
        cache.add(key(name), name, 3)
    cache.use(key("a"))
    cache.release(key("a"))
    cache.add(key("d"), "d", 3)
    assert (kept(cache, "abcd"), cache.num_bytes) == ("acd", 9)


def test_what_is_in_use_counts_and_stays() -> None:
    cache = GrammarCache[str](10)
    for name in "abcd":
        cache.add(key(name), name, 4)
        if name in "ab":
            cache.use(key(name))
    # Two in use leave no room for idle ones but the newest.
    assert (kept(cache, "abcd"), cache.num_bytes) == ("abd", 12)
    cache.use(key("a"))
    cache.release(key("a"))
    assert kept(cache, "abd") == "abd"
    cache.release(key("a"))
    assert (kept(cache, "abd"), cache.num_bytes) == ("ab", 8)


def test_one_that_is_too_large_serves_until_the_next_one_comes() -> None:
    cache = GrammarCache[str](10)
    cache.add(key("a"), "a", 50)
    cache.use(key("a"))
    cache.release(key("a"))
    assert kept(cache, "a") == "a"
    cache.add(key("b"), "b", 50)
    assert (kept(cache, "ab"), cache.num_bytes) == ("b", 50)


def test_the_bytes_are_those_of_what_is_kept_whatever_happens() -> None:
    for seed in range(20):
        draw, cache, users = random.Random(seed), GrammarCache[str](60), Counter[str]()
        sizes = {name: draw.randint(1, 30) for name in "abcdefgh"}
        for _ in range(200):
            name = draw.choice("abcdefgh")
            if users[name] and draw.random() < 0.5:
                cache.release(key(name))
                users[name] -= 1
            else:
                if cache.get(key(name)) is None:
                    cache.add(key(name), name, sizes[name])
                cache.use(key(name))
                users[name] += 1
            there = kept(cache, "abcdefgh")
            in_use = {name for name, number in users.items() if number}
            assert in_use <= {*there}
            assert cache.num_bytes == sum(sizes[name] for name in there)
            assert cache.num_bytes <= 60 or len(there) <= len(in_use) + 1


def test_refusals_are_remembered_for_a_while() -> None:
    clock = Clock()
    cache = GrammarCache[str](10, clock)
    error = InvalidRequest("no")
    cache.refuse(key("a"), error)
    assert cache.get(key("a")) is error
    clock.now = REFUSED_S
    assert cache.get(key("a")) is None
    for number in range(MAX_REFUSALS + 1):
        cache.refuse(key(str(number)), error)
    assert cache.get(key("0")) is None
    assert cache.get(key("1")) is error
