"""The actor keeps what it learned across deaths; the client keeps serving without it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from ropewalk.kernels.keys import as_tokens
from ropewalk.scheduler import actor as actor_module
from ropewalk.scheduler import client as client_module
from ropewalk.scheduler.actor import (
    ACTOR_NAME,
    ACTOR_NAMESPACE,
    SchedulerService,
    anchors_path,
    get_or_create_scheduler,
    stop_scheduler,
)
from ropewalk.scheduler.anchors import Anchor, AnchorBook, AnchorMessage, AnchorUpdate
from ropewalk.scheduler.client import MAX_BUFFERED, SchedulerClient, SchedulerUnavailableError, failure_reason
from ropewalk.scheduler.snapshot import EMPTY_SNAPSHOT
from ropewalk.scheduler.state import Observation, SchedulerSettings


def turn(agent: str, session: str = "s", time_s: float = 1.0) -> Observation:
    return Observation(session, agent, None, "m", "r0", "n0", time_s, prompt_tokens=100)


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"still not true after {seconds} s: {condition}")


# Without Ray


def test_the_service_publishes_only_what_is_new() -> None:
    service = SchedulerService()
    assert service.observe([turn("a"), turn("b")]) == 2
    first = until(lambda: s if (s := service.snapshot()).agents else None)
    assert first.agents.keys() == {"a", "b"}
    assert service.snapshot(first.version) is None
    service.observe([turn("c")])
    second = until(lambda: service.snapshot(first.version))
    assert second.version > first.version
    assert "c" in second.agents


def test_a_new_service_restores_what_the_last_one_saved(tmp_path: Path) -> None:
    settings = SchedulerSettings(state_path=str(tmp_path / "state.json"))
    service = SchedulerService(settings)
    service.observe([turn(agent) for agent in "abab"])
    assert service.save()
    again = SchedulerService(settings)
    assert again.status()["start"] == "restored"
    assert again.graph()["transitions"] == service.graph()["transitions"]


def test_versions_never_come_up_twice_across_restarts(tmp_path: Path) -> None:
    settings = SchedulerSettings(state_path=str(tmp_path / "state.json"))
    service = SchedulerService(settings)
    service.save()
    service.observe([turn(agent) for agent in "abab"])  # may never reach the file
    last = service.status()["version"]
    until(lambda: time.time_ns() // 1_000_000 > last)
    assert SchedulerService(settings).status()["version"] > last


def test_a_changed_state_is_saved_without_being_asked(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    service = SchedulerService(SchedulerSettings(state_path=str(path), save_interval_s=0.05))
    service.observe([turn("a")])
    until(path.exists)


def test_a_state_file_that_cannot_be_written_is_counted_and_harmless(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    service = SchedulerService(SchedulerSettings(state_path=str(tmp_path / "file" / "state.json")))
    assert service.observe([turn("a")]) == 1
    assert service.save() is False
    assert sum(service.status()["save_failures"].values()) >= 1


def test_two_schedulers_do_not_write_the_same_file(tmp_path: Path) -> None:
    settings = SchedulerSettings(state_path=str(tmp_path / "state.json"), save_interval_s=0.05)
    first = SchedulerService(settings)
    first.observe([turn("a")])
    assert first.save()
    second = SchedulerService(settings)
    second.observe([turn("b")])
    assert second.save() is False
    assert second.status()["save_failures"]["InUse"] >= 1
    assert SchedulerService(settings).graph()["agents"][0]["id"] == "a"


def end(service: SchedulerService) -> None:
    """What is left of a service when its process ends."""
    assert service._file_lock is not None
    service._file_lock.release()


def test_a_scheduler_goes_on_with_the_file_of_one_that_ended_but_not_with_what_another_has_written(
    tmp_path: Path,
) -> None:
    settings = SchedulerSettings(state_path=str(tmp_path / "state.json"))
    first = SchedulerService(settings)
    assert first.save()
    next_one, other = SchedulerService(settings), SchedulerService(settings)
    end(first)
    assert next_one.save(), "the one before was still ending"
    end(next_one)
    assert other.save() is False, "what is there is not what it began with"


def test_an_unreadable_file_of_another_scheduler_stays_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    first = SchedulerService(SchedulerSettings(state_path=str(path)))
    assert first.save()
    path.write_text('{"format": 999}')
    second = SchedulerService(SchedulerSettings(state_path=str(path)))
    assert second.status()["start"] == "unknown-format"
    assert path.exists()


def test_a_replica_whose_clock_is_ahead_does_not_end_the_sessions_of_others() -> None:
    service = SchedulerService()
    service.observe([turn("a", "s", time.time()), turn("b", "t", time.time() + 86_400)])
    until(lambda: (found := service.snapshot()) is not None and found.sessions.keys() == {"s", "t"})


def test_a_damaged_file_is_named_and_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text('{"format": 999}')
    service = SchedulerService(SchedulerSettings(state_path=str(path)))
    assert service.status()["start"] == "unknown-format"
    assert (tmp_path / "state.json.unknown-format").exists()


ANCHOR = as_tokens(range(100))


def test_anchors_are_kept_beside_the_state_and_handed_to_replicas_of_the_model(tmp_path: Path) -> None:
    settings = SchedulerSettings(state_path=str(tmp_path / "state.json"))
    service = SchedulerService(settings)
    service.put_anchor("m", Anchor("a", ANCHOR, "registered"))
    assert service.save()
    again = SchedulerService(settings)
    update = again.sync_anchors(AnchorMessage("m", "r0", "n0", epoch=0, life=0, since=0))
    assert [(anchor.agent, anchor.tokens.tolist()) for anchor in update.changed] == [("a", ANCHOR.tolist())]
    assert again.sync_anchors(AnchorMessage("m", "r0", "n0", 0, update.life, update.version)).changed == ()
    assert again.sync_anchors(AnchorMessage("other", "r1", "n0", 0, 0, 0)).changed == ()


def test_damaged_anchors_are_put_aside_and_the_state_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    service = SchedulerService(SchedulerSettings(state_path=str(path)))
    service.observe([turn("a"), turn("b")])
    assert service.save()
    anchors_path(path).write_text("{")
    end(service)
    again = SchedulerService(SchedulerSettings(state_path=str(path)))
    assert again.status()["start"] == "restored"
    assert again.anchors() == []
    assert (tmp_path / "state.json.anchors.damaged").exists()


def test_a_replica_that_is_not_heard_of_any_more_leaves_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(actor_module.time, "monotonic", lambda: now_s)
    service = SchedulerService()
    service.observe([turn("a")])
    for replica in ("r1", "r0"):
        service.sync_anchors(AnchorMessage("m", replica, "n0", 0, 0, 0))
    now_s += 1
    first = service.snapshot()
    assert first is not None
    assert first.replicas == {"m": (("r0", "n0"), ("r1", "n0"))}
    assert [stand.past for stand in first.stands] == [("a",)], "somebody prewarms"
    now_s += actor_module.REPLICA_TTL_S - 0.5
    service.sync_anchors(AnchorMessage("m", "r1", "n0", 0, 0, 0))
    now_s += 1
    second = service.snapshot(first.version)
    assert second is not None
    assert second.replicas == {"m": (("r1", "n0"),)}


def test_what_was_prewarmed_is_listed_with_its_anchor() -> None:
    service = SchedulerService()
    service.observe([turn("a")])
    learned = AnchorMessage("m", "r1", "n1", 0, 0, 0, (Anchor("a", ANCHOR),), (("a", 2.0),))
    service.sync_anchors(learned)
    assert service.anchors() == [
        {
            "agent": "a",
            "model": "m",
            "tokens": 100,
            "origin": "learned",
            "warm": [{"replica": "r1", "node": "n1", "last_s": 2.0}],
        }
    ]
    assert service.delete_anchor("a") == ["m"]
    assert service.anchors() == []


def test_a_call_that_nobody_answers_says_why() -> None:
    client = SchedulerClient()
    with pytest.raises(SchedulerUnavailableError, match="ray-not-started"):
        asyncio.run(client.call("anchors"))
    client.close()


def test_reset_forgets_everything() -> None:
    service = SchedulerService()
    service.observe([turn("a")])
    service.reset()
    assert service.graph()["agents"] == []


def test_without_ray_the_client_names_the_reason_and_bounds_its_buffer() -> None:
    client = SchedulerClient()
    for i in range(MAX_BUFFERED + 10):
        client.observe(turn("a", time_s=float(i)))
    status = until(lambda: s if (s := client.status())["failures"] else None)
    assert status["failures"].keys() == {"ray-not-started"}
    assert status["dropped"] == 10
    assert status["buffered"] == MAX_BUFFERED
    assert client.snapshot is EMPTY_SNAPSHOT
    payload = asyncio.run(client.graph())
    assert (payload["complete"], payload["reason"]) == (False, "ray-not-started")
    client.close()


def test_nothing_is_sent_to_a_scheduler_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray fails calls to an actor that restarts at once: what is sent then is lost, what waits is not."""
    client = SchedulerClient()
    client._actor = object()
    client._note_failure(ActorUnavailableError("restarting", None))
    assert client._actor is None


