"""How often which agent followed which, and how predictable that is, for each group of sessions.

A hand-over is a turn of another agent than the one before in the same session. Repeats of the same agent are counted
apart: they say how long an agent keeps the floor, not who is next, and would drown the rest in agents that loop.

A *group* is the sessions that begin with the same agent: they run the same program. Programs that share agents differ
in how predictable they are, and one that is not must not hide one that is.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ropewalk.scheduler.packing import index_kind, pack, unpack

MAX_GROUPS = 16
"""Groups kept apart; those that were not met longest go together into one, so that nothing counted is lost."""

MAX_SUCCESSORS = 64
"""Successors kept an agent and group, rarest dropped: an agent that hands over to more than 64 others predicts none."""

MAX_HANDOVERS = 4096
"""Hand-overs of a group at which all its counts are halved: what was counted long ago fades, and a change of program
shows in `R` after some thousand hand-overs. Estimates of an entropy need that many, where programs have many agents."""

Table = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Predictability:
    """`R = 1 - H(next | current) / H(next)` in [0, 1] (CacheScout, "Prefetch"), and the hand-overs it rests on.

    From few hand-overs `r` is too high, as every estimate of an entropy from counts is.
    """

    r: float = 0.0
    num_handovers: int = 0


@dataclass(slots=True)
class _Group:
    table: Table = field(default_factory=dict)
    """`table[previous][agent]`; where the two are the same, repeats."""
    size: int = 0
    """Hand-overs in it."""
    known: Predictability | None = None
    """R as last worked out, None once something was counted since."""

    def count(self) -> None:
        self.size = sum(n for previous, row in self.table.items() for agent, n in row.items() if agent != previous)
        self.known = None

    def halve(self) -> None:
        """Halve all counts, rounded down."""
        self.table = {
            previous: {agent: n // 2 for agent, n in row.items() if n > 1} for previous, row in self.table.items()
        }
        self.count()


class HandoverCounts:
    """Counts by group. No clock, no Ray; one observation costs O(1) but for a halving every `MAX_HANDOVERS`."""

    def __init__(self) -> None:
        self.num_handovers = 0
        """Hand-overs observed in all, halved or not."""
        self._groups: OrderedDict[str | None, _Group] = OrderedDict()
        # None: sessions of groups that are not kept apart any more.

    def observe(self, group: str | None, previous: str, agent: str) -> None:
        """Count one turn of `agent` after one of `previous` in a session of `group`."""
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = _Group()
            self._fold()
        else:
            self._groups.move_to_end(group)
        row = found.table.get(previous)
        if row is None:
            row = found.table[previous] = {}
        row[agent] = row.get(agent, 0) + 1
        if previous == agent:
            return
        self.num_handovers += 1
        found.size += 1
        found.known = None
        if len(row) > MAX_SUCCESSORS + 1:
            _bound(row, previous, agent)
            found.count()
        if found.size >= MAX_HANDOVERS:
            found.halve()

    def _fold(self) -> None:
        while len(self._groups) - (None in self._groups) > MAX_GROUPS:
            oldest = next(group for group in self._groups if group is not None)
            self._merge(self._groups.pop(oldest), None)

    def _merge(self, group: _Group, into: str | None) -> None:
        """Add one group's counts to another's. Costs as many steps as the first has pairs."""
        target = self._groups.setdefault(into, _Group())
        _add(target.table, group.table, lambda name: name)
        target.size += group.size
        target.known = None
        for previous in group.table:
            if len(target.table[previous]) > MAX_SUCCESSORS + 1:
                _bound(target.table[previous], previous, None)
                target.count()
        while target.size >= MAX_HANDOVERS:
            target.halve()

    def totals(self) -> Table:
        """`counts[previous][agent]` over all groups; where the two are the same, repeats.

        `predictability` of it is R over all sessions.
        """
        return _mapped((group.table for group in self._groups.values()), lambda name: name)

    def count(self, previous: str, agent: str) -> int:
        """Hand-overs from `previous` to `agent`; for the same agent, its repeats."""
        return sum(group.table.get(previous, {}).get(agent, 0) for group in self._groups.values())

    def groups(self) -> dict[str, Predictability]:
        """R of each group that is kept apart, by the agent its sessions begin with; the one met last comes first."""
        found = {}
        for name, group in reversed(self._groups.items()):
            if group.known is None:
                group.known = predictability(group.table)
            if name is not None:
                found[name] = group.known
        return found

    def rename(self, old: str, new: str) -> None:
        """Give what was counted for `old` to `new`; hand-overs between the two become repeats."""
        if old == new:
            return
        if old in self._groups:
            self._merge(self._groups.pop(old), new)
            self._fold()

        def name_of(agent: str) -> str:
            return new if agent == old else agent

        for group in self._groups.values():
            if old in group.table or any(old in row for row in group.table.values()):
                before = group.size
                group.table = _mapped([group.table], name_of)
                group.count()
                self.num_handovers -= before - group.size

    def remove(self, agent: str) -> None:
        """Forget an agent and every hand-over from or to it; its group goes to those that are not kept apart."""
        if agent in self._groups:
            self._merge(self._groups.pop(agent), None)
        for group in self._groups.values():
            group.table.pop(agent, None)
            for row in group.table.values():
                row.pop(agent, None)
            group.count()

    def to_dict(self) -> dict[str, Any]:
        """JSON form: agents once; `groups`: the agent of each (null: not kept apart) and how many rows it has; then, as
        packed columns, the agent of each row, how many followed it, those and their counts."""
        agents = sorted(self.agents)
        number = {agent: i for i, agent in enumerate(agents)}
        kind = index_kind(len(agents))
        rows = [
            (name, previous, row)
            for name, group in self._groups.items()
            for previous, row in group.table.items()
            if row
        ]
        sizes = Counter(name for name, _, _ in rows)
        return {
            "agents": agents,
            "groups": [[None if name is None else number[name], sizes[name]] for name in self._groups],
            "previous": pack((number[previous] for _, previous, _ in rows), kind),
            "widths": pack((len(row) for _, _, row in rows), "u1"),
            "successors": pack((number[agent] for _, _, row in rows for agent in row), kind),
            "counts": pack((n for _, _, row in rows for n in row.values()), "<u4"),
            "num_handovers": self.num_handovers,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HandoverCounts:
        """Inverse of `to_dict`. Raises ValueError, IndexError, KeyError or TypeError on a damaged form."""
        counts = cls()
        counts.num_handovers = int(data["num_handovers"])
        agents = [str(agent) for agent in data["agents"]]
        kind = index_kind(len(agents))
        previous, widths = unpack(data["previous"], kind), unpack(data["widths"], "u1")
        successors, numbers = unpack(data["successors"], kind), unpack(data["counts"], "<u4")
        sizes = sum(size for _, size in data["groups"]), sum(widths)
        if sizes != (len(previous), len(successors)):
            raise ValueError(f"rows and successors must be {sizes}, got {len(previous)} and {len(successors)}")
        rows, pairs = zip(previous, widths, strict=True), zip(successors, numbers, strict=True)
        for name, size in data["groups"]:
            group = counts._groups[None if name is None else agents[name]] = _Group()
            for agent, width in itertools.islice(rows, size):
                group.table[agents[agent]] = {agents[other]: n for other, n in itertools.islice(pairs, width)}
            group.count()
        counts.check_integrity()
        return counts

    @property
    def agents(self) -> set[str]:
        """Agents that anything was counted of."""
        named = {name for name in self._groups if name is not None}
        for group in self._groups.values():
            named.update(group.table, *group.table.values())
        return named

    def check_integrity(self) -> None:
        """Raises ValueError unless bounds hold, counts are positive and sizes are right."""
        if len(self._groups) - (None in self._groups) > MAX_GROUPS:
            raise ValueError(f"groups must be at most {MAX_GROUPS}, got {len(self._groups)}")
        for name, group in self._groups.items():
            size = sum(n for previous, row in group.table.items() for agent, n in row.items() if agent != previous)
            if size != group.size or size >= MAX_HANDOVERS:
                raise ValueError(f"group {name!r} must have {group.size} hand-overs, below {MAX_HANDOVERS}, got {size}")
            for previous, row in group.table.items():
                if len(row) > MAX_SUCCESSORS + 1 or any(n < 1 for n in row.values()):
                    raise ValueError(f"successors of {previous!r} must be few and counted at least once, got {row!r}")


def _mapped(tables: Iterable[Table], name_of: Callable[[str], str]) -> Table:
    """The sum of tables, with agents by their new names."""
    result: Table = {}
    for table in tables:
        _add(result, table, name_of)
    for previous, row in result.items():
        _bound(row, previous, None)
    return {previous: row for previous, row in result.items() if row}


def _add(target: Table, table: Table, name_of: Callable[[str], str]) -> None:
    for previous, row in table.items():
        into = target.setdefault(name_of(previous), {})
        for agent, n in row.items():
            name = name_of(agent)
            into[name] = into.get(name, 0) + n


def _bound(row: dict[str, int], previous: str, latest: str | None) -> None:
    """Drop the rarest successors; neither repeats nor the latest."""
    while len(row) - (previous in row) > MAX_SUCCESSORS:
        del row[min((agent for agent in row if agent not in (previous, latest)), key=row.__getitem__)]


def predictability(table: Table) -> Predictability:
    """R of a table; 0 when nothing was counted, 1 when every hand-over led to the same agent."""
    arrivals: Counter[str] = Counter()
    sizes, entropies = [], []
    for previous, row in table.items():
        departures = {agent: n for agent, n in row.items() if agent != previous}
        if departures:
            sizes.append(sum(departures.values()))
            entropies.append(sizes[-1] * _entropy(departures.values()))
            arrivals.update(departures)
    if not sizes:
        return Predictability()
    marginal = _entropy(arrivals.values())
    r = 1.0 if marginal == 0 else min(1.0, max(0.0, 1 - math.fsum(entropies) / sum(sizes) / marginal))
    return Predictability(r, sum(sizes))


def _entropy(counts: Collection[int]) -> float:
    """Shannon entropy in bits of positive counts, whatever their order."""
    total = sum(counts)
    return -math.fsum(n / total * math.log2(n / total) for n in counts)
