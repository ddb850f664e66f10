"""How soon an anchor is needed again: survival over all live sessions (CacheScout), and the outlook of one session.

Both follow a *chain*: the hand-overs that the learner foretells, from context to context. A state of the chain is a
context, the last agents of a session; a turn of agent `b` leads from state `c` to the longest state that `(*c, b)` ends
in. It is worked out anew when agents came or went, and otherwise only when the learner has seen as many observations as
`Chain` says: within so few, probabilities move little. Where the sessions stand is always what it is now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ropewalk.scheduler.handovers import HandoverCounts
from ropewalk.scheduler.markov import Context, VariableOrder

TAU = 0.1
"""Hand-overs less likely than this are not followed by survival (CacheScout)."""

MAX_HOPS = 6
"""`E_max` of CacheScout: an agent this many hand-overs away is as good as gone."""

HORIZON = 16
"""Turns that an outlook reaches: past several rounds of a group chat, who is further off is as good as gone."""

LEAST = 0.02
"""Hand-overs less likely than this are not part of the chain, nor are those never seen; the others share what they
leave. 50 of a state at most."""

MAX_LONGER = 256
"""States of more than one agent, most recently met first: those of the live sessions are among them. Bounds what it
takes to work the chain out, a few milliseconds."""

REFRESH = 64
"""Observations after which the chain is worked out anew; with more agents as many as there are, early on an eighth of
those that there have been."""

Array = npt.NDArray[np.float32]


class Chain:
    """Survival and outlook by what `learner` foretells; `counts` says how often agents keep the floor.

    Not safe to use from several threads. Both are exact as long as there are no more than `MAX_LONGER` longer contexts
    and `least` is 0, except that additive smoothing of order 2 or 3, which does not back off, does so here.
    """

    def __init__(
        self,
        learner: VariableOrder,
        counts: HandoverCounts,
        *,
        tau: float = TAU,
        max_hops: int = MAX_HOPS,
        horizon: int = HORIZON,
        least: float = LEAST,
    ) -> None:
        if max_hops < 1 or horizon < 1:
            raise ValueError(f"max_hops and horizon must be at least 1, got {max_hops!r} and {horizon!r}")
        self.learner = learner
        self.counts = counts
        self.tau = tau
        self.max_hops = max_hops
        self.horizon = horizon
        self.least = min(least, tau)
        self._made_at: tuple[int, int] | None = None
        self._near: Array | None = None
        self._turns: Array | None = None

    def survival(self, live: Mapping[Context, int]) -> dict[str, float]:
        """Survival of every reachable agent's anchor, in (0, 1]; agents not in the result have none.

        One session at past `c` gives each agent `a` `p_surv = 1 - min(E, E_max) / E_max`, where `E` is the number of
        hand-overs from `c` to `a`, breadth first over those with `P >= tau`. Over the live sessions (`live`: how many
        stand at each past) the values are averaged: the result ranks anchors by how much of the load needs them soon. A
        maximum, or the chance that any session does, is 1 for nearly all anchors as soon as some dozen sessions are
        live, and then ranks nothing.
        """
        if not live:
            return {}
        self.update()
        if self._near is None:
            self._near = self._nearness()
        states = self._states
        longest = self._longest
        at = [states[c] if (c := past[-longest:]) in states else self.state(c) for past in live]
        weights = np.fromiter(live.values(), dtype=np.float32, count=len(live))
        mean = (weights @ self._near[at]) / weights.sum()
        return {agent: min(1.0, p) for agent, p in zip(self._agents, mean.tolist(), strict=True) if p > 0}

    def outlook(self, past: Sequence[str]) -> dict[str, float]:
        """Expected number of a session's own turns until each agent has the floor again, for one that stands at `past`.

        With `T_a` the number of turns until the first of agent `a`, it is `E[min(T_a, H)]`, `H = horizon`:

            h_0(c, a)     = 0
            h_{t+1}(c, a) = 1 + sum_b P(b | c) * (0 if b = a else h_t(c followed by b, a))
            outlook(c)[a] = h_H(c, a)

        `P(b | c)` is the learned chance of a hand-over to `b`, times the share of turns at which the last agent of `c`
        hands over at all; the rest are repeats of it, so that the agent that just spoke has a return like any other.
        Where nobody was ever seen to follow, nobody is expected.
        Agents whose figure rounds to `H` are left out: they are beyond the horizon, as are all where nothing is known.
        """
        self.update()
        if self._turns is None:
            self._turns = self._expected_turns()
        row = self._turns[self.state(past)].tolist()
        return {agent: turns for agent, turns in zip(self._agents, row, strict=True) if turns < self.horizon - 0.5}

    def nearest(self, pasts: Sequence[Context], count: int) -> dict[Context, tuple[tuple[str, float], ...]]:
        """The `count` agents of the lowest `outlook` at each past, with it, ascending."""
        if not pasts:
            return {}
        self.update()
        if self._turns is None:
            self._turns = self._expected_turns()
        turns = self._turns[[self.state(past) for past in pasts]]
        order = np.argsort(turns, axis=1, kind="stable")[:, :count]
        return {
            past: tuple((self._agents[a], float(row[a])) for a in nearest.tolist() if row[a] < self.horizon - 0.5)
            for past, row, nearest in zip(pasts, turns, order, strict=True)
        }

    def state(self, past: Sequence[str]) -> int:
        """Number of the longest state that `past` ends in; that of no agent at all when its last is not known."""
        context = tuple(past[-self._longest :])
        while context not in self._states:
            context = context[1:]
        return self._states[context]

    def update(self) -> bool:
        """Work the chain out anew if it is time to; says whether it was."""
        learner = self.learner
        if self._made_at is not None:
            made, changes = self._made_at
            wait = min(max(REFRESH, len(self._agents)), made // 8)
            if changes == learner.num_agent_changes and learner.num_observations - made <= wait:
                return False
        self._made_at = (learner.num_observations, learner.num_agent_changes)
        self._make()
        return True

    def _make(self) -> None:
        """States and edges.

        Edge `e` leads from state `_sources[e]` (ascending) to `_targets[e]` with probability `_chances[e]`. Each state
        has one to itself: the repeats of its last agent. State 0 is nobody's: what follows where nothing is known.
        """
        learner = self.learner
        self._agents = learner.agents
        longer = [context for context in learner.contexts() if len(context) > 1]
        contexts: list[Context] = [(), *((agent,) for agent in self._agents), *longer[:MAX_LONGER]]
        self._longest = max(1, learner.order)
        self._states = {context: i for i, context in enumerate(contexts)}
        self._near = self._turns = None
        repeats = self._repeat_shares()
        edges: list[tuple[int, int, float, bool]] = [(0, 0, 1.0, True)]
        for source, context in enumerate(contexts[1:], 1):
            stay = repeats.get(context[-1], 0.0)
            edges.append((source, source, stay, True))
            following = learner.likely(context, self.least)
            if not following:
                edges.append((source, 0, 1.0 - stay, False))
            scale = (1.0 - stay) / (sum(following.values()) or 1.0)
            for agent, p in following.items():
                edges.append((source, self.state((*context, agent)), scale * p, p >= self.tau))
        sources, targets, chances, are_likely = zip(*edges, strict=True)
        self._sources, self._targets = np.array(sources), np.array(targets)
        self._chances = np.array(chances, dtype=np.float32)
        self._are_likely = np.array(are_likely)
        number = {agent: i for i, agent in enumerate(self._agents)}
        self._own: Array = np.zeros((len(contexts), len(number)), dtype=np.float32)
        """(states, agents): 1 where the state's last agent is the agent."""
        for state, context in enumerate(contexts[1:], 1):
            self._own[state, number[context[-1]]] = 1.0

    def _repeat_shares(self) -> dict[str, float]:
        """Share of each agent's turns that are followed by another turn of its own."""
        return {agent: row.get(agent, 0) / sum(row.values()) for agent, row in self.counts.totals().items()}

    def _nearness(self) -> Array:
        """(states, agents): `1 - min(E, E_max) / E_max`."""
        targets = self._targets[self._are_likely]
        starts = self._starts(self._sources[self._are_likely])
        near = self._own
        for _ in range(1, self.max_hops):
            near = np.maximum(self._own, np.maximum.reduceat(near[targets], starts) - np.float32(1 / self.max_hops))
        return np.where(near > 0.5 / self.max_hops, near, np.float32(0))

    def _expected_turns(self) -> Array:
        """(states, agents): `h_H` as `outlook` says."""
        starts = self._starts(self._sources)
        chances, others = self._chances[:, None], 1 - self._own
        turns = np.zeros_like(others)
        for _ in range(self.horizon):
            turns = 1 + np.add.reduceat(chances * (others * turns)[self._targets], starts)
        return turns

    def _starts(self, sources: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """The first edge of each state."""
        return np.searchsorted(sources, np.arange(len(self._own)))
