"""A purge on several nodes: in which order, and what becomes of it when one of them fails. Replicas are played."""

from types import SimpleNamespace
from typing import Any

import pytest

from ropewalk.cluster.serve import ingress
from ropewalk.cluster.serve.edits import TokenSpan
from ropewalk.cluster.serve.ingress import AgentIngress, UnreachableError, VerbBody
from ropewalk.cluster.serve.server import AgentServer, unknown_session
from ropewalk.cluster.store.node_store import Traces

NODES = {"a": ["a-1", "a-2"], "b": ["b-1"]}
SHORT = {"message": "is no span", "type": "BadRequestError", "param": "span", "code": 400}


class Cluster:
    """`answers` by method and replica, where it is not the usual one; the calls in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        self.answers: dict[tuple[str, str], dict[str, Any]] = {}
        monkeypatch.setattr(ingress, "_ask", self._ask)
        self.ingress = AgentIngress.__new__(AgentIngress)
        replicas = [
            {"replica": name, "actor": name, "node": node, "state": "RUNNING"} for node in NODES for name in NODES[node]
        ]
        replicas.append({"replica": "c-1", "actor": "c-1", "node": "c", "state": "STARTING"})

        async def of_model() -> dict[str, Any]:
            return {"models": [{"name": "m", "replicas": replicas}]}

        self.ingress._models = {"m": {"plain": False}}
        self.ingress._replicas = of_model  # type: ignore[method-assign]

    async def _ask(self, actor: str, method: str, *args: Any, deadline_s: float = 0) -> dict[str, Any]:
        self.calls.append((method, actor, args))
        usual = {
            "settle": {},
            "traces": {"traces": Traces(frozenset({actor}))},
            "discard": {"purged_chunks": 1},
            "empty_prefix_cache": {"emptied": True},
            "delete_session": {"deleted": True},
            "end_session": {},
        }
        return self.answers.get((method, actor), usual[method])

    async def purge(self) -> Any:
        body = VerbBody(span=TokenSpan(start=5, end=9))
        return await self.ingress.purge("s", body, SimpleNamespace())  # type: ignore[arg-type]

    def of(self, method: str) -> list[str]:
        return [actor for name, actor, _ in self.calls if name == method]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


async def test_every_replica_is_settled_and_emptied_and_every_node_purged_before_the_session_goes(cluster):
    answer = await cluster.purge()
    assert answer.status_code == 200
    steps = list(dict.fromkeys(method for method, _, _ in cluster.calls))
    assert steps == ["settle", "traces", "discard", "empty_prefix_cache", "delete_session"]
    assert set(cluster.of("settle")) == set(cluster.of("empty_prefix_cache")) == {"a-1", "a-2", "b-1"}
    assert len(cluster.of("delete_session")) == 2
    last = [method for method, _, _ in cluster.calls][-4:]
    assert last == ["discard", "discard", "delete_session", "delete_session"], "and once more what came meanwhile"
    (traces,) = next(args for method, _, args in cluster.calls if method == "discard")
    assert len(traces.names) == 2, "each node removes what any of them knows"


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("settle", {"unreachable": "x"}),
        ("traces", {"unreachable": "x"}),
        ("discard", {"unreachable": "x"}),
        ("empty_prefix_cache", {"emptied": False}),
    ],
)
async def test_a_purge_that_fails_somewhere_leaves_the_session_to_be_asked_for_again(cluster, method, answer):
    cluster.answers[method, "b-1"] = answer
    with pytest.raises(UnreachableError):
        await cluster.purge()
    assert cluster.of("delete_session") == []


async def test_a_node_with_a_shorter_history_does_its_part(cluster):
    cluster.answers["traces", "b-1"] = {"traces": Traces(frozenset({"short"})), "error": SHORT}
    assert (await cluster.purge()).status_code == 200
    (traces,) = next(args for method, _, args in cluster.calls if method == "discard")
    assert "short" in traces.names


async def test_a_span_that_no_node_holds_is_refused_and_nothing_removed(cluster):
    for actor in ("a-1", "a-2"):
        cluster.answers["traces", actor] = {"traces": Traces(), "error": SHORT}
    cluster.answers["traces", "b-1"] = {"error": unknown_session("s")}
    assert (await cluster.purge()).status_code == 400
    assert cluster.of("discard") == []


async def test_without_a_replica_nothing_is_purged(cluster):
    async def none() -> dict[str, Any]:
        return {"models": [{"name": "m", "replicas": []}]}

    cluster.ingress._replicas = none
    with pytest.raises(UnreachableError, match="none is running"):
        await cluster.purge()


async def test_without_a_span_the_whole_history_is_purged(cluster):
    answer = await cluster.ingress.purge("s", VerbBody(), SimpleNamespace())
    assert answer.status_code == 200
    assert {args for method, _, args in cluster.calls if method == "traces"} == {("s", None)}


async def test_every_replica_hears_that_a_session_is_over(cluster: Cluster) -> None:
    answer = await cluster.ingress.delete_session("s", SimpleNamespace(), "m")  # type: ignore[arg-type]
    assert answer.status_code == 200
    assert cluster.of("end_session") == ["a-1", "a-2", "b-1"]
    assert [method for method, _, _ in cluster.calls][-1] == "delete_session"


async def test_a_replica_tells_its_engine_and_its_prewarmer_that_a_session_is_over() -> None:
    said: list[tuple[str, ...]] = []
    server = AgentServer.__new__(AgentServer)
    planned = SimpleNamespace(end_session=lambda tenant, name: said.append(("engine", tenant, name)))
    server.engine = SimpleNamespace(planned=planned)  # type: ignore[assignment]
    server._prewarmer = SimpleNamespace(forget_session=lambda name: said.append(("prewarmer", name)))  # type: ignore[assignment]
    assert await server.end_session("s") == {}
    assert said == [("engine", "default", "s"), ("prewarmer", "s")]
