"""Requests go where they are warm, within bounds of imbalance, and routing never raises."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ropewalk.agents.sketch import AnchorSketch, anchor_sketch
from ropewalk.scheduler.routing import (
    ANCHOR_SLACK,
    RELATIVE_SLACK,
    SESSION_SLACK,
    UNEVEN,
    UNEVEN_BY,
    LocalAffinity,
    ReplicaView,
    RequestHints,
    RouteReason,
    agent_key,
    rank_replicas,
)
from ropewalk.scheduler.snapshot import LIVE_S, Snapshot
from ropewalk.scheduler.state import Observation, SchedulerState

ANCHOR = anchor_sketch(
    {"messages": [{"role": "system", "content": "\n".join(f"Rule {c * 3} holds." * 9 for c in "abcdefghij")}]}
)


def views(*queues: int, **changes: Any) -> list[ReplicaView]:
    return [ReplicaView(f"r{i}", queue, **changes) for i, queue in enumerate(queues)]


def snapshot(*turns: tuple[str, str, str]) -> Snapshot:
    """After these (session, agent, replica) turns, all with the same anchor."""
    state = SchedulerState()
    for session, agent, replica in turns:
        state.observe(Observation(session, agent, ANCHOR, "m", replica, "n", 1.0, prompt_tokens=900))
    return state.snapshot()


def test_a_session_goes_back_to_its_replica() -> None:
    known = snapshot(("s", "planner", "r1"))
    ranking = rank_replicas(RequestHints("s", num_prompt_chars=8000), views(0, 1, 0), known)
    assert ranking.order[0] == "r1"
    assert ranking.reason is RouteReason.SESSION
    assert ranking.warm_tokens == 900


def test_a_router_remembers_what_it_did_before_any_snapshot() -> None:
    local = LocalAffinity()
    local.remember("r2", "s", None)
    ranking = rank_replicas(RequestHints("s"), views(0, 0, 1), None, local)
    assert (ranking.order[0], ranking.reason) == ("r2", RouteReason.SESSION)


def test_what_the_router_did_is_newer_than_the_snapshot() -> None:
    local = LocalAffinity()
    local.remember("r2", "s", None)
    assert rank_replicas(RequestHints("s"), views(0, 0, 0), snapshot(("s", "a", "r1")), local).order[0] == "r2"


def test_a_session_leaves_a_replica_that_is_too_busy() -> None:
    local = LocalAffinity()
    local.remember("r0", "s", None)
    others = [8] * 6
    stays = rank_replicas(RequestHints("s"), views(8 + SESSION_SLACK, *others), None, local)
    leaves = rank_replicas(RequestHints("s"), views(8 + SESSION_SLACK + 1, *others), None, local)
    assert (stays.order[0], stays.reason) == ("r0", RouteReason.SESSION)
    assert leaves.order[0] != "r0"
    assert leaves.reason is RouteReason.SESSION_BUSY


@pytest.mark.parametrize(("queues", "first"), [((1, 0), "r0"), ((4, 0), "r1"), ((4, 3), "r0"), ((6, 2), "r1")])
def test_a_session_does_not_make_its_replica_s_queue_one_and_a_half_times_the_mean(
    queues: tuple[int, int], first: str
) -> None:
    local = LocalAffinity()
    local.remember("r0", "s", None)
    assert rank_replicas(RequestHints("s"), views(*queues), None, local).order[0] == first


def test_each_agent_of_a_session_goes_back_to_where_it_spoke_in_it() -> None:
    """Another system prompt stands before the same history: one agent's cache is of no use to another."""
    local = LocalAffinity()
    local.remember("r0", "s", "planner")
    local.remember("r1", "s", "coder")
    for agent, replica in (("planner", "r0"), ("coder", "r1")):
        ranking = rank_replicas(RequestHints("s", agent), views(0, 0, 0), None, local)
        assert (ranking.order[0], ranking.reason) == (replica, RouteReason.SESSION)
    new = rank_replicas(RequestHints("s", "critic"), views(0, 1, 0), None, local)
    assert new.order[0] != "r1"
    assert new.reason is RouteReason.SPREAD
    idle = rank_replicas(RequestHints("s", "critic"), views(0, 0, 0), None, local)
    assert idle.order[0] == "r1", "of equals, where the session was last"


