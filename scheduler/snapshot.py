"""What the scheduler publishes, as one value: routers, replicas and prewarmers read it locally."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ropewalk.agents.profiles import AnchorIndex, Profile
from ropewalk.agents.sessions import Past
from ropewalk.agents.sketch import AnchorSketch, clean_agent_name
from ropewalk.scheduler.handovers import Predictability

LIVE_S = 60.0
"""Seconds since its last turn for which a session's outlook is published, and counts as load of its replica: one that
waits longer, for a person or a long tool run, gives no notice of when it goes on."""


@dataclass(frozen=True, slots=True)
class Warmth:
    """An agent's anchor on one replica: when it was last used there."""

    replica: str
    node: str
    last_s: float


@dataclass(frozen=True, slots=True)
class AgentView:
    """What a snapshot says about one agent.

    `next`: (agent, probability, count) likeliest first. `warm`: most recent first. `anchor_tokens`: estimated length.
    """

    agent: str
    named: bool
    num_requests: int
    several_sessions: bool
    survival: float
    anchor_tokens: int
    profile: Profile | None
    next: tuple[tuple[str, float, int], ...]
    warm: tuple[Warmth, ...]
    model: str = ""


class SessionView(NamedTuple):
    """What a snapshot says about one session, as its last turn left it; fields as `agents.sessions.SessionState`."""

    agent: str | None
    replicas: tuple[str, ...]
    prompt_tokens: int
    last_s: float = 0.0
    spoke: Mapping[str, tuple[str, float]] = {}


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a session stands that had a turn in the last `LIVE_S` seconds; fields as `agents.sessions.SessionState`."""

    session: str
    past: Past
    group: str | None
    last_s: float


@dataclass(frozen=True)
class Snapshot:
    """What routers and replicas read locally. `version` differs whenever the content does, across restarts too.

    `groups`: how predictable the sessions are that begin with an agent. `predictability`: that of all sessions.
    `stands`: the sessions that had a turn just now, most recent first, at most `MAX_STANDS`. `outlooks`: for each past
    of theirs the `OUTLOOK_AGENTS` that are needed first, and in how many turns. `replicas`: those of each model that
    prewarm and were heard of just now, with their nodes.
    """

    version: int
    time_s: float
    agents: Mapping[str, AgentView]
    sessions: Mapping[str, SessionView]
    predictability: float
    num_handovers: int
    num_observations: int
    groups: Mapping[str, Predictability] = field(default_factory=dict)
    stands: tuple[Stand, ...] = ()
    outlooks: Mapping[Past, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    replicas: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    @cached_property
    def index(self) -> AnchorIndex:
        """Finds agents by sketch, built on first use."""
        return AnchorIndex({a: v.profile for a, v in self.agents.items() if v.profile is not None})

    @cached_property
    def sessions_by_replica(self) -> Mapping[str, int]:
        """Sessions whose last turn was on each replica, in the last `LIVE_S` seconds: most of the others have ended."""
        first_s = self.time_s - LIVE_S
        return Counter(view.replicas[0] for view in self.sessions.values() if view.replicas and view.last_s >= first_s)

    def agent_of(self, name: str | None, sketch: AnchorSketch | None) -> str | None:
        """The agent of a request: its explicit name, else the one its sketch matches, else None."""
        return clean_agent_name(name) or (self.index.match(sketch) if sketch else None)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        agents = {
            agent: {
                **{f.name: getattr(view, f.name) for f in dataclasses.fields(view)},
                "profile": None if view.profile is None else view.profile.to_dict(),
                "next": [list(item) for item in view.next],
                "warm": [dataclasses.asdict(w) for w in view.warm],
            }
            for agent, view in self.agents.items()
        }
        return {
            "version": self.version,
            "time_s": self.time_s,
            "agents": agents,
            "sessions": {
                session: view._asdict() | {"replicas": list(view.replicas), "spoke": dict(view.spoke)}
                for session, view in self.sessions.items()
            },
            "predictability": self.predictability,
            "num_handovers": self.num_handovers,
            "num_observations": self.num_observations,
            "groups": {group: [p.r, p.num_handovers] for group, p in self.groups.items()},
            "stands": [[s.session, list(s.past), s.group, s.last_s] for s in self.stands],
            "outlooks": [[list(past), [list(item) for item in nearest]] for past, nearest in self.outlooks.items()],
            "replicas": {model: [list(pair) for pair in pairs] for model, pairs in self.replicas.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Snapshot:
        """Inverse of `to_dict`, up to the rounding of supports."""
        agents = {
            agent: AgentView(
                **{
                    **view,
                    "profile": None if view["profile"] is None else Profile.from_dict(view["profile"]),
                    "next": tuple((str(a), float(p), int(n)) for a, p, n in view["next"]),
                    "warm": tuple(Warmth(**w) for w in view["warm"]),
                }
            )
            for agent, view in data["agents"].items()
        }
        sessions = {
            session: SessionView(
                **{
                    **view,
                    "replicas": tuple(view["replicas"]),
                    "spoke": {agent: (replica, float(time_s)) for agent, (replica, time_s) in view["spoke"].items()},
                }
            )
            for session, view in data["sessions"].items()
        }
        groups = {group: Predictability(float(r), int(n)) for group, (r, n) in data["groups"].items()}
        stands = tuple(Stand(s, tuple(past), group, float(at)) for s, past, group, at in data["stands"])
        outlooks = {tuple(past): tuple((str(a), float(t)) for a, t in near) for past, near in data["outlooks"]}
        replicas = {m: tuple((str(r), str(node)) for r, node in pairs) for m, pairs in data["replicas"].items()}
        more = {"agents": agents, "sessions": sessions, "groups": groups}
        return cls(**{**data, **more, "stands": stands, "outlooks": outlooks, "replicas": replicas})


EMPTY_SNAPSHOT = Snapshot(0, 0.0, {}, {}, 0.0, 0, 0)
"""What is known before the scheduler has said anything."""
