"""Sessions are remembered within bounds of number and time."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ropewalk.agents.sessions import MAX_REPLICAS, MAX_SPOKE, SessionTable


def test_a_turn_returns_the_agents_before_it() -> None:
    table = SessionTable()
    assert table.update("s", "planner", "r0", 1.0) == ()
    assert table.update("s", "coder", "r0", 2.0) == ("planner",)
    assert table.update("s", None, "r0", 3.0) == ("planner", "coder")
    assert table.update("s", "planner", "r0", 4.0) == ("planner", "coder"), "an unrecognised turn keeps the agents"


def test_the_last_three_agents_are_kept_and_a_repeat_is_none_of_them() -> None:
    table = SessionTable()
    for i, agent in enumerate("aabbbcdd"):
        table.update("s", agent, "r0", float(i))
    state = table.get("s")
    assert state is not None
    assert (state.past, state.agent, state.group) == (("b", "c", "d"), "d", "a")


def test_a_turn_that_is_reported_late_changes_nothing_about_where_the_session_stands() -> None:
    table = SessionTable()
    table.update("s", "planner", "r0", 1.0)
    table.update("s", "calculator", "r0", 3.0)
    assert table.update("s", "solver", "r1", 2.0) is None
    state = table.get("s")
    assert state is not None
    assert (state.past, state.replicas, state.num_turns) == (("planner", "calculator"), ("r0", "r1"), 3)
    assert table.update("s", "reviewer", "r0", 4.0) == ("planner", "calculator")


@pytest.mark.parametrize(
    ("old", "new", "past"),
    [
        ("a", "x", ("x", "b", "c")),
        ("a", "b", ("b", "c")),
        ("b", "a", ("a", "c")),
        ("b", None, ("c",)),
        ("c", None, ()),
        ("d", None, ("a", "b", "c")),
    ],
)
def test_pasts_follow_renames_and_forget_what_lies_before_a_gap(
    old: str, new: str | None, past: tuple[str, ...]
) -> None:
    table = SessionTable()
    for i, agent in enumerate("abc"):
        table.update("s", agent, "r0", float(i))
    table.rename_agent(old, new)
    table.check_integrity()
    state = table.get("s")
    assert state is not None
    assert state.past == past


def test_replicas_are_listed_most_recent_first_and_bounded() -> None:
    table = SessionTable()
    for i in range(MAX_REPLICAS + 2):
        table.update("s", None, f"r{i}", float(i))
    table.update("s", None, "r3", 10.0)
    state = table.get("s")
    assert state is not None
    assert state.replicas[0] == "r3"
    assert len(state.replicas) == MAX_REPLICAS


def test_it_is_known_where_each_agent_spoke_last() -> None:
    table = SessionTable()
    for time_s, (agent, replica) in enumerate([("a", "r0"), ("b", "r1"), ("a", "r2"), (None, "r3")]):
        table.update("s", agent, replica, float(time_s))
    table.update("s", "b", "r9", 0.5)
    table.update("s", "c", "r4", 0.5)
    state = table.get("s")
    assert state is not None
    assert state.spoke == {"a": ("r2", 2.0), "b": ("r1", 1.0), "c": ("r4", 0.5)}
    table.update("s", "b", "r5", 1.5)
    assert state.spoke["b"] == ("r5", 1.5), "later than its own last turn, though not than the session's"
    table.rename_agent("a", "d")
    table.rename_agent("b", None)
    table.rename_agent("c", "d")
    assert state.spoke == {"d": ("r2", 2.0)}, "of two that are one, the later turn"
    for number in range(MAX_SPOKE):
        table.update("s", f"x{number}", "r0", 10.0 + number)
    assert len(state.spoke) == MAX_SPOKE
    assert "d" not in state.spoke, "who has been silent longest is forgotten"


def test_silent_sessions_are_forgotten() -> None:
    table = SessionTable(ttl_s=10)
    table.update("old", "a", "r", 0.0)
    table.update("new", "b", "r", 8.0)
    assert table.expire(11.0) == 1
    assert table.get("old") is None
    assert dict(table.live_agents()) == {"b": 1}


def test_the_least_recent_session_goes_when_there_are_too_many() -> None:
    table = SessionTable(max_sessions=2)
    for session in ("a", "b", "a", "c"):
        table.update(session, None, "r", 1.0)
    assert [session for session, _ in table.recent(9)] == ["c", "a"]


@pytest.mark.parametrize(("max_sessions", "ttl_s"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_bounds_that_hold_nothing_are_refused(max_sessions: int, ttl_s: float) -> None:
    with pytest.raises(ValueError, match=r"max_sessions|ttl_s"):
        SessionTable(max_sessions, ttl_s)


class SessionMachine(RuleBasedStateMachine):
    """Counts by agent follow every change, and the table never grows past its bound."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(max_sessions=4, ttl_s=20)
        self.now = 0.0
        self.forgot = False

    @rule(
        session=st.sampled_from("abcdefg"),
        agent=st.none() | st.sampled_from(["x", "y", "z"]),
        replica=st.none() | st.sampled_from(["r0", "r1"]),
        step=st.floats(0, 8),
    )
    def update(self, session: str, agent: str | None, replica: str | None, step: float) -> None:
        self.now += step
        self.table.update(session, agent, replica, self.now)
        state = self.table.get(session)
        assert state is not None
        assert agent is None or state.agent == agent
        assert state.agent is None or state.group is not None or self.forgot

    @rule(old=st.sampled_from(["x", "y"]), new=st.none() | st.sampled_from(["y", "z"]))
    def rename(self, old: str, new: str | None) -> None:
        self.table.rename_agent(old, new)
        self.forgot = self.forgot or new is None
        assert old == new or old not in self.table.agents()

    @rule()
    def reload(self) -> None:
        before = self.table.to_dict()
        self.table = SessionTable.from_dict(json.loads(json.dumps(before)), 4, 20)
        assert self.table.to_dict() == before

    @invariant()
    def integrity(self) -> None:
        self.table.check_integrity()


SessionMachine.TestCase.settings = settings(max_examples=30, deadline=None)
test_sessions_keep_their_bounds = SessionMachine.TestCase