def test_several_routers_send_the_agents_of_a_session_alike() -> None:
    """The first routed all turns of a session; the second knows what the scheduler has heard of them."""
    first, second = LocalAffinity(), LocalAffinity()
    first.remember("r0", "s", "planner", 1.0)
    first.remember("r1", "s", "coder", 2.0)
    known = snapshot(("s", "planner", "r0"), ("s", "coder", "r1"))
    for agent, replica in (("planner", "r0"), ("coder", "r1")):
        for local in (first, second):
            ranking = rank_replicas(RequestHints("s", agent), views(0, 0, 0), known, local)
            assert (ranking.order[0], ranking.reason) == (replica, RouteReason.SESSION)
    new = rank_replicas(RequestHints("s", "critic"), views(1, 1, 0), known, second)
    assert (new.order[0], new.reason) == ("r2", RouteReason.SPREAD)


def test_a_later_turn_of_another_router_counts_more_than_an_earlier_one_of_ones_own() -> None:
    state = SchedulerState()
    local = LocalAffinity()

    def turn(replica: str, time_s: float) -> None:
        state.observe(Observation("s", "planner", None, "m", replica, "n", time_s, prompt_tokens=900))

    def chosen() -> str:
        return rank_replicas(RequestHints("s", "planner"), views(0, 0, 0), state.snapshot(), local).order[0]

    turn("r0", 9.0)
    local.remember("r1", "s", "planner", 10.0)
    assert chosen() == "r1", "the scheduler has not heard of it yet"
    turn("r1", 11.0)
    assert chosen() == "r1"
    turn("r2", 12.0)
    assert chosen() == "r2"


def test_a_turn_of_another_agent_says_nothing_of_where_this_one_spoke() -> None:
    """Agents of a session may run side by side."""
    state = SchedulerState()
    local = LocalAffinity()
    state.observe(Observation("s", "a", None, "m", "r0", "n", 1.0))
    local.remember("r2", "s", "a", 2.5)
    state.observe(Observation("s", "b", None, "m", "r1", "n", 3.05))
    asked = RequestHints("s", "a")
    assert rank_replicas(asked, views(0, 0, 0), state.snapshot(), local).order[0] == "r2", "on its way"
    state.observe(Observation("s", "a", None, "m", "r2", "n", 3.0))
    assert rank_replicas(asked, views(0, 0, 0), state.snapshot(), LocalAffinity()).order[0] == "r2", "reported late"


def test_the_loss_of_the_last_replica_of_a_session_is_no_loss_to_its_other_agents() -> None:
    local = LocalAffinity()
    local.remember("r0", "s", "a")
    local.remember("r1", "s", "b")
    local.keep_only(["r0", "r2"])
    ranking = rank_replicas(RequestHints("s", "a"), [ReplicaView("r2"), ReplicaView("r0")], None, local)
    assert (ranking.order[0], ranking.reason) == ("r0", RouteReason.SESSION)


def test_a_turn_without_an_agent_goes_where_another_router_sent_a_later_one() -> None:
    state = SchedulerState()
    local = LocalAffinity()
    local.remember("r0", "s", None, 1.0)
    state.observe(Observation("s", None, None, "m", "r2", "n", 5.0))
    assert rank_replicas(RequestHints("s"), views(0, 0, 0), state.snapshot(), local).order[0] == "r2"


def test_an_agent_that_gets_a_name_later_goes_where_it_spoke_without_one() -> None:
    state = SchedulerState()
    local = LocalAffinity()
    for number, name in enumerate((None, None, "planner")):
        state.observe(Observation("s", name, ANCHOR, "m", "r1", "n", float(number)))
    unnamed = agent_key(RequestHints("s", None, ANCHOR), None)
    local.remember("r1", "s", unnamed, 0.0)
    ranking = rank_replicas(RequestHints("s", "planner", ANCHOR), views(0, 1, 0), state.snapshot(), local)
    assert (ranking.order[0], ranking.reason) == ("r1", RouteReason.SESSION)


