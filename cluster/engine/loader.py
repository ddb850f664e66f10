"""Takes planned chunks out of the store, verifies them, and moves their rows into the paged cache: the worker's share.

On CPUs two threads share the chunks. Each reads one into its own buffer and moves it on from there, while it lies in
the core's cache; memory for two chunks is all that takes. On a GPU the rows of all chunks are moved in one launch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from ropewalk.cluster.engine.layouts import KvLayout, StoredRows, UnsupportedLayout
from ropewalk.cluster.engine.saves import Slots
from ropewalk.cluster.engine.stores import OpenStores, Place
from ropewalk.cluster.store.chunk import Buffer, ChunkCorrupt
from ropewalk.kernels.keys import Tokens

MAX_THREADS = 2
"""More gain little: memory is the limit."""


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
    """`open_stores` makes the stores of one thread; `layout` moves the rows."""

    def __init__(self, layout: KvLayout, open_stores: Callable[[], OpenStores]) -> None:
        self._layout = layout
        self._open_stores = open_stores
        self._local = threading.local()
        self._all_stores: list[OpenStores] = []
        self._threads: ThreadPoolExecutor | None = None
        if layout.is_on_cpu:
            num_threads = max(min(torch.get_num_threads(), MAX_THREADS), 1)
            self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="ropewalk-loader")

    def load(self, load: Load) -> tuple[int, Exception | None]:
        """Take as many parts as can be had, in order. Mutates the engine's cache.

        Returns the position up to which it holds what was planned, and why not further. Nothing is raised: an engine
        that dies of one chunk loses everybody's requests. Slots behind that position may hold rows too.
        """
        failures: list[Exception | None]
        if self._threads is not None:
            failures = list(self._threads.map(lambda part: self._move(load.place, part), load.parts))
        else:
            failures = self._move_together(load)
        position = load.start
        for part, failure in zip(load.parts, failures, strict=True):
            if failure is not None:
                return position, failure
            position += len(part.tokens)
        return position, None

    def take_counters(self) -> Counter[str]:
        """Return what the stores have counted since the last call."""
        counters: Counter[str] = Counter()
        for stores in self._all_stores:
            counters.update(stores.take_counters())
        return counters

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def _move(self, place: Place, part: LoadPart) -> Exception | None:
        try:
            self._layout.scatter([self._read(place, part, self._buffer())], max_threads=1)
        except Exception as error:
            return error
        return None

    def _move_together(self, load: Load) -> list[Exception | None]:
        found: list[StoredRows] = []
        failures: list[Exception | None] = []
        for part in load.parts:
            try:
                found.append(self._read(load.place, part, None))
            except Exception as error:
                failures.append(error)
                break
            failures.append(None)
        try:
            if found:
                self._layout.scatter(found)
        except Exception as error:
            failures = [error]
        return failures + [failures[-1]] * (len(load.parts) - len(failures))

    def _read(self, place: Place, part: LoadPart, buffer: Buffer | None) -> StoredRows:
        header, rows = self._stores().get(place).read(part.chunk, buffer)
        end = part.offset + len(part.tokens)
        # A key is only a candidate: the token ids decide.
        if not np.array_equal(header.tokens[part.offset : end], part.tokens):
            raise TokensDiffer(f"chunk {part.chunk} holds other tokens")
        # The plan turns by where it believed the rows to come from.
        if part.source is not None and header.start != part.source:
            raise StartDiffers(f"chunk {part.chunk} begins at {header.start}, planned as {part.source}")
        return StoredRows(torch.from_numpy(part.slots), rows[:, part.offset : end], part.turn)

    def _stores(self) -> OpenStores:
        if not hasattr(self._local, "stores"):
            self._local.stores = self._open_stores()
            self._all_stores.append(self._local.stores)
        stores: OpenStores = self._local.stores
        return stores

    def _buffer(self) -> Buffer:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = Buffer()
        buffer: Buffer = self._local.buffer
        return buffer


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
