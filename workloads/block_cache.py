"""A model of an engine's prefix cache: full blocks, found by everything up to their end, evicted by a rule.

As in vLLM: a request finds the blocks of its longest cached prefix, but for its last token; it takes new blocks for the
rest, first those that hold nothing, then those that a rule gives up; when it ends, its full blocks stay, its last one
to be taken first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

import xxhash

from ropewalk.scheduler.foresight import Foresight
from ropewalk.scheduler.retention import Block, Retention
from ropewalk.workloads.traces import TraceTurn


def block_names(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Name each full block of a prompt by all tokens up to its end."""
    state = xxhash.xxh3_128()
    names = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        state.update(b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block_size]))
        names.append(state.digest())
    return names


class BlockCache:
    """Answers turns one after the other. `num_blocks` of `block_size` tokens, evicted as `rule` says."""

    def __init__(self, num_blocks: int, block_size: int, rule: Retention) -> None:
        self.block_size = block_size
        self.rule = rule
        self._free: dict[bytes, None] = {}
        self._num_blocks = num_blocks

    def serve(self, turn: TraceTurn) -> int:
        """Answer a turn; return how many of its prompt tokens were cached. Raises ValueError when it has no room."""
        names = block_names((*turn.prompt, *turn.output[:-1]), self.block_size)
        usable = names[: (len(turn.prompt) - 1) // self.block_size]
        num_cached = next((n for n, name in enumerate(usable) if name not in self._free), len(usable))
        self.rule.begin(turn.session, turn.agent, turn.time_s)
        needed = -(-(len(turn.prompt) + len(turn.output) - 1) // self.block_size)
        if needed > self._num_blocks:
            raise ValueError(f"a turn of {needed} blocks does not fit into {self._num_blocks}")
        missing = needed - num_cached - (self._num_blocks - len(self._free))
        if missing > 0:
            found = set(usable[:num_cached])
            for name in self.rule.victims([name for name in self._free if name not in found], missing):
                del self._free[name]
        self._free.update(dict.fromkeys(names))
        self.rule.used(turn.session, turn.agent, names)
        return num_cached * self.block_size


class Clairvoyant(Retention):
    """Belady's rule: the block whose next use is furthest away goes first. It is told the whole trace before."""

    def __init__(self, turns: Iterable[TraceTurn], block_size: int) -> None:
        super().__init__(max_blocks=1 << 30)
        self._next: defaultdict[Block, list[int]] = defaultdict(list)
        for number, turn in enumerate(turns, 1):
            for name in block_names(turn.prompt[:-1], block_size):
                self._next[name].append(number)
        for uses in self._next.values():
            uses.reverse()

    def rank(self, block: Block) -> tuple[float, int, int]:
        """Return what orders blocks for eviction: the number of the next turn that uses it, largest first."""
        uses = self._next.get(block, [])
        while uses and uses[-1] <= self.num_turns:
            uses.pop()
        use = self._uses.get(block)
        return (-uses[-1] if uses else float("-inf"), 0, -use.depth if use is not None else 0)


class Foretold(Foresight):
    """Foresight that is told who speaks in each session, in which order, though not when: what no learner can exceed
    that goes by agents.
    """

    def __init__(self, turns: Iterable[TraceTurn]) -> None:
        super().__init__()
        self._coming: defaultdict[str, deque[str]] = defaultdict(deque)
        for turn in turns:
            self._coming[turn.session].append(turn.agent)

    def begin(self, session: str | None, agent: str, now_s: float) -> None:
        if session is not None:
            self._coming[session].popleft()
        super().begin(session, agent, now_s)

    def _own_rates(self, session: str) -> tuple[float, dict[str, float]]:
        own = self._own.get(session)
        if own is None:
            _, rest = self._standing(self._live[session])
            rates: dict[str, float] = {}
            for turns, agent in enumerate(self._coming[session]):
                rates.setdefault(agent, 1 / (rest + turns * self.pauses.mean_s))
            own = self._own[session] = float(bool(rates)), rates
        return own

    def _sum_up(self) -> None:
        super()._sum_up()
        summed: defaultdict[str, float] = defaultdict(float)
        for session in self._live:
            for agent, rate in self._own_rates(session)[1].items():
                summed[agent] += rate
        self._rates = dict(summed)


def hit_rate(
    turns: Sequence[TraceTurn], num_blocks: int, block_size: int, rule: Retention, *, told: bool = False
) -> float:
    """Return the share of prompt tokens that are cached. `told`: the rule learns of each session's end at once."""
    cache = BlockCache(num_blocks, block_size, rule)
    num_cached = num_tokens = 0
    for turn in turns:
        num_cached += cache.serve(turn)
        num_tokens += len(turn.prompt)
        if told and turn.is_last:
            rule.end(turn.session)
    return num_cached / num_tokens