@pytest.mark.parametrize(("reuse", "expected"), [(True, "r1"), (False, "r2")])
def test_an_agent_that_is_new_to_a_session_goes_to_its_node_where_histories_are_reused(
    reuse: bool, expected: str
) -> None:
    local = LocalAffinity()
    local.remember("r0", "s", "planner")
    candidates = [ReplicaView("r0", 9, "n0"), ReplicaView("r1", 1, "n0"), ReplicaView("r2", 0, "n1")]
    hints = RequestHints("s", "critic", num_prompt_chars=4 * 2_000, reuse=reuse)
    assert rank_replicas(hints, candidates, None, local).order[0] == expected


@pytest.mark.parametrize(
    ("other_node", "chars", "queue", "expected"),
    [
        ("n0", 4 * 2_000, 1, "r1"),  # the store of the node has the history
        ("n1", 4 * 2_000, 1, "r0"),  # elsewhere it would be computed again
        ("n0", 4 * 8_000, 1, "r0"),  # even reading it takes longer than a request
        ("n1", 4 * 200, 2, "r1"),  # a short history is computed sooner than two requests end
    ],
)
def test_a_session_leaves_when_waiting_costs_more_than_its_history(
    other_node: str, chars: int, queue: int, expected: str
) -> None:
    local = LocalAffinity()
    local.remember("r0", "s", None)
    candidates = [ReplicaView("r0", queue, node="n0"), ReplicaView("r1", 0, node=other_node)]
    ranking = rank_replicas(RequestHints("s", num_prompt_chars=chars), candidates, None, local)
    assert ranking.order[0] == expected


def test_of_many_replicas_a_queue_like_the_mean_is_not_left() -> None:
    local = LocalAffinity()
    local.remember("r0", "s", None)
    assert rank_replicas(RequestHints("s"), views(*[1] * 16), None, local).order[0] == "r0"


@pytest.mark.parametrize(("node", "first"), [("n0", "r1"), ("n1", "r0")])
def test_a_queue_like_all_others_is_left_only_where_a_store_has_the_history(node: str, first: str) -> None:
    local = LocalAffinity()
    local.remember("r0", "s", None)
    candidates = [ReplicaView("r0", 5, "n0"), ReplicaView("r1", 3, node)]
    ranking = rank_replicas(RequestHints("s", num_prompt_chars=4 * 300), candidates, None, local)
    assert ranking.order[0] == first


def test_what_leaving_loses_is_what_is_not_warm_elsewhere() -> None:
    tokens = ANCHOR.num_chars // 4
    hints = RequestHints("s", "planner", ANCHOR, num_prompt_chars=4 * (tokens + 100))
    candidates = views(2, 0, 1, 1)
    for others, expected in (([], "r0"), (["r1"], "r1")):
        local = LocalAffinity()
        for number, replica in enumerate(others):
            local.remember(replica, f"other-{number}", "planner")
        local.remember("r0", "s", "planner")
        assert rank_replicas(hints, candidates, None, local).order[0] == expected


def test_a_new_session_goes_to_a_warm_anchor() -> None:
    known = snapshot(("other", "planner", "r2"))
    hints = RequestHints("new", sketch=ANCHOR)
    ranking = rank_replicas(hints, views(0, 0, 0), known)
    assert (ranking.order[0], ranking.reason) == ("r2", RouteReason.ANCHOR)
    assert ranking.warm_tokens == ANCHOR.num_chars // 4


def test_a_hot_anchor_spreads_over_the_replicas() -> None:
    local, chosen = LocalAffinity(), Counter[str]()
    for i in range(40):
        hints = RequestHints(f"s{i}", agent="planner", sketch=ANCHOR)
        ranking = rank_replicas(hints, views(0, 0, 0, 0), None, local)
        chosen[ranking.order[0]] += 1
        local.remember(ranking.order[0], hints.session, agent_key(hints, None))
    assert max(chosen.values()) - min(chosen.values()) <= 2


def test_more_sessions_are_no_reason_to_wait_where_the_anchor_is_warm_on_both() -> None:
    """The replica with fewer sessions has the longer queue just now."""
    known = snapshot(*((f"s{i}", "planner", "r0") for i in range(5)), ("t", "planner", "r1"))
    ranking = rank_replicas(RequestHints("new", "planner", ANCHOR), views(0, 2), known)
    assert (ranking.order[0], ranking.reason) == ("r0", RouteReason.ANCHOR)
    assert rank_replicas(RequestHints("new", "planner", ANCHOR), views(0, 0), known).order[0] == "r1", "of equals"


