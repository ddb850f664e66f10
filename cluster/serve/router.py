"""Chooses the replica for a request: Ray Serve's end of `ropewalk.scheduler.routing`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.request_router import LocalityMixin, MultiplexMixin, RequestRouter

from ropewalk.cluster.engine.request import Mode
from ropewalk.cluster.serve.hints import request_hints
from ropewalk.cluster.serve.reasons import reasons_of
from ropewalk.scheduler.client import SchedulerClient
from ropewalk.scheduler.routing import LocalAffinity, ReplicaView, RequestHints, agent_key, rank_replicas

logger = logging.getLogger("ray.serve")


class AgentRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Session affinity, anchor affinity and load, over the scheduler's last snapshot and its own memory.

    Requests are matched to the replica chosen for *them* (no FIFO mixin, which may hand a choice to another request).
    `choose_replicas` never raises: an exception there leaves the request waiting for ever. Whatever goes wrong is
    counted and the choice falls back to the better of two random replicas.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reasons = reasons_of(self._deployment_id.name)
        self._affinity = LocalAffinity()
        self._alive: set[str] = set()
        self._ongoing: Counter[str] = Counter()
        self._scheduler: SchedulerClient | None = None
        self._has_store = True
        self._mode: Mode = "exact"

    def initialize_state(self, scheduler: bool = True, store: bool = True, mode: Mode = "exact") -> None:
        """Called by Ray Serve with `request_router_kwargs`.

        `scheduler`: the cluster has Ropewalk's scheduler, whose snapshots say what is warm where. `store`: the replicas
        of a node share a chunk store. Replicas of plain vLLM have neither. `mode`: of requests that do not say.
        """
        self._scheduler = SchedulerClient(create=False) if scheduler else None
        self._has_store = store
        self._mode = mode

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        alive = {_name(replica.replica_id) for replica in replicas}
        if gone := self._alive - alive:  # else all that is remembered would be walked for nothing, in the event loop
            self._affinity.keep_only(alive)
            for name in gone:
                self._ongoing.pop(name, None)
        self._alive = alive

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """One iteration of replica selection: ranks of one replica each, the best first."""
        try:
            if pending_request is None:
                return await self._power_of_two(candidate_replicas, pending_request)
            # Without this Ray asks again at once, in a busy loop, while no replica accepts.
            pending_request.routing_context.should_backoff = True
            return self._ranks(candidate_replicas, pending_request)
        except Exception:  # whatever it is, the request would wait for ever
            self.reasons["router-error"] += 1
            logger.exception("Ranking replicas failed; falling back to two random ones")
        try:
            return await self._power_of_two(candidate_replicas, pending_request)
        except Exception:  # for the same reason: any replica is better than none
            return [list(candidate_replicas)]

    def _ranks(self, candidates: list[Any], pending_request: Any) -> list[list[Any]]:
        hints = _hints(pending_request, self._mode)
        snapshot = self._scheduler.snapshot if self._scheduler is not None else None
        self._affinity.saw(snapshot)
        agent = agent_key(hints, snapshot)
        replicas = {_name(replica.replica_id): replica for replica in candidates}
        views = [self._view(name, replica) for name, replica in replicas.items()]
        ranking = rank_replicas(hints, views, snapshot, self._affinity, agent)
        self.reasons[str(ranking.reason)] += 1
        if ranking.order:
            # At once, not when the replica has accepted: requests that arrive together must see each other.
            self._affinity.remember(ranking.order[0], hints.session, agent, time.time())
        return [[replicas[name]] for name in ranking.order]

    def _view(self, name: str, replica: Any) -> ReplicaView:
        # Ray's cache forgets a queue length after some seconds without news, so busy replicas would look idle.
        queue_len = max(self._replica_queue_len_cache.get(replica.replica_id) or 0, self._ongoing[name])
        # On which node a replica is says what its store has; without one, nothing.
        node = replica.node_id if self._has_store else None
        return ReplicaView(name, queue_len, node, replica.max_ongoing_requests)

    async def _power_of_two(self, candidates: list[Any], pending_request: Any) -> list[list[Any]]:
        chosen: list[list[Any]] = await PowerOfTwoChoicesRequestRouter.choose_replicas(
            self, candidates, pending_request
        )
        return chosen

    def on_send_request(self, replica_id: Any) -> None:
        # Not when it is accepted: whatever was sent is completed once, though it be refused or given up.
        super().on_send_request(replica_id)
        self._ongoing[_name(replica_id)] += 1

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        name = _name(replica_id)
        self._ongoing[name] = max(0, self._ongoing[name] - 1)
        if name not in self._alive:
            del self._ongoing[name]


def _name(replica_id: Any) -> str:
    return str(replica_id.unique_id)


def _hints(pending_request: Any, mode: Mode) -> RequestHints:
    request = pending_request.args[0] if pending_request.args else None
    info = pending_request.args[1] if len(pending_request.args) > 1 else None
    headers: Mapping[str, str] = info.headers if info is not None else {}
    hints = request_hints(request, headers, mode)
    if hints.session is None and pending_request.metadata.session_id:
        return replace(hints, session=pending_request.metadata.session_id)
    return hints
