"""The block cache of one simulated replica: vLLM's queue of free blocks, with the window in which a rule reorders it.

    blocks of running requests      held: cannot be evicted; those of a common prefix are held once
    blocks of answered requests     free: found by later requests, taken from the head of the queue when room is needed
    the rest                        empty: taken first

As in vLLM a request that ends appends its blocks to the queue, the last one first. A rule weighs `WINDOW` blocks more
than are needed, from the head of the queue on, as `ropewalk.cluster.engine.pool` does: those worth least go, and those
that stood before them and stay move to the queue's end. So a request costs the same however large a cache is.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from ropewalk.scheduler.retention import Retention
from ropewalk.workloads.simulate.request import Request

WINDOW = 256
"""Free blocks that are weighed beyond those that are needed: that of `ropewalk.cluster.engine.pool`."""


class DoesNotFitError(ValueError):
    """A request that needs more blocks than a replica has."""


class ReplicaCache:
    """`num_blocks` blocks of `block_size` tokens. Without a `rule` the queue stays as it is: least recently used."""

    def __init__(self, num_blocks: int, block_size: int, rule: Retention | None = None, window: int = WINDOW) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.rule = rule
        self.window = window
        self._free: OrderedDict[int, None] = OrderedDict()
        self._held: dict[int, int] = {}
        """How many running requests hold each block."""
        self._num_nameless = 0
        """Blocks held for tokens that nobody can ask for again: a partial block, or an answer that the trace hides."""
        if rule is not None:
            rule.max_blocks = max(2 * num_blocks, 1024)

    @property
    def num_free(self) -> int:
        """Blocks of answered requests."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks of running requests."""
        return len(self._held) + self._num_nameless

    @property
    def num_empty(self) -> int:
        """Blocks that hold nothing."""
        return self.num_blocks - len(self._free) - len(self._held) - self._num_nameless

    def num_needed(self, request: Request) -> int:
        """Blocks that a request holds while it runs, its answer's among them; the last token is never written."""
        return -(-(request.num_prompt + request.num_output - 1) // self.block_size)

    def admit(self, request: Request) -> int | None:
        """Take the blocks of a request; return how many tokens of its prompt are cached, or None: there is no room now.

        The last token of a prompt is always computed. Raises DoesNotFitError when a request would not even fit alone.
        """
        free, held, blocks = self._free, self._held, request.blocks
        hit = num_revived = 0
        for name in blocks[: (request.num_prompt - 1) // self.block_size]:
            if name in free:
                num_revived += 1
            elif name not in held:
                break
            hit += 1
        needed = self.num_needed(request)
        missing = needed - hit - self.num_empty
        if missing > len(free) - num_revived:
            if needed > self.num_blocks:
                raise DoesNotFitError(f"a request of {needed} blocks does not fit into {self.num_blocks}")
            return None
        if num_revived:
            for name in blocks[:hit]:
                if name in free:
                    del free[name]
                    held[name] = 1
                else:
                    held[name] += 1
        else:
            for name in blocks[:hit]:
                held[name] += 1
        if missing > 0:
            self._evict(missing)
        for name in blocks[hit:]:
            if name in held:
                held[name] += 1
            else:
                # A block behind a gap is computed again, and replaces what was there.
                free.pop(name, None)
                held[name] = 1
        self._num_nameless += needed - len(blocks)
        return hit * self.block_size

    def release(self, request: Request) -> None:
        """Free the blocks of a request that is answered."""
        free, held = self._free, self._held
        for name in reversed(request.blocks):
            count = held[name]
            if count == 1:
                del held[name]
                free[name] = None
            else:
                held[name] = count - 1
        self._num_nameless -= self.num_needed(request) - len(request.blocks)

    def _evict(self, count: int) -> None:
        """Let `count` free blocks go."""
        free = self._free
        if self.rule is None or count >= min(len(free), self.window + count):
            for _ in range(count):
                free.popitem(last=False)
            return
        window = list(islice(free, self.window + count))
        rank = self.rule.rank
        ranked = sorted([(rank(name), place) for place, name in enumerate(window)])
        ahead = 0
        for _, place in ranked[:count]:
            ahead = max(ahead, place)
            del free[window[place]]
        for _, place in ranked[count:]:
            if place < ahead:
                free.move_to_end(window[place])

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is held, free or empty, and none is two of them."""
        assert not self._free.keys() & self._held.keys()
        assert all(count > 0 for count in self._held.values())
        assert self._num_nameless >= 0
        assert self.num_empty >= 0
        assert self.num_held + self.num_free + self.num_empty == self.num_blocks
