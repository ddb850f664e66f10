"""The scheduler as a Ray actor, and the client that replicas, routers and the ingress use.

`SchedulerActor` wraps one `SchedulerState`: it is found by name, restarts by itself, and restores what it had saved.
`SchedulerClient` keeps it off the request path: observations are buffered, snapshots are refreshed by a thread of its
own, and whatever happens to the actor (absent, slow, stopped, killed) only makes the snapshot older. Nothing in the
client raises into its caller but `call`, and nothing waits for Ray but that and `graph`, in a thread and for a bounded
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from ropewalk.scheduler.anchors import Anchor, AnchorMessage, AnchorTable, AnchorUpdate
from ropewalk.scheduler.snapshot import EMPTY_SNAPSHOT, Snapshot
from ropewalk.scheduler.state import (
    Observation,
    SchedulerSettings,
    SchedulerState,
    graph_payload,
    load_state,
    save_state,
)

logger = logging.getLogger(__name__)

ACTOR_NAME = "ropewalk-scheduler"
ACTOR_NAMESPACE = "ropewalk"

FLUSH_INTERVAL_S = 0.2
"""Observations wait at most this long: a turn takes longer, so the next turn of a session finds the last one known."""

REFRESH_INTERVAL_S = 0.5
"""How old a snapshot may get before it is asked for again: routers remember their own decisions meanwhile."""

SNAPSHOT_INTERVAL_S = 0.2
"""A snapshot this young is published again: many clients ask, and making one for each would be all the actor does."""

CALL_TIMEOUT_S = 2.0
"""A call takes about a millisecond; after two seconds the actor is stuck, and the snapshot stays as it is."""

MAX_BACKOFF_S = 10.0
"""Longest pause between tries to reach the actor: a cluster that comes back is found again within this."""

ANCHOR_SYNC_S = 1.0
"""How often a replica that prewarms tells its anchors and hears of others', and says by it that it is there."""

REPLICA_TTL_S = 10.0
"""A replica not heard of for so long is taken to be gone: nobody waits for it to warm anything."""

MAX_BUFFERED = 4096
"""Observations held while the actor cannot be reached; the oldest are dropped and counted. About 4 MB with sketches."""

MAX_BATCH = 512
"""Observations sent in one call, so that a backlog does not become one call that runs into its timeout."""


