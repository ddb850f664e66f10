"""Takes finished requests' rows out of the paged cache and stores them, in a thread beside the engine's.

vLLM holds a finished request's blocks until the worker reports it (`get_finished`), so nobody writes to them: they are
neither free nor evicted, and a block that others share is full and never written again. The thread may therefore read
them while the engine computes. What it has read is stored only if the blocks were still held when it had read it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from ropewalk.cluster.engine.layouts import KvLayout
from ropewalk.cluster.engine.saves import Save, SavePart
from ropewalk.cluster.engine.stores import OpenStores
from ropewalk.cluster.store.node_store import NodeStore

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Saves that wait for the thread, released ones included: those of a store that hangs must not pile up."""

DRAIN_S = 1.0
"""Seconds that are given, when the engine ends, to what waits to be saved, and once more to the chunk at hand."""


def save_part(store: NodeStore, layout: KvLayout, part: SavePart) -> Counter[str]:
    """Gather and store one chunk in the calling thread; return what to count. The store counts why it refuses."""
    if store.contains(part.header.chain):
        return Counter(save_present=1)
    return _put(store, part, layout.gather(torch.from_numpy(part.slots)))


@dataclass(slots=True, eq=False)
class _Job:
    save: Save
    fence: AbstractContextManager[None]
    deadline: float
    num_gathered: int = 0
    is_released: bool = False


class Saver:
    """One thread that saves in the order of `submit`. `stores` are for that thread alone.

    All methods are for the engine's thread. The thread starts with the first save. Blocks are held for `max_hold_s`
    seconds at most: a store that hangs costs saves, not the engine's cache.
    """

    def __init__(self, layout: KvLayout, stores: OpenStores, max_hold_s: float) -> None:
        self._layout = layout
        self._stores = stores
        self._max_hold_s = max_hold_s
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards the rest, and the jobs' last two fields
        self._held: dict[str, _Job] = {}
        self._done: set[str] = set()
        self._counters: Counter[str] = Counter()

    def submit(self, save: Save) -> None:
        """Save these chunks later. Their blocks must be held until `take_finished` names the request."""
        if self._queue.qsize() >= MAX_WAITING:
            with self._lock:
                self._counters["save_dropped_queue_full"] += len(save.parts)
                self._done.add(save.request_id)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ropewalk-saver", daemon=True)
            self._thread.start()
        job = _Job(save, self._layout.fence(), time.monotonic() + self._max_hold_s)
        with self._lock:
            self._held[save.request_id] = job
        self._queue.put(job)

    def take_finished(self) -> set[str]:
        """Return, once, the requests whose blocks are no longer needed: their rows are out, or were given up."""
        now = time.monotonic()
        with self._lock:
            for job in list(self._held.values()):  # oldest first
                if now < job.deadline:
                    break
                self._counters["save_dropped_too_slow"] += self._release(job)
            done, self._done = self._done, set()
        return done

    def take_counters(self) -> Counter[str]:
        """Return what was counted since the last call."""
        with self._lock:
            counters, self._counters = self._counters, Counter()
        return counters

    def close(self, drain_s: float = DRAIN_S) -> None:
        """End the thread: after what waits is saved or `drain_s` seconds, with the chunk at hand then."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(drain_s)
        with self._lock:
            for job in list(self._held.values()):
                self._counters["save_dropped_shutdown"] += self._release(job)
        self._thread.join(drain_s)
        self._thread = None

    def _release(self, job: _Job) -> int:
        """Let a request's blocks go; return how many chunks are given up by that. The caller has the lock."""
        if job.is_released:
            return 0
        job.is_released = True
        del self._held[job.save.request_id]
        self._done.add(job.save.request_id)
        return len(job.save.parts) - job.num_gathered

    # The thread

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                with job.fence:
                    self._save(job)
            except Exception:  # a thread that dies of one chunk would hold everybody's blocks
                logger.exception("Not saving the rest of request %s", job.save.request_id)
                with self._lock:
                    self._counters["save_failed"] += max(self._release(job), 1)
            with self._lock:
                self._counters.update(self._stores.take_counters())

    def _save(self, job: _Job) -> None:
        store = self._stores.get(job.save.place)
        for part in job.save.parts:
            if job.is_released:
                return
            is_present = store.contains(part.header.chain)
            rows = None if is_present else self._layout.gather(torch.from_numpy(part.slots))
            with self._lock:
                # Rows read behind the release may be another request's.
                if job.is_released:
                    return
                job.num_gathered += 1
                if job.num_gathered == len(job.save.parts):
                    self._release(job)
            counters = Counter(save_present=1) if rows is None else _put(store, part, rows)
            with self._lock:
                self._counters.update(counters)


def _put(store: NodeStore, part: SavePart, rows: torch.Tensor) -> Counter[str]:
    if not store.put(part.header, rows):
        return Counter()
    return Counter(saved_chunks=1, saved_bytes=rows.numel() * rows.element_size())
