"""Hand-overs are counted exactly, by group, and say how predictable the next one is."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.scheduler.handovers import MAX_GROUPS, MAX_HANDOVERS, MAX_SUCCESSORS, HandoverCounts, predictability
from ropewalk.scheduler.packing import pack

sequences = st.lists(st.lists(st.sampled_from("abcdef"), max_size=20), max_size=6)


def learned(sessions: list[list[str]]) -> HandoverCounts:
    counts = HandoverCounts()
    for session in sessions:
        for previous, agent in pairwise(session):
            counts.observe(session[0], previous, agent)
    counts.check_integrity()
    return counts


def r(sessions: list[list[str]]) -> float:
    return predictability(learned(sessions).totals()).r


@given(sequences)
def test_counts_equal_what_was_observed(sessions: list[list[str]]) -> None:
    counts = learned(sessions)
    expected = Counter(pair for session in sessions for pair in pairwise(session))
    assert {(a, b): n for a, row in counts.totals().items() for b, n in row.items()} == expected
    assert all(counts.count(a, b) == n for (a, b), n in expected.items())
    assert counts.num_handovers == sum(n for (a, b), n in expected.items() if a != b)


@given(sequences)
def test_each_group_is_as_predictable_as_its_sessions_alone(sessions: list[list[str]]) -> None:
    found = learned(sessions).groups()
    for group in found:
        own = [session for session in sessions if session[:1] == [group]]
        assert found[group] == predictability(learned(own).totals())
        assert found[group].num_handovers == sum(a != b for session in own for a, b in pairwise(session))


@given(sequences)
def test_predictability_is_the_formula_of_the_paper(sessions: list[list[str]]) -> None:
    pairs = Counter((a, b) for session in sessions for a, b in pairwise(session) if a != b)
    total = pairs.total()

    def entropy(counts: Counter[str]) -> float:
        return -sum(n / counts.total() * math.log2(n / counts.total()) for n in counts.values())

    arrivals: Counter[str] = Counter()
    conditional = 0.0
    for a in "abcdef":
        row = Counter({b: n for (before, b), n in pairs.items() if before == a})
        arrivals += row
        conditional += row.total() / total * entropy(row) if row else 0.0
    if total and entropy(arrivals):
        expected = max(0.0, 1 - conditional / entropy(arrivals))
        assert r(sessions) == pytest.approx(expected)


def test_a_fixed_pipeline_is_fully_predictable_and_a_fair_die_is_not() -> None:
    assert r([list("abcabcabc")]) == pytest.approx(1.0)
    assert r([[a, b] for a in "ab" for b in "cd"]) == pytest.approx(0.0)
    assert predictability({}).r == 0.0


def test_repeats_are_kept_apart_from_hand_overs() -> None:
    counts = learned([list("aaab")])
    assert counts.count("a", "a") == 2
    assert counts.num_handovers == counts.groups()["a"].num_handovers == 1


@given(sequences)
def test_counts_survive_json(sessions: list[list[str]]) -> None:
    counts = learned(sessions)
    data = counts.to_dict()
    again = HandoverCounts.from_dict(json.loads(json.dumps(data)))
    assert again.to_dict() == data
    assert again.groups() == counts.groups()


@given(sequences, st.sampled_from("abc"), st.sampled_from("cxy"))
def test_a_rename_keeps_every_turn(sessions: list[list[str]], old: str, new: str) -> None:
    counts = learned(sessions)
    counts.rename(old, new)
    counts.check_integrity()
    renamed = learned([[new if agent == old else agent for agent in session] for session in sessions])
    assert counts.totals() == renamed.totals()
    assert counts.groups() == renamed.groups()
    assert counts.num_handovers == renamed.num_handovers


@given(sequences, st.sampled_from("abc"))
def test_a_removed_agent_leaves_no_trace(sessions: list[list[str]], agent: str) -> None:
    counts = learned(sessions)
    counts.remove(agent)
    counts.check_integrity()
    assert agent not in counts.agents
    assert agent not in counts.groups()
    assert all(counts.count(agent, other) == counts.count(other, agent) == 0 for other in "abcdef")


def test_groups_are_bounded_and_what_they_counted_is_not_lost() -> None:
    counts = learned([[f"first{i}", "a", "b"] for i in range(3 * MAX_GROUPS)])
    assert list(counts.groups()) == [f"first{i}" for i in reversed(range(2 * MAX_GROUPS, 3 * MAX_GROUPS))]
    assert counts.count("a", "b") == 3 * MAX_GROUPS
    assert counts.num_handovers == 6 * MAX_GROUPS


def test_a_change_of_program_shows() -> None:
    counts = HandoverCounts()
    for i in range(MAX_HANDOVERS):
        counts.observe("g", "a", "bcde"[i % 4])
    for i in range(5 * MAX_HANDOVERS):
        counts.observe("g", "ab"[i % 2], "ba"[i % 2])
    counts.check_integrity()
    assert counts.groups()["g"].r > 0.9
    assert counts.groups()["g"].num_handovers < MAX_HANDOVERS
    assert counts.num_handovers == 6 * MAX_HANDOVERS


def test_successors_of_one_agent_are_bounded() -> None:
    counts = HandoverCounts()
    for i in range(3 * MAX_SUCCESSORS):
        counts.observe("g", "hub", f"spoke{i}")
    counts.check_integrity()
    assert len(counts.totals()["hub"]) <= MAX_SUCCESSORS + 1
    assert counts.count("hub", f"spoke{3 * MAX_SUCCESSORS - 1}") == 1, "the latest stays"


def test_agents_that_turn_out_to_be_one_keep_the_bound_on_successors() -> None:
    counts = HandoverCounts()
    for i in range(MAX_SUCCESSORS):
        counts.observe("g", "a", f"x{i}")
        counts.observe("g", "b", f"y{i}")
        counts.observe("g", "b", f"y{i}")
    counts.rename("a", "b")
    counts.check_integrity()
    assert all(agent.startswith("y") for agent in counts.totals()["b"])


@pytest.mark.parametrize(
    "damage",
    [
        {"agents": ["a"]},
        {"groups": [[7, 1]]},
        {"groups": []},
        {"widths": pack([2], "u1")},
        {"counts": pack([0], "<u4")},
        {"counts": pack([MAX_HANDOVERS], "<u4")},
        {"counts": "eJ"},
        {"successors": pack([1, 1], "u1")},
    ],
)
def test_damaged_counts_are_refused(damage: dict[str, object]) -> None:
    data = learned([["a", "b"]]).to_dict()
    assert HandoverCounts.from_dict(data).to_dict() == data
    with pytest.raises((ValueError, IndexError)):
        HandoverCounts.from_dict({**data, **damage})
