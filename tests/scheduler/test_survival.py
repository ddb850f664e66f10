"""Survival follows likely hand-overs only; an outlook is the expected number of turns in the learned chain."""

from __future__ import annotations

import functools
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.scheduler.handovers import HandoverCounts
from ropewalk.scheduler.markov import Context, VariableOrder
from ropewalk.scheduler.survival import HORIZON, MAX_HOPS, REFRESH, TAU, Chain

sequences = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), max_size=6)
learners = st.sampled_from(
    [
        *({"order": order} for order in range(4)),
        {"order": 0, "smoothing": "additive"},
        {"order": 1, "smoothing": "additive"},
    ]
)
PAPER = {"order": 1, "smoothing": "additive", "half_life": float("inf")}


def learned(sessions: list[str] | list[list[str]], **options: object) -> tuple[VariableOrder, HandoverCounts]:
    """What the scheduler would have learned of these sessions."""
    learner, counts = VariableOrder(**options), HandoverCounts()
    for session in sessions:
        past: Context = ()
        for agent in session:
            if past:
                counts.observe(session[0], past[-1], agent)
            if past[-1:] != (agent,):
                learner.observe(past, agent)
                past = (*past, agent)[-3:]
    return learner, counts


def chain(sessions: list[str] | list[list[str]], **options: object) -> Chain:
    return Chain(*learned(sessions, **(options or PAPER)))


# Survival


def test_survival_falls_with_every_hand_over() -> None:
    alive = chain(["abcdefgh"]).survival({("a",): 1})
    assert alive == pytest.approx({"a": 1, "b": 5 / 6, "c": 4 / 6, "d": 3 / 6, "e": 2 / 6, "f": 1 / 6})


def test_unlikely_hand_overs_are_not_followed() -> None:
    learner, counts = learned(["ab"] * 95 + ["ac"] * 5, **PAPER)
    assert Chain(learner, counts, tau=0.1).survival({("a",): 1}).keys() == {"a", "b"}
    assert Chain(learner, counts, tau=0.01).survival({("a",): 1}).keys() == {"a", "b", "c"}


def test_survival_is_averaged_over_the_live_sessions() -> None:
    found = chain(["ab"] * 20 + ["cd"] * 20)
    live = {("a",): 3, ("c",): 1}
    assert found.survival(live) == pytest.approx({"a": 0.75, "b": 0.75 * 5 / 6, "c": 0.25, "d": 0.25 * 5 / 6})
    assert found.survival({}) == {}


def test_the_past_tells_which_expert_survives() -> None:
    """An orchestrator `o` that asks a, b and c in turn: each of them is one, three or five hand-overs away."""
    found = chain(["oaoboc" * 50], order=3)
    alive = found.survival({("c", "o"): 1})
    assert [alive[agent] for agent in "oabc"] == pytest.approx([1, 5 / 6, 3 / 6, 1 / 6])
    assert chain(["oaoboc" * 50]).survival({("c", "o"): 1})["c"] == pytest.approx(5 / 6), "the last agent alone"


def seen_after(learner: VariableOrder, past: Context) -> dict[str, float]:
    """Hand-overs that the learner foretells, but for those that never were."""
    seen = learner.counts(past[-1:] if learner.order else ())
    return {agent: p for agent, p in learner.handover(past).items() if agent in seen}


def breadth_first(learner: VariableOrder, past: Context, tau: float, max_hops: int) -> dict[str, int]:
    """Hops to each agent, over whole pasts instead of states."""
    distance = {past[-1]: 0}
    seen, frontier = {past}, [past]
    for step in range(1, max_hops):
        reached = []
        for current in frontier:
            for agent, p in seen_after(learner, current).items():
                following = (*current, agent)[-3:]
                if p >= tau and following not in seen:
                    seen.add(following)
                    reached.append(following)
                    distance.setdefault(agent, step)
        frontier = reached
    return distance


@given(
    sequences,
    learners,
    st.dictionaries(
        st.lists(st.sampled_from("abcdz"), min_size=1, max_size=3)
        .filter(lambda past: all(a != b for a, b in pairwise(past)))
        .map(tuple),
        st.integers(1, 5),
        min_size=1,
    ),
    st.integers(1, 7),
)
@settings(max_examples=100, deadline=None)
def test_survival_is_that_of_a_search_from_each_session(sessions, options, live, max_hops) -> None:
    learner, counts = learned(sessions, **options)
    live = {past: n for past, n in live.items() if past[-1] in learner.agents}
    expected: dict[str, float] = {}
    for past, n in live.items():
        for agent, hops in breadth_first(learner, past, 0.13, max_hops).items():
            expected[agent] = expected.get(agent, 0.0) + n / sum(live.values()) * (1 - hops / max_hops)
    found = Chain(learner, counts, tau=0.13, max_hops=max_hops).survival(live)
    assert found == pytest.approx(expected, abs=1e-5)


# Outlook


def exact(learner: VariableOrder, counts: HandoverCounts, past: Context, agent: str, horizon: int) -> float:
    """E[min(T, horizon)] from the formula, over whole pasts instead of states."""
    table = counts.totals()

    @functools.cache
    def turns(current: Context, left: int) -> float:
        if not left:
            return 0.0
        row = table.get(current[-1], {})
        stay = row.get(current[-1], 0) / sum(row.values()) if row else 0.0
        found = 1.0 + stay * (0.0 if current[-1] == agent else turns(current, left - 1))
        following = seen_after(learner, current)
        if not following:
            return found + (1 - stay) * (left - 1)
        for other, p in following.items():
            found += (
                (1 - stay)
                * p
                / sum(following.values())
                * (0.0 if other == agent else turns((*current, other)[-3:], left - 1))
            )
        return found

    return turns(past, horizon)


