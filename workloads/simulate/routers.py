"""Who serves a request in a simulated cluster: one router that sees all queues.

round-robin   one replica after the other
random        any replica
p2c           the shorter queue of two random replicas: Ray Serve's default
prefix        Ray's PrefixCacheAffinityRouter, on blocks instead of characters
rank          ours: `ropewalk.scheduler.routing`, with the scheduler's snapshots
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ropewalk.agents.sketch import AnchorSketch
from ropewalk.scheduler.routing import CHARS_PER_TOKEN, LocalAffinity, ReplicaView, RequestHints, rank_replicas
from ropewalk.scheduler.state import Observation, SchedulerSettings, SchedulerState
from ropewalk.workloads.simulate.request import Request

MATCH_RATE = 0.1
"""Share of a prompt that has to match, as Ray has it: else the replica goes that was sent the fewest characters."""

SNAPSHOT_S = 0.5
"""Seconds between two snapshots of the scheduler that a router sees, as `ropewalk.scheduler.client` has it."""


ROUTER_SESSIONS = LocalAffinity().max_sessions
"""Sessions that our router remembers."""


class Router(Protocol):
    """Chooses replicas. `queues`: requests at each, running ones included."""

    def choose(self, request: Request, queues: Sequence[int], now_s: float) -> int:
        """Return the replica for a request, which is sent there."""
        ...

    def answered(self, request: Request, replica: int, now_s: float, num_cached: int) -> None:
        """Note that a replica has answered a request."""
        ...


class RoundRobin:
    """One replica after the other."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._next = -1

    def choose(self, request: Request, queues: Sequence[int], now_s: float) -> int:
        self._next = (self._next + 1) % self._num_replicas
        return self._next

    def answered(self, request: Request, replica: int, now_s: float, num_cached: int) -> None:
        pass


class RandomReplica(RoundRobin):
    """Any replica."""

    def __init__(self, num_replicas: int, seed: int = 0) -> None:
        super().__init__(num_replicas)
        self._random = random.Random(seed).random

    def choose(self, request: Request, queues: Sequence[int], now_s: float) -> int:
        return int(self._random() * self._num_replicas)


class PowerOfTwo(RandomReplica):
    """The shorter queue of two random replicas."""

    def choose(self, request: Request, queues: Sequence[int], now_s: float) -> int:
        if self._num_replicas == 1:
            return 0
        one = int(self._random() * self._num_replicas)
        other = int(self._random() * (self._num_replicas - 1))
        other += other >= one
        return one if queues[one] <= queues[other] else other


