"""Which agent follows which, from as much of what came before as has been seen often enough: variable order, with
back-off.

    P_k(a | c) = (n(c, a) + d(c) · P_{k-1}(a | c')) / (n(c) + d(c))        c' = c without its oldest agent
    P_{-1}(a)  = 1 / number of known agents

`n` are counts that fade, `d(c)` is the number of different successors of `c` (Witten and Bell 1991, "The zero-frequency
problem", method C): a context that has led to many agents says little by itself, and the shorter one counts more. With
`order=1` and `smoothing="additive"` this is CacheScout's learner (arXiv 2608.14624).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

MAX_ORDER = 3
"""Agents of the past that can matter: beyond three, contexts of the data that we have are hardly ever seen again."""

MAX_CONTEXTS = 1024
"""Contexts remembered; those that were not met longest are forgotten."""

MAX_SUCCESSORS = 64
"""Successors kept a context, rarest dropped."""

HALF_LIFE = 500.0
"""Observations of a context after which one counts half: an agent program that changes is followed."""

EPSILON = 0.01
"""Additive smoothing of CacheScout: a hundredth of one observation for every pair never seen."""

Smoothing = Literal["back-off", "additive"]
Context = tuple[str, ...]


class VariableOrder:
    """Learns from sequences of agents, one observation at a time. No clock, no Ray.

    `order`: 0 to 3. An observation costs O(order), a prediction O(order x successors).
    """

    def __init__(
        self,
        order: int = MAX_ORDER,
        *,
        smoothing: Smoothing = "back-off",
        half_life: float = HALF_LIFE,
        max_contexts: int = MAX_CONTEXTS,
    ) -> None:
        if not 0 <= order <= MAX_ORDER:
            raise ValueError(f"order must be 0 to {MAX_ORDER}, not {order!r}")
        if smoothing not in ("back-off", "additive"):
            raise ValueError(f"smoothing must be 'back-off' or 'additive', not {smoothing!r}")
        if not half_life > 0:
            raise ValueError(f"half_life must be positive, not {half_life!r}")
        if max_contexts <= order:
            raise ValueError(f"max_contexts must be above the order, not {max_contexts!r}")
        self.order = order
        self.smoothing = smoothing
        self.half_life = half_life
        self.max_contexts = max_contexts
        self._growth = 2.0 ** (1.0 / half_life)
        self._agents: dict[str, None] = {}
        self._counts: OrderedDict[Context, dict[str, float]] = OrderedDict()
        self._weights: dict[Context, float] = {}
        """What the next observation of a context counts: it grows, instead of all older ones fading each time."""

    @property
    def num_contexts(self) -> int:
        """Contexts remembered."""
        return len(self._counts)

    def observe(self, past: Sequence[str], agent: str) -> None:
        """Count a turn of `agent` after those of `past`, oldest first."""
        self._agents.setdefault(agent, None)
        for length in range(min(self.order, len(past)) + 1):
            context = tuple(past[len(past) - length :])
            row = self._counts.get(context)
            if row is None:
                row = self._counts[context] = {}
                self._weights[context] = 1.0
                if len(self._counts) > self.max_contexts:
                    self._forget_one()
            else:
                self._counts.move_to_end(context)
            weight = self._weights[context]
            row[agent] = row.get(agent, 0.0) + weight
            if len(row) > MAX_SUCCESSORS:
                del row[min((other for other in row if other != agent), key=row.__getitem__)]
            weight *= self._growth
            if weight > 1e12:
                for other in row:
                    row[other] /= weight
                weight = 1.0
            self._weights[context] = weight

    def _forget_one(self) -> None:
        """Forget the context that was not met longest; never the empty one, on which all others fall back."""
        context = next(context for context in self._counts if context)
        del self._counts[context]
        del self._weights[context]

    def counts(self, past: Sequence[str]) -> dict[str, float]:
        """Faded counts of the agents that followed exactly this context; the latest observation counts about 1."""
        context = tuple(past)
        row = self._counts.get(context)
        if not row:
            return {}
        latest = self._weights[context] / self._growth
        return {agent: n / latest for agent, n in row.items()}

    def distribution(self, past: Sequence[str]) -> dict[str, float]:
        """`P(agent | past)` of every known agent; sums to 1, empty before the first observation."""
        if not self._agents:
            return {}
        uniform = 1.0 / len(self._agents)
        probabilities = dict.fromkeys(self._agents, uniform)
        lengths = range(min(self.order, len(past)) + 1)
        if self.smoothing == "additive":
            lengths = range(lengths[-1], lengths[-1] + 1)
        for length in lengths:
            row = self.counts(past[len(past) - length :])
            total = sum(row.values())
            if self.smoothing == "additive":
                whole = total + EPSILON * len(probabilities)
                return {agent: (row.get(agent, 0.0) + EPSILON) / whole for agent in probabilities}
            if not row:
                break  # nor is a longer context known
            share = len(row) / (total + len(row))
            for agent, probability in probabilities.items():
                probabilities[agent] = share * probability
            for agent, n in row.items():
                probabilities[agent] += n / (total + len(row))
        return probabilities

    def predict(self, past: Sequence[str], top: int | None = None) -> list[tuple[str, float]]:
        """Agents with their probability, likeliest first (ties: by name)."""
        ranked = sorted(self.distribution(past).items(), key=lambda item: (-item[1], item[0]))
        return ranked[:top]

    def remove(self, agent: str) -> None:
        """Forget an agent, and every context it is part of."""
        self._agents.pop(agent, None)
        for context in [context for context in self._counts if agent in context]:
            del self._counts[context]
            del self._weights[context]
        for row in self._counts.values():
            row.pop(agent, None)

    def to_dict(self) -> dict[str, Any]:
        """JSON form: agents once, then each context with its successors' faded counts, least recently met first."""
        order = {agent: number for number, agent in enumerate(self._agents)}
        rows = [
            [
                [order[agent] for agent in context],
                [[order[agent], round(n, 3)] for agent, n in self.counts(context).items()],
            ]
            for context in self._counts
        ]
        return {"agents": list(order), "contexts": rows}

    @classmethod
    def from_dict(cls, data: dict[str, Any], order: int = MAX_ORDER, **settings: Any) -> VariableOrder:
        """Inverse of `to_dict`, up to rounding.

        Raises ValueError, IndexError, KeyError or TypeError on a damaged form.
        """
        learner = cls(order, **settings)
        agents = [str(agent) for agent in data["agents"]]
        learner._agents = dict.fromkeys(agents)
        for context, row in data["contexts"]:
            name = tuple(agents[number] for number in context)
            learner._counts[name] = {agents[number]: float(n) for number, n in row}
            learner._weights[name] = learner._growth
        learner.check_integrity()
        return learner

    def check_integrity(self) -> None:
        """Raise ValueError unless contexts are as long as allowed, successors known, counts positive, bounds kept."""
        if self._counts.keys() != self._weights.keys() or len(self._counts) > self.max_contexts:
            raise ValueError("contexts and weights differ, or are too many")
        for context, row in self._counts.items():
            if len(context) > self.order or len(row) > MAX_SUCCESSORS:
                raise ValueError(f"context {context!r} is too long, or has too many successors")
            if not all(agent in self._agents and n > 0 and math.isfinite(n) for agent, n in row.items()):
                raise ValueError(f"successors of {context!r} must be known and counted, got {row!r}")


def top_hits(
    sequences: Iterable[Sequence[str]], learner: VariableOrder, tops: Sequence[int] = (1, 3)
) -> dict[str, Any]:
    """Predict each element of each sequence from those before it, then learn it: no element is seen before it is
    predicted. First elements are learned, and not asked for: nothing precedes them.

    Returns the number of predictions, and for each of `tops` in how many the element was among the first so many.
    """
    hits = dict.fromkeys(tops, 0)
    count = 0
    for sequence in sequences:
        for position, element in enumerate(sequence):
            past = sequence[max(position - MAX_ORDER, 0) : position]
            if position:
                ranked = [agent for agent, _ in learner.predict(past, max(tops))]
                count += 1
                for top in tops:
                    hits[top] += element in ranked[:top]
            learner.observe(past, element)
    return {"predictions": count, **{f"top_{top}": hits[top] for top in tops}}
