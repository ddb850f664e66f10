"""The scheduler's state learns, publishes, survives JSON and files, and refuses what it cannot read."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ropewalk.agents.sketch import AnchorSketch, anchor_sketch
from ropewalk.scheduler.graph import graph_payload
from ropewalk.scheduler.snapshot import LIVE_S, Snapshot
from ropewalk.scheduler.state import (
    MAX_WARM_REPLICAS,
    Observation,
    SchedulerSettings,
    SchedulerState,
    StateFormatError,
    load_state,
    save_state,
)
from ropewalk.scheduler.survival import HORIZON

SKETCHES = [
    anchor_sketch(
        {"messages": [{"role": "system", "content": "\n".join(f"{who} does {what} well." for what in whats)}]}
    )
    for who, whats in (
        ("Planner", ["planning", "dividing", "asking", "ordering"]),
        ("Coder", ["coding", "testing", "naming", "typing"]),
        ("Critic", ["reading", "doubting", "proving", "grading"]),
    )
]


def observation(session: str | None = "s", agent: str | None = None, **changes: Any) -> Observation:
    values = {"sketch": None, "model": "m", "replica": "r0", "node": "n0", "time_s": 1.0, "prompt_tokens": 100}
    return Observation(session, agent, **{**values, **changes})


observations = st.builds(
    Observation,
    session=st.none() | st.sampled_from(["s1", "s2", "s3", ""]),
    agent=st.none() | st.sampled_from(["planner", "coder", " "]),
    sketch=st.none() | st.sampled_from(SKETCHES) | st.just(AnchorSketch()),
    model=st.sampled_from(["m1", "m2"]),
    replica=st.sampled_from(["r0", "r1", ""]),
    node=st.sampled_from(["n0", "n1"]),
    time_s=st.floats(0, 100) | st.just(float("nan")),
    prompt_tokens=st.integers(-5, 5000),
    cached_tokens=st.integers(0, 5000),
    reused_tokens=st.integers(0, 5000),
)


def learned(batch: list[Observation]) -> SchedulerState:
    state = SchedulerState()
    for item in batch:
        state.observe(item)
    return state


def test_hand_overs_are_learned_a_session_at_a_time() -> None:
    state = learned([observation(s, a) for s, a in [("1", "a"), ("2", "x"), ("1", "b"), ("2", "y"), ("1", "b")]])
    assert state.handovers.count("a", "b") == 1
    assert state.handovers.count("x", "y") == 1
    assert state.handovers.count("a", "x") == 0
    assert state.handovers.count("b", "b") == 1


def test_requests_without_a_session_teach_no_hand_over() -> None:
    state = learned([observation(None, "a"), observation(None, "b")])
    assert state.handovers.num_handovers == 0
    assert {entry.agent for entry in state.registry.entries()} == {"a", "b"}


def test_a_snapshot_says_what_a_router_asks() -> None:
    state = learned(
        [
            observation("s", "planner", sketch=SKETCHES[0], time_s=1.0),
            observation("s", "coder", replica="r1", node="n1", time_s=2.0, prompt_tokens=700),
        ]
    )
    snapshot = state.snapshot()
    assert snapshot.sessions["s"] == ("coder", ("r1", "r0"), 700, 2.0, {"planner": ("r0", 1.0), "coder": ("r1", 2.0)})
    assert snapshot.agent_of(None, SKETCHES[0]) == "planner"
    assert snapshot.agent_of(None, SKETCHES[1]) is None
    assert snapshot.agents["planner"].next[0][0] == "coder"
    assert [w.replica for w in snapshot.agents["coder"].warm] == ["r1"]
    assert snapshot.agents["coder"].survival == 1.0
    assert snapshot.sessions_by_replica == {"r1": 1}


def test_a_snapshot_carries_recent_sessions_only() -> None:
    state = SchedulerState(SchedulerSettings(snapshot_sessions=2))
    for i in range(5):
        state.observe(observation(f"s{i}", "a", time_s=float(i)))
    assert list(state.snapshot().sessions) == ["s4", "s3"]


def test_an_evicted_agent_is_forgotten_everywhere() -> None:
    state = SchedulerState(SchedulerSettings(max_agents=2))
    for agent in "abc":
        state.observe(observation("s", agent))
    state.check_integrity()
    assert "a" not in state.snapshot().agents
    assert "a" not in state.learner.agents
    assert "a" not in state.handovers.agents


def test_a_name_given_later_takes_over_what_was_learned() -> None:
    state = SchedulerState()
    unnamed = state.observe(observation("1", None, sketch=SKETCHES[0]))
    state.observe(observation("1", "coder", time_s=2.0))
    state.observe(observation("2", "planner", sketch=SKETCHES[0], time_s=3.0))
    state.check_integrity()
    assert unnamed not in state.snapshot().agents
    assert state.handovers.count("planner", "coder") == 1


def test_warm_replicas_are_bounded() -> None:
    state = learned([observation(None, "a", replica=f"r{i}") for i in range(2 * MAX_WARM_REPLICAS)])
    assert len(state.snapshot().agents["a"].warm) == MAX_WARM_REPLICAS


@given(st.lists(observations, max_size=30))
@settings(max_examples=50, deadline=None)
def test_state_and_snapshot_survive_json(batch: list[Observation]) -> None:
    state = learned(batch)
    state.check_integrity()
    data = state.to_dict()
    restored = SchedulerState.from_dict(json.loads(json.dumps(data, allow_nan=False)))
    restored.check_integrity()
    assert restored.to_dict() == data
    snapshot = state.snapshot(outlooks=True)
    again = Snapshot.from_dict(json.loads(json.dumps(snapshot.to_dict(), allow_nan=False)))
    assert again.to_dict() == snapshot.to_dict()
    assert state.num_observations + state.num_refused == len(batch)


def test_the_payload_shows_agents_and_hand_overs() -> None:
    state = learned([observation("s", a, cached_tokens=60) for a in ["a", "b", "a", "b"]])
    payload = json.loads(json.dumps(graph_payload(state)))
    assert payload["complete"] is True
    assert [a["id"] for a in payload["agents"]] == ["a", "b"]
    assert payload["agents"][0]["cached_tokens"] == 120
    assert payload["transitions"][0] == {"source": "a", "target": "b", "count": 2, "probability": 1.0}
    fallback = json.loads(json.dumps(graph_payload(state.snapshot())))
    assert fallback["complete"] is False
    assert fallback["transitions"] == payload["transitions"]


# The state file


def test_a_saved_state_is_loaded_again(tmp_path: Path) -> None:
    state = learned([observation("s", a) for a in "abab"])
    save_state(state.to_dict(), tmp_path / "deep" / "state.json")
    loaded, reason = load_state(tmp_path / "deep" / "state.json", SchedulerSettings())
    assert reason is None
    assert loaded.to_dict() == state.to_dict()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["state.json"]


def test_no_file_is_no_failure(tmp_path: Path) -> None:
    state, reason = load_state(tmp_path / "state.json", SchedulerSettings())
    assert reason is None
    assert state.num_observations == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"format": 999}', "unknown-format"),
        ("[]", "unknown-format"),
        ('{"format": 1, "version": 3, "registry": [], "transitions": {}}', "unknown-format"),
        ('{"format": 2, "version": 3}', "damaged"),
        ('{"format": 2, "version": null}', "damaged"),
        ("not json", "damaged"),
        ("", "damaged"),
    ],
)
def test_a_file_that_cannot_be_read_is_put_aside_by_name(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(content)
    state, found = load_state(path, SchedulerSettings())
    assert found == reason
    assert state.num_observations == 0
    assert not path.exists()
    assert (tmp_path / f"state.json.{reason}").read_text() == content


@pytest.mark.parametrize("table", ["learner", "handovers", "sessions"])
def test_tables_that_contradict_each_other_are_damaged(table: str) -> None:
    data = learned([observation("s", a) for a in "abab"]).to_dict()
    data[table]["agents"] = data[table]["agents"][:1]
    with pytest.raises(StateFormatError, match="damaged"):
        SchedulerState.from_dict(data)


def test_what_is_said_of_agents_that_the_registry_lost_is_forgotten() -> None:
    data = learned([observation("s", a) for a in "abcabc"]).to_dict()
    data["registry"], data["uses"] = data["registry"][1:], data["uses"][1:]
    state = SchedulerState.from_dict(data)
    assert sorted(state.learner.agents) == ["b", "c"]
    state.check_integrity()


@pytest.mark.parametrize(
    "field", ["epsilon", "tau", "max_hops", "max_agents", "max_sessions", "session_ttl_s", "half_life"]
)
def test_settings_without_sense_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"scheduler.{field} must be .* got 0"):
        SchedulerSettings(**{field: 0})


@pytest.mark.parametrize(("field", "value"), [("order", 4), ("order", -1), ("smoothing", "none")])
def test_learners_that_do_not_exist_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"scheduler.{field} must be .* got {value!r}"):
        SchedulerSettings(**{field: value})


# What comes next


def play(programs: list[str], turns: int, **options: Any) -> SchedulerState:
    """Sessions side by side, one a program that is repeated, so many turns each."""
    state = SchedulerState(SchedulerSettings(**options))
    for turn in range(turns):
        for number, program in enumerate(programs):
            state.observe(observation(f"s{number}", program[turn % len(program)], time_s=float(turn)))
    return state


def test_the_second_agent_back_tells_who_is_next() -> None:
    """One orchestrator `o` that asks a, b and c in turn: by the last agent alone, one in three."""
    state = play(["oaoboc"], 120)
    assert state.learner.handover(("a", "o"))["b"] > 0.9
    first = play(["oaoboc"], 120, order=1, smoothing="additive", half_life=float("inf"))
    assert first.learner.handover(("a", "o"))["b"] == pytest.approx(1 / 3, abs=0.05)


def test_order_1_with_additive_smoothing_is_the_papers_learner() -> None:
    state = play(["ababac"], 60, order=1, smoothing="additive", half_life=float("inf"))
    # From a: 20 times to b and 10 times to c, epsilon for each of the two other agents.
    assert state.learner.handover(("c", "b", "a")) == pytest.approx({"b": 20.01 / 30.02, "c": 10.01 / 30.02})


def test_each_program_has_a_predictability_of_its_own() -> None:
    dice = random.Random(0)
    steady, wild = "pqr", "x" + "".join(dice.choice("uvwyz") for _ in range(2_000))
    state = play([steady, wild], 2_000)
    groups = state.snapshot().groups
    assert groups["p"].r == pytest.approx(1.0)
    assert groups["p"].num_handovers == 1_999
    assert groups["x"].r < 0.2
    assert groups["x"].num_handovers < 1_999, "its repeats are no hand-overs"
    assert groups["x"].r < state.snapshot().predictability < groups["p"].r
    rows = graph_payload(state)["groups"]
    assert rows == graph_payload(state.snapshot())["groups"]
    assert [(row["id"], row["handovers"]) for row in rows] == [(g, p.num_handovers) for g, p in groups.items()][::-1]


def test_a_turn_that_is_reported_late_teaches_no_hand_over() -> None:
    state = learned([observation("s", a, time_s=t) for a, t in [("a", 1.0), ("b", 3.0), ("c", 2.0), ("d", 4.0)]])
    assert state.handovers.num_handovers == 2
    assert state.learner.counts(("a", "b")) == {"d": 1.0}
    assert "c" not in state.learner.counts(())


def test_what_was_learned_is_the_same_after_a_restart() -> None:
    state = play(["oaoboc", "oxoy"], 60)
    again = SchedulerState.from_dict(json.loads(json.dumps(state.to_dict())))
    for past in [("a", "o"), ("y", "o"), ("o",), ("o", "c")]:
        assert again.learner.handover(past) == pytest.approx(state.learner.handover(past), abs=2e-3)
        assert again.outlook(past) == pytest.approx(state.outlook(past), abs=0.05)
    assert again.survival() == pytest.approx(state.survival())
    assert again.snapshot().groups == state.snapshot().groups
    for some in (state, again):
        some.observe(observation("s0", "o", time_s=60.0))
        some.observe(observation("s0", "a", time_s=61.0))
    before, after = state.sessions.get("s0"), again.sessions.get("s0")
    assert before is not None
    spoke = {"o": ("r0", 60.0), "a": ("r0", 61.0)}
    assert after == dataclasses.replace(before, spoke=spoke), "a session goes on where it stood"


def test_a_restart_with_a_smaller_order_keeps_what_fits() -> None:
    data = play(["oaoboc"], 60).to_dict()
    state = SchedulerState.from_dict(data, SchedulerSettings(order=1))
    state.check_integrity()
    assert state.learner.handover(("a", "o")) == state.learner.handover(("o",))


names = st.sampled_from(["a", "b", "c", "d"])


@given(st.lists(st.tuples(st.sampled_from("12"), names), max_size=40), names, names)
@settings(max_examples=60, deadline=None)
def test_a_rename_is_as_if_the_agent_had_always_been_called_that(
    turns: list[tuple[str, str]], old: str, new: str
) -> None:
    """Exactly so for pasts and counts of hand-overs."""

    def taught(name_of: dict[str, str]) -> SchedulerState:
        state = SchedulerState(SchedulerSettings(half_life=float("inf")))
        for i, (session, agent) in enumerate(turns):
            state.observe(observation(session, name_of.get(agent, agent), time_s=float(i)))
        return state

    state, always = taught({}), taught({old: new})
    state._rename(old, new)
    state.learner.check_integrity()
    state.handovers.check_integrity()
    state.sessions.check_integrity()
    assert state.handovers.totals() == always.handovers.totals()
    assert state.handovers.groups() == always.handovers.groups()
    for session in "12":
        now, then = state.sessions.get(session), always.sessions.get(session)
        assert now is None or then is None or (now.group, now.agent) == (then.group, then.agent)
    assert old == new or old not in state.learner.agents
    if old not in {b for _, b in turns} or new not in {b for _, b in turns}:
        for past in [(), *({row.past for row in always.sessions._sessions.values()})]:
            assert state.learner.distribution(past) == pytest.approx(always.learner.distribution(past))


@given(st.lists(st.tuples(st.sampled_from("12"), names), max_size=40), names)
@settings(max_examples=60, deadline=None)
def test_a_forgotten_agent_leaves_no_trace(turns: list[tuple[str, str]], gone: str) -> None:
    state = learned([observation(session, agent, time_s=float(i)) for i, (session, agent) in enumerate(turns)])
    state._forget(gone)
    assert gone not in state._known_somewhere()
    state.learner.check_integrity()
    state.handovers.check_integrity()
    state.sessions.check_integrity()
    tables = [state.learner.to_dict(), state.handovers.to_dict(), state.sessions.to_dict()]
    assert all(gone not in table["agents"] for table in tables)


class StateMachine(RuleBasedStateMachine):
    """All tables keep speaking of the same agents, through renames, evictions and reloads."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = SchedulerSettings(max_agents=3, max_sessions=3, session_ttl_s=30, snapshot_sessions=2)
        self.state = SchedulerState(self.settings)

    @rule(item=observations)
    def observe(self, item: Observation) -> None:
        version = self.state.version
        agent = self.state.observe(item)
        assert agent is None or self.state.version > version
        assert agent is None or agent in self.state.registry

    @rule()
    def reload(self) -> None:
        self.state = SchedulerState.from_dict(json.loads(json.dumps(self.state.to_dict())), self.settings)

    @rule()
    def clear(self) -> None:
        version = self.state.version
        self.state.clear()
        assert self.state.version > version
        assert not self.state.snapshot().agents

    @invariant()
    def integrity(self) -> None:
        self.state.check_integrity()
        snapshot = self.state.snapshot()
        assert len(snapshot.agents) <= 3
        assert len(snapshot.sessions) <= 2
        assert all(view.survival <= 1 for view in snapshot.agents.values())
        assert all(0 <= group.r <= 1 for group in snapshot.groups.values())
        for state in self.state.sessions._sessions.values():
            assert all(1 <= turns < HORIZON for turns in self.state.outlook(state.past).values())


StateMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
test_tables_stay_in_step = StateMachine.TestCase


def test_a_snapshot_says_where_sessions_stand_that_had_a_turn_just_now() -> None:
    state = learned(
        [observation("old", agent, time_s=1.0) for agent in ("planner", "coder")]
        + [observation("new", agent, time_s=1.0 + 2 * LIVE_S) for agent in ("planner", "coder", "planner")]
    )
    assert state.snapshot().stands == (), "only for who asks"
    snapshot = state.snapshot(outlooks=True)
    assert [(stand.session, stand.past, stand.group) for stand in snapshot.stands] == [
        ("new", ("planner", "coder", "planner"), "planner")
    ]
    (past,) = snapshot.outlooks
    assert snapshot.outlooks[past][0][0] == "coder"
    assert snapshot.outlooks[past][0][1] == pytest.approx(state.outlook(past)["coder"])
    assert Snapshot.from_dict(json.loads(json.dumps(snapshot.to_dict()))).stands == snapshot.stands
    assert Snapshot.from_dict(json.loads(json.dumps(snapshot.to_dict()))).outlooks == snapshot.outlooks


def test_a_prewarmed_anchor_is_shown_as_warm_and_teaches_nothing() -> None:
    state = learned([observation("s", "planner"), observation("s", "coder", time_s=2.0)])
    before, version = state.to_dict()["handovers"], state.version
    assert state.note_warm("coder", "r9", "n9", 3.0)
    assert not state.note_warm("coder", "r9", "n9", 3.0), "nothing new"
    assert not state.note_warm("nobody", "r9", "n9", 3.0)
    assert state.version == version + 1
    assert [w.replica for w in state.snapshot().agents["coder"].warm] == ["r9", "r0"]
    assert state.to_dict()["handovers"] == before
    assert state.snapshot().agents["coder"].num_requests == 1
    state.check_integrity()
