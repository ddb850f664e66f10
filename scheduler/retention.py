"""Which blocks of a KV cache are worth keeping: the order of eviction, by rules that can be compared.

Every rule sees the same: which agent's turn begins in which session, and which blocks that turn uses. A block's *worth*
says in which order free blocks go, lowest first; among equals the least recently used goes first, and of one prompt the
last block, since a block is of use only behind all those before it.

    Lru            what plain vLLM does
    TtlPin         a turn's blocks stay for some seconds after it (Continuum, arXiv 2511.02230)
    Anchors        blocks that several sessions have used outlive those of one session; nothing is predicted
    FirstOrder     CacheScout's score (arXiv 2608.14624): hops over likely hand-overs, of first order
    Foresight      how soon each block is expected to be used again (`foresight.py`)

No clock, no vLLM: times are in seconds and come with the calls.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ropewalk.scheduler.markov import VariableOrder

Block = Hashable
AnyBlock = TypeVar("AnyBlock", bound=Hashable)

TTL_S = 0.3
"""Seconds that Continuum pins a program's KV for, in CacheScout's comparison."""

DELTA = 0.01
LAMBDA = 0.005
TAU = 0.1
MAX_HOPS = 6
"""CacheScout's: floor of both factors, decay a turn, likely hand-overs, and `E_max`."""

FORGOTTEN = 100
"""Turns of all sessions after which `FirstOrder` takes a session to have ended."""

MAX_SESSIONS = 4096
MAX_BLOCKS = 1 << 16
"""Sessions and blocks remembered, least recently used forgotten. About 10 MB at most."""

MAX_AGENTS = 256
"""Agents remembered, of a block and in all; some programs name a new one for each task."""


@dataclass(slots=True)
class Use:
    """Who has used a block: one `session` (None: several), which `agents`, when last (number of the turn, seconds), and
    how many blocks stand before it."""

    session: str | None
    agents: set[str]
    turn: int
    time_s: float
    depth: int


class Retention:
    """What all rules know: turns and the blocks that they use. This one evicts the least recently used."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks = max_blocks
        self.num_turns = 0
        self.now_s = 0.0
        self._uses: OrderedDict[Block, Use] = OrderedDict()

    def begin(self, session: str | None, agent: str, now_s: float) -> None:
        """Note that a turn of `agent` begins in a session; None: in none, so that nothing follows it."""
        self.num_turns += 1
        self.now_s = max(self.now_s, now_s)

    def used(self, session: str | None, agent: str, blocks: Iterable[Block]) -> None:
        """Note that the turn uses these blocks, in the order of its tokens.

        Without a session there is no turn: an agent's anchor was put into the cache, which is all its sessions'.
        """
        self.note(self._uses, session, agent, blocks, self.max_blocks)

    def note(
        self, uses: OrderedDict[AnyBlock, Use], session: str | None, agent: str, blocks: Iterable[AnyBlock], most: int
    ) -> None:
        """Add what a turn uses to `uses`, of `most` blocks at most, as `used` does to the rule's own."""
        for depth, block in enumerate(blocks):
            use = uses.get(block)
            if use is None:
                uses[block] = Use(session, {agent}, self.num_turns, self.now_s, depth)
                continue
            if use.session != session:
                use.session = None
            if len(use.agents) >= MAX_AGENTS:  # who has used it lately is found again
                use.agents.clear()
            use.agents.add(agent)
            use.turn, use.time_s = self.num_turns, self.now_s
            uses.move_to_end(block)
        while len(uses) > most:
            uses.popitem(last=False)

    def end(self, session: str) -> None:
        """Note that a session will not go on."""

    def worth(self, use: Use) -> float:
        """Return how much a block is worth that was used like this."""
        return 0.0

    def victims(self, blocks: Sequence[AnyBlock], count: int) -> list[AnyBlock]:
        """Return the `count` blocks that are worth least, the first to go first. Unknown ones are worth nothing."""
        return heapq.nsmallest(count, blocks, key=self.rank)

    def rank(self, block: Block) -> tuple[float, int, int]:
        """Return what orders blocks for eviction, lowest first."""
        use = self._uses.get(block)
        return (-1.0, 0, 0) if use is None else (self.worth(use), use.turn, -use.depth)


class RecentAgents:
    """The agents of the latest turns, `MAX_AGENTS` at most; what a learner knows of all others is forgotten."""

    def __init__(self, learner: VariableOrder) -> None:
        self._learner = learner
        self._agents: OrderedDict[str, None] = OrderedDict()

    def note(self, agent: str) -> None:
        """An agent has the floor, and the learner has observed it."""
        self._agents[agent] = None
        self._agents.move_to_end(agent)
        if len(self._agents) > MAX_AGENTS:
            self._learner.remove(self._agents.popitem(last=False)[0])


Lru = Retention


class TtlPin(Retention):
    """Blocks used within the last `ttl_s` seconds go last."""

    def __init__(self, ttl_s: float = TTL_S, max_blocks: int = MAX_BLOCKS) -> None:
        super().__init__(max_blocks)
        self.ttl_s = ttl_s

    def worth(self, use: Use) -> float:
        return float(self.now_s - use.time_s <= self.ttl_s)


class Anchors(Retention):
    """Blocks of several sessions go last."""

    def worth(self, use: Use) -> float:
        return float(use.session is None)


class FirstOrder(Retention):
    """`(p_surv + delta) · (exp(-lambda · age) + delta)`, `age` in turns of all sessions; only anchors have a survival.

    `p_surv = 1 - min(E, E_max) / E_max`, averaged over the live sessions, `E` hops over hand-overs of at least `tau`.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        super().__init__(max_blocks)
        self._learner = VariableOrder(1, smoothing="additive", half_life=math.inf)
        self._agents = RecentAgents(self._learner)
        self._at: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._survival: dict[str, float] = {}

    def begin(self, session: str | None, agent: str, now_s: float) -> None:
        super().begin(session, agent, now_s)
        before = self._at.pop(session, None) if session is not None else None
        if before is None or before[0] != agent:
            self._learner.observe(() if before is None else (before[0],), agent)
        self._agents.note(agent)
        if session is None:
            return
        self._at[session] = agent, self.num_turns
        while self._at and next(iter(self._at.values()))[1] <= self.num_turns - FORGOTTEN:
            self._at.popitem(last=False)
        standing = defaultdict[str, int](int)
        for at, _ in self._at.values():
            standing[at] += 1
        total: defaultdict[str, float] = defaultdict(float)
        for at, count in standing.items():
            for other, hops in self._hops(at).items():
                total[other] += count / len(self._at) * (1 - hops / MAX_HOPS)
        self._survival = dict(total)

    def end(self, session: str) -> None:
        self._at.pop(session, None)

    def _hops(self, agent: str) -> dict[str, int]:
        hops, frontier = {agent: 0}, [agent]
        for step in range(1, MAX_HOPS):
            reached = []
            for current in frontier:
                seen = self._learner.counts((current,))
                likely = [other for other, p in self._learner.predict((current,)) if p >= TAU and other in seen]
                reached += [other for other in likely if other not in hops]
                hops.update((other, step) for other in likely if other not in hops)
            frontier = reached
        return hops

    def worth(self, use: Use) -> float:
        survival = max((self._survival.get(agent, 0.0) for agent in use.agents), default=0.0)
        survival *= use.session is None
        return (survival + DELTA) * (math.exp(-LAMBDA * (self.num_turns - use.turn)) + DELTA)
