"""Which agent follows which: first-order hand-over counts, learned online (CacheScout, arXiv 2608.14624, "Learn").

A hand-over is a turn of another agent than the one before in the same session. Repeats of the same agent are counted
apart: they say how long an agent keeps the floor, not who is next, and would drown the rest in agents that loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import networkx as nx

EPSILON = 0.01
"""Smoothing of CacheScout: a hundredth of one hand-over for every pair never seen."""

MAX_SUCCESSORS = 64
"""Successors kept an agent, rarest dropped: an agent that hands over to more than 64 others predicts none of them."""


class TransitionCounts:
    """`C[i][j]`: how often agent `i` handed over to agent `j`. No clock, no Ray; one observation costs O(1)."""

    def __init__(self, epsilon: float = EPSILON) -> None:
        if not epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {epsilon!r}")
        self.epsilon = epsilon
        self._counts: dict[str, Counter[str]] = {}
        self._repeats: Counter[str] = Counter()

    @property
    def agents(self) -> list[str]:
        """Known agents, in the order they came up."""
        return list(self._counts)

    @property
    def num_handovers(self) -> int:
        """Hand-overs counted."""
        return sum(row.total() for row in self._counts.values())

    def add_agent(self, agent: str) -> None:
        """Make an agent known before its first hand-over."""
        if agent not in self._counts:
            self._counts[agent] = Counter()

    def observe(self, previous: str | None, agent: str) -> None:
        """Count one turn of `agent` after one of `previous` (None: first turn of a session)."""
        self.add_agent(agent)
        if previous is None:
            return
        self.add_agent(previous)
        if previous == agent:
            self._repeats[agent] += 1
            return
        row = self._counts[previous]
        row[agent] += 1
        if len(row) > MAX_SUCCESSORS:
            rarest = min((other for other in row if other != agent), key=row.__getitem__)
            del row[rarest]

    def count(self, previous: str, agent: str) -> int:
        """Hand-overs from `previous` to `agent`; for the same agent, its repeats."""
        if previous == agent:
            return self._repeats[agent]
        row = self._counts.get(previous)
        return 0 if row is None else row[agent]

    def successors(self, agent: str) -> Mapping[str, int]:
        """Counts of the agents that followed `agent`; not to be changed."""
        return self._counts.get(agent, Counter())

    def row(self, agent: str) -> dict[str, float]:
        """`P[i][j] = (C[i][j] + eps) / sum_k (C[i][k] + eps)` over all other known agents `j` (CacheScout).

        Sums to 1; empty when there is no other agent.
        """
        counts = self._counts.get(agent, Counter())
        others = [other for other in self._counts if other != agent]
        total = counts.total() + self.epsilon * len(others)
        return {other: (counts[other] + self.epsilon) / total for other in others}

    def probability(self, previous: str, agent: str) -> float:
        """`P[previous][agent]`, 0 for the same or an unknown agent."""
        if previous == agent or agent not in self._counts:
            return 0.0
        counts = self._counts.get(previous, Counter())
        num_others = len(self._counts) - (previous in self._counts)
        return (counts[agent] + self.epsilon) / (counts.total() + self.epsilon * num_others)

    def predict(self, agent: str, top: int | None = None) -> list[tuple[str, float]]:
        """Agents seen after `agent` with their probability, likeliest first (ties: by name); empty when none was seen.

        Agents never seen after it are left out: all smoothing says of them is that they are equally unlikely.
        """
        counts = self._counts.get(agent)
        if not counts:
            return []
        total = counts.total() + self.epsilon * (len(self._counts) - 1)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return [(other, (n + self.epsilon) / total) for other, n in ranked[:top]]

    def predictability(self) -> float:
        """`R = 1 - H(A_{t+1} | A_t) / H(A_{t+1})` over the counted hand-overs (CacheScout, "Prefetch").

        0 when nothing was counted; 1 when every hand-over led to the same agent. From few hand-overs it is too high,
        as every estimate of an entropy from counts is: read it together with `num_handovers`.
        """
        arrivals: Counter[str] = Counter()
        conditional = 0.0
        for row in self._counts.values():
            arrivals.update(row)
            conditional += row.total() * _entropy(row)
        total = arrivals.total()
        if not total:
            return 0.0
        marginal = _entropy(arrivals)
        return 1.0 if marginal == 0 else min(1.0, max(0.0, 1 - conditional / total / marginal))

    def rename(self, old: str, new: str) -> None:
        """Give what was counted for `old` to `new`; hand-overs between the two become repeats."""
        if old == new or old not in self._counts:
            return
        self.add_agent(new)
        for other, n in self._counts.pop(old).items():
            if other == new:
                self._repeats[new] += n
            else:
                self._counts[new][other] += n
        for agent, row in self._counts.items():
            n = row.pop(old, 0)
            if n and agent == new:
                self._repeats[new] += n
            elif n:
                row[new] += n
        if len(self._counts[new]) > MAX_SUCCESSORS:
            self._counts[new] = Counter(dict(self._counts[new].most_common(MAX_SUCCESSORS)))
        repeats = self._repeats.pop(old, 0)
        if repeats:
            self._repeats[new] += repeats

    def remove(self, agent: str) -> None:
        """Forget an agent and every hand-over from or to it."""
        self._counts.pop(agent, None)
        self._repeats.pop(agent, None)
        for row in self._counts.values():
            row.pop(agent, None)

    def graph(self) -> nx.DiGraph[str]:
        """Nodes: agents with `repeats`. Edges: seen hand-overs with `count` and `probability`."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        for agent in self._counts:
            graph.add_node(agent, repeats=self._repeats[agent])
        for agent in self._counts:
            for other, probability in self.predict(agent):
                graph.add_edge(agent, other, count=self._counts[agent][other], probability=probability)
        return graph

    def to_dict(self) -> dict[str, Any]:
        """JSON form: agents once, then per agent its repeats and `[successor index, count]` pairs."""
        order = {agent: i for i, agent in enumerate(self._counts)}
        rows = [[[order[other], n] for other, n in row.items()] for row in self._counts.values()]
        return {"agents": list(order), "repeats": [self._repeats[agent] for agent in order], "rows": rows}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], epsilon: float = EPSILON) -> TransitionCounts:
        """Inverse of `to_dict`. Raises ValueError, IndexError, KeyError or TypeError on a damaged form."""
        counts = cls(epsilon)
        agents = [str(agent) for agent in data["agents"]]
        for agent, repeats, row in zip(agents, data["repeats"], data["rows"], strict=True):
            counts._counts[agent] = Counter({agents[i]: int(n) for i, n in row})
            if repeats:
                counts._repeats[agent] = int(repeats)
        counts.check_integrity()
        return counts

    def check_integrity(self) -> None:
        """Raises ValueError unless every successor is known, no agent follows itself and counts are positive."""
        for agent, row in self._counts.items():
            if agent in row or len(row) > MAX_SUCCESSORS:
                raise ValueError(f"successors of {agent!r} must be at most {MAX_SUCCESSORS} other agents, got {row!r}")
            if any(other not in self._counts or n < 1 for other, n in row.items()):
                raise ValueError(f"successors of {agent!r} must be known and counted at least once, got {row!r}")
        if not self._repeats.keys() <= self._counts.keys():
            raise ValueError(f"repeats of unknown agents: {self._repeats.keys() - self._counts.keys()!r}")


def _entropy(counts: Counter[str]) -> float:
    """Shannon entropy in bits of a table of positive counts; 0 when it is empty."""
    total = counts.total()
    return -sum(n / total * math.log2(n / total) for n in counts.values() if n)
