"""Where each session stands: its current agent and the replicas that hold its cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_REPLICAS = 4
"""Replicas remembered a session: one for each model it talks to; programs with more than four models are rare."""


@dataclass(frozen=True, slots=True)
class SessionState:
    """One session: current `agent` (None: not recognised), `replicas` most recent first, tokens of the last prompt."""

    agent: str | None = None
    replicas: tuple[str, ...] = ()
    prompt_tokens: int = 0
    num_turns: int = 0
    last_s: float = 0.0


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
        # How many sessions stand at each agent, kept up to date: survival asks for it at every snapshot.
        self._at_agent: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session: str) -> SessionState | None:
        """The session's state, None when unknown. Does not count as use."""
        return self._sessions.get(session)

    def update(
        self, session: str, agent: str | None, replica: str | None, time_s: float, prompt_tokens: int = 0
    ) -> str | None:
        """Record a turn and return the agent of the turn before.

        A turn without a recognised agent (None) leaves the session at the agent it had. So does one that is reported
        after a later one, as replicas report in batches of their own: it has no turn before it.
        """
        self.expire(time_s)
        old = self._sessions.get(session, SessionState())
        if time_s < old.last_s:
            replicas = old.replicas if replica is None or replica in old.replicas else (*old.replicas, replica)
            late = SessionState(old.agent, replicas[:MAX_REPLICAS], old.prompt_tokens, old.num_turns + 1, old.last_s)
            self._put(session, late, touch=False)
            return None
        replicas = old.replicas
        if replica is not None and replicas[:1] != (replica,):
            replicas = (replica, *(r for r in replicas if r != replica))[:MAX_REPLICAS]
        self._put(
            session,
            SessionState(
                agent=agent if agent is not None else old.agent,
                replicas=replicas,
                prompt_tokens=prompt_tokens or old.prompt_tokens,
                num_turns=old.num_turns + 1,
                last_s=time_s,
            ),
        )
        while len(self._sessions) > self.max_sessions:
            self._drop(next(iter(self._sessions)))
        return old.agent

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

    def live_agents(self) -> Mapping[str, int]:
        """How many sessions stand at each agent."""
        return self._at_agent

    def rename_agent(self, old: str, new: str | None) -> None:
        """Sessions at `old` stand at `new`, or at no agent when that is None."""
        if not self._at_agent.get(old):
            return
        for session, state in list(self._sessions.items()):
            if state.agent == old:
                self._put(
                    session,
                    SessionState(new, state.replicas, state.prompt_tokens, state.num_turns, state.last_s),
                    touch=False,
                )

    def clear(self) -> None:
        """Forget all sessions."""
        self._sessions.clear()
        self._at_agent.clear()

    def _put(self, session: str, state: SessionState, *, touch: bool = True) -> None:
        old = self._sessions.get(session)
        if old is not None and old.agent is not None:
            self._leave(old.agent)
        self._sessions[session] = state
        if touch:
            self._sessions.move_to_end(session)
        if state.agent is not None:
            self._at_agent[state.agent] += 1

    def _drop(self, session: str) -> None:
        state = self._sessions.pop(session)
        if state.agent is not None:
            self._leave(state.agent)

    def _leave(self, agent: str) -> None:
        self._at_agent[agent] -= 1
        if not self._at_agent[agent]:
            del self._at_agent[agent]

    def to_dict(self, limit: int | None = None) -> list[list[Any]]:
        """JSON form, oldest first: `[session, agent, replicas, prompt_tokens, num_turns, last_s]` each."""
        rows = [
            [session, s.agent, list(s.replicas), s.prompt_tokens, s.num_turns, s.last_s]
            for session, s in self.recent(len(self) if limit is None else limit)
        ]
        return rows[::-1]

    @classmethod
    def from_dict(cls, rows: list[list[Any]], max_sessions: int = 4096, ttl_s: float = 1800.0) -> SessionTable:
        """Inverse of `to_dict`; keeps the `max_sessions` most recent."""
        table = cls(max_sessions, ttl_s)
        for session, agent, replicas, prompt_tokens, num_turns, last_s in rows[-max_sessions:]:
            table._put(
                str(session),
                SessionState(
                    None if agent is None else str(agent),
                    tuple(map(str, replicas))[:MAX_REPLICAS],
                    int(prompt_tokens),
                    int(num_turns),
                    float(last_s),
                ),
            )
        return table

    def check_integrity(self) -> None:
        """Raises AssertionError unless the bounds hold and the counts by agent are right."""
        assert len(self._sessions) <= self.max_sessions
        assert all(len(s.replicas) == len(set(s.replicas)) <= MAX_REPLICAS for s in self._sessions.values())
        assert self._at_agent == Counter(s.agent for s in self._sessions.values() if s.agent is not None)
