"""The router around `ropewalk.scheduler.routing`: what it hands to Ray Serve, and that it never raises."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.request_router.common import ReplicaQueueLengthCache

from ropewalk.cluster.serve.router import AgentRouter
from ropewalk.scheduler.routing import LocalAffinity


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=ReplicaID(name, DeploymentID("model")), node_id="node", max_ongoing_requests=100)


def request(session: str | None = None, args: list[Any] | None = None) -> Any:
    body = SimpleNamespace(messages=[{"role": "user", "content": "hello"}], tools=None, model_extra={})
    headers = {"x-session-id": session} if session else {}
    return SimpleNamespace(
        args=[body, SimpleNamespace(headers=headers)] if args is None else args,
        metadata=SimpleNamespace(session_id=None, multiplexed_model_id=""),
        routing_context=SimpleNamespace(should_backoff=False),
    )


@pytest.fixture
def router() -> AgentRouter:
    """A router without the event loop, metrics and actor handles that Ray gives it."""
    made = object.__new__(AgentRouter)
    made.reasons = Counter()
    made._affinity = LocalAffinity()
    made._ongoing = Counter()
    made._alive = set()
    made._scheduler = None
    made._has_store = True
    made._mode = "exact"
    made._replica_queue_len_cache = ReplicaQueueLengthCache()
    made._use_replica_queue_len_cache = False
    return made


def first_of(ranks: list[list[Any]]) -> str:
    return str(ranks[0][0].replica_id.unique_id)


async def test_a_session_returns_to_its_replica(router: AgentRouter) -> None:
    replicas = [replica("a"), replica("b"), replica("c")]
    home = first_of(await router.choose_replicas(replicas, request("s")))
    for _ in range(5):
        assert first_of(await router.choose_replicas(replicas[::-1], request("s"))) == home
    assert router.reasons["session"] == 5


@pytest.mark.parametrize(("store", "goes_to"), [(True, "b"), (False, "a")])
async def test_a_long_history_is_waited_for_where_no_store_has_it(router: AgentRouter, store: bool, goes_to: str):
    router._has_store = store
    replicas = [replica("a"), replica("b")]
    router._affinity.remember("a", "s", None)
    router._ongoing["a"] = 1
    body = SimpleNamespace(messages=[{"role": "user", "content": "x" * 8000}], tools=None, model_extra={})
    asked = request(args=[body, SimpleNamespace(headers={"x-session-id": "s"})])
    assert first_of(await router.choose_replicas(replicas, asked)) == goes_to


async def test_every_replica_is_ranked_once(router: AgentRouter) -> None:
    replicas = [replica(name) for name in "abcd"]
    ranks = await router.choose_replicas(replicas, request())
    assert sorted(rank[0].replica_id.unique_id for rank in ranks) == list("abcd")
    assert all(len(rank) == 1 for rank in ranks)


async def test_requests_that_run_count_although_ray_has_forgotten_their_replica_s_queue(router: AgentRouter) -> None:
    busy, idle = replica("busy"), replica("idle")
    router._alive = {"busy", "idle"}
    for _ in range(3):
        router.on_send_request(busy.replica_id)
    assert first_of(await router.choose_replicas([busy, idle], request())) == "idle"
    for _ in range(3):
        router.on_request_completed(busy.replica_id, "id")
    router.on_send_request(idle.replica_id)
    assert first_of(await router.choose_replicas([busy, idle], request())) == "busy"


async def test_what_a_replica_that_is_gone_completes_leaves_nothing_behind(router: AgentRouter) -> None:
    gone = replica("gone")
    router.on_send_request(gone.replica_id)
    router.on_request_completed(gone.replica_id, "id")
    assert not router._ongoing


async def test_a_session_of_more_characters_than_a_name_may_have_is_not_remembered(router: AgentRouter) -> None:
    await router.choose_replicas([replica("a"), replica("b")], request("s" * 257))
    assert not router._affinity._sessions


@pytest.mark.parametrize("args", [[], [None], [object(), None], [SimpleNamespace(messages=5), "x"]])
async def test_a_request_of_an_odd_shape_is_routed_all_the_same(router: AgentRouter, args: list[Any]) -> None:
    replicas = [replica("a"), replica("b")]
    ranks = await router.choose_replicas(replicas, request(args=args))
    assert {one.replica_id.unique_id for rank in ranks for one in rank} == {"a", "b"}


async def test_an_error_is_counted_and_not_raised(router: AgentRouter) -> None:
    router._affinity = None  # type: ignore[assignment]
    router._ongoing = None  # type: ignore[assignment]
    replicas = [replica("a"), replica("b")]
    ranks = await router.choose_replicas(replicas, request("s"))
    assert {one.replica_id.unique_id for rank in ranks for one in rank} == {"a", "b"}
    assert router.reasons["router-error"] == 1


async def test_ray_is_told_to_wait_between_rounds(router: AgentRouter) -> None:
    pending = request()
    await router.choose_replicas([replica("a")], pending)
    assert pending.routing_context.should_backoff
