"""Hand-overs are counted exactly and smoothed as CacheScout says."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.scheduler.survival import hops, survival
from ropewalk.scheduler.transitions import MAX_SUCCESSORS, TransitionCounts

sequences = st.lists(st.lists(st.sampled_from("abcdef"), max_size=20), max_size=6)


def learned(sessions: list[list[str]]) -> TransitionCounts:
    counts = TransitionCounts()
    for session in sessions:
        for previous, agent in zip([None, *session], session, strict=False):
            counts.observe(previous, agent)
    counts.check_integrity()
    return counts


def test_agents_that_turn_out_to_be_one_keep_the_bound_on_successors() -> None:
    counts = TransitionCounts()
    for i in range(MAX_SUCCESSORS):
        counts.observe("a", f"x{i}")
        counts.observe("b", f"y{i}")
        counts.observe("b", f"y{i}")
    counts.rename("a", "b")
    counts.check_integrity()
    assert all(agent.startswith("y") for agent in counts.successors("b"))
    assert TransitionCounts.from_dict(counts.to_dict()).to_dict() == counts.to_dict()


@given(sequences)
def test_counts_equal_what_was_observed(sessions: list[list[str]]) -> None:
    counts = learned(sessions)
    expected = Counter(pair for session in sessions for pair in pairwise(session))
    assert all(counts.count(a, b) == n for (a, b), n in expected.items())
    assert counts.num_handovers == sum(n for (a, b), n in expected.items() if a != b)


@given(sequences)
def test_rows_sum_to_one_and_agree_with_predictions(sessions: list[list[str]]) -> None:
    counts = learned(sessions)
    for agent in counts.agents:
        row = counts.row(agent)
        assert not row or math.isclose(sum(row.values()), 1.0)
        assert all(math.isclose(p, counts.probability(agent, other)) for other, p in row.items())
        ranked = counts.predict(agent)
        assert [p for _, p in ranked] == sorted((p for _, p in ranked), reverse=True)
        assert all(math.isclose(p, row[other]) for other, p in ranked)


@given(sequences)
def test_counts_survive_json(sessions: list[list[str]]) -> None:
    counts = learned(sessions)
    data = counts.to_dict()
    assert TransitionCounts.from_dict(json.loads(json.dumps(data))).to_dict() == data


@given(sequences, st.sampled_from("abc"), st.sampled_from("cxy"))
def test_a_rename_keeps_every_turn(sessions: list[list[str]], old: str, new: str) -> None:
    counts = learned(sessions)
    counts.rename(old, new)
    counts.check_integrity()
    renamed = learned([[new if agent == old else agent for agent in session] for session in sessions])
    pairs = [(a, b) for a in renamed.agents for b in renamed.agents]
    assert all(counts.count(a, b) == renamed.count(a, b) for a, b in pairs)


@given(sequences, st.sampled_from("abc"))
def test_a_removed_agent_leaves_no_trace(sessions: list[list[str]], agent: str) -> None:
    counts = learned(sessions)
    counts.remove(agent)
    counts.check_integrity()
    assert agent not in counts.agents
    assert all(counts.count(agent, other) == counts.count(other, agent) == 0 for other in "abcdef")


@given(sequences)
def test_predictability_lies_between_zero_and_one(sessions: list[list[str]]) -> None:
    assert 0 <= learned(sessions).predictability() <= 1


def test_a_fixed_pipeline_is_fully_predictable_and_a_fair_die_is_not() -> None:
    assert learned([list("abcabcabc")]).predictability() == pytest.approx(1.0)
    fair = [[a, b] for a in "ab" for b in "cd"]
    assert learned(fair).predictability() == pytest.approx(0.0)
    assert TransitionCounts().predictability() == 0.0


def test_smoothing_is_the_formula_of_the_paper() -> None:
    counts = learned([list("ababac")])
    # From a: twice to b, once to c; epsilon for each of the two other agents.
    assert counts.row("a") == pytest.approx({"b": 2.01 / 3.02, "c": 1.01 / 3.02})


def test_repeats_are_kept_apart_from_hand_overs() -> None:
    counts = learned([list("aaab")])
    assert counts.count("a", "a") == 2
    assert counts.predict("a") == [("b", pytest.approx(1.0))]


def test_successors_of_one_agent_are_bounded() -> None:
    counts = TransitionCounts()
    for i in range(3 * MAX_SUCCESSORS):
        counts.observe("hub", f"spoke{i}")
    counts.check_integrity()
    assert len(counts.predict("hub")) == MAX_SUCCESSORS
    assert counts.predict("hub")[0][0]


def test_the_graph_shows_counts_and_probabilities() -> None:
    graph = learned([list("abab")]).graph()
    assert graph.edges["a", "b"]["count"] == 2
    assert graph.edges["a", "b"]["probability"] == pytest.approx(1.0)


@pytest.mark.parametrize("rows", [[[[0, 1]], []], [[[1, 0]], []], [[[7, 1]], []]])
def test_damaged_counts_are_refused(rows: list[list[list[int]]]) -> None:
    with pytest.raises((ValueError, IndexError)):
        TransitionCounts.from_dict({"agents": ["a", "b"], "repeats": [0, 0], "rows": rows})


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan")])
def test_smoothing_must_be_positive(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon"):
        TransitionCounts(epsilon)


# Survival


def test_survival_falls_with_every_hand_over() -> None:
    counts = learned([list("abcdefgh")])
    assert hops(counts, "a") == {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "f": 5}
    alive = survival(counts, {"a": 1})
    assert alive["a"] == 1.0
    assert alive["b"] == pytest.approx(5 / 6)
    assert alive["f"] == pytest.approx(1 / 6)
    assert "g" not in alive


def test_unlikely_hand_overs_are_not_followed() -> None:
    counts = learned([["a", "b"]] * 95 + [["a", "c"]] * 5)
    assert survival(counts, {"a": 1}, tau=0.1).keys() == {"a", "b"}
    assert survival(counts, {"a": 1}, tau=0.01).keys() == {"a", "b", "c"}


def test_survival_is_averaged_over_the_live_sessions() -> None:
    counts = learned([["a", "b"], ["c", "d"]])
    alive = survival(counts, {"a": 3, "c": 1})
    assert alive == pytest.approx({"a": 0.75, "b": 0.75 * 5 / 6, "c": 0.25, "d": 0.25 * 5 / 6})
    assert survival(counts, {}) == {}


@given(sequences, st.dictionaries(st.sampled_from("abcdefz"), st.integers(1, 5)), st.integers(1, 8))
def test_survival_is_a_share(sessions: list[list[str]], live: dict[str, int], max_hops: int) -> None:
    alive = survival(learned(sessions), live, max_hops=max_hops)
    assert all(0 < value <= 1 for value in alive.values())
    assert live.keys() <= alive.keys()