class SchedulerService:
    """What runs inside the actor: learn, publish, save. Methods are called one at a time; a thread saves."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        self._settings = settings or SchedulerSettings()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._save_failures: Counter[str] = Counter()
        self._path = Path(self._settings.state_path) if self._settings.state_path else None
        self._restored: str | None = None
        if self._path is None:
            self._state = SchedulerState(self._settings)
        else:
            self._state, reason = load_state(self._path, self._settings)
            self._restored = reason or ("restored" if self._state.num_observations else None)
            if reason is not None:
                logger.warning("scheduler state %s not used: %s; starting empty", self._path, reason)
        # Versions of an earlier life, even those never saved, must not come up again with other content: milliseconds
        # since the epoch grow faster than one actor can observe.
        self._state.version = max(self._state.version + 1, time.time_ns() // 1_000_000)
        self._anchors = self._load_anchors()
        self._anchors_saved = self._anchors.version
        self._heard_s: dict[tuple[str, str, str], float] = {}
        self._replicas: dict[str, tuple[tuple[str, str], ...]] = {}
        self._snapshot = self._state.snapshot()
        self._snapshot_s = time.monotonic()
        if self._path is not None:
            threading.Thread(target=self._save_forever, name="scheduler-save", daemon=True).start()

    def observe(self, observations: Sequence[Observation]) -> int:
        """Take in a batch; returns how many were."""
        with self._lock:
            before = self._state.num_observations
            for observation in observations:
                self._state.observe(observation)
        self._changed.set()
        return self._state.num_observations - before

    def snapshot(self, since_version: int = 0) -> Snapshot | None:
        """A snapshot at most `SNAPSHOT_INTERVAL_S` old, None when the caller has it already."""
        with self._lock:
            now = time.monotonic()
            self._count_replicas(now)
            if self._snapshot.version != self._state.version and now - self._snapshot_s >= SNAPSHOT_INTERVAL_S:
                self._snapshot, self._snapshot_s = self._make_snapshot(), now
            return None if since_version == self._snapshot.version else self._snapshot

    def sync_anchors(self, message: AnchorMessage) -> AnchorUpdate:
        """Take in what a replica says of its anchors, and answer what it does not know."""
        with self._lock:
            now = time.monotonic()
            self._heard_s[message.model, message.replica, message.node] = now
            self._count_replicas(now)
            for agent, time_s in message.warmed:
                self._state.note_warm(agent, message.replica, message.node, time_s)
            update = self._anchors.sync(message)
        if message.warmed or message.anchors:
            self._changed.set()
        return update

    def put_anchor(self, model: str, anchor: Anchor) -> None:
        """Add or replace an anchor. Raises ValueError when it is too short or too long."""
        with self._lock:
            self._anchors.put(model, anchor)
        self._changed.set()

    def delete_anchor(self, agent: str, model: str | None = None) -> list[str]:
        """Remove an agent's anchors; returns the models that had one."""
        with self._lock:
            models = self._anchors.delete(agent, model)
        self._changed.set()
        return models

    def purge_anchors(self, model: str) -> int:
        """Forget what was learned for a model; returns the model's new epoch."""
        with self._lock:
            epoch = self._anchors.purge(model)
        self._changed.set()
        return epoch

    def anchors(self) -> list[dict[str, Any]]:
        """All anchors, for `GET /v1/anchors`: where each was used or warmed, and when."""
        with self._lock:
            views = self._state.snapshot().agents
            return [
                {
                    "agent": anchor.agent,
                    "model": model,
                    "tokens": len(anchor.tokens),
                    "origin": anchor.origin,
                    "warm": [
                        {"replica": w.replica, "node": w.node, "last_s": w.last_s}
                        for w in (views[anchor.agent].warm if anchor.agent in views else ())
                        if (w.replica, w.node) in self._replicas.get(model, ())
                    ],
                }
                for model, anchor in self._anchors.anchors()
            ]

    def graph(self) -> dict[str, Any]:
        """The body of `GET /v1/agents`."""
        with self._lock:
            return graph_payload(self._state)

    def status(self) -> dict[str, Any]:
        """What is known, how it started, and what went wrong with saving."""
        with self._lock:
            return {
                "version": self._state.version,
                "observations": self._state.num_observations,
                "refused": self._state.num_refused,
                "agents": len(self._state.registry),
                "sessions": len(self._state.sessions),
                "anchors": len(self._anchors.anchors()),
                "start": self._restored or "empty",
                "save_failures": dict(self._save_failures),
            }

    def save(self) -> bool:
        """Write the state file now; False when there is none to write or it failed (counted in `status`)."""
        if self._path is None:
            return False
        with self._lock:
            data = self._state.to_dict()
            anchors, version = None, self._anchors.version
            if version != self._anchors_saved:
                anchors = self._anchors.to_dict()
        try:
            save_state(data, self._path)
            if anchors is not None:
                save_state(anchors, anchors_path(self._path))
                self._anchors_saved = version
        except OSError as error:
            self._save_failures[type(error).__name__] += 1
            logger.warning("scheduler state could not be saved to %s: %s", self._path, error)
            return False
        return True

    def pid(self) -> int:
        """Process the actor runs in."""
        return os.getpid()

    def reset(self) -> None:
        """Forget everything learned."""
        with self._lock:
            self._state.clear()
            self._anchors = AnchorTable(time.time_ns())
            self._anchors_saved = -1
            self._snapshot, self._snapshot_s = self._make_snapshot(), time.monotonic()
        self._changed.set()

    def _make_snapshot(self) -> Snapshot:
        snapshot = self._state.snapshot(outlooks=bool(self._replicas))
        return dataclasses.replace(snapshot, replicas=self._replicas)

    def _count_replicas(self, now_s: float) -> None:
        """Forget the replicas that were not heard of, and publish who is left if that changed."""
        for name in [name for name, heard_s in self._heard_s.items() if now_s - heard_s > REPLICA_TTL_S]:
            del self._heard_s[name]
        found: dict[str, tuple[tuple[str, str], ...]] = {}
        for model, replica, node in sorted(self._heard_s):
            found[model] = (*found.get(model, ()), (replica, node))
        if found != self._replicas:
            self._replicas = found
            self._state.version += 1

    def _load_anchors(self) -> AnchorTable:
        """The table as it was saved. What cannot be read is put aside; replicas send what they know again."""
        life = time.time_ns()
        if self._path is None:
            return AnchorTable(life)
        path = anchors_path(self._path)
        try:
            return AnchorTable.from_dict(json.loads(path.read_bytes()), life)
        except FileNotFoundError:
            return AnchorTable(life)
        except (OSError, ValueError) as error:
            logger.warning("anchors in %s not used: %s; starting with none", path, error)
        with contextlib.suppress(OSError):
            path.replace(path.with_name(f"{path.name}.damaged"))
        return AnchorTable(life)

    def _save_forever(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            self.save()
            time.sleep(self._settings.save_interval_s)  # no more saves than one an interval


def anchors_path(state_path: Path) -> Path:
    """The file of anchors beside a state file: it is larger, and changes seldom."""
    return state_path.with_name(f"{state_path.name}.anchors")


SchedulerActor = ray.remote(SchedulerService)


def get_or_create_scheduler(settings: SchedulerSettings | None = None) -> Any:
    """Handle of this Ray cluster's scheduler; makes it when there is none. Blocks for a call to Ray's head.

    Detached, because replicas come and go and none of them should take the scheduler along: `stop_scheduler` ends it.
    It restarts whenever its process dies. Two clusters side by side have one each: names are per cluster.
    """
    return SchedulerActor.options(
        name=ACTOR_NAME,
        namespace=ACTOR_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
    ).remote(settings or SchedulerSettings())


def stop_scheduler() -> bool:
    """End this cluster's scheduler after saving its state; False when there is none."""
    try:
        actor = ray.get_actor(ACTOR_NAME, namespace=ACTOR_NAMESPACE)
    except ValueError:
        return False
    try:
        ray.get(actor.save.remote(), timeout=CALL_TIMEOUT_S)
    except RayError:
        logger.warning("scheduler did not save before it was stopped")
    ray.kill(actor, no_restart=True)
    return True


class AnchorExchange(Protocol):
    """What a replica that prewarms gives its client. Called from the client's thread."""

    def message(self) -> AnchorMessage:
        """What the table should hear."""

    def take(self, message: AnchorMessage, update: AnchorUpdate) -> None:
        """Take in what the table answered to a message."""


class SchedulerUnavailableError(RuntimeError):
    """A call to the scheduler was not answered; the message is the reason's name."""


class SchedulerClient:
    """One per process. `observe` and `snapshot` return at once, from any thread or event loop.

    `settings`: for the actor, should this client be the one that makes it. `create`: whether it may.
    """

    def __init__(self, settings: SchedulerSettings | None = None, *, create: bool = True) -> None:
        self._settings = settings
        self._create = create
        self._buffer: deque[Observation] = deque()
        self._snapshot = EMPTY_SNAPSHOT
        self._refreshed_s: float | None = None
        self._actor: Any = None
        self._found: tuple[Any, Any] | None = None  # an actor that has not answered yet, and the answer awaited
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._exchange: AnchorExchange | None = None

    def share_anchors(self, exchange: AnchorExchange) -> None:
        """Exchange anchors with the scheduler from now on, every `ANCHOR_SYNC_S`."""
        self._exchange = exchange
        self._ensure_thread()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of `SchedulerService`, for what somebody waits for: `CALL_TIMEOUT_S` at most, and as long for
        the actor to be found.

        Raises `SchedulerUnavailableError`, and ValueError when the method does.
        """
        return await asyncio.to_thread(self._call_blocking, method, *args)

    def _call_blocking(self, method: str, *args: Any) -> Any:
        self._ensure_thread()
        try:
            return self._await(getattr(self._connected(), method).remote(*args))
        except RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise error.cause from None
            raise SchedulerUnavailableError(self._note_failure(error)) from error
        except Exception as error:
            raise SchedulerUnavailableError(self._note_failure(error)) from error

    def _connected(self) -> Any:
        """The actor, waited for if the client's thread is just about to find it."""
        deadline = time.monotonic() + CALL_TIMEOUT_S
        if not ray.is_initialized():
            raise _NoRayError
        while (actor := self._actor) is None:
            if time.monotonic() > deadline:
                raise _StartingError
            time.sleep(FLUSH_INTERVAL_S / 4)
        return actor

    def observe(self, observation: Observation) -> None:
        """Hand an observation over. When the buffer is full, the oldest is dropped and counted."""
        with self._lock:
            self._counts["observed"] += 1
            self._buffer.append(observation)
            if len(self._buffer) > MAX_BUFFERED:
                self._buffer.popleft()
                self._counts["dropped"] += 1
        self._ensure_thread()

    @property
    def snapshot(self) -> Snapshot:
        """The latest known snapshot; empty before the first."""
        self._ensure_thread()
        return self._snapshot

    @property
    def snapshot_age_s(self) -> float | None:
        """Seconds since the scheduler last confirmed the snapshot; None before the first time."""
        return None if self._refreshed_s is None else time.monotonic() - self._refreshed_s

    async def graph(self) -> dict[str, Any]:
        """The body of `GET /v1/agents`: from the actor, or from the last snapshot when it does not answer."""
        return await asyncio.to_thread(self.graph_blocking)

    def graph_blocking(self) -> dict[str, Any]:
        """`graph` for callers without an event loop; waits at most `CALL_TIMEOUT_S`."""
        self._ensure_thread()
        try:
            if not ray.is_initialized():
                raise _NoRayError
            actor = self._actor
            if actor is None:
                raise _StartingError
            payload: dict[str, Any] = self._await(actor.graph.remote())
        except Exception as error:
            reason = self._note_failure(error)
            return {**graph_payload(self._snapshot), "reason": reason}
        return payload

    def status(self) -> dict[str, Any]:
        """Counts for metrics: observations seen, sent, dropped, lost, and failures by reason."""
        with self._lock:
            return {
                "connected": self._actor is not None,
                "version": self._snapshot.version,
                "snapshot_age_s": self.snapshot_age_s,
                "buffered": len(self._buffer),
                **{name: self._counts[name] for name in ("observed", "sent", "dropped", "lost")},
                "failures": dict(self._failures),
            }

    def flush(self) -> None:
        """Ask the thread to send and refresh now; returns at once."""
        self._ensure_thread()
        self._wake.set()

    def close(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Send what is buffered, then stop the thread; waits at most `timeout_s`."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _ensure_thread(self) -> None:
        if self._thread is not None or self._closed:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="scheduler-client", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        backoff_s = 0.0
        refresh_at = sync_at = 0.0
        while True:
            try:
                self._send_buffered()
                if time.monotonic() >= refresh_at:
                    self._refresh()
                    refresh_at = time.monotonic() + REFRESH_INTERVAL_S
                if self._exchange is not None and time.monotonic() >= sync_at:
                    self._sync_anchors(self._exchange)
                    sync_at = time.monotonic() + ANCHOR_SYNC_S
                backoff_s = 0.0
            except Exception as error:
                self._note_failure(error)
                backoff_s = min(MAX_BACKOFF_S, max(2 * backoff_s, FLUSH_INTERVAL_S))
            if self._closed:
                return
            self._wake.wait(backoff_s or FLUSH_INTERVAL_S)
            if self._wake.is_set():
                refresh_at = sync_at = 0.0
            self._wake.clear()

    def _send_buffered(self) -> None:
        while self._buffer:
            actor = self._connect()
            with self._lock:
                batch = [self._buffer.popleft() for _ in range(min(MAX_BATCH, len(self._buffer)))]
            try:
                self._await(actor.observe.remote(batch))
            except Exception:  # counted here and named by the caller
                # Sent again it might be counted twice: the call may have arrived and only its answer been lost.
                with self._lock:
                    self._counts["lost"] += len(batch)
                raise
            with self._lock:
                self._counts["sent"] += len(batch)

    def _refresh(self) -> None:
        snapshot = self._await(self._connect().snapshot.remote(self._snapshot.version))
        if snapshot is not None:
            self._snapshot = snapshot
        self._refreshed_s = time.monotonic()

    def _sync_anchors(self, exchange: AnchorExchange) -> None:
        message = exchange.message()
        exchange.take(message, self._await(self._connect().sync_anchors.remote(message)))

    def _connect(self) -> Any:
        """The actor once it has answered. Runs in the client's thread only; tried again after every failure."""
        if not ray.is_initialized():  # asked each time: a call to an actor known before a shutdown starts Ray anew
            raise _NoRayError
        if self._actor is not None:
            return self._actor
        if self._found is None:
            if self._create:
                actor = get_or_create_scheduler(self._settings)
            else:
                actor = ray.get_actor(ACTOR_NAME, namespace=ACTOR_NAMESPACE)
            self._found = (actor, actor.pid.remote())
        actor, answer = self._found
        try:
            # A process takes seconds to start on a busy machine: nothing is sent before it has answered once.
            self._await(answer)
        except TimeoutError as error:
            raise _StartingError from error
        self._actor, self._found = actor, None
        return actor

    @staticmethod
    def _await(ref: Any) -> Any:
        # A future rather than ray.get: that warns, rightly, about blocking inside an asyncio actor, which replicas are;
        # here it is a thread of its own that waits.
        return ref.future().result(timeout=CALL_TIMEOUT_S)

    def _note_failure(self, error: Exception) -> str:
        reason = failure_reason(error)
        with self._lock:
            first = not self._failures[reason]
            self._failures[reason] += 1
        if reason in ("scheduler-restarting", "scheduler-died", "scheduler-error", "ray-not-started"):
            # Found again, and answered once, before anything more is sent to it: what is sent meanwhile would be lost.
            self._actor = self._found = None
        if first:
            logger.warning("scheduler: %s (%s); serving goes on with the last snapshot", reason, error)
        return reason


class _StartingError(RuntimeError):
    """The actor is there but has not answered yet."""


class _NoRayError(RuntimeError):
    """Ray has not been started in this process, and a client must not start it."""


def failure_reason(error: Exception) -> str:
    """The name under which a failed call is counted."""
    if isinstance(error, _NoRayError):
        return "ray-not-started"
    if isinstance(error, _StartingError):
        return "scheduler-starting"
    if isinstance(error, ActorUnavailableError):
        return "scheduler-restarting"
    if isinstance(error, ActorDiedError | RayActorError):
        return "scheduler-died"
    if isinstance(error, TimeoutError | GetTimeoutError):
        return "scheduler-timeout"
    if isinstance(error, ValueError):
        return "scheduler-absent"
    return "scheduler-error"