def test_a_client_that_outlives_ray_does_not_start_it_again() -> None:
    """Ray starts a cluster by itself when somebody calls an actor without one."""
    client = SchedulerClient()
    client._actor = Unreachable()
    client.observe(turn("a"))
    until(lambda: client.status()["failures"].get("ray-not-started"))
    assert asyncio.run(client.graph())["reason"] == "ray-not-started"
    with pytest.raises(SchedulerUnavailableError, match="ray-not-started"):
        asyncio.run(client.call("anchors"))
    client.close()


class Unreachable:
    """An actor that nothing may be asked of."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


def test_every_failure_has_a_name() -> None:
    assert failure_reason(TimeoutError()) == "scheduler-timeout"
    assert failure_reason(ValueError("no actor of that name")) == "scheduler-absent"
    assert failure_reason(RuntimeError("anything else")) == "scheduler-error"


# With Ray

SECOND_CLUSTER = """
import sys, ray
from ropewalk.scheduler.actor import get_or_create_scheduler
from ropewalk.scheduler.state import Observation, SchedulerSettings
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 1024**2,
         _temp_dir=sys.argv[1])
actor = get_or_create_scheduler(SchedulerSettings())
ray.get(actor.observe.remote([Observation("s", "theirs", None, "m", "r0", "n0", 1.0)]))
print(*(agent["id"] for agent in ray.get(actor.graph.remote())["agents"]), flush=True)
input()
ray.kill(actor)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # every listener on the loopback
    with tempfile.TemporaryDirectory(prefix="rw-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 1024**2,
            _temp_dir=folder,  # short: Ray's sockets lie below it
        )
        yield
        ray.shutdown()


