"""Where each session stands: the agents that had the floor last and the replicas that hold its cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

MAX_PAST = 3
"""Agents remembered a session: as many as the learner of hand-overs looks back."""

MAX_REPLICAS = 4
"""Replicas remembered a session: one for each model it talks to; programs with more than four models are rare."""

MAX_SPOKE = 8
"""Agents of a session whose replica is remembered: more than speak in most group chats."""

Past = tuple[str, ...]


@dataclass(slots=True)
class SessionState:
    """One session.

    `past`: the last agents that had the floor, oldest first; an agent that kept it stands there once. `group`: the
    first agent of the session, None until one is recognised, or when it was forgotten since. `replicas`: most recent
    first. `prompt_tokens`: of the last turn. `spoke`: on which replica each agent spoke last, and when; who has spoken
    most recently is last.
    """

    past: Past = ()
    group: str | None = None
    replicas: tuple[str, ...] = ()
    prompt_tokens: int = 0
    num_turns: int = 0
    last_s: float = 0.0
    spoke: dict[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def agent(self) -> str | None:
        """The agent that has the floor, None when none was recognised."""
        return self.past[-1] if self.past else None


class SessionTable:
    """Sessions by id, at most `max_sessions`, each forgotten `ttl_s` seconds after its last turn.

    Times are those of the observations; the table has no clock of its own.
    """

    def __init__(self, max_sessions: int = 4096, ttl_s: float = 1800.0) -> None:
        if max_sessions < 1:
            raise ValueError(f"max_sessions must be at least 1, got {max_sessions!r}")
        if not ttl_s > 0:
            raise ValueError(f"ttl_s must be positive, got {ttl_s!r}")
        self.max_sessions = max_sessions
        self.ttl_s = ttl_s
        self._sessions: OrderedDict[str, SessionState] = OrderedDict()
        # How many sessions stand at each past, kept up to date: survival asks for it at every snapshot.
        self._at_past: dict[Past, int] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session: str) -> SessionState | None:
        """The session's state, None when unknown; not to be changed. Does not count as use."""
        return self._sessions.get(session)

    def group(self, session: str | None) -> str | None:
        """The first agent of a session that is known."""
        state = self._sessions.get(session) if session is not None else None
        return None if state is None else state.group

    def update(
        self, session: str, agent: str | None, replica: str | None, time_s: float, prompt_tokens: int = 0
    ) -> Past | None:
        """Record a turn and return the agents before it: `past` as it was, empty for the first turn.

        A turn without a recognised agent (None) leaves the session at the agents it had. So does one that is reported
        after a later one, as replicas report in batches of their own: None, for it is not known what came before it.
        """
        sessions = self._sessions
        for oldest in sessions.values():
            if time_s - oldest.last_s > self.ttl_s:
                self.expire(time_s)
            break
        state = sessions.get(session)
        if state is None:
            state = sessions[session] = SessionState(last_s=time_s)
            if len(sessions) > self.max_sessions:
                self._drop(next(iter(sessions)))
        state.num_turns += 1
        replicas = state.replicas
        if time_s < state.last_s:
            if replica is not None and replica not in replicas:
                state.replicas = (*replicas, replica)[:MAX_REPLICAS]
            if replica is not None and agent is not None:
                known = state.spoke.get(agent)
                if (len(state.spoke) < MAX_SPOKE) if known is None else known[1] <= time_s:
                    state.spoke[agent] = replica, time_s
            return None
        state.last_s = time_s
        sessions.move_to_end(session)
        if prompt_tokens:
            state.prompt_tokens = prompt_tokens
        if replica is not None and not (replicas and replicas[0] == replica):
            state.replicas = (replica, *(r for r in replicas if r != replica))[:MAX_REPLICAS]
        if replica is not None and agent is not None:
            spoke = state.spoke
            spoke.pop(agent, None)
            spoke[agent] = replica, time_s
            if len(spoke) > MAX_SPOKE:
                del spoke[next(iter(spoke))]
        past = state.past
        if agent is not None and not (past and past[-1] == agent):
            if not past and state.group is None:
                state.group = agent
            state.past = now = (*past[1 - MAX_PAST :], agent)
            at = self._at_past
            at[now] = at.get(now, 0) + 1
            if past:
                self._leave(past)
        return past

    def expire(self, now_s: float) -> int:
        """Forget sessions idle for longer than `ttl_s`; returns how many. Stops at the first that is not idle."""
        count = 0
        while self._sessions:
            session, state = next(iter(self._sessions.items()))
            if now_s - state.last_s <= self.ttl_s:
                break
            self._drop(session)
            count += 1
        return count

    def recent(self, limit: int) -> Iterator[tuple[str, SessionState]]:
        """At most `limit` sessions, most recent first."""
        for (session, state), _ in zip(reversed(self._sessions.items()), range(limit), strict=False):
            yield session, state

    def live_pasts(self) -> Mapping[Past, int]:
        """How many sessions stand at each past; sessions without a recognised agent do not count."""
        return self._at_past

    def live_agents(self) -> dict[str, int]:
        """How many sessions stand at each agent."""
        at: dict[str, int] = {}
        for past, count in self._at_past.items():
            at[past[-1]] = at.get(past[-1], 0) + count
        return at

    def agents(self) -> set[str]:
        """All agents that the table speaks of."""
        groups = {state.group for state in self._sessions.values() if state.group is not None}
        return groups.union(*self._at_past, *(state.spoke for state in self._sessions.values()))

    def rename_agent(self, old: str, new: str | None) -> None:
        """What was said of `old` is said of `new`, where the two stood side by side once.

        When `new` is None the agent is forgotten: of a past only what came after it is left, since what came before and
        after it did not follow each other.
        """
        if old == new:
            return
        for state in self._sessions.values():
            if state.group == old:
                state.group = new
            if old in state.spoke:
                spoke = state.spoke
                both = [spoke.pop(old)] if new is None or new not in spoke else [spoke.pop(old), spoke.pop(new)]
                if new is not None:
                    spoke[new] = max(both, key=lambda one: one[1])
            if old not in state.past:
                continue
            past: Past = ()
            for agent in state.past:
                name = new if agent == old else agent
                if name is None:
                    past = ()
                elif past[-1:] != (name,):
                    past = (*past, name)
            self._move(state, past)

    def clear(self) -> None:
        """Forget all sessions."""
        self._sessions.clear()
        self._at_past.clear()

    def _move(self, state: SessionState, past: Past) -> None:
        self._leave(state.past)
        state.past = past
        if past:
            self._at_past[past] = self._at_past.get(past, 0) + 1

    def _drop(self, session: str) -> None:
        self._leave(self._sessions.pop(session).past)

    def _leave(self, past: Past) -> None:
        if past:
            count = self._at_past[past]
            if count > 1:
                self._at_past[past] = count - 1
            else:
                del self._at_past[past]

    def to_dict(self) -> dict[str, Any]:
        """JSON form: agents and replicas once; then, oldest first, `[session, past, group, replicas, prompt_tokens,
        num_turns, age]` each, agents and replicas by number, age in milliseconds before `time_s`.

        Not `spoke`: it would be most of the file, and who is taken to be new to a session is sent where it was last.
        """
        agents: dict[str, int] = {}
        replicas: dict[str, int] = {}
        time_s = max((state.last_s for state in self._sessions.values()), default=0.0)
        rows = [
            [
                session,
                [agents.setdefault(agent, len(agents)) for agent in s.past],
                None if s.group is None else agents.setdefault(s.group, len(agents)),
                [replicas.setdefault(replica, len(replicas)) for replica in s.replicas],
                s.prompt_tokens,
                s.num_turns,
                round(1_000 * (time_s - s.last_s)),
            ]
            for session, s in self._sessions.items()
        ]
        return {"time_s": time_s, "agents": list(agents), "replicas": list(replicas), "rows": rows}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], max_sessions: int = 4096, ttl_s: float = 1800.0) -> SessionTable:
        """Inverse of `to_dict`, times to the millisecond; keeps the `max_sessions` most recent.

        Raises ValueError, IndexError, KeyError or TypeError on a damaged form.
        """
        table = cls(max_sessions, ttl_s)
        agents = [str(agent) for agent in data["agents"]]
        names = [str(replica) for replica in data["replicas"]]
        for session, past, group, replicas, prompt_tokens, num_turns, age in data["rows"][-max_sessions:]:
            state = table._sessions[str(session)] = SessionState(
                group=None if group is None else agents[group],
                replicas=tuple(names[replica] for replica in replicas),
                prompt_tokens=int(prompt_tokens),
                num_turns=int(num_turns),
                last_s=float(data["time_s"]) - int(age) / 1_000,
            )
            table._move(state, tuple(agents[agent] for agent in past))
        return table

    def check_integrity(self) -> None:
        """Raises AssertionError unless the bounds hold and the counts by past are right."""
        assert len(self._sessions) <= self.max_sessions
        assert all(len(s.replicas) == len(set(s.replicas)) <= MAX_REPLICAS for s in self._sessions.values())
        for state in self._sessions.values():
            assert len(state.past) <= MAX_PAST
            assert len(state.spoke) <= MAX_SPOKE
            assert all(a != b for a, b in pairwise(state.past))
        assert self._at_past == Counter(s.past for s in self._sessions.values() if s.past)
