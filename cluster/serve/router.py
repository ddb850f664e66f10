"""Chooses the replica for a request: where its session and anchor are warm, unless that replica is too busy."""

from __future__ import annotations

import logging
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.request_router import LocalityMixin, MultiplexMixin, RequestRouter

logger = logging.getLogger("ray.serve")


class AgentRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Session affinity, anchor affinity and load, over the scheduler's snapshot.

    Requests are matched to the replica chosen for *them* (no FIFO mixin, which may hand a choice to another request).
    `choose_replicas` never raises: an exception there leaves the request waiting for ever. Whatever goes wrong is
    counted and the choice falls back to the better of two random replicas.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_fallbacks = 0

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """One iteration of replica selection: ranks of replicas, the best first."""
        try:
            if pending_request is not None:
                # Without this Ray asks again at once, in a busy loop, while no replica accepts.
                pending_request.routing_context.should_backoff = True
            return await PowerOfTwoChoicesRequestRouter.choose_replicas(self, candidate_replicas, pending_request)
        except Exception:
            self.num_fallbacks += 1
            logger.exception("Choosing a replica failed; falling back to two random ones")
            return [list(candidate_replicas)]