def test_sessions_that_were_silent_for_long_do_not_count() -> None:
    state = SchedulerState()
    for i in range(5):
        state.observe(Observation(f"old-{i}", "planner", None, "m", "r0", "n", 1.0))
    state.observe(Observation("now", "planner", None, "m", "r1", "n", 1.0 + 2 * LIVE_S))
    assert rank_replicas(RequestHints("new"), views(0, 0), state.snapshot()).order[0] == "r0"


def test_an_anchor_does_not_hold_requests_without_sessions_on_a_busy_replica() -> None:
    local = LocalAffinity()
    local.remember("r0", None, "planner")
    hints = RequestHints(None, "planner", ANCHOR)
    assert rank_replicas(hints, views(0, 0), None, local).order[0] == "r0"
    assert rank_replicas(hints, views(ANCHOR_SLACK + 1, 0), None, local).order[0] == "r1"


def test_new_sessions_of_unknown_agents_are_spread() -> None:
    local, chosen = LocalAffinity(), Counter[str]()
    for i in range(30):
        ranking = rank_replicas(RequestHints(f"s{i}"), views(0, 0, 0), None, local)
        assert ranking.reason is RouteReason.SPREAD
        chosen[ranking.order[0]] += 1
        local.remember(ranking.order[0], f"s{i}", None)
    assert set(chosen.values()) == {10}


def test_sessions_that_ended_long_ago_do_not_drive_new_ones_to_a_new_replica() -> None:
    local = LocalAffinity()
    for i in range(300):
        local.remember(f"r{i % 2}", f"old-{i}", None)
    live = snapshot(("a", "planner", "r0"), ("b", "planner", "r1"))
    local.saw(live)
    chosen = Counter[str]()
    for i in range(30):
        ranking = rank_replicas(RequestHints(f"new-{i}"), views(0, 0, 0), live, local)
        chosen[ranking.order[0]] += 1
        local.remember(ranking.order[0], f"new-{i}", None)
    assert max(chosen.values()) - min(chosen.values()) <= 2


def test_a_replica_on_the_same_node_is_nearly_warm() -> None:
    state = SchedulerState()
    state.observe(Observation(None, "planner", ANCHOR, "m", "gone", "n1", 1.0))
    candidates = [ReplicaView("r0", 0, node="n0"), ReplicaView("r1", 0, node="n1")]
    ranking = rank_replicas(RequestHints(None, "planner"), candidates, state.snapshot())
    assert (ranking.order[0], ranking.reason) == ("r1", RouteReason.ANCHOR)


def test_full_replicas_come_last() -> None:
    local = LocalAffinity()
    local.remember("r0", "s", None)
    candidates = [ReplicaView("r0", 2, max_ongoing=2), ReplicaView("r1", 4, max_ongoing=8)]
    assert rank_replicas(RequestHints("s"), candidates, None, local).order == ["r1", "r0"]


def test_replicas_that_are_gone_are_not_chosen() -> None:
    local = LocalAffinity()
    local.remember("gone", "s", "planner")
    known = snapshot(("s", "planner", "gone"), ("s", "planner", "gone2"))
    ranking = rank_replicas(RequestHints("s", "planner"), views(0, 0), known, local)
    assert sorted(ranking.order) == ["r0", "r1"]
    local.keep_only(["r0"])
    assert local.session_sent("s") is None
    assert local.agent_replicas("planner") == []
    local.check_integrity()


def test_no_replica_is_a_reason_of_its_own() -> None:
    assert rank_replicas(RequestHints("s"), []) == ([], RouteReason.NO_REPLICAS, 0)


ids = st.sampled_from([f"r{i}" for i in range(6)])
turns = st.tuples(st.sampled_from(["s1", "s2", "s3"]), st.sampled_from(["a", "b"]), ids)


