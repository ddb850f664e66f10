"""Routers of a simulated cluster, Ray's prefix tree beside ours."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

from ropewalk.workloads.simulate.request import Request
from ropewalk.workloads.simulate.routers import ROUTERS, PrefixAffinity, Rank, RouterSettings


def request(blocks, session=None, agent="", num_anchor=0, extra=0):
    return Request(0.0, session, agent, len(blocks) + extra, 1, tuple(blocks), num_anchor)


def router(name, num_replicas, **options):
    return ROUTERS[name](RouterSettings(num_replicas, 100, 1, **options))


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("num_replicas", [1, 2, 7])
def test_a_router_chooses_replicas_that_are_there_and_the_same_ones_for_the_same_seed(name, num_replicas):
    one, other = (router(name, num_replicas, seed=3) for _ in range(2))
    queues = [number % 3 for number in range(num_replicas)]
    for number in range(50):
        asked = request([number % 4, number], f"s{number % 5}", "a")
        chosen = one.choose(asked, queues, float(number))
        assert 0 <= chosen < num_replicas
        assert chosen == other.choose(asked, queues, float(number))
        for each in (one, other):
            each.answered(asked, chosen, float(number), 0)


def test_round_robin_takes_one_after_the_other():
    robin = router("round-robin", 3)
    assert [robin.choose(request([1]), [9, 0, 0], 0.0) for _ in range(4)] == [0, 1, 2, 0]


def test_power_of_two_never_takes_the_longest_queue():
    two = router("p2c", 3)
    assert {two.choose(request([1]), [0, 1, 5], 0.0) for _ in range(200)} == {0, 1}


def test_a_prefix_goes_where_it_was_sent_while_queues_are_balanced():
    affinity = router("prefix", 4, imbalance=2)
    home = affinity.choose(request([1, 2, 3, 4]), [1, 1, 0, 1], 0.0)
    assert home == 2
    queues = [0, 0, 2, 0]
    assert affinity.choose(request([1, 2, 3, 9]), queues, 0.0) == home
    # Too far apart: the shorter queue of two, never that one.
    queues = [0, 0, 3, 0]
    assert all(affinity.choose(request([1, 2, 3, 9]), queues, 0.0) != home for _ in range(20))


def test_a_prompt_of_which_less_than_a_tenth_matches_goes_where_least_was_sent():
    affinity = router("prefix", 2)
    first = affinity.choose(request(range(20)), [0, 0], 0.0)
    assert affinity.choose(request([0, *range(100, 119)]), [0, 0], 0.0) == 1 - first
    assert affinity.choose(request([0, 1, *range(200, 218)]), [5, 5], 0.0) == first


texts = st.lists(st.tuples(st.text(alphabet="ab", min_size=1, max_size=8), st.integers(0, 2)), min_size=1, max_size=25)


@given(sent=texts, asked=st.text(alphabet="ab", min_size=1, max_size=8))
def test_ours_matches_what_rays_tree_matches(sent, asked):
    """Blocks of one character each, named by the text up to there."""

    def named(text):
        return request([hash(text[: end + 1]) for end in range(len(text))])

    names = ["0", "1", "2"]
    tree = PrefixTree()
    tree.add_tenants(names, 0.0)
    affinity = PrefixAffinity(3, 1, 1000)
    for time_s, (text, replica) in enumerate(sent, 1):
        tree.insert(text, str(replica), float(time_s))
        affinity._insert(replica, named(text).blocks)
    affinity.check_integrity()
    matched, owners = tree.prefix_match(asked, names)
    if matched:  # a tenth of eight characters is less than one
        assert affinity._candidates(named(asked)) == [int(owner) for owner in owners]


@given(sent=texts, max_blocks=st.integers(1, 10))
def test_what_was_sent_longest_ago_is_forgotten_and_what_is_left_are_whole_prefixes(sent, max_blocks):
    affinity = PrefixAffinity(3, 1, max_blocks)
    prefix_of = {}
    for text, replica in sent:
        blocks = [hash(text[: end + 1]) for end in range(len(text))]
        prefix_of |= {name: blocks[:depth] for depth, name in enumerate(blocks)}
        affinity._insert(replica, blocks)
        affinity.check_integrity()
    for own in affinity._sent:
        assert all(before in own for name in own for before in prefix_of[name])


@pytest.mark.parametrize("snapshot_s", [0.0, 0.5])
def test_ours_brings_a_session_back_and_a_new_one_to_its_agents_anchor(snapshot_s):
    rank = Rank(8, snapshot_s)
    home = rank.choose(request(range(4000), "s1", "a", 90), [0] * 8, 0.0)
    rank.answered(request(range(4000), "s1", "a", 90), home, 0.5, 0)
    queues = [0] * 8
    queues[home] = 1
    assert rank.choose(request(range(4000), "s1", "a", 90), queues, 1.0) == home
    for number in range(8):  # no one has more than a fair share of sessions then
        other = rank.choose(request(range(4000), f"t{number}", "b", 2000), [0] * 8, 1.0)
        rank.answered(request(range(4000), f"t{number}", "b", 2000), other, 1.0, 0)
    assert rank.reasons["anchor"] > 0
    assert rank.reasons["session"] == 1
    assert rank.reasons["fallback-error"] == 0


def test_the_tree_of_prefixes_needs_no_imbalance_by_default_as_rays_does_not():
    assert RouterSettings(1, 1, 1).imbalance == math.inf


def test_ours_forgets_sessions_beyond_those_that_it_remembers():
    rank = Rank(4, 0.0, max_sessions=2)
    for number in range(9):
        rank.choose(request(range(4000), f"s{number}"), [0] * 4, 0.0)
    for session, reason in (("s8", "session"), ("s0", "spread")):
        rank.choose(request(range(4000), session), [0] * 4, 1.0)
        assert rank.reasons[reason] == {"session": 1, "spread": 10}[reason]
