"""The client of the scheduler's actor that replicas, routers and the ingress use.

It keeps the actor off the request path: observations are buffered, snapshots are refreshed by a thread of its own, and
whatever happens to the actor (absent, slow, stopped, killed) only makes the snapshot older. Nothing here raises into
its caller but `call`, and nothing waits for Ray but that and `graph`, in a thread and for a bounded time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from ropewalk.scheduler.actor import ACTOR_NAME, ACTOR_NAMESPACE, CALL_TIMEOUT_S, get_or_create_scheduler
from ropewalk.scheduler.anchors import AnchorMessage, AnchorUpdate
from ropewalk.scheduler.graph import graph_payload
from ropewalk.scheduler.snapshot import EMPTY_SNAPSHOT, Snapshot
from ropewalk.scheduler.state import Observation, SchedulerSettings

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.2
"""Observations wait at most this long: a turn takes longer, so the next turn of a session finds the last one known."""

REFRESH_INTERVAL_S = 0.5
"""How old a snapshot may get before it is asked for again: routers remember their own decisions meanwhile."""

MAX_BACKOFF_S = 10.0
"""Longest pause between tries to reach the actor: a cluster that comes back is found again within this."""

ANCHOR_SYNC_S = 1.0
"""How often a replica that prewarms tells its anchors and hears of others', and says by it that it is there."""

MAX_BUFFERED = 4096
"""Observations held while the actor cannot be reached; the oldest are dropped and counted. About 4 MB with sketches."""

MAX_BATCH = 512
"""Observations sent in one call, so that a backlog does not become one call that runs into its timeout."""


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
