"""A simulated cluster: requests come by time, a router sends each to a replica, and what happens there is measured.

A session has one turn at a time: a request that comes before its session's last answer waits for that answer, and is
sent then. What it waits so is no part of its TTFT, since a client waits then, not the cluster.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ropewalk.scheduler.rules import RULES
from ropewalk.workloads.simulate.cache import ReplicaCache
from ropewalk.workloads.simulate.measures import Distribution, Queues
from ropewalk.workloads.simulate.replica import Replica, Running, Service
from ropewalk.workloads.simulate.request import Request
from ropewalk.workloads.simulate.routers import Router

MAX_OUTSTANDING = 1000
"""Requests a replica, on average, that may be under way: a cluster that falls behind further is overloaded, and would
only fill memory."""

BEHIND, BEHIND_S = 1.2, 30.0
"""A cluster is overloaded, too, that needs so many times as long for its answers as requests come for, and seconds
more: its times depend on where the trace ends."""

PROGRESS_EVERY = 4096


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Replicas, all alike. `told`: a session's end is told to the rules of eviction when its last turn is answered."""

    num_replicas: int
    num_blocks: int
    block_size: int
    retention: str = "lru"
    service: Service = field(default_factory=Service)
    told: bool = False

    def __post_init__(self) -> None:
        for name in ("num_replicas", "num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.retention not in RULES:
            raise ValueError(f"retention must be one of {', '.join(RULES)}, got {self.retention!r}")


class Cluster:
    """Runs requests through replicas. `run` may be called once."""

    def __init__(self, settings: ClusterSettings, router: Router) -> None:
        self.settings = settings
        self.router = router
        self.queues = Queues(settings.num_replicas)
        self.ttft, self.latency = Distribution(), Distribution()
        self.num_requests = self.num_answered = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.is_overloaded = False
        self.replicas = [
            # The least recently used block is the queue's head anyway: that rule need not be asked.
            Replica(
                settings.service,
                ReplicaCache(
                    settings.num_blocks,
                    settings.block_size,
                    None if settings.retention == "lru" else RULES[settings.retention](),
                ),
            )
            for _ in range(settings.num_replicas)
        ]
        self._sessions: dict[str, deque[Request] | None] = {}
        """Sessions that wait for an answer, with the requests that wait behind it."""
        self._first_s: float | None = None
        self._last_s = self._last_arrival_s = 0.0
        self._events: list[tuple[float, int, int]] = []
        """(when, replica, its version): one that is not of a replica's last version is void."""
        self._versions = [0] * settings.num_replicas

    def run(self, requests: Iterable[Request], progress: Callable[[int], None] | None = None) -> None:
        """Answer all requests, which come by time, unless the cluster is overloaded. Raises DoesNotFitError when
        one does not fit into a replica's cache.
        """
        events, versions = self._events, self._versions
        most = MAX_OUTSTANDING * self.settings.num_replicas
        source = iter(requests)
        coming = next(source, None)
        while True:
            while coming is not None and (not events or coming.time_s <= events[0][0]):
                self.num_requests += 1
                if progress is not None and self.num_requests % PROGRESS_EVERY == 0:
                    progress(self.num_requests)
                if self.num_requests - self.num_answered > most:
                    self.is_overloaded = True
                    break
                self._last_arrival_s = coming.time_s
                self._receive(coming)
                coming = next(source, None)
            if self.is_overloaded or not events:
                break
            now_s, replica, version = heapq.heappop(events)
            if version == versions[replica]:
                answered = self.replicas[replica].step()
                self._expect(replica)
                if answered is not None:
                    self._answered(answered, now_s)
        self.queues.close(self._last_s)

    def _receive(self, request: Request) -> None:
        if self._first_s is None:
            self._first_s = request.time_s
        session = request.session
        if session is not None:
            if session in self._sessions:
                behind = self._sessions[session]
                if behind is None:
                    self._sessions[session] = deque((request,))
                else:
                    behind.append(request)
                return
            self._sessions[session] = None
        self._dispatch(request, request.time_s)

    def _dispatch(self, request: Request, now_s: float) -> None:
        number = self.router.choose(request, self.queues.lengths, now_s)
        self.queues.change(number, 1, now_s)
        replica = self.replicas[number]
        if (rule := replica.cache.rule) is not None:
            rule.begin(request.session, request.agent, now_s)
        if replica.enqueue(Running(request, number, now_s), now_s):
            self._expect(number)

    def _expect(self, number: int) -> None:
        self._versions[number] += 1
        when = self.replicas[number].next_s
        if when < math.inf:
            heapq.heappush(self._events, (when, number, self._versions[number]))

    def _answered(self, running: Running, now_s: float) -> None:
        request, number = running.request, running.replica
        self.num_answered += 1
        self._last_s = now_s
        self.queues.change(number, -1, now_s)
        self.prompt_tokens += request.num_prompt
        self.cached_tokens += running.num_cached
        self.ttft.add(running.first_token_s - running.arrived_s)
        self.latency.add(now_s - running.arrived_s)
        session = request.session
        if (rule := self.replicas[number].cache.rule) is not None:
            rule.used(session or f"#{self.num_answered}", request.agent, request.blocks)
            if self.settings.told and request.is_last and session is not None:
                for replica in self.replicas:
                    assert replica.cache.rule is not None
                    replica.cache.rule.end(session)
        self.router.answered(request, number, now_s, running.num_cached)
        if session is not None:
            behind = self._sessions[session]
            if behind is None:
                del self._sessions[session]
            else:
                following = behind.popleft()
                if not behind:
                    self._sessions[session] = None
                self._dispatch(following, now_s)

    def report(self) -> dict[str, Any]:
        """What was measured: times in seconds, `hit_rate` of prompt tokens."""
        first_s = self._first_s or 0.0
        elapsed, arriving = self._last_s - first_s, self._last_arrival_s - first_s
        return {
            "requests": self.num_requests,
            "answered": self.num_answered,
            "overloaded": self.is_overloaded or elapsed > BEHIND * arriving + BEHIND_S,
            "hit_rate": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.prompt_tokens - self.cached_tokens,
            "ttft_s": self.ttft.summary(),
            "turn_s": self.latency.summary(),
            "turns_per_s": self.num_answered / elapsed if elapsed > 0 else 0.0,
            "simulated_s": elapsed,
            "longest_imbalance_s": self.queues.longest_s,
            "max_queue": self.queues.max_length,
        }

    def check_integrity(self) -> None:
        """Raises AssertionError unless every cache and the queues are in order, and all blocks are free when idle."""
        self.queues.check_integrity()
        for number, replica in enumerate(self.replicas):
            replica.cache.check_integrity()
            if not self.queues.lengths[number]:
                assert replica.cache.num_held == 0
                assert replica.num_running == 0
