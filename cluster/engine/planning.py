"""From a turn to its plan: by what the store holds, and what stages have cost on this engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from ropewalk.cluster.engine.pending import PendingSaves, heads_of
from ropewalk.cluster.engine.request import RequestReport, RequestSettings
from ropewalk.cluster.engine.sessions import Sessions, Turn
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.scheduler.costs import LEAST_RUN, StageCost
from ropewalk.scheduler.plan import Plan, empty_plan
from ropewalk.scheduler.planner import PlannerSettings, make_plan

logger = logging.getLogger(__name__)

SAVE_WAIT_SHARE = 0.25
"""Of the time that a prompt's prefill would take, so much is waited for what may spare it. On CPUs a save takes some
15 % of that: a tenth would make a client's second request miss what its first one left."""

MAX_SAVE_WAIT = 0.1
"""Seconds waited for that at most: a save takes some milliseconds, unless it waits behind many others."""

SPLICE_WAIT_SHARE, MAX_SPLICE_WAIT = 1.0, 1.0
"""The same for the rows of a session's own history, and seconds at most: what is waited for is known by name, was
computed by the turn before, and comes for certain unless it was dropped."""


class Planning:
    """Plans of one engine. `store` opens a tenant's; `fixed_run` is the shortest run worth a stage, if it is not to be
    learned. `settings.block_size` is None where vLLM has no prefix cache; its blocks have `block_size` tokens anyway.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        block_size: int,
        store: Callable[[str], NodeStore],
        sessions: Sessions,
        fixed_run: int | None,
        max_hold_s: float,
    ) -> None:
        self.settings = settings
        self.pending = PendingSaves(max_hold_s)
        self._block_size = block_size
        self._store = store
        self._sessions = sessions
        self._fixed_run = fixed_run
        self.forget_costs()

    @property
    def is_batched(self) -> bool:
        """Whether all stages run in one step with the request."""
        return self.settings.block_size is not None

    @property
    def min_run(self) -> int:
        """Shortest run, in tokens, that is taken."""
        return self._fixed_run or self.cost.min_run

    def forget_costs(self) -> None:
        """Forget what was learned of costs. A batched stage costs little more than being scheduled."""
        self.cost = StageCost(LEAST_RUN if self.is_batched else None)

    async def wait_for_saves(self, turn: Turn, settings: RequestSettings, num_running: int) -> None:
        """Wait a little for what is being stored, if this request may find it there.

        An exact request finds its prefix in vLLM's own cache, where there is one.
        """
        if not len(self.pending):
            return
        cost = self.cost.per_token_s * len(turn.tokens)
        if turn.held is not None:
            chains = {rows.chunk for rows in turn.held.rows if rows.end > turn.held.inexact_from}
            # Beside others, computing them would take as many times longer.
            seconds = min(SPLICE_WAIT_SHARE * cost * max(num_running, 1), MAX_SPLICE_WAIT)
            await self.pending.wait_for(self._store(settings.tenant), chains, seconds)
        elif settings.mode == "reuse" or not self.is_batched:
            heads = heads_of(turn.tokens, settings.tenant, self.settings.chunks)
            await self.pending.wait(min(SAVE_WAIT_SHARE * cost, MAX_SAVE_WAIT), heads)

    def plan(self, turn: Turn, settings: RequestSettings, report: RequestReport, *, reuse_refused: str | None) -> Plan:
        """Plan one turn; what cannot be had is named in `report`."""
        tokens, reuse, held = turn.tokens, turn.reuse, turn.held
        if settings.mode == "reuse" and not reuse:
            report.fallbacks.append("forgotten")
        if reuse and reuse_refused is not None:
            report.fallbacks.append("reuse_refused")
            reuse = False
        if reuse and not settings.keep and not self.is_batched:
            report.fallbacks.append("stages_need_the_store")
            reuse, held = False, None
        store = self._store(settings.tenant)
        boundary = self.settings.boundary if settings.boundary is None else settings.boundary
        per_position = self.cost.per_position if self._fixed_run is None else 0.0
        planner = replace(self.settings, min_run=self.min_run, per_position=per_position, boundary=boundary)
        try:
            plan = make_plan(tokens, settings.tenant, store, planner, reuse=reuse, held=held, scratch=turn.scratch)
            if self._sessions.lost(turn, plan, store):
                report.fallbacks.append("lineage_lost")
            first = plan.first_inexact
            inexact = [n for n in (*plan.stages, plan.num_tokens) if first is not None and first < n]
            if inexact and min(inexact) < self._block_size:
                # No full block could carry the reuse domain's hash.
                report.fallbacks.append("shorter_than_a_block")
                plan = make_plan(tokens, settings.tenant, store, planner, reuse=False, scratch=turn.scratch)
            if not settings.rotate:
                plan = replace(plan, segments=tuple(replace(segment, turn=0) for segment in plan.segments))
        except OSError as error:
            logger.warning("Planning without the store: %s", error)
            report.fallbacks.append("store_unreadable")
            plan = empty_plan(len(tokens), turn.scratch)
        return plan
