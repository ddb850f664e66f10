"""Which of vLLM's blocks go next: before a request takes blocks, those worth keeping move away from the queue's end.

vLLM takes new blocks from the head of a queue of free ones and appends what is freed: the least recently used goes
first. `touch` and `free_blocks`, called for a free block one after the other, move it to the queue's other end, and
nothing else. That is all that happens here: what is in the cache and who may use it stays vLLM's affair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import get_block_hash

from ropewalk.scheduler.retention import Retention

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

WINDOW = 256
"""Free blocks that are weighed against each other, from the next to go on: one weighed takes about a microsecond."""

MAX_OUTPUT_BLOCKS = 4
"""Blocks that are made room for beyond the prompt's: a long answer takes the rest as they come."""


class PoolOrder:
    """Keeps the head of the queue of free blocks in the order that a rule gives them."""

    def __init__(self, make_rule: Callable[[], Retention], block_size: int) -> None:
        self.rule = make_rule()
        self.num_kept = 0
        """Blocks that were moved away from the queue's end."""
        self._make_rule = make_rule
        self._block_size = block_size
        self._pool: BlockPool | None = None
        self._turns: dict[str, tuple[str | None, str]] = {}
        """Session and agent of each request that is a turn; no session where an agent's anchor is prewarmed."""
        self._asked: tuple[str, int] | None = None

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool; remember as many blocks as tell twice its content."""
        self._pool = pool
        self.forget()

    def forget(self) -> None:
        """Forget everything that was learned."""
        self.rule = self._make_rule()
        if self._pool is not None:
            self.rule.max_blocks = max(2 * int(self._pool.num_gpu_blocks), 1024)

    def begin(self, request_id: str, turn: Mapping[str, Any]) -> None:
        """Take in a request and what is said of its turn: `session`, `agent`, `at_s` (None: now), whether it is a
        `prewarm`, and which sessions have `ended`.
        """
        for ended in turn.get("ended", ()):
            self.rule.end(ended)
        session, agent, at_s = turn.get("session"), turn.get("agent") or "", turn.get("at_s")
        if turn.get("prewarm"):  # nobody's turn: nothing is learned from it
            self._turns[request_id] = None, agent
            return
        self._turns[request_id] = session or request_id, agent
        self.rule.begin(session, agent, time.monotonic() if at_s is None else at_s)

    def end(self, request: Request, num_tokens: int) -> tuple[str | None, str] | None:
        """Note which blocks a request has used: all that its first `num_tokens` tokens fill.

        Returns its turn: the session (the request's own id if it had none; None where an anchor was prewarmed) and the
        agent; None for a request that is no turn.
        """
        turn = self._turns.pop(request.request_id, None)
        if turn is not None:
            self.rule.used(*turn, request.block_hashes[: num_tokens // self._block_size])
        return turn

    def make_room(self, request: Request, num_cached: int) -> None:
        """Let the blocks go first that are worth least, as many as a request will take. `num_cached`: its tokens that
        lie in blocks already.
        """
        if self._pool is None:
            return
        asked = request.request_id, self._pool.get_num_free_blocks()
        if asked == self._asked:  # it found no room in the step before, and finds the queue as it was left
            return
        self._asked = asked
        needed = -(-(request.num_tokens - num_cached) // self._block_size)
        needed += min(-(-(request.max_tokens or 0) // self._block_size), MAX_OUTPUT_BLOCKS)
        # vLLM takes those that the request shares out of the queue before it takes new ones.
        shared = set(request.block_hashes[: num_cached // self._block_size])
        window, needed = self._next_to_go(needed, shared)
        if not 0 < needed < len(window):
            return
        ranked = sorted((self.rule.rank(name), place) for place, (name, _) in enumerate(window))
        victims = {place for _, place in ranked[:needed]}
        ahead = max(victims)
        kept = [window[place][1] for _, place in ranked if place < ahead and place not in victims]
        self._pool.touch(kept)
        self._pool.free_blocks(kept)
        self.num_kept += len(kept)

    def _next_to_go(self, needed: int, shared: Set[bytes]) -> tuple[list[tuple[bytes, KVCacheBlock]], int]:
        """Return the next free blocks that hold something, by name, and how many of them have to go."""
        assert self._pool is not None
        window: list[tuple[bytes, KVCacheBlock]] = []
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        while block is not None and block.next_free_block is not None and needed > 0 and len(window) < WINDOW + needed:
            if block.block_hash is None:
                needed -= 1
            elif (name := get_block_hash(block.block_hash)) not in shared:
                window.append((name, block))
            block = block.next_free_block
        return window, needed
