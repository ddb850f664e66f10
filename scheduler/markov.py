"""Which agent follows which, from as much of what came before as has been seen often enough: variable order, with
back-off.

    P_k(a | c) = (n(c, a) + d(c) · P_{k-1}(a | c')) / (n(c) + d(c))        c' = c without its oldest agent
    P_{-1}(a)  = 1 / number of known agents

`n` are counts that fade, `d(c)` is the number of different successors of `c` (Witten and Bell 1991, "The zero-frequency
problem", method C): a context that has led to many agents says little by itself, and the shorter one counts more. With
`order=1` and `smoothing="additive"` this is CacheScout's learner (arXiv 2608.14624):

    P(a | c) = (n(c, a) + ε) / (n(c) + ε · number of known agents)

Where repeats are counted apart, as the scheduler does, the last agent of the past cannot be the next one:
`handover(a | c) = P(a | c) / (1 - P(last agent of c | c))`.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ropewalk.scheduler.packing import index_kind, pack, unpack

MAX_ORDER = 3
"""Agents of the past that can matter: beyond three, contexts of the data that we have are hardly ever seen again."""

MAX_CONTEXTS = 1024
"""Contexts remembered; those that were not met longest are forgotten."""

MAX_SUCCESSORS = 64
"""Successors kept a context, rarest dropped; the empty context has one for each agent."""

HALF_LIFE = 500.0
"""Observations of a context after which one counts half: an agent program that changes is followed."""

EPSILON = 0.01
"""Additive smoothing of CacheScout: a hundredth of one observation for every pair never seen."""

MAX_WEIGHT = 1024.0
"""What an observation may weigh, ten half-lives on, before the counts of its context are scaled down; those that have
faded to less than a thousandth are forgotten then."""

MAX_COUNT = 60_000.0
"""Largest count that a file keeps: half precision ends at 65,504. Counts that fade stay far below."""

Smoothing = Literal["back-off", "additive"]
Context = tuple[str, ...]


@dataclass(slots=True)
class _Row:
    """Successors of one context, and the row of the context without its oldest agent.

    Counts are in units of `weight`, what the next observation counts: it grows, instead of all older ones fading each
    time.
    """

    context: Context = ()
    shorter: _Row | None = None
    counts: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    weight: float = 1.0

    def rescale(self) -> None:
        """Let the next observation count 1 again; forget what has faded to less than a thousandth of it."""
        self.counts = {agent: n / self.weight for agent, n in self.counts.items() if n >= 1.0}
        self.total = sum(self.counts.values())
        self.weight = 1.0

    def bound(self, latest: str | None = None) -> None:
        """Drop the rarest successors, but not the latest."""
        while len(self.counts) > MAX_SUCCESSORS:
            self.drop(min((other for other in self.counts if other != latest), key=self.counts.__getitem__))

    def add(self, agent: str, n: float) -> None:
        self.counts[agent] = self.counts.get(agent, 0.0) + n
        self.total += n

    def drop(self, agent: str) -> None:
        if self.counts.pop(agent, None) is not None:
            self.total = sum(self.counts.values())

    def faded(self, growth: float) -> dict[str, float]:
        """Counts in units of the latest observation."""
        latest = self.weight / growth
        return {agent: n / latest for agent, n in self.counts.items()}


class _Mixture(NamedTuple):
    """`P(a) = explicit(a) + share · frequent(a) + flat`: contexts, the empty context, and every known agent alike."""

    explicit: dict[str, float]
    frequent: Mapping[str, float]
    share: float
    flat: float

    def probability(self, agent: str) -> float:
        return self.explicit.get(agent, 0.0) + self.share * self.frequent.get(agent, 0.0) + self.flat


class VariableOrder:
    """Learns from sequences of agents, one observation at a time. No clock, no Ray.

    `order`: 0 to 3. `half_life` may be infinite. `epsilon` is used by additive smoothing alone. An observation costs
    O(order), a prediction O(order x successors), and O(agents) where all of them are asked for.

    Where a context is remembered, its shorter ones are too: they are met whenever it is, and forgotten after it.
    """

    def __init__(
        self,
        order: int = MAX_ORDER,
        *,
        smoothing: Smoothing = "back-off",
        half_life: float = HALF_LIFE,
        epsilon: float = EPSILON,
        max_contexts: int = MAX_CONTEXTS,
    ) -> None:
        if not 0 <= order <= MAX_ORDER:
            raise ValueError(f"order must be 0 to {MAX_ORDER}, not {order!r}")
        if smoothing not in ("back-off", "additive"):
            raise ValueError(f"smoothing must be 'back-off' or 'additive', not {smoothing!r}")
        if not half_life >= 1:
            raise ValueError(f"half_life must be at least 1, not {half_life!r}")
        if not (epsilon > 0 and math.isfinite(epsilon)):
            raise ValueError(f"epsilon must be a positive number, not {epsilon!r}")
        if max_contexts <= order:
            raise ValueError(f"max_contexts must be above the order, not {max_contexts!r}")
        self.order = order
        self.smoothing = smoothing
        self.half_life = half_life
        self.epsilon = epsilon
        self.max_contexts = max_contexts
        self.num_observations = 0
        """Observations of this learner object; it tells what was worked out from it how old it is."""
        self.num_agent_changes = 0
        """How often agents came, went or were renamed since it was made."""
        self._growth = 2.0 ** (1.0 / half_life)
        self._agents: dict[str, None] = {}
        self._rows: OrderedDict[Context, _Row] = OrderedDict({(): _Row()})

    @property
    def agents(self) -> list[str]:
        """Known agents, in the order they came up."""
        return list(self._agents)

    @property
    def num_contexts(self) -> int:
        """Contexts remembered, the empty one among them."""
        return len(self._rows)

    def contexts(self) -> list[Context]:
        """Contexts remembered but for the empty one, most recently met first."""
        return [context for context in reversed(self._rows) if context]

    def add_agent(self, agent: str) -> None:
        """Make an agent known before anything is learned of it."""
        if agent not in self._agents:
            self._agents[agent] = None
            self.num_agent_changes += 1

    def observe(self, past: Sequence[str], agent: str) -> None:
        """Count a turn of `agent` after those of `past`, oldest first."""
        if agent not in self._agents:
            self.add_agent(agent)
        self.num_observations += 1
        rows, growth = self._rows, self._growth
        context = tuple(past[max(0, len(past) - self.order) :])
        row = rows.get(context) or self._add_row(context)
        while True:
            weight, counts = row.weight, row.counts
            counts[agent] = counts.get(agent, 0.0) + weight
            row.total += weight
            row.weight = weight = weight * growth
            if weight > MAX_WEIGHT:
                row.rescale()
            if row.shorter is None:
                break
            if len(counts) > MAX_SUCCESSORS:
                row.bound(agent)
            rows.move_to_end(row.context)  # the shorter ones after it, so that they are forgotten later
            row = row.shorter
        if len(rows) > self.max_contexts:
            self._forget_oldest()

    def _add_row(self, context: Context) -> _Row:
        """The row of a context, made with all shorter ones where it is not there."""
        row = self._rows.get(context)
        if row is None:
            row = self._rows[context] = _Row(context, self._add_row(context[1:]))
        return row

    def _forget_oldest(self) -> None:
        """Forget the contexts that were not met longest; never the empty one, on which all others fall back."""
        while len(self._rows) > self.max_contexts:
            del self._rows[next(context for context in self._rows if context)]

    def counts(self, past: Sequence[str]) -> dict[str, float]:
        """Faded counts of the agents that followed exactly this context; the latest observation counts about 1."""
        return self._rows.get(tuple(past), _NO_ROW).faded(self._growth)

    def longest(self, past: Sequence[str]) -> Context:
        """The longest remembered context that `past` ends in."""
        context = tuple(past[max(0, len(past) - self.order) :])
        while context not in self._rows:
            context = context[1:]
        return context

    def distribution(self, past: Sequence[str]) -> dict[str, float]:
        """`P(agent | past)` of every known agent; sums to 1, empty before the first observation."""
        mixture = self._mixture(past)
        return {agent: mixture.probability(agent) for agent in self._agents}

    def probability(self, past: Sequence[str], agent: str) -> float:
        """`P(agent | past)`, 0 for an agent that is not known."""
        return self._mixture(past).probability(agent) if agent in self._agents else 0.0

    def predict(self, past: Sequence[str], top: int | None = None) -> list[tuple[str, float]]:
        """Agents with their probability, likeliest first (ties: by name)."""
        ranked = sorted(self.distribution(past).items(), key=lambda item: (-item[1], item[0]))
        return ranked[:top]

    def handover(self, past: Sequence[str], agents: Iterable[str] | None = None) -> dict[str, float]:
        """`P(agent | past, another than its last agent)` of these agents, by default of all that are known."""
        last = past[-1] if past else None
        if not self._others(past):
            return {}
        mixture = self._mixture(past)
        scale = 1.0 / (1.0 - mixture.probability(last)) if last in self._agents else 1.0
        asked = self._agents if agents is None else agents
        return {a: scale * mixture.probability(a) for a in asked if a in self._agents and a != last}

    def likely(self, past: Sequence[str], least: float) -> dict[str, float]:
        """Those of `handover` that were seen after the last agent of `past`, with a probability of at least `least`.

        Of agents never seen after it all that can be said is how frequent they are. Without a past, and with order 0,
        that is all there is.
        """
        if not self._others(past):
            return {}
        last = past[-1] if past else None
        mixture = self._mixture(past)
        explicit, frequent, share, flat = mixture
        scale = 1.0 / (1.0 - mixture.probability(last)) if last in self._agents else 1.0
        found = {}
        for agent in explicit if past and self.order else self._rows[()].counts:
            p = scale * (explicit.get(agent, 0.0) + share * frequent.get(agent, 0.0) + flat)
            if p >= least and agent != last:
                found[agent] = p
        return found

    def _others(self, past: Sequence[str]) -> int:
        """Number of known agents other than the last of `past`."""
        return len(self._agents) - bool(past and past[-1] in self._agents)

    def _mixture(self, past: Sequence[str]) -> _Mixture:
        if not self._agents:
            return _Mixture({}, {}, 0.0, 0.0)
        context = tuple(past[max(0, len(past) - self.order) :])
        if self.smoothing == "additive":
            last = self._rows.get(context, _NO_ROW)
            epsilon = self.epsilon * last.weight / self._growth
            whole = last.total + epsilon * len(self._agents)
            return _Mixture({agent: n / whole for agent, n in last.counts.items()}, {}, 0.0, epsilon / whole)
        explicit: dict[str, float] = {}
        share = 1.0
        row = self._rows[self.longest(context)]
        while row.shorter is not None:
            different = len(row.counts) * row.weight / self._growth
            scale = share / (row.total + different)
            for agent, n in row.counts.items():
                explicit[agent] = explicit.get(agent, 0.0) + scale * n
            share = scale * different
            row = row.shorter
        if not row.counts:
            return _Mixture(explicit, {}, 0.0, share / len(self._agents))
        different = len(row.counts) * row.weight / self._growth
        scale = share / (row.total + different)
        return _Mixture(explicit, row.counts, scale, scale * different / len(self._agents))

    def rename(self, old: str, new: str) -> None:
        """Give what was learned of `old` to `new`, wherever it stands.

        Where the two followed each other they are repeats of one agent from here on: contexts become shorter, and a
        successor that repeats the last agent of its context is dropped. What comes together is added as it has faded.
        """
        if old == new or old not in self._agents:
            return
        self._agents = dict.fromkeys(new if agent == old else agent for agent in self._agents)
        self.num_agent_changes += 1
        former, self._rows = self._rows, OrderedDict()
        for context, row in former.items():
            if old not in context and old not in row.counts:
                self._put(context, row)
                continue
            names = tuple(new if agent == old else agent for agent in context)
            if old in context and names[:1] == names[1:2]:
                continue  # the context without its oldest agent has counted the same observations
            target = tuple(agent for agent, _ in itertools.groupby(names)) if old in context else names
            faded = _Row(weight=self._growth)
            for agent, n in row.faded(self._growth).items():
                name = new if agent == old else agent
                if target[-1:] != (name,):
                    faded.add(name, n)
            self._put(target, faded)
        self._link()

    def remove(self, agent: str) -> None:
        """Forget an agent, and every context it is part of."""
        if agent not in self._agents:
            return
        del self._agents[agent]
        self.num_agent_changes += 1
        for context, row in list(self._rows.items()):
            if agent in context:
                del self._rows[context]
            else:
                row.drop(agent)
        self._link()

    def _put(self, context: Context, row: _Row) -> None:
        """Add a row as the one met last; to what the context has already, if it has anything."""
        known = self._rows.get(context)
        if known is not None and known.counts:
            faded = _Row(weight=self._growth)
            for counts in (known.faded(self._growth), row.faded(self._growth)):
                for agent, n in counts.items():
                    faded.add(agent, n)
            row = faded
        row.context = context
        self._rows[context] = row
        if context:
            row.bound()
            self._rows.move_to_end(context)

    def _link(self) -> None:
        """Drop contexts without successors, and those whose shorter one was dropped; tell each its shorter one."""
        for context in sorted(self._rows, key=len):
            if context:
                row, shorter = self._rows[context], self._rows.get(context[1:])
                row.shorter = shorter
                if not row.counts or shorter is None:
                    del self._rows[context]

    def to_dict(self) -> dict[str, Any]:
        """JSON form: agents once; all else as packed columns, counts faded and in half precision.

        `frequent` has the count of each agent without regard to its past. Contexts come least recently met first.
        `shapes` has a byte for each context: two bits for how many agents it has, six for how many followed it, less
        one. `contexts`, `successors` and `counts` have those of all contexts in a row. Agents are numbered with one
        byte up to 256 of them, with two above.
        """
        number = {agent: i for i, agent in enumerate(self._agents)}
        kind = index_kind(len(number))
        rows = {context: row.faded(self._growth) for context, row in self._rows.items()}
        frequent = rows.pop(())
        return {
            "agents": list(number),
            "frequent": _pack_counts(frequent.get(agent, 0.0) for agent in number),
            "shapes": pack((len(context) << 6 | len(row) - 1 for context, row in rows.items()), "u1"),
            "contexts": pack((number[agent] for context in rows for agent in context), kind),
            "successors": pack((number[agent] for row in rows.values() for agent in row), kind),
            "counts": _pack_counts(n for row in rows.values() for n in row.values()),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], order: int = MAX_ORDER, **settings: Any) -> VariableOrder:
        """Inverse of `to_dict`, up to rounding. Contexts longer than `order` are left out.

        Raises ValueError, IndexError, KeyError or TypeError on a damaged form.
        """
        learner = cls(order, **settings)
        agents = [str(agent) for agent in data["agents"]]
        learner._agents = dict.fromkeys(agents)
        kind = index_kind(len(agents))
        shapes = unpack(data["shapes"], "u1")
        members = unpack(data["contexts"], kind)
        successors = unpack(data["successors"], kind)
        counts = unpack(data["counts"], "<f2")
        sizes = sum(shape >> 6 for shape in shapes), sum((shape & 63) + 1 for shape in shapes)
        if sizes != (len(members), len(successors)) or len(successors) != len(counts):
            raise ValueError(f"contexts and successors must be {sizes}, got {len(members)} and {len(successors)}")
        next_member, next_pair = iter(members), zip(successors, counts, strict=True)
        frequent = learner._rows[()]
        frequent.weight = learner._growth
        for agent, n in zip(agents, unpack(data["frequent"], "<f2"), strict=True):
            if n:
                frequent.add(agent, n)
        for shape in shapes:
            context = tuple(agents[member] for member in itertools.islice(next_member, shape >> 6))
            row = _Row(weight=learner._growth)
            for successor, n in itertools.islice(next_pair, (shape & 63) + 1):
                row.add(agents[successor], n)
            if 1 <= len(context) <= order:
                learner._put(context, row)
        learner._forget_oldest()
        learner._link()
        learner.check_integrity()
        return learner

    def check_integrity(self) -> None:
        """Raise ValueError unless contexts are as long as allowed, agents known, counts positive, bounds kept."""
        if len(self._rows) > self.max_contexts or () not in self._rows:
            raise ValueError(f"contexts must be at most {self.max_contexts} and the empty one among them")
        for context, row in self._rows.items():
            if len(context) > self.order or (context and len(row.counts) > MAX_SUCCESSORS):
                raise ValueError(f"context {context!r} is too long, or has too many successors")
            if row.context != context or row.shorter is not (self._rows.get(context[1:]) if context else None):
                raise ValueError(f"context {context!r} has no shorter one, or not its own")
            if context and not row.counts:
                raise ValueError(f"context {context!r} has no successors")
            if not all(agent in self._agents for agent in context):
                raise ValueError(f"agents of context {context!r} must be known")
            if not all(agent in self._agents and n > 0 and math.isfinite(n) for agent, n in row.counts.items()):
                raise ValueError(f"successors of {context!r} must be known and counted, got {row.counts!r}")
            if not math.isclose(row.total, sum(row.counts.values()), rel_tol=1e-6, abs_tol=1e-9):
                raise ValueError(f"successors of {context!r} do not add up to {row.total!r}")


_NO_ROW = _Row()


def _pack_counts(counts: Iterable[float]) -> str:
    return pack((min(n, MAX_COUNT) for n in counts), "<f2")


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