@given(sequences, learners, st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_an_outlook_is_the_expectation_of_the_formula(sessions, options, horizon) -> None:
    learner, counts = learned(sessions, **options)
    found = Chain(learner, counts, least=0.0, horizon=horizon)
    for session in sessions:
        past = tuple(b for a, b in pairwise(["", *session]) if a != b)[-3:]
        expected = {agent: exact(learner, counts, past, agent, horizon) for agent in learner.agents}
        outlook = found.outlook(past)
        assert all(outlook[agent] == pytest.approx(expected[agent], abs=1e-4) for agent in outlook)
        assert all(expected[agent] >= horizon - 0.5 - 1e-4 for agent in expected.keys() - outlook.keys())


def test_an_outlook_is_what_happens_on_average() -> None:
    """Many sessions of one program with chance in it, repeats and a return to the agent that just spoke."""
    dice = random.Random(3)

    def session(turns: int) -> list[str]:
        agents = ["o"]
        while len(agents) < turns:
            last = agents[-1]
            if dice.random() < 0.25:
                agents.append(last)
            elif last == "o":
                agents.append(dice.choices("abc", [6, 3, 1])[0])
            else:
                agents.append("o")
        return agents

    found = chain([session(400) for _ in range(40)], half_life=1e9)
    waits: dict[tuple[Context, str], list[int]] = {}
    for run in (session(400) for _ in range(40)):
        past: Context = ()
        for i, now in enumerate(run[:-HORIZON]):
            past = past if past[-1:] == (now,) else (*past, now)[-2:]
            for agent in "oab":
                ahead = run[i + 1 : i + HORIZON]
                waits.setdefault((past, agent), []).append(ahead.index(agent) + 1 if agent in ahead else HORIZON)
    for past in [("a", "o"), ("o", "a"), ("b", "o")]:
        outlook = found.outlook(past)
        for agent in "oab":
            happened = waits[past, agent]
            assert outlook[agent] == pytest.approx(sum(happened) / len(happened), rel=0.08)


def test_a_pipeline_comes_round() -> None:
    outlook = chain(["abcde" * 60], order=3).outlook(("c", "d", "e"))
    assert outlook == pytest.approx({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, abs=0.3)


def test_agents_beyond_the_horizon_are_left_out() -> None:
    ring = "abcdefghijklmnopqrstuvwxyz"
    outlook = chain([ring * 40], order=1).outlook(("a",))
    assert outlook.keys() == set("bcdefghijklmnop")
    assert [round(outlook[agent]) for agent in "bcd"] == [1, 2, 3]


def test_nothing_is_foretold_where_nothing_is_known() -> None:
    assert chain([]).outlook(("a",)) == {}
    assert chain([]).outlook(()) == {}
    assert chain(["a"]).outlook(("a",)) == {}
    assert chain(["ab"] * 5).outlook(("z",)) == {}


def test_an_agent_that_keeps_the_floor_is_needed_at_once() -> None:
    outlook = chain(["aaab" * 20]).outlook(("b", "a"))
    assert outlook["a"] < 1.7 < outlook["b"]


# When it is worked out anew


def test_a_chain_is_worked_out_anew_when_agents_come_and_when_enough_was_learned() -> None:
    learner, counts = learned(["ab" * 300], **PAPER)
    found = Chain(learner, counts, tau=TAU, max_hops=MAX_HOPS)
    assert found.update()
    assert not found.update()
    for past, agent in [(("a",), "b"), (("b",), "a")] * (REFRESH // 2):
        learner.observe(past, agent)
    assert not found.update()
    learner.observe(("a",), "b")
    assert found.update()
    learner.observe(("a",), "c")
    assert found.update(), "a new agent"
    learner.rename("c", "d")
    assert found.survival({("a",): 1, ("d",): 1})["d"] > 0
    learner.remove("d")
    assert "d" not in found.outlook(("a",))


def test_the_first_hand_overs_are_learned_from_at_once() -> None:
    learner, counts = learned(["ab"], **PAPER)
    found = Chain(learner, counts)
    for agent in "cde":
        learner.observe(("a",), agent)
        assert agent in found.survival({("a",): 1})


def test_the_nearest_agents_are_those_of_the_lowest_outlook() -> None:
    learner, counts = VariableOrder(), HandoverCounts()
    program = ["a", "b", "c", "d"] * 20
    for i, agent in enumerate(program):
        learner.observe(tuple(program[max(0, i - 3) : i]), agent)
        if i:
            counts.observe("a", program[i - 1], agent)
    chain = Chain(learner, counts)
    pasts = [("a", "b"), ("c",), ("nobody",)]
    nearest = chain.nearest(pasts, 2)
    assert [agent for agent, _ in nearest[("a", "b")]] == ["c", "d"]
    for past in pasts:
        outlook = chain.outlook(past)
        expected = sorted(outlook.items(), key=lambda item: item[1])[:2]
        assert [turns for _, turns in nearest[past]] == [turns for _, turns in expected]
    assert chain.nearest([], 2) == {}
