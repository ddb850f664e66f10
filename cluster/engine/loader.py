"""Takes planned chunks out of the store, verifies them, and moves their rows into the paged cache: the worker's share.

Chunks in memory are mapped, not copied. Rows of many are moved in one call, which shares them out among threads of
compiled code, or is one launch on a GPU. (Threads that read chunks would wait for Python's lock most of the time.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ropewalk.cluster.engine.layouts import KvLayout, StoredRows, UnsupportedLayout
from ropewalk.cluster.engine.saves import Slots
from ropewalk.cluster.engine.stores import OpenStores, Place
from ropewalk.cluster.store.chunk import ChunkCorrupt
from ropewalk.kernels.keys import Tokens

BATCH_BYTES = 64 << 20
"""Rows are moved from so many bytes on: chunks from the disk, and those on their way to a GPU, take memory."""


@dataclass(slots=True)
class LoadPart:
    """Rows `[offset, offset + n)` of a chunk, `n = len(slots)`, turned by `turn`, go to `slots`.

    `source` is the position that the plan takes the chunk's first row to be computed at. None: rows are taken at wrong
    positions on purpose.
    """

    chunk: str
    offset: int
    turn: int
    source: int | None
    tokens: Tokens
    slots: Slots


@dataclass(slots=True)
class Load:
    """Parts of one request, ascending from position `start`. `block_ids` are all of its blocks."""

    request_id: str
    place: Place
    start: int
    parts: list[LoadPart]
    block_ids: list[int]


class Loader:
    """`stores` are of the engine's thread; `layout` moves the rows."""

    def __init__(self, layout: KvLayout, stores: OpenStores) -> None:
        self._layout = layout
        self._stores = stores

    def load(self, load: Load) -> tuple[int, Exception | None]:
        """Take as many parts as can be had, in order. Mutates the engine's cache.

        Returns the position up to which it holds what was planned, and why not further. Nothing is raised: an engine
        that dies of one chunk loses everybody's requests.
        """
        position, failure = load.start, None
        parts = iter(load.parts)
        while failure is None:
            batch, failure = self._read_batch(load.place, parts)
            if not batch:
                break
            try:
                self._layout.scatter(batch)
            except Exception as error:
                return position, error
            position += sum(len(rows.slots) for rows in batch)
        return position, failure

    def take_counters(self) -> Counter[str]:
        """Return what the stores have counted since the last call."""
        return self._stores.take_counters()

    def _read_batch(self, place: Place, parts: Iterator[LoadPart]) -> tuple[list[StoredRows], Exception | None]:
        """Read the next parts, as many as make a batch; fewer when one cannot be had, and why it cannot."""
        batch: list[StoredRows] = []
        num_bytes = 0
        try:
            for part in parts:
                batch.append(self._read(place, part))
                num_bytes += batch[-1].rows.nbytes
                if num_bytes >= BATCH_BYTES:
                    break
        except Exception as error:
            return batch, error
        return batch, None

    def _read(self, place: Place, part: LoadPart) -> StoredRows:
        header, rows = self._stores.get(place).read(part.chunk)
        end = part.offset + len(part.tokens)
        # A key is only a candidate: the token ids decide.
        if not np.array_equal(header.tokens[part.offset : end], part.tokens):
            raise TokensDiffer(f"chunk {part.chunk} holds other tokens")
        # The plan turns by where it believed the rows to come from.
        if part.source is not None and header.start != part.source:
            raise StartDiffers(f"chunk {part.chunk} begins at {header.start}, planned as {part.source}")
        return StoredRows(torch.from_numpy(part.slots), rows[:, part.offset : end], part.turn)


class TokensDiffer(Exception):
    """A chunk's token ids are not those of the prompt: a key collided."""


class StartDiffers(Exception):
    """A chunk was computed at another position than the plan assumed: its keys would be turned wrongly."""


def reason_of(failure: Exception) -> str:
    """Return the name of a failure, as `fallbacks` show it (docs/reuse.md)."""
    if isinstance(failure, OSError):
        return "chunk_missing"
    if isinstance(failure, ChunkCorrupt):
        return "chunk_corrupt"
    if isinstance(failure, TokensDiffer):
        return "tokens_differ"
    if isinstance(failure, StartDiffers):
        return "start_differs"
    if isinstance(failure, UnsupportedLayout):
        return "layout_unknown"
    return "load_failed"