class PrefixAffinity(PowerOfTwo):
    """Ray 2.60's `PrefixCacheAffinityRouter`.

    While the longest and the shortest queue are at most `imbalance` apart: of the replicas that were sent the longest
    prefix of this prompt, the one with the shortest queue; if less than `MATCH_RATE` of the prompt matches, of those
    that were sent least. Else the better of two random ones.

    Ray's tree grows without end by default; here it forgets, of each replica, what was sent longest ago beyond
    `max_blocks`. A block's owners are the bits of an integer. Ancestors are as recent as what follows them, so that
    what a replica owns is closed under prefixes, and the longest match is found by bisection.
    """

    def __init__(
        self, num_replicas: int, block_size: int, max_blocks: int, imbalance: float = math.inf, seed: int = 0
    ) -> None:
        super().__init__(num_replicas, seed)
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._imbalance = imbalance
        self._owners: dict[int, int] = {}
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._sizes = [0] * num_replicas

    def choose(self, request: Request, queues: Sequence[int], now_s: float) -> int:
        if max(queues) - min(queues) > self._imbalance:
            chosen = super().choose(request, queues, now_s)
        else:
            chosen = min(self._candidates(request), key=queues.__getitem__)
        self._insert(chosen, request.blocks[: request.num_prompt // self._block_size])
        return chosen

    def _candidates(self, request: Request) -> Sequence[int]:
        blocks, owners = request.blocks, self._owners
        low, high = 0, min(request.num_prompt // self._block_size, len(blocks))
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in owners:
                low = middle
            else:
                high = middle - 1
        if low * self._block_size >= MATCH_RATE * request.num_prompt:
            bits = owners[blocks[low - 1]]
            return [replica for replica in range(bits.bit_length()) if bits >> replica & 1]
        least = min(self._sizes)
        return [replica for replica, size in enumerate(self._sizes) if size == least]

    def _insert(self, replica: int, blocks: Sequence[int]) -> None:
        owners, sent, bit = self._owners, self._sent[replica], 1 << replica
        for name in reversed(blocks):
            if name in sent:
                sent.move_to_end(name)
            else:
                sent[name] = None
                owners[name] = owners.get(name, 0) | bit
        while len(sent) > self._max_blocks:
            name, _ = sent.popitem(last=False)
            left = owners[name] & ~bit
            if left:
                owners[name] = left
            else:
                del owners[name]
        self._sizes[replica] = len(sent)

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks and their owners agree and bounds hold."""
        assert self._sizes == [len(sent) for sent in self._sent]
        assert max(self._sizes) <= self._max_blocks
        found: Counter[int] = Counter()
        for replica, sent in enumerate(self._sent):
            for name in sent:
                found[name] |= 1 << replica
        assert found == self._owners


class Rank:
    """Ours: `rank_replicas`, over the router's own memory and, every `snapshot_s` seconds, what the scheduler knows.

    The scheduler learns from each answer. `snapshot_s` of 0: there is no scheduler. `max_sessions`: how many the router
    remembers. Nodes are not modelled: a replica has what it has computed itself.
    """

    def __init__(self, num_replicas: int, snapshot_s: float = SNAPSHOT_S, max_sessions: int = ROUTER_SESSIONS) -> None:
        self.reasons: Counter[str] = Counter()
        self._names = [f"r{number}" for number in range(num_replicas)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._views = [ReplicaView(name) for name in self._names]
        self._affinity = LocalAffinity(max_sessions)
        self._sketches: dict[str, AnchorSketch] = {}
        self._scheduler = SchedulerState(SchedulerSettings()) if snapshot_s > 0 else None
        self._snapshot = None if self._scheduler is None else self._scheduler.snapshot()
        self._snapshot_s = snapshot_s
        self._next_snapshot_s = 0.0

    def choose(self, request: Request, queues: Sequence[int], now_s: float) -> int:
        if self._scheduler is not None and now_s >= self._next_snapshot_s:
            self._snapshot = self._scheduler.snapshot()
            self._affinity.saw(self._snapshot)
            self._next_snapshot_s = now_s + self._snapshot_s
        views = self._views
        for number, queue_len in enumerate(queues):
            if views[number].queue_len != queue_len:
                views[number] = ReplicaView(self._names[number], queue_len)
        agent = request.agent or None
        hints = RequestHints(request.session, agent, self._sketch(request), CHARS_PER_TOKEN * request.num_prompt)
        ranking = rank_replicas(hints, views, self._snapshot, self._affinity, agent)
        self.reasons[str(ranking.reason)] += 1
        self._affinity.remember(ranking.order[0], request.session, agent, now_s)
        return self._numbers[ranking.order[0]]

    def _sketch(self, request: Request) -> AnchorSketch | None:
        """Agents are named, so that of a sketch only the anchor's length counts."""
        if not request.num_anchor:
            return None
        sketch = self._sketches.get(request.agent)
        if sketch is None:
            if len(self._sketches) >= self._affinity.max_agents:
                self._sketches.clear()
            sketch = AnchorSketch((1,), 1, CHARS_PER_TOKEN * request.num_anchor)
            self._sketches[request.agent] = sketch
        return sketch

    def answered(self, request: Request, replica: int, now_s: float, num_cached: int) -> None:
        if self._scheduler is not None:
            self._scheduler.observe(
                Observation(
                    session=request.session,
                    agent=request.agent or None,
                    sketch=None,
                    model="",
                    replica=self._names[replica],
                    node=self._names[replica],
                    time_s=now_s,
                    prompt_tokens=request.num_prompt,
                    cached_tokens=num_cached,
                )
            )


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What routers need to know. `num_blocks`, `block_size`: of each replica's cache."""

    num_replicas: int
    num_blocks: int
    block_size: int
    imbalance: float = math.inf
    snapshot_s: float = SNAPSHOT_S
    max_sessions: int = ROUTER_SESSIONS
    seed: int = 0


ROUTERS: Mapping[str, Callable[[RouterSettings], Router]] = {
    "round-robin": lambda s: RoundRobin(s.num_replicas),
    "random": lambda s: RandomReplica(s.num_replicas, s.seed),
    "p2c": lambda s: PowerOfTwo(s.num_replicas, s.seed),
    # What a replica was sent before twice its cache's content has gone.
    "prefix": lambda s: PrefixAffinity(s.num_replicas, s.block_size, 2 * s.num_blocks, s.imbalance, s.seed),
    "rank": lambda s: Rank(s.num_replicas, s.snapshot_s, s.max_sessions),
}
"""By name."""