def test_clusters_side_by_side_have_a_scheduler_each(settings: SchedulerSettings) -> None:
    import ray

    actor = get_or_create_scheduler(settings)
    ray.get(actor.observe.remote([turn("ours")]))
    with tempfile.TemporaryDirectory(prefix="rw-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-c", SECOND_CLUSTER, folder]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline().split() == ["theirs"]
            assert [agent["id"] for agent in ray.get(actor.graph.remote())["agents"]] == ["ours"]
            process.stdin.write("\n")
            process.stdin.close()
            assert process.wait(60) == 0
    assert ray.get(actor.status.remote())["agents"] == 1, "the end of one is nothing to the other"


@pytest.fixture
def settings(cluster: None, tmp_path: Path) -> Iterator[SchedulerSettings]:
    yield SchedulerSettings(state_path=str(tmp_path / "state.json"), save_interval_s=0.1)
    stop_scheduler()


def published(client: SchedulerClient, agent: str) -> Callable[[], bool]:
    return lambda: agent in client.snapshot.agents


@pytest.mark.engine
def test_what_one_client_observes_every_client_sees(settings: SchedulerSettings) -> None:
    one, two = SchedulerClient(settings), SchedulerClient(settings)
    for i, agent in enumerate("abab"):
        one.observe(turn(agent, time_s=float(i)))
    until(published(two, "b"))
    assert two.snapshot.agents["a"].next[0][0] == "b"
    assert one.status()["sent"] == 4
    payload = asyncio.run(two.graph())
    assert payload["complete"] is True
    assert payload["transitions"][0]["count"] == 2
    one.close()
    two.close()


@pytest.mark.engine
def test_a_scheduler_whose_process_dies_comes_back_with_its_state(settings: SchedulerSettings) -> None:
    import ray

    actor = get_or_create_scheduler(settings)
    ray.get(actor.observe.remote([turn(agent) for agent in "abab"]))
    before = ray.get(actor.graph.remote())["transitions"]
    assert ray.get(actor.save.remote())
    client = SchedulerClient(settings)
    until(published(client, "a"))
    old = client.snapshot
    ray.kill(actor, no_restart=False)
    client.observe(turn("c", time_s=2.0))
    assert client.snapshot.agents.keys() >= {"a", "b"}, "the last snapshot serves meanwhile"
    until(lambda: client.snapshot.version > old.version)
    client.observe(turn("d", time_s=3.0))
    until(published(client, "d"))
    after = asyncio.run(client.graph())["transitions"]
    assert all(edge["count"] >= 1 for edge in after)
    assert {(e["source"], e["target"]) for e in before} <= {(e["source"], e["target"]) for e in after}
    client.close()


