"""Which chunks of a request are saved: the scheduler half's share of saving.

    request_finished ── SaveQueue.add ──► Save ──► worker: Saver ──► store
           blocks held from here ────────────────────► released when the rows are out of the cache

Nothing is queued that is stored or queued already, and the blocks held are bounded: what is more is not saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ropewalk.cluster.engine.pending import keys_of
from ropewalk.cluster.engine.stores import OpenStores, Place
from ropewalk.cluster.store.chunk import ChunkHeader
from ropewalk.kernels.gear import ChunkSizes
from ropewalk.kernels.keys import HEAD_LENGTH, Domain, Tokens, content_key
from ropewalk.scheduler.plan import Piece, Plan, pieces

HELD_SHARE = 0.25
"""Of vLLM's blocks, at most so many are held for finished requests that wait to be saved. One request may always wait,
or a small cache would never save a long one."""

Slots = npt.NDArray[np.int64]


@dataclass(slots=True)
class SavePart:
    """One chunk, and where its rows lie: `slots` is `[n]` int64."""

    header: ChunkHeader
    slots: Slots


@dataclass(slots=True)
class Save:
    """Chunks of one request, ascending."""

    request_id: str
    place: Place
    parts: list[SavePart]


class SaveQueue:
    """What is to be saved, and what is being saved. `counters` counts chunks that were given up, by reason."""

    def __init__(self, sizes: ChunkSizes, block_size: int, stores: OpenStores) -> None:
        self.max_blocks = 0
        """Blocks that finished requests may hold together; set once the size of the cache is known."""
        self.counters: Counter[str] = Counter()
        self._sizes = sizes
        self._block_size = block_size
        self._stores = stores
        self._held: dict[str, tuple[int, set[str]]] = {}
        """By request: how many blocks it holds, and the names and contents of what it saves."""

    def add(
        self,
        request_id: str,
        place: Place,
        tokens: Tokens,
        plan: Plan,
        block_ids: list[int],
        cut: Sequence[Piece] | None = None,
    ) -> tuple[Save | None, dict[str, Any] | None]:
        """Queue what a finished request computed: return what is to be saved, and how to see that it is stored. `cut`:
        its `pieces`, if they are known.

        With a save, the request's blocks must be held until it is `release`d. The second value names the chunk that
        is stored last and its content, if that lists it, all chunks, and the heads of all: the planner's share. None
        for nothing.
        """
        cut = self.pieces(place, tokens, plan) if cut is None else cut
        missing = [piece for piece in cut if not self._is_stored(place, piece, tokens)]
        queued = set[str]().union(*(keys for _, keys in self._held.values()))
        own = [piece for piece in missing if queued.isdisjoint(_keys(place, piece, tokens))]
        num_held = sum(num_blocks for num_blocks, _ in self._held.values())
        if own and num_held and num_held + len(block_ids) > self.max_blocks:
            self.counters["save_dropped_queue_full"] += len(own)
            return None, None
        if not missing:
            return None, None
        # The worker saves in order: with the last own piece, those that others have queued are stored too.
        heads = set[str]().union(*(keys_of(tokens[piece.start : piece.end], place[1]) for piece in missing))
        chains = [piece.chain for piece in missing]
        last = (own or missing)[-1]
        listed = "" if last.domain is Domain.LINEAGE else content_key(place[1], tokens[last.start : last.end])
        awaited = {"chain": last.chain, "content": listed, "heads": sorted(heads), "chains": chains}
        if not own:
            return None, awaited
        self._held[request_id] = len(block_ids), set[str]().union(*(_keys(place, piece, tokens) for piece in own))
        return Save(request_id, place, self._parts(place, own, tokens, block_ids)), awaited

    def stage(self, request_id: str, place: Place, tokens: Tokens, plan: Plan, block_ids: list[int]) -> Save | None:
        """Return what a stage has to store before its answer leaves: every piece, under its own name."""
        store = self._stores.get(place)
        missing = [piece for piece in self.pieces(place, tokens, plan) if not store.contains(piece.chain)]
        return Save(request_id, place, self._parts(place, missing, tokens, block_ids)) if missing else None

    def release(self, request_ids: Iterable[str]) -> None:
        """Note that these requests' blocks are held no longer."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def pieces(self, place: Place, tokens: Tokens, plan: Plan) -> list[Piece]:
        """Cut what a request computed into chunks."""
        return pieces_of(tokens, place[1], self._sizes, plan)

    def _is_stored(self, place: Place, piece: Piece, tokens: Tokens) -> bool:
        """Tell whether saving a piece adds nothing."""
        if piece.end - piece.start < HEAD_LENGTH and piece.domain != Domain.LINEAGE:
            return True  # no look-up would ever find it
        store = self._stores.get(place)
        if store.contains(piece.chain):
            return True
        if piece.domain != Domain.REUSE:
            return False
        try:
            return bool(store.by_content(content_key(place[1], tokens[piece.start : piece.end])))
        except OSError:  # the store has counted it; in this place it would end the engine
            return False

    def _parts(self, place: Place, own: list[Piece], tokens: Tokens, block_ids: list[int]) -> list[SavePart]:
        return [
            SavePart(
                _header(place[1], piece, tokens[piece.start : piece.end]),
                slots_of(block_ids, piece.start, piece.end, self._block_size),
            )
            for piece in own
        ]


def pieces_of(tokens: Tokens, tenant: str, sizes: ChunkSizes, plan: Plan) -> list[Piece]:
    """Cut what a request computed of `tokens`, prompt and answer, into chunks to be saved; see `pieces`."""
    # A run that was not reached (the request was aborted, a chunk was missing) would leave false edges: only what
    # lies inside the computed range counts.
    reached, unsaved = (
        [(start, min(end, len(tokens))) for start, end in spans if start < len(tokens)]
        for spans in (plan.runs, plan.unsaved)
    )
    marks = [mark for mark in plan.marks if mark.start < len(tokens)]
    return pieces(tokens, tenant, sizes, reached, marks, unsaved)


def slots_of(block_ids: list[int], start: int, end: int, block_size: int) -> Slots:
    """Return the slots of positions `[start, end)`: `block * B + offset`, int64."""
    positions = np.arange(start, end)
    blocks = np.asarray(block_ids, dtype=np.int64)[positions // block_size]
    slots: Slots = blocks * block_size + positions % block_size
    return slots


def _keys(place: Place, piece: Piece, tokens: Tokens) -> set[str]:
    """Return what tells that a piece is queued already: its name or, where any left context will do, its content."""
    fingerprint, tenant = place
    names = {f"{fingerprint}/{piece.chain}"}
    if piece.domain == Domain.REUSE:
        names.add(f"{fingerprint}/{content_key(tenant, tokens[piece.start : piece.end])}")
    return names


def _header(tenant: str, piece: Piece, tokens: Tokens) -> ChunkHeader:
    content = content_key(tenant, tokens)
    return ChunkHeader(piece.chain, piece.parent, content, tenant, piece.domain, piece.start, tokens)