@given(
    st.lists(st.tuples(ids, st.integers(0, 60)), min_size=1, max_size=6, unique_by=lambda item: item[0]),
    st.lists(turns, max_size=12),
    st.lists(turns, max_size=12),
    st.builds(
        RequestHints,
        session=st.none() | st.sampled_from(["s1", "s2", "s9"]),
        agent=st.none() | st.sampled_from(["a", "z"]),
        sketch=st.none() | st.just(ANCHOR) | st.just(AnchorSketch()),
        num_prompt_chars=st.integers(0, 10**6),
    ),
)
@settings(max_examples=100, deadline=None)
def test_imbalance_is_bounded_and_every_replica_is_ranked_once(
    queues: list[tuple[str, int]],
    published: list[tuple[str, str, str]],
    routed: list[tuple[str, str, str]],
    hints: RequestHints,
) -> None:
    local = LocalAffinity()
    for session, agent, replica in routed:
        local.remember(replica, session, agent)
    candidates = [ReplicaView(replica, queue) for replica, queue in queues]
    ranking = rank_replicas(hints, candidates, snapshot(*published), local)
    assert sorted(ranking.order) == sorted(replica for replica, _ in queues)
    assert ranking.reason is not RouteReason.FALLBACK
    queue, mean = dict(queues), sum(n for _, n in queues) / len(queues)
    if ranking.reason is RouteReason.SESSION:
        after = mean + 1 / len(queue)
        longest = max(UNEVEN * after - 1, after + UNEVEN_BY - 1, mean * (1 + RELATIVE_SLACK))
        assert queue[ranking.order[0]] <= longest
    slack = {RouteReason.SESSION: SESSION_SLACK, RouteReason.ANCHOR: ANCHOR_SLACK}.get(ranking.reason, ANCHOR_SLACK)
    assert queue[ranking.order[0]] <= max(min(queue.values()) + slack, mean * (1 + RELATIVE_SLACK))
    assert rank_replicas(hints, candidates, snapshot(*published), local) == ranking, "the same knowledge decides alike"


junk = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)
odd_views = st.builds(ReplicaView, replica_id=junk | ids, queue_len=junk, node=junk, max_ongoing=junk) | junk
odd_hints = st.builds(RequestHints, session=junk, agent=junk, sketch=junk, num_prompt_chars=junk) | junk


@given(odd_hints, st.lists(odd_views, max_size=5) | junk, junk, junk)
@settings(max_examples=200, deadline=None)
def test_nothing_makes_routing_raise(hints: Any, candidates: Any, published: Any, local: Any) -> None:
    ranking = rank_replicas(hints, candidates, published, local)
    if isinstance(candidates, list):
        readable = {v.replica_id for v in candidates if isinstance(v, ReplicaView) and isinstance(v.replica_id, str)}
        assert readable <= set(ranking.order)


def test_odd_input_falls_back_to_the_shortest_queue() -> None:
    broken: Any = object()
    ranking = rank_replicas(broken, views(3, 1, 2))
    assert ranking == (["r1", "r2", "r0"], RouteReason.FALLBACK, 0)


@pytest.mark.parametrize("bounds", [(0, 1), (1, 0)])
def test_a_memory_that_holds_nothing_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LocalAffinity(*bounds)


class AffinityMachine(RuleBasedStateMachine):
    """The router's memory keeps its bounds and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.local = LocalAffinity(max_sessions=3, max_agents=2)

    @rule(replica=ids, session=st.none() | st.sampled_from("uvwxyz"), agent=st.none() | st.sampled_from("abcd"))
    def remember(self, replica: str, session: str | None, agent: str | None) -> None:
        self.local.remember(replica, session, agent)
        sent = self.local.session_sent(session)
        assert session is None or (sent is not None and sent.replica == replica)
        assert agent is None or self.local.agent_replicas(agent)[0] == replica

    @rule(alive=st.sets(ids))
    def keep_only(self, alive: set[str]) -> None:
        self.local.keep_only(alive)
        assert all(sent.replica in alive for sent in map(self.local.session_sent, "uvwxyz") if sent is not None)

    @invariant()
    def integrity(self) -> None:
        self.local.check_integrity()


AffinityMachine.TestCase.settings = settings(max_examples=30, deadline=None)
test_affinity_keeps_its_bounds = AffinityMachine.TestCase
