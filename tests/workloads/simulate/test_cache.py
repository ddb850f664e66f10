"""The cache of a simulated replica: that of `block_cache`, block for block, and what concurrent requests hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.scheduler.retention import Retention
from ropewalk.scheduler.rules import RULES
from ropewalk.workloads.block_cache import BlockCache
from ropewalk.workloads.simulate.cache import WINDOW, ReplicaCache
from ropewalk.workloads.simulate.request import Request
from ropewalk.workloads.simulate.sessions import from_turns
from ropewalk.workloads.traces import PATTERNS, TraceTurn, chat

BLOCK = 4


def serve(cache: ReplicaCache, request: Request) -> int:
    if cache.rule is not None:
        cache.rule.begin(request.session, request.agent, request.time_s)
    num_cached = cache.admit(request)
    assert num_cached is not None
    cache.check_integrity()
    cache.release(request)
    if cache.rule is not None:
        cache.rule.used(request.session, request.agent, request.blocks)
    return num_cached


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.integers(1, 6)), min_size=1, max_size=40
)


@given(prompts=prompts, num_blocks=st.integers(8, 24))
def test_lru_hits_what_the_model_of_one_cache_hits(prompts, num_blocks):
    turns = [
        TraceTurn("s", "a", float(time_s), tuple(tokens), tuple(range(10, 10 + num_output)), False)
        for time_s, (tokens, num_output) in enumerate(prompts)
    ]
    reference, cache = BlockCache(num_blocks, BLOCK, Retention()), ReplicaCache(num_blocks, BLOCK)
    for turn, request in zip(turns, from_turns(turns, BLOCK), strict=True):
        assert serve(cache, request) == reference.serve(turn)
        cache.check_integrity()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_hits_what_the_model_of_one_cache_hits_while_the_window_holds_all(name, pattern):
    turns = chat(pattern, 8)
    num_blocks = 110
    reference = BlockCache(num_blocks, 32, RULES[name]())
    cache = ReplicaCache(num_blocks, 32, RULES[name]())
    for turn, request in zip(turns, from_turns(turns, 32), strict=True):
        assert serve(cache, request) == reference.serve(turn)


@given(data=st.data(), name=st.sampled_from([None, *RULES]), num_blocks=st.integers(4, 12))
@settings(max_examples=200, deadline=None)
def test_whatever_runs_together_every_block_is_held_free_or_empty(data, name, num_blocks):
    cache = ReplicaCache(num_blocks, BLOCK, None if name is None else RULES[name](), window=2)
    running: list[Request] = []
    for number in range(data.draw(st.integers(1, 30))):
        if running and data.draw(st.booleans()):
            request = running.pop(data.draw(st.integers(0, len(running) - 1)))
            cache.release(request)
            if cache.rule is not None:
                cache.rule.used(request.session, request.agent, request.blocks)
        else:
            length = data.draw(st.integers(1, 3))
            head = data.draw(st.integers(1, 3))
            blocks = tuple(100 * head + depth for depth in range(length))
            request = Request(float(number), "s", "a", length * BLOCK + 1, data.draw(st.integers(1, 4)), blocks)
            if cache.rule is not None:
                cache.rule.begin("s", "a", float(number))
            held = cache.num_held
            if cache.admit(request) is None:
                assert cache.num_held == held
                assert held
            else:
                running.append(request)
        cache.check_integrity()
    for request in running:
        cache.release(request)
    assert cache.num_held == 0
    assert cache.num_free + cache.num_empty == num_blocks


def test_requests_with_a_common_prefix_hold_it_once():
    cache = ReplicaCache(10, BLOCK)
    one, other = Request(0, None, "", 13, 1, (1, 2, 3)), Request(0, None, "", 13, 1, (1, 2, 9))
    assert cache.admit(one) == 0
    assert cache.admit(other) == 2 * BLOCK
    assert cache.num_held == 6  # 1, 2, 3, 9 and a partial block of each
    cache.release(one)
    assert cache.num_held == 4
    assert cache.num_free == 1


def test_blocks_of_a_running_request_are_not_evicted():
    cache = ReplicaCache(4, BLOCK)
    one, other = Request(0, None, "", 13, 1, (1, 2, 3)), Request(0, None, "", 5, 1, (7,))
    assert cache.admit(one) == 0
    assert cache.admit(other) is None
    cache.release(one)
    assert cache.admit(other) == 0
    assert cache.admit(Request(0, None, "", 9, 1, (1, 2))) is None


def test_the_last_token_is_always_computed():
    cache = ReplicaCache(4, BLOCK)
    request = Request(0, None, "", 8, 1, (1, 2))
    assert serve(cache, request) == 0
    assert serve(cache, request) == BLOCK


def test_a_request_that_never_fits_is_said():
    with pytest.raises(ValueError, match="a request of 4 blocks does not fit into 3"):
        ReplicaCache(3, BLOCK).admit(Request(0, None, "", 13, 1, (1, 2, 3)))


def test_a_rule_weighs_a_window_of_blocks_however_many_are_free():
    class Counting(Retention):
        num_asked = 0

        def rank(self, block):
            self.num_asked += 1
            return super().rank(block)

    rule = Counting()
    cache = ReplicaCache(4 * WINDOW, 1, rule)
    serve(cache, Request(0, None, "", 4 * WINDOW, 1, tuple(range(4 * WINDOW))))
    rule.num_asked = 0
    serve(cache, Request(1, None, "", 3, 1, (-1, -2, -3)))
    assert rule.num_asked == WINDOW + 3


def test_what_stands_before_the_last_victim_and_stays_moves_to_the_end_of_the_queue():
    class Odd(Retention):
        def rank(self, block):
            return (float(block % 2), 0, 0)

    cache = ReplicaCache(6, 1, Odd(), window=4)
    for name in (1, 3, 2, 5, 4, 7):
        serve(cache, Request(0, None, "", 1, 1, (name,)))
    serve(cache, Request(0, None, "", 1, 1, (8,)))
    # Of 1, 3, 2, 5, 4 the 2 went, and 1 and 3, which stood before it, moved behind 7.
    assert list(cache._free) == [5, 4, 7, 1, 3, 8]
