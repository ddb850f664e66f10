"""What the engine has said it is storing, seen from the planning process: whether it is worth waiting for."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Set
from typing import Any, NamedTuple

from ropewalk.cluster.store.folder import anchor_keys
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.kernels.gear import ChunkSizes, chunk_limits
from ropewalk.kernels.keys import HEAD_LENGTH, Tokens, head_key

GRACE_S = 1.0
"""Seconds beyond those that blocks are held for, after which a save is taken to be lost: dropped by the engine, refused
by the store, or evicted again."""

MAX_PENDING = 256
"""Saves remembered. Of more, the oldest are forgotten: they are stored by then, or nobody asks for them."""

POLL_S, MAX_POLL_S = 0.001, 0.008
"""Seconds between two looks for a chunk, at first and at most: many may be waiting."""


class _Pending(NamedTuple):
    store: NodeStore
    chain: str
    content: str
    heads: Set[str]
    chains: Set[str]
    deadline: float


class PendingSaves:
    """Saves of finished requests that are not known to be stored yet, oldest first.

    `max_hold_s` is how many seconds the engine holds blocks for a save.
    """

    def __init__(self, max_hold_s: float) -> None:
        self._given_up_s = max_hold_s + GRACE_S
        self._pending: deque[_Pending] = deque(maxlen=MAX_PENDING)

    def __len__(self) -> int:
        while self._pending and self._is_over(self._pending[0]):
            self._pending.popleft()
        return len(self._pending)

    def add(self, store: NodeStore, saving: dict[str, Any]) -> None:
        """Remember what the engine returned with an answer: the chunk that is stored last with its content (empty:
        nothing lists it), all chunks, and their heads.
        """
        len(self)  # forget what is stored
        self._pending.append(
            _Pending(
                store,
                saving["chain"],
                saving["content"],
                frozenset(saving["heads"]),
                frozenset(saving["chains"]),
                time.monotonic() + self._given_up_s,
            )
        )

    async def wait(self, seconds: float | None = None, heads: Set[str] | None = None) -> None:
        """Wait, at most so long (None: until it is given up), until what begins with one of `heads` is stored (None:
        everything).
        """
        until = time.monotonic() + (self._given_up_s if seconds is None else seconds)
        for pending in list(self._pending):  # not for what is answered meanwhile
            if heads is None or not heads.isdisjoint(pending.heads):
                while not self._is_over(pending) and time.monotonic() < until:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)  # another process stores it: there is no event

    async def wait_for(self, store: NodeStore, chains: Set[str], seconds: float) -> None:
        """Wait, at most so long, until those of these chunks are stored that are being stored."""
        until = time.monotonic() + seconds
        poll_s = POLL_S
        while self._are_coming({chain for chain in chains if not store.contains(chain)}) and time.monotonic() < until:
            await asyncio.sleep(poll_s)  # another process stores them: there is no event
            poll_s = min(1.2 * poll_s, MAX_POLL_S)

    def _are_coming(self, missing: Set[str]) -> bool:
        return bool(missing and len(self)) and any(not missing.isdisjoint(pending.chains) for pending in self._pending)

    def _is_over(self, pending: _Pending) -> bool:
        if time.monotonic() > pending.deadline:
            return True
        if not pending.content:
            return pending.store.contains(pending.chain)
        return pending.store.is_listed(pending.chain, pending.content)


def heads_of(tokens: Tokens, tenant: str, sizes: ChunkSizes) -> set[str]:
    """Return the keys by which a prompt finds chunks: `keys_of` all that it is cut into."""
    limits = chunk_limits(tokens, sizes)
    return set[str]().union(*(keys_of(tokens[a:b], tenant) for a, b in zip([0, *limits[:-1]], limits, strict=True)))


def keys_of(tokens: Tokens, tenant: str) -> set[str]:
    """Return the head key of a chunk and those of its anchors.

    A chunk and a longer one of the same place have the same head, so this covers a history's unfinished last chunk. A
    text in which no limit falls is one chunk with whatever stands before it, and shares anchors only.
    """
    return {head_key(tenant, tokens), *anchor_keys(tenant, tokens)} if len(tokens) >= HEAD_LENGTH else set()
