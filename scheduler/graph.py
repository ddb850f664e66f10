"""What the scheduler knows, for people and tools: the body of `GET /v1/agents`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.scheduler.snapshot import Snapshot
from ropewalk.scheduler.state import SchedulerState

PAYLOAD_VERSION = 1
"""Format of `/v1/agents`; raised when a reader of the old one would misread the new one."""


def graph_payload(source: SchedulerState | Snapshot) -> dict[str, Any]:
    """The body of `GET /v1/agents`: agents, hand-overs and how predictable they are (docs/scheduler.md).

    From a Snapshot, when the scheduler cannot be asked, the payload has `"complete": false`, only the likeliest
    hand-overs of each agent, and no token counts.
    """
    if isinstance(source, Snapshot):
        at: dict[str, int] = {}
        for session in source.sessions.values():
            if session.agent is not None:
                at[session.agent] = at.get(session.agent, 0) + 1
        agents: Sequence[Mapping[str, Any]] = [
            {
                "id": view.agent,
                "named": view.named,
                "requests": view.num_requests,
                "survival": round(view.survival, 4),
                "sessions": at.get(view.agent, 0),
                "anchor_tokens": view.anchor_tokens,
                "warm_replicas": [w.replica for w in view.warm],
            }
            for view in source.agents.values()
        ]
        edges = [
            {"source": view.agent, "target": agent, "count": count, "probability": round(probability, 4)}
            for view in source.agents.values()
            for agent, probability, count in view.next
        ]
        return _payload(source, agents, edges, len(source.sessions), complete=False)
    graph = source.graph()
    agents = [
        {"id": agent, **{k: round(v, 4) if isinstance(v, float) else v for k, v in data.items()}}
        for agent, data in graph.nodes(data=True)
    ]
    edges = [
        {"source": a, "target": b, "count": data["count"], "probability": round(data["probability"], 4)}
        for a, b, data in graph.edges(data=True)
    ]
    return _payload(source.snapshot(), agents, edges, len(source.sessions), complete=True)


def _payload(
    snapshot: Snapshot,
    agents: Sequence[Mapping[str, Any]],
    edges: Sequence[Mapping[str, Any]],
    num_sessions: int,
    *,
    complete: bool,
) -> dict[str, Any]:
    return {
        "format": PAYLOAD_VERSION,
        "version": snapshot.version,
        "complete": complete,
        "predictability": round(snapshot.predictability, 4),
        "handovers": snapshot.num_handovers,
        "observations": snapshot.num_observations,
        "live_sessions": num_sessions,
        "groups": [
            {"id": group, "predictability": round(found.r, 4), "handovers": found.num_handovers}
            for group, found in sorted(snapshot.groups.items(), key=lambda item: (-item[1].num_handovers, item[0]))
        ],
        "agents": sorted(agents, key=lambda agent: (-agent["requests"], agent["id"])),
        "transitions": sorted(edges, key=lambda edge: (edge["source"], -edge["count"], edge["target"])),
    }
