"""What is warmed where, why nothing is, and when too much was warmed for nothing."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.scheduler.handovers import Predictability
from ropewalk.scheduler.prewarm import (
    MAX_OUTCOMES,
    MAX_OUTSTANDING,
    MAX_PAUSE_S,
    MAX_TURNS,
    MIN_OUTCOMES,
    OUTCOME_WINDOW_S,
    PAUSE_S,
    Decision,
    Ledger,
    PrewarmSettings,
    Situation,
    Verdict,
    WasteBudget,
    decide,
    home_of,
)
from ropewalk.scheduler.snapshot import EMPTY_SNAPSHOT, LIVE_S, AgentView, SessionView, Snapshot, Stand, Warmth
from ropewalk.scheduler.state import Observation, SchedulerState

NOW = 1000.0
SETTINGS = PrewarmSettings()
REPLICAS = {"m": (("r0", "x"), ("r1", "x")), "n": (("s0", "x"), ("s1", "y"))}


def view(agent: str, *warm: Warmth, model: str = "m") -> AgentView:
    return AgentView(agent, True, 9, True, 0.5, 100, None, (), warm, model)


def snapshot_of(**changes: Any) -> Snapshot:
    """A session stands at `a` on replica `r0` of model `m`, and `b` is expected next."""
    values: dict[str, Any] = {
        "version": 1,
        "groups": {"a": Predictability(0.9, 100)},
        "stands": (Stand("s", ("a",), "a", NOW - 1),),
        "outlooks": {("a",): (("b", 1.0),)},
        "sessions": {"s": SessionView("a", ("r0",), 100)},
        "replicas": {"m": REPLICAS["m"]},
        "agents": {"a": view("a"), "b": view("b")},
    }
    return dataclasses.replace(EMPTY_SNAPSHOT, **{**values, **changes})


def situation(snapshot: Snapshot | None = None, **changes: Any) -> Situation:
    values: dict[str, Any] = {"anchors": {"a": 100, "b": 100, "c": 100}, "used": {}, "tried": {}}
    return Situation(
        **{
            "snapshot": snapshot or snapshot_of(),
            "model": "m",
            "replica": "r0",
            "now_s": NOW,
            **values,
            **changes,
        }
    )


def test_the_agent_that_is_expected_is_warmed_where_its_session_stands() -> None:
    assert decide(situation(), SETTINGS) == Decision("b", Verdict.WARM)
    assert decide(situation(replica="r1"), SETTINGS) == Decision(None, Verdict.ELSEWHERE)


def test_who_is_needed_by_more_sessions_or_sooner_comes_first() -> None:
    stands = tuple(Stand("s", (past,), "a", NOW - 1) for past in ("x", "y", "z"))
    outlooks = {("x",): (("b", 2.0),), ("y",): (("b", 2.0),), ("z",): (("c", 1.5),)}
    assert decide(situation(snapshot_of(stands=stands, outlooks=outlooks)), SETTINGS).agent == "b"
    outlooks[("z",)] = (("c", 1.0),)
    assert decide(situation(snapshot_of(stands=stands, outlooks=outlooks)), SETTINGS).agent == "b", "a tie: by name"
    outlooks[("y",)] = (("b", 3.0),)
    assert decide(situation(snapshot_of(stands=stands, outlooks=outlooks)), SETTINGS).agent == "c"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"snapshot": EMPTY_SNAPSHOT}, Verdict.NO_SESSIONS),
        ({"snapshot": snapshot_of(stands=(Stand("s", ("a",), "a", NOW - LIVE_S - 1),))}, Verdict.NO_SESSIONS),
        ({"snapshot": snapshot_of(groups={"a": Predictability(0.29, 100)})}, Verdict.UNPREDICTABLE),
        ({"snapshot": snapshot_of(groups={"a": Predictability(1.0, 31)})}, Verdict.UNPREDICTABLE),
        ({"snapshot": snapshot_of(groups={})}, Verdict.UNPREDICTABLE),
        ({"snapshot": snapshot_of(outlooks={("a",): (("b", MAX_TURNS + 0.1),)})}, Verdict.NOBODY_EXPECTED),
        ({"anchors": {}}, Verdict.NO_ANCHOR),
        ({"snapshot": snapshot_of(agents={"b": view("b", model="other")})}, Verdict.NO_ANCHOR),
        ({"replica": "r1"}, Verdict.ELSEWHERE),
        ({"used": {"b": NOW - 59}}, Verdict.ALL_WARM),
        ({"snapshot": snapshot_of(agents={"b": view("b", Warmth("r0", "n", NOW - 59))})}, Verdict.ALL_WARM),
        ({"tried": {"b": NOW - 1.9}}, Verdict.TOO_SOON),
    ],
)
def test_nothing_is_warmed_and_the_reason_is_named(changes: dict[str, Any], verdict: Verdict) -> None:
    assert decide(situation(**changes), SETTINGS) == Decision(None, verdict)


def test_what_was_used_long_ago_or_tried_before_is_warmed_again() -> None:
    assert decide(situation(used={"b": NOW - 61}, tried={"b": NOW - 2}), SETTINGS).agent == "b"


def test_while_too_much_is_wasted_nothing_is_warmed() -> None:
    assert decide(situation(), SETTINGS, paused=True) == Decision(None, Verdict.PAUSED)


def test_an_agent_of_another_model_is_warmed_where_the_session_used_that_model_last() -> None:
    agents = {"a": view("a"), "b": view("b", model="n")}
    snapshot = snapshot_of(agents=agents, replicas=REPLICAS, sessions={"s": SessionView("a", ("r0", "s1"), 100)})
    decided = {r: decide(situation(snapshot, model="n", replica=r), SETTINGS).agent for r in ("s0", "s1")}
    assert decided == {"s0": None, "s1": "b"}
    assert decide(situation(snapshot), SETTINGS).verdict == Verdict.NO_ANCHOR


def test_a_session_without_a_replica_of_the_model_is_at_home_where_the_router_would_send_it() -> None:
    stand = Stand("s", ("a",), "a", NOW)
    warm = (Warmth("gone", "z", NOW), Warmth("s1", "y", NOW - 500))
    snapshot = snapshot_of(agents={"b": view("b", *warm, model="n")}, replicas=REPLICAS)
    assert home_of("b", stand, snapshot, "n") == "s1", "where the anchor was used"
    cold = dataclasses.replace(snapshot, agents={}, sessions={"t": SessionView("a", ("s0",), 10)})
    assert home_of("b", stand, cold, "n") == "s1", "the one with fewer sessions"
    assert home_of("b", stand, snapshot, "none") is None


def test_an_agent_is_at_home_where_it_spoke_in_the_session_not_where_another_spoke_last() -> None:
    stand = Stand("s", ("b", "a"), "b", NOW)
    spoke = SessionView("a", ("r1", "r0"), 100, NOW, {"b": ("r0", NOW), "a": ("r1", NOW)})
    snapshot = snapshot_of(replicas=REPLICAS, sessions={"s": spoke})
    assert (home_of("b", stand, snapshot, "m"), home_of("a", stand, snapshot, "m")) == ("r0", "r1")


replicas = st.sampled_from(["r0", "r1", "s0", "s1", "gone"])
agents = st.sampled_from(["a", "b", "c"])
snapshots = st.builds(
    snapshot_of,
    groups=st.dictionaries(agents, st.builds(Predictability, st.floats(0, 1), st.integers(0, 200)), max_size=3),
    stands=st.lists(
        st.builds(
            Stand,
            session=st.sampled_from(["s", "t", "u"]),
            past=st.tuples(agents),
            group=st.none() | agents,
            last_s=st.floats(NOW - 100, NOW),
        ),
        max_size=5,
    ).map(tuple),
    outlooks=st.dictionaries(
        st.tuples(agents), st.lists(st.tuples(agents, st.floats(1, 16)), max_size=4).map(tuple), max_size=3
    ),
    agents=st.dictionaries(
        agents,
        st.lists(st.builds(Warmth, replicas, st.just("n"), st.floats(NOW - 100, NOW)), max_size=3).flatmap(
            lambda warm: st.sampled_from(["m", "n", ""]).map(lambda model: view("a", *warm, model=model))
        ),
        max_size=3,
    ),
    sessions=st.dictionaries(
        st.sampled_from(["s", "t", "u"]),
        st.tuples(agents, st.lists(replicas, unique=True, max_size=3).map(tuple), st.just(100)),
    ),
    replicas=st.just(REPLICAS),
)


@settings(deadline=None)
@given(snapshots, st.dictionaries(agents, st.floats(NOW - 100, NOW)), st.dictionaries(agents, st.floats(NOW - 9, NOW)))
def test_whatever_is_warmed_keeps_every_rule(
    snapshot: Snapshot, used: dict[str, float], tried: dict[str, float]
) -> None:
    here = situation(snapshot, used=used, tried=tried)
    decision = decide(here, SETTINGS)
    assert (decision.agent is not None) == (decision.verdict is Verdict.WARM)
    assert decide(here, SETTINGS) == decision
    if decision.agent is None:
        return
    agent = decision.agent
    assert agent in here.anchors
    assert NOW - used.get(agent, -math.inf) > SETTINGS.window_s
    assert NOW - tried.get(agent, -math.inf) >= SETTINGS.min_interval_s
    reasons = [
        stand
        for stand in snapshot.stands
        if NOW - stand.last_s <= LIVE_S
        and (found := snapshot.groups.get(stand.group or "")) is not None
        and found.r >= SETTINGS.r_min
        and found.num_handovers >= SETTINGS.min_handovers
        and any(a == agent and turns <= MAX_TURNS for a, turns in snapshot.outlooks.get(stand.past, ()))
        and home_of(agent, stand, snapshot, "m") == "r0"
    ]
    assert reasons


@settings(deadline=None)
@given(snapshots, agents, st.sampled_from(["m", "n"]))
def test_each_session_has_one_home_for_an_agent_among_the_replicas_that_live(
    snapshot: Snapshot, agent: str, model: str
) -> None:
    for stand in snapshot.stands:
        assert home_of(agent, stand, snapshot, model) in dict(snapshot.replicas[model])


def test_a_learned_program_is_foretold_from_its_snapshot() -> None:
    state = SchedulerState()
    time_s = NOW
    for session in range(20):
        for agent in ("plan", "code", "test"):
            time_s += 0.1
            state.observe(Observation(f"s{session}", agent, None, "m", "r0", "n0", time_s, prompt_tokens=10))
    state.observe(Observation("now", "plan", None, "m", "r0", "n0", time_s, prompt_tokens=10))
    snapshot = dataclasses.replace(state.snapshot(outlooks=True), replicas={"m": (("r0", "n0"),)})
    here = situation(snapshot, anchors={"plan": 100, "code": 100, "test": 100}, now_s=time_s + 1)
    assert decide(here, SETTINGS).agent is None, "everything was used within the window"
    waiting = dataclasses.replace(here, now_s=time_s + 50)
    short = dataclasses.replace(SETTINGS, window_s=10.0)
    assert decide(waiting, short).agent == "code"


# The budget


def settle(budget: WasteBudget, now_s: float, *, used: int, count: int = MIN_OUTCOMES) -> None:
    for _ in range(count):
        budget.settle(now_s, 100, used)


def test_too_much_waste_pauses_and_each_pause_in_a_row_is_twice_as_long() -> None:
    budget, now_s, pause_s = WasteBudget(0.5), 0.0, PAUSE_S
    for _ in range(9):
        settle(budget, now_s, used=0)
        assert budget.is_paused(now_s)
        assert budget.is_paused(now_s + pause_s - 0.1)
        now_s += pause_s
        assert not budget.is_paused(now_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
    assert pause_s == MAX_PAUSE_S


def test_after_good_outcomes_the_next_pause_is_short_again() -> None:
    budget = WasteBudget(0.5)
    settle(budget, 0.0, used=0)
    settle(budget, PAUSE_S, used=100)
    assert not budget.is_paused(PAUSE_S)
    settle(budget, PAUSE_S, used=0, count=2 * MIN_OUTCOMES)
    assert budget.status(PAUSE_S)["paused_for_s"] == PAUSE_S


def test_a_few_bad_outcomes_judge_nothing_and_old_ones_are_forgotten() -> None:
    budget = WasteBudget(0.5)
    settle(budget, 0.0, used=0, count=MIN_OUTCOMES - 1)
    assert budget.waste(0.0) is None
    settle(budget, OUTCOME_WINDOW_S + 1, used=0, count=1)
    assert not budget.is_paused(OUTCOME_WINDOW_S + 1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 100), st.floats(0, 1)), max_size=200))
def test_the_budget_stays_bounded_and_its_share_between_0_and_1(steps: list[tuple[float, int, float]]) -> None:
    budget, now_s = WasteBudget(0.5), 0.0
    for seconds, tokens, share in steps:
        now_s += seconds
        budget.settle(now_s, tokens, int(share * tokens))
        waste = budget.waste(now_s)
        assert waste is None or 0 <= waste <= 1
        assert len(budget._outcomes) <= MAX_OUTCOMES
        assert 0 <= budget.status(now_s)["paused_for_s"] <= MAX_PAUSE_S


# The ledger


def test_a_prewarm_is_used_by_the_next_request_as_far_as_it_was_found() -> None:
    ledger = Ledger(60.0)
    assert ledger.warmed("a", 0.0, 320, 320) == []
    assert ledger.used("a", 1.0, 320) == [(320, 320)]
    assert ledger.used("a", 2.0, 320) == [], "once"
    ledger.warmed("a", 3.0, 320, 320)
    assert ledger.used("a", 4.0, 64) == [(320, 64)], "the rest was evicted before"


def test_what_was_there_before_is_not_the_prewarms_merit() -> None:
    ledger = Ledger(60.0)
    ledger.warmed("a", 0.0, 320, 100)
    assert ledger.used("a", 1.0, 220) == [(100, 0)]
    ledger.warmed("a", 2.0, 320, 0)
    assert ledger.used("a", 3.0, 320) == []


def test_what_is_not_used_within_the_window_or_warmed_twice_is_wasted() -> None:
    ledger = Ledger(60.0)
    ledger.warmed("a", 0.0, 320, 320)
    assert ledger.expire(60.0) == []
    assert ledger.expire(60.1) == [(320, 0)]
    ledger.warmed("a", 100.0, 320, 320)
    assert ledger.warmed("a", 101.0, 320, 64) == [(320, 0)]


def test_the_ledger_is_bounded_and_loses_no_token() -> None:
    ledger, rng = Ledger(60.0), random.Random(1)
    warmed, ended = 0, Counter[str]()
    for step in range(2000):
        agent, now_s = f"agent {rng.randrange(2 * MAX_OUTSTANDING)}", 0.01 * step
        if rng.random() < 0.7:
            tokens = rng.randrange(1, 300)
            warmed += tokens
            outcomes = ledger.warmed(agent, now_s, 300, tokens)
        else:
            outcomes = ledger.used(agent, now_s, rng.randrange(301))
        for tokens, used in outcomes:
            assert 0 <= used <= tokens
            ended["tokens"] += tokens
        assert len(ledger) <= MAX_OUTSTANDING
    ended["tokens"] += sum(tokens for tokens, _ in ledger.expire(1e9))
    assert ended["tokens"] == warmed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r_min", 1.5),
        ("r_min", -0.1),
        ("max_waste", 0.0),
        ("max_waste", 1.1),
        ("min_handovers", 0),
        ("idle_s", 0.0),
        ("min_interval_s", -1.0),
        ("window_s", math.inf),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name_and_value(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"prewarm\.{field} .*{value}"):
        PrewarmSettings(**{field: value})  # type: ignore[arg-type]