@pytest.mark.engine
def test_a_scheduler_that_was_killed_for_good_is_made_again(settings: SchedulerSettings) -> None:
    import ray

    client = SchedulerClient(settings)
    client.observe(turn("a"))
    until(published(client, "a"))
    until(Path(settings.state_path or "").exists)
    ray.kill(ray.get_actor(ACTOR_NAME, namespace=ACTOR_NAMESPACE), no_restart=True)

    def observed_again() -> bool:
        client.observe(turn("b"))
        return "b" in client.snapshot.agents

    until(observed_again)
    assert "a" in client.snapshot.agents, "restored from the file"
    assert client.status()["failures"], "the death was counted"
    client.close()


class Shared:
    """The book of one replica, as its client exchanges it."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.book = AnchorBook()

    def message(self) -> AnchorMessage:
        return self.book.message("m", self.replica, "n0")

    def take(self, message: AnchorMessage, update: AnchorUpdate) -> None:
        self.book.take(message, update)


@pytest.mark.engine
def test_an_anchor_that_one_replica_learned_reaches_another(
    settings: SchedulerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ANCHOR_SYNC_S", 0.1)
    clients = [SchedulerClient(settings), SchedulerClient(settings)]
    shared = [Shared("r0"), Shared("r1")]
    for number in range(2):
        shared[0].book.learn("a", f"s{number}", [*range(100), 1000 + number])
    for client, exchange in zip(clients, shared, strict=True):
        client.share_anchors(exchange)
    until(lambda: shared[1].book.get("a"))
    found = shared[1].book.get("a")
    assert found is not None
    assert found.tokens.tolist() == list(range(100))
    until(lambda: clients[0].snapshot.replicas == {"m": (("r0", "n0"), ("r1", "n0"))})
    asyncio.run(clients[1].call("put_anchor", "m", Anchor("b", ANCHOR, "registered")))
    until(lambda: all(exchange.book.get("b") for exchange in shared))
    with pytest.raises(ValueError, match="got 3"):
        asyncio.run(clients[1].call("put_anchor", "m", Anchor("c", ANCHOR[:3])))
    assert asyncio.run(clients[0].call("delete_anchor", "b", None)) == ["m"]
    until(lambda: not any(exchange.book.get("b") for exchange in shared))
    assert not clients[1].status()["failures"].get("scheduler-error")
    for client in clients:
        client.close()


@pytest.mark.engine
def test_a_hanging_scheduler_holds_nobody_up(settings: SchedulerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(client_module, "CALL_TIMEOUT_S", 0.3)
    actor = get_or_create_scheduler(settings)
    pid = ray.get(actor.pid.remote())
    client = SchedulerClient(settings)
    client.observe(turn("a"))
    until(published(client, "a"))
    os.kill(pid, signal.SIGSTOP)
    try:

        async def serve() -> int:
            """Counts how often the loop turns while the scheduler hangs."""
            turns = 0
            while "scheduler-timeout" not in client.status()["failures"]:
                client.observe(turn("b"))
                assert "a" in client.snapshot.agents
                await asyncio.sleep(0.01)
                turns += 1
            return turns

        assert asyncio.run(asyncio.wait_for(serve(), 60)) > 3
        payload = asyncio.run(client.graph())
        assert (payload["complete"], payload["reason"]) == (False, "scheduler-timeout")
    finally:
        os.kill(pid, signal.SIGCONT)
    until(published(client, "b"))
    client.close()


@pytest.mark.engine
def test_the_client_works_inside_an_asyncio_actor_as_replicas_are(settings: SchedulerSettings) -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Replica:
        async def serve(self, settings: SchedulerSettings) -> int:
            client = SchedulerClient(settings)
            client.observe(turn("a"))
            turns = 0
            while "a" not in client.snapshot.agents:
                await asyncio.sleep(0.01)
                turns += 1
            client.close(0)
            return turns

    assert ray.get(Replica.remote().serve.remote(settings), timeout=120) >= 1


@pytest.mark.engine
def test_a_client_that_may_not_create_waits_for_one_to_appear(settings: SchedulerSettings) -> None:
    client = SchedulerClient(create=False)
    client.observe(turn("a"))
    until(lambda: client.status()["failures"].get("scheduler-absent"))
    get_or_create_scheduler(settings)
    until(published(client, "a"))
    assert client.status()["lost"] == 0
    client.close()


@pytest.mark.engine
def test_stopping_saves_and_ends_it(settings: SchedulerSettings) -> None:
    import ray

    actor = get_or_create_scheduler(settings)
    ray.get(actor.observe.remote([turn("a")]))
    assert stop_scheduler() is True
    assert "a" in Path(settings.state_path or "").read_text()
    until(lambda: not stop_scheduler())
