"""The scheduler as a Ray actor: one `SchedulerState`, found by name, restarted by Ray, restored from what it had saved.

Others reach it through `ropewalk.scheduler.client`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from ropewalk.scheduler.anchors import Anchor, AnchorMessage, AnchorTable, AnchorUpdate
from ropewalk.scheduler.file_lock import FileLock
from ropewalk.scheduler.graph import graph_payload
from ropewalk.scheduler.snapshot import Snapshot
from ropewalk.scheduler.state import (
    Observation,
    SchedulerSettings,
    SchedulerState,
    load_state,
    save_state,
)

logger = logging.getLogger(__name__)

ACTOR_NAME = "ropewalk-scheduler"
ACTOR_NAMESPACE = "ropewalk"

SNAPSHOT_INTERVAL_S = 0.2
"""A snapshot this young is published again: many clients ask, and making one for each would be all the actor does."""

CALL_TIMEOUT_S = 2.0
"""A call takes about a millisecond; after two seconds the actor is stuck, and the snapshot stays as it is."""

REPLICA_TTL_S = 10.0
"""A replica not heard of for so long is taken to be gone: nobody waits for it to warm anything."""


class SchedulerService:
    """What runs inside the actor: learn, publish, save. Methods are called one at a time; a thread saves."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        self._settings = settings or SchedulerSettings()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._save_failures: Counter[str] = Counter()
        self._path = Path(self._settings.state_path) if self._settings.state_path else None
        self._restored: str | None = None
        self._file_lock: FileLock | None = None
        self._is_owner = False
        self._found: tuple[int, int] | None = None
        self._saving = threading.Lock()
        if self._path is None:
            self._state = SchedulerState(self._settings)
        else:
            self._file_lock = FileLock(self._path)
            with contextlib.suppress(OSError):  # named when it is saved
                self._is_owner = self._file_lock.acquire()
            self._found = _identity(self._path)
            self._state, reason = load_state(self._path, self._settings, put_aside=self._is_owner)
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
        """Take in a batch; returns how many were.

        A replica whose clock is ahead does not make the sessions of all others look old: times end now.
        """
        now_s = time.time()
        with self._lock:
            before = self._state.num_observations
            for observation in observations:
                if isinstance(observation.time_s, float) and observation.time_s > now_s:
                    observation = dataclasses.replace(observation, time_s=now_s)
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
        with self._saving:  # one after the other, so that the newer state is written last
            try:
                if not self._owns():
                    self._note_save_failure("InUse", "another scheduler has it; give each cluster its own state_path")
                    return False
                self._write(self._path)
            except OSError as error:
                self._note_save_failure(type(error).__name__, error)
                return False
        return True

    def _write(self, path: Path) -> None:
        with self._lock:
            data = self._state.to_dict()
            anchors, version = None, self._anchors.version
            if version != self._anchors_saved:
                anchors = self._anchors.to_dict()
        save_state(data, path)
        if anchors is not None:
            save_state(anchors, anchors_path(path))
            self._anchors_saved = version

    def _note_save_failure(self, name: str, why: object) -> None:
        self._save_failures[name] += 1
        if self._save_failures[name] == 1:
            logger.warning("scheduler state could not be saved to %s: %s", self._path, why)

    def _owns(self) -> bool:
        """Whether the state file is this scheduler's to write. Raises OSError where it could not be written.

        Asked at each save: the process before may not have ended yet. A file that somebody has written since it was
        read is another cluster's, and stays so.
        """
        if self._path is None or self._file_lock is None or not self._file_lock.acquire():
            return False
        if not self._is_owner and _identity(self._path) != self._found:
            self._file_lock.release()
            return False
        self._is_owner = True
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
        if self._is_owner:
            with contextlib.suppress(OSError):
                path.replace(path.with_name(f"{path.name}.damaged"))
        return AnchorTable(life)

    def _save_forever(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            self.save()
            time.sleep(self._settings.save_interval_s)  # no more saves than one an interval


def _identity(path: Path) -> tuple[int, int] | None:
    """What differs when a file has been written since; None when there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


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
