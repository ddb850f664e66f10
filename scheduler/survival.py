"""How likely an anchor is needed soon: breadth-first survival over likely hand-overs (CacheScout)."""

from __future__ import annotations

from collections.abc import Mapping

from ropewalk.scheduler.transitions import TransitionCounts

TAU = 0.1
"""Hand-overs less likely than this are not followed (CacheScout)."""

MAX_HOPS = 6
"""`E_max` of CacheScout: an agent this many hand-overs away is as good as gone."""


def hops(
    transitions: TransitionCounts,
    agent: str,
    tau: float = TAU,
    max_hops: int = MAX_HOPS,
    likely: dict[str, list[str]] | None = None,
) -> dict[str, int]:
    """`E[a]`: hand-overs from `agent` to each agent it reaches over edges with `P >= tau` in fewer than `max_hops`.

    The agent itself is at 0. Breadth first, so every distance is the shortest. `likely` keeps the edges followed, by
    agent, for the next call on unchanged transitions.
    """
    likely = {} if likely is None else likely
    distance = {agent: 0}
    frontier = [agent]
    for step in range(1, max_hops):
        reached = []
        for current in frontier:
            if current not in likely:
                likely[current] = [other for other, p in transitions.predict(current) if p >= tau]
            for other in likely[current]:
                if other not in distance:
                    distance[other] = step
                    reached.append(other)
        if not reached:
            break
        frontier = reached
    return distance


def survival(
    transitions: TransitionCounts, live_agents: Mapping[str, int], tau: float = TAU, max_hops: int = MAX_HOPS
) -> dict[str, float]:
    """Survival of every reachable agent's anchor, in (0, 1]; agents not in the result have none.

    One session at agent `c` gives each agent `a` `p_surv = 1 - min(E, E_max) / E_max`. Over the live sessions
    (`live_agents`: how many stand at each agent) the values are averaged: the result ranks anchors by how much of the
    load needs them soon. A maximum, or the chance that any session does, is 1 for nearly all anchors as soon as some
    dozen sessions are live, and then ranks nothing.
    """
    if max_hops < 1:
        raise ValueError(f"max_hops must be at least 1, got {max_hops!r}")
    total = sum(live_agents.values())
    result: dict[str, float] = {}
    likely: dict[str, list[str]] = {}
    for agent, num_sessions in live_agents.items():
        for other, distance in hops(transitions, agent, tau, max_hops, likely).items():
            result[other] = result.get(other, 0.0) + num_sessions / total * (1 - distance / max_hops)
    return {agent: min(1.0, value) for agent, value in result.items()}
