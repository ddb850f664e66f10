"""Which agent sent this request: a registry that recognises anchors again.

A request with a name belongs to the agent of that name. Without one it belongs to the agent whose profile contains its
sketch, else to a new one. Profiles that turn out to hold two agents are split (see `ropewalk.agents.profiles`), and
*folded*: many look-alikes seen once each are one agent behind a header that never repeats.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ropewalk.agents.profiles import (
    HISTORY_SESSIONS,
    MATCH_CONTAINMENT,
    MIN_EXPLAINED,
    AnchorHistory,
    AnchorIndex,
    Profile,
)
from ropewalk.agents.sketch import AnchorSketch, clean_agent_name

ADOPT_SESSIONS = (4, 8, 16, HISTORY_SESSIONS)
"""Numbers of sessions at which an agent takes over its look-alikes: often enough, and too seldom to cost anything."""

FOLD_LOOKALIKES = 8
"""So many agents, each seen in a session of its own and never again, that share `FOLD_CONTAINMENT` with a request are
one agent. Fewer may well be the agents of a program behind one preamble on their first turn."""

FOLD_CONTAINMENT = 0.5
"""Half of the anchor must be common before look-alikes are folded."""

FOLD_BAND = 0.12
"""Look-alikes are as alike as the most alike of them less this, three standard errors of the sketches: agents that
merely share a preamble with the request lie further off."""


@dataclass(slots=True)
class AgentEntry:
    """One known agent. `named`: a client gave the name. `first_session`: the first it was seen in, if it had an id."""

    agent: str
    named: bool
    num_requests: int = 0
    first_session: str | None = None
    several_sessions: bool = False
    history: AnchorHistory = field(default_factory=AnchorHistory)


class Resolution(NamedTuple):
    """The agent of a request, and what had to change to say so."""

    agent: str | None
    created: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    """(old, new): what was learned about `old` belongs to `new` from here on."""
    evicted: tuple[str, ...] = ()
    """Agents forgotten because the registry was full."""


@dataclass(slots=True)
class AgentRegistry:
    """Recognises agents and remembers at most `max_agents` of them; the least recently seen is forgotten."""

    max_agents: int = 256
    index: AnchorIndex = field(default_factory=AnchorIndex)
    _entries: OrderedDict[str, AgentEntry] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        if self.max_agents < 2:
            raise ValueError(f"max_agents must be at least 2, got {self.max_agents!r}")

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, agent: str) -> bool:
        return agent in self._entries

    def entries(self) -> list[AgentEntry]:
        """Known agents, least recently seen first."""
        return list(self._entries.values())

    def again(self, name: object, session: str | None) -> str | None:
        """Count a request by the name of a known agent, without a sketch, and return the agent.

        None for any other name: then nothing is counted, and `resolve` says what that means.
        """
        entry = self._entries.get(name) if isinstance(name, str) else None
        if entry is None or not entry.named:
            return None
        self._entries.move_to_end(entry.agent)
        entry.num_requests += 1
        if not entry.several_sessions:
            entry.several_sessions = session != entry.first_session
        return entry.agent

    def resolve(self, name: str | None, sketch: AnchorSketch | None, session: str | None = None) -> Resolution:
        """Say which agent sent a request, and learn from it.

        An explicit `name` wins; its anchor is learned, so that later requests without the name are recognised, and an
        unnamed agent with that anchor takes the name. Without either there is no agent (`agent` is None).
        """
        name = clean_agent_name(name)
        if name is None and not sketch:
            return Resolution(None)
        renamed: list[tuple[str, str]] = []
        agent = name
        history: AnchorHistory | None = None
        if sketch and name is None:
            agent = self.index.match(sketch) or self._fold(sketch, renamed)
            if agent is not None and not self._entries[agent].named:
                history = self._entries[agent].history.split(sketch)
                if history is not None:
                    self.index.put(agent, self._entries[agent].history.profile())
                    agent = None
            if agent is None:
                agent = self._new_id(sketch)
        elif sketch and name is not None and self.index.get(name) is None:
            twin = self.index.match(sketch)
            if twin is not None and not self._entries[twin].named:
                self._rename(twin, name, renamed)
        assert agent is not None
        entry = self._entries.get(agent)
        created = entry is None
        if entry is None:
            entry = self._entries[agent] = AgentEntry(agent, named=name is not None, first_session=session)
        self._entries.move_to_end(agent)
        if history is not None:
            entry.history, entry.several_sessions = history, True
        entry.named = entry.named or name is not None
        entry.num_requests += 1
        entry.several_sessions = entry.several_sessions or session != entry.first_session
        if sketch:
            known = entry.history.num_sessions
            if entry.history.add(sketch, session):
                self.index.put(agent, entry.history.profile())
            if known < entry.history.num_sessions in ADOPT_SESSIONS:
                self._adopt(agent, renamed)
        evicted = tuple(self._evict()) if len(self._entries) > self.max_agents else ()
        return Resolution(agent, created, tuple(renamed), evicted)

    def _new_id(self, sketch: AnchorSketch) -> str:
        agent = f"agent-{sketch.fingerprint}"
        if agent not in self._entries:
            return agent
        # The same pieces once named an agent whose profile has moved on since.
        return next(name for n in range(2, len(self._entries) + 3) if (name := f"{agent}-{n}") not in self._entries)

    def _fold(self, sketch: AnchorSketch, renamed: list[tuple[str, str]]) -> str | None:
        """Fold look-alikes that were each seen in one session alone into the oldest of them, and return it."""
        once = [
            (contained, entry)
            for agent, contained, _ in self.index.candidates(sketch)
            if not (entry := self._entries[agent]).named and entry.history.num_sessions == 1
        ]
        least = max(FOLD_CONTAINMENT, max((contained for contained, _ in once), default=1.0) - FOLD_BAND)
        alike = [entry for contained, entry in once if contained >= least]
        # Look-alikes within one session are the agents of one program.
        sessions = [entry.first_session for entry in alike]
        if sessions.count(None) + len(set(sessions) - {None}) < FOLD_LOOKALIKES:
            return None
        keeper = alike[0]
        for entry in alike[1:]:
            keeper.history.absorb(entry.history)
            self._rename(entry.agent, keeper.agent, renamed)
        self.index.put(keeper.agent, keeper.history.profile())
        return keeper.agent

    def _adopt(self, agent: str, renamed: list[tuple[str, str]]) -> None:
        """Give an agent that knows its anchor by now the look-alikes that its first headers left behind."""
        profile = self.index.get(agent)
        if profile is None:
            return
        sharing = set().union(*(self.index.holders(piece) for piece in profile.support)) - {agent}
        for other in sorted(sharing):
            entry, seen = self._entries[other], self.index.get(other)
            if entry.named or entry.history.num_sessions > 1 or seen is None:
                continue
            match = self.index.candidates(seen.as_sketch(), {agent})
            if any(contained >= MATCH_CONTAINMENT and explained >= MIN_EXPLAINED for _, contained, explained in match):
                self._rename(other, agent, renamed)

    def _rename(self, old: str, new: str, renamed: list[tuple[str, str]]) -> None:
        """Give an agent's entry to `new`; when that is known already, only the counts."""
        entry, target, profile = self._entries.pop(old), self._entries.get(new), self.index.get(old)
        self.index.remove(old)
        if target is None:
            entry.agent = new
            target = self._entries[new] = entry
        else:
            target.num_requests += entry.num_requests
            target.several_sessions = target.several_sessions or entry.several_sessions
            if not target.history.num_sessions:
                target.history = entry.history
        if profile is not None and self.index.get(new) is None:
            self.index.put(new, profile)
        renamed.append((old, new))

    def _evict(self) -> Iterator[str]:
        while len(self._entries) > self.max_agents:
            agent, _ = self._entries.popitem(last=False)
            self.index.remove(agent)
            yield agent

    def to_dict(self) -> list[list[Any]]:
        """JSON form, least recently seen first: `[agent, named, num_requests, several_sessions, first_session,
        profile]` each, the profile with its regular pieces alone."""
        rows = []
        for entry in self._entries.values():
            profile = self.index.core(entry.agent)
            rows.append(
                [
                    entry.agent,
                    int(entry.named),
                    entry.num_requests,
                    int(entry.several_sessions),
                    # Asked for no more once several are known.
                    entry.first_session if entry.history.num_sessions == 1 or not entry.several_sessions else None,
                    None if profile is None else profile.to_dict(),
                ]
            )
        return rows

    @classmethod
    def from_dict(cls, rows: Sequence[Sequence[Any]], max_agents: int = 256) -> AgentRegistry:
        """Inverse of `to_dict`; keeps the `max_agents` most recently seen."""
        registry = cls(max_agents)
        for agent, named, num_requests, several_sessions, first_session, row in rows[-max_agents:]:
            profile = None if row is None else Profile.from_dict(row)
            registry._entries[str(agent)] = AgentEntry(
                str(agent),
                named=bool(named),
                num_requests=int(num_requests),
                several_sessions=bool(several_sessions),
                first_session=first_session,
                history=AnchorHistory() if profile is None else AnchorHistory.restored(profile),
            )
            if profile is not None:
                registry.index.put(str(agent), profile)
        return registry

    def check_integrity(self) -> None:
        """Raises AssertionError unless the bounds hold and every profile belongs to a known agent."""
        assert len(self._entries) <= self.max_agents
        assert all(entry.agent == agent for agent, entry in self._entries.items())
        for agent, entry in self._entries.items():
            assert entry.num_requests >= 1
            entry.history.check_integrity()
            assert (self.index.get(agent) is None) == (entry.history.num_sessions == 0)
        assert sum(entry.history.num_sessions > 0 for entry in self._entries.values()) == len(self.index)
        self.index.check_integrity()
