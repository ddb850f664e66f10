"""The chunks of one node: content-addressed files that every replica of a model maps.

The file system is the index, so replicas share chunks without a call between them. A marker whose chunk is gone is a
miss. There are one or two tiers of the same form (`folder.py`): memory, and the disk below it, which survives restarts.
Look-ups see both, memory first.

                     put                       read: verified, then mapped
                      │                                  ▲
                      ▼                                  │
        memory   [ chunk files ] ────────────────────────┤
                      │    ▲                             │
        eviction:     │    │ read: promoted,             │
        demoted       ▼    │ where memory has room       │
        disk     [ chunk files ] ── read: verified copy ─┘
                      │
                      ▼ eviction: gone

Everything here tolerates files that vanish at any moment, the whole root included.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from ropewalk.cluster.store.chunk import (
    ChunkCorrupt,
    ChunkHeader,
    Damage,
    parse_chunk,
    read_chunk,
    read_header,
    verify_names,
    write_bytes,
    write_chunk,
)
from ropewalk.cluster.store.folder import KINDS, MAX_HEADS, MAX_VERSIONS, SUPERSEDED, ChunkFolder
from ropewalk.cluster.store.tier import StoreUsage, Tier, io_reason
from ropewalk.cluster.store.worth import remove_worths
from ropewalk.kernels.keys import HEAD_LENGTH, Domain, head_key

__all__ = ["MAX_HEADS", "MAX_VERSIONS", "DiskTier", "NodeStore", "StoreUsage", "Traces"]

HEADER_CACHE = 4096
"""Headers remembered in the process. A name stands for one header for ever, so it stays true while a file has it."""


@dataclass(frozen=True, slots=True)
class DiskTier:
    """Where chunks go that memory has no room for, and how many bytes of them."""

    root: Path
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Traces:
    """By what the chunks of a purge are known, on any node: `names` of those of the session itself; of the text that
    goes, `contents` (keys), and `places` (parent and first token), where shorter and longer chunks begin as well.
    """

    names: frozenset[str] = frozenset()
    contents: frozenset[str] = frozenset()
    places: frozenset[tuple[str, int]] = frozenset()

    def __or__(self, other: Traces) -> Traces:
        return Traces(self.names | other.names, self.contents | other.contents, self.places | other.places)

    def are_of(self, header: ChunkHeader) -> bool:
        """Tell whether a chunk bears one of them."""
        return (
            header.chain in self.names
            or header.content in self.contents
            or (header.parent, int(header.tokens[0])) in self.places
        )


class NodeStore:
    """Chunks of one model and tenant under roots that several models, tenants and processes share.

    `budget_bytes` bounds the whole root: `put` evicts the chunks of anybody that are worth least when it is exceeded
    (`tier.py` has the order), to `disk` if there is one. `counters` counts what happened in this process, by name
    (docs/reuse.md).
    """

    def __init__(
        self, root: Path, fingerprint: str, tenant: str, budget_bytes: int, disk: DiskTier | None = None
    ) -> None:
        self.root = root
        self.tenant = tenant
        self.budget_bytes = budget_bytes
        self.counters: Counter[str] = Counter()
        below = None
        if disk is not None:
            below = Tier(disk.root, disk.budget_bytes, self.counters, "disk_", worth_root=root)
        self._memory = Tier(root, budget_bytes, self.counters, below=below)
        # The tenant's name comes from outside: only its hash becomes part of a path.
        place = Path(fingerprint) / xxhash.xxh3_64_hexdigest(tenant.encode())
        self._folders = [ChunkFolder(tier.root / place) for tier in (self._memory, below) if tier is not None]
        self.base = self._folders[0].base
        self._headers: OrderedDict[str, ChunkHeader] = OrderedDict()

    @property
    def last_base(self) -> Path:
        """This model's and tenant's folder in the last tier: what survives most."""
        return self._folders[-1].base

    # Look-ups

    def contains(self, chain: str) -> bool:
        """Tell whether the chunk's file is there."""
        # Unlike `Path.exists`, this never raises.
        return any(os.path.exists(folder.path(chain)) for folder in self._folders)

    def size(self, chain: str) -> int:
        """Return the size of the chunk's file in bytes; 0 when it is not there."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                return os.stat(folder.path(chain)).st_size
        return 0

    def chains(self) -> set[str]:
        """Return the names of all chunks of this model and tenant."""
        return {chain for folder in self._folders for chain in folder.chains()}

    def is_listed(self, chain: str, content: str) -> bool:
        """Tell whether look-ups of every kind find a chunk, or one that replaces it: its file is there a moment before.

        Not for chunks of a lineage, which nothing lists.
        """
        return any(folder.is_listed(chain, content) for folder in self._folders)

    def by_chain(self, chain: str) -> ChunkHeader | None:
        """Return the header of the chunk of this name, or None. Raises `OSError` when memory cannot be read."""
        header = self._headers.get(chain)
        if header is not None and self.contains(chain):
            return header
        self._headers.pop(chain, None)
        failure: OSError | None = None
        for folder in self._folders:
            try:
                header = read_header(folder.path(chain))
                self._verify(header, chain)
            except FileNotFoundError:
                continue
            except ChunkCorrupt as error:
                self._quarantine(folder, chain, error.damage)
            except OSError as error:
                self._count_unreadable(folder)
                if folder is self._folders[0]:  # a disk that fails is no reason to go without memory
                    failure = error
            else:
                self._headers[chain] = header
                if len(self._headers) > HEADER_CACHE:
                    with contextlib.suppress(KeyError):  # another thread was faster
                        self._headers.popitem(last=False)
                return header
        if failure is not None:
            raise failure
        return None

    def by_content(self, content: str) -> list[ChunkHeader]:
        """Return the chunks listed under a content key: memory before disk, most recently stored first."""
        return self._listed("content", content)[:MAX_VERSIONS]

    def by_head(self, head: str) -> list[ChunkHeader]:
        """Return the chunks listed under a head key: memory before disk, most recently stored first."""
        return self._listed("heads", head)[:MAX_HEADS]

    def by_anchor(self, head: str) -> list[ChunkHeader]:
        """Return the chunks that hold, at an anchor, what has this head key: memory before disk, newest first."""
        return self._listed("anchors", head)[:MAX_VERSIONS]

    def read(self, chain: str) -> tuple[ChunkHeader, torch.Tensor]:
        """Read, verify and mark as used: header and rows `[L, n, ...]`, not to be written to.

        Raises `FileNotFoundError` when it is gone and `ChunkCorrupt` when it was damaged (it is quarantined then).
        """
        failure: Exception = FileNotFoundError(f"there is no chunk {chain}")
        for folder in self._folders:
            try:
                header, rows, data = self._read(folder, chain)
            except FileNotFoundError:
                continue
            except ChunkCorrupt as error:
                self._quarantine(folder, chain, error.damage)
                failure = error
                continue
            except OSError as error:
                self._count_unreadable(folder)
                if error.errno == errno.EIO:  # it will not get better, and nothing would be stored in its place
                    self._quarantine(folder, chain, Damage.UNREADABLE)
                failure = error
                continue
            with contextlib.suppress(OSError):
                # One that a longer one replaces is still the first to go, one that is pinned stays so.
                if SUPERSEDED != (path := folder.path(chain)).stat().st_mtime < time.time():
                    os.utime(path)
            self.counters["reads"] += 1
            if data is not None:
                self._promote(header, data)
            return header, rows
        raise failure

    # Changes

    def put(self, header: ChunkHeader, rows: torch.Tensor) -> bool:
        """Store a chunk, unless it is there already. `rows` is `[L, n, ...]`.

        Returns False, and counts the reason, when there is no room or the file system refuses.
        """
        assert header.tenant == self.tenant, (header.tenant, self.tenant)
        if self.contains(header.chain):
            self.counters["put_present"] += 1
            return True
        if not self._memory.make_room(rows.numel() * rows.element_size()):
            self.counters["put_over_budget"] += 1
            return False
        is_written = False
        try:
            self._memory.wrote(write_chunk(self._folders[0].path(header.chain), header, rows))
            is_written = True
            self._mark(header)
        except OSError as error:
            if is_written:  # without its markers it would never be found, nor stored again
                self._folders[0].delete(header.chain)
            self.counters["put_failed"] += 1
            self.counters[f"put_failed_{io_reason(error)}"] += 1
            return False
        self.counters["puts"] += 1
        return True

    def keep_until(self, chain: str, time_s: float) -> int:
        """Make a chunk count as last used at `time_s` (seconds since the epoch); later than now pins it, softly.

        Returns its size in bytes; 0 when it is gone.
        """
        size = 0
        for folder in self._folders:
            with contextlib.suppress(OSError):
                path = folder.path(chain)
                os.utime(path, (time_s, time_s))
                size = path.stat().st_size
        return size

    def pinned_bytes(self) -> int:
        """Count the bytes of this model's and tenant's chunks in memory that are kept until later than now."""
        now, total = time.time(), 0
        for path in self._folders[0].files("objects"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                total += stat.st_size if stat.st_mtime > now + 1 else 0
        return total

    def headers(self) -> dict[str, ChunkHeader | None]:
        """Read the headers of all of this tenant's chunks, by name; None for one that cannot be made out."""
        found: dict[str, ChunkHeader | None] = {}
        for folder in self._folders:
            for path in folder.files("objects"):
                if path.name.startswith("."):
                    continue
                try:
                    found[path.name] = read_header(path)
                except ChunkCorrupt:
                    found.setdefault(path.name, None)
                except OSError:
                    continue
        return found

    def remove(self, names: Collection[str]) -> int:
        """Remove chunks from every tier. Quarantine goes as a whole, since nobody knows what is in it.

        Returns how many files of chunks were removed.
        """
        count = 0
        for folder in self._folders:
            for name in names:
                count += os.path.exists(folder.path(name))
                folder.delete(name)
                self._headers.pop(name, None)
            with contextlib.suppress(OSError):
                shutil.rmtree(folder.base / "quarantine")
        return count

    def forget_worths(self) -> None:
        """Remove what replicas have said of chunks: some of those are to be forgotten. Raises `OSError`."""
        remove_worths(self._memory.worth_folder)

    def evict(self, target_bytes: int) -> int:
        """Remove worthless files, then the chunks that are worth least, until memory holds at most `target_bytes`.

        They move to the disk, if there is one. Returns the bytes that are left. Only one process evicts at a time:
        another's call removes nothing.
        """
        return self._memory.evict(target_bytes)

    def flush(self, timeout_s: float) -> int:
        """Copy chunks of anybody in memory to the disk, those worth most first; return how many were copied."""
        return self._memory.flush(timeout_s)

    def clear(self) -> None:
        """Remove everything of this model and tenant."""
        self._headers.clear()
        for folder in self._folders:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder.base)

    # Reports

    def usage(self) -> StoreUsage:
        """Count the chunks and bytes in memory (all models and tenants)."""
        return self._memory.usage()

    def disk_usage(self) -> StoreUsage | None:
        """Count the chunks and bytes on the disk (all models and tenants); None without a disk."""
        return self._memory.below.usage() if self._memory.below is not None else None

    def check_integrity(self) -> list[str]:
        """Verify every chunk of this model and tenant and its markers; return what is wrong, a line each."""
        return [line for folder in self._folders for line in self._wrong(folder)]

    def _wrong(self, folder: ChunkFolder) -> Iterator[str]:
        for path in folder.files("objects"):
            if not path.name.startswith("."):
                try:
                    self._verify(read_chunk(path)[0], path.name)
                except (ChunkCorrupt, FileNotFoundError) as error:
                    yield str(error)
        for marker in folder.files(*KINDS):
            if not os.path.exists(folder.path(marker.name)):
                yield f"{marker.parent.parent.name}: marker without chunk {marker.name}"

    # Internals

    def _read(self, folder: ChunkFolder, chain: str) -> tuple[ChunkHeader, torch.Tensor, bytearray | None]:
        """Read a whole chunk of a tier and verify it; with the file's bytes when they were copied."""
        path, data = folder.path(chain), None
        if folder is self._folders[0]:
            header, rows = read_chunk(path)
        else:
            # Not mapped: a disk that fails when a page is read again would kill the process.
            data = bytearray(path.read_bytes())
            header, rows = parse_chunk(data, chain)
        self._verify(header, chain)
        return header, rows, data

    def _verify(self, header: ChunkHeader, chain: str) -> None:
        verify_names(header, chain)
        if header.tenant != self.tenant:
            raise ChunkCorrupt(f"{chain}: belongs to another tenant", Damage.WRONG_NAME)

    def _listed(self, kind: str, key: str) -> list[ChunkHeader]:
        headers: dict[str, ChunkHeader] = {}
        for folder in self._folders:
            for chain in folder.listed(kind, key):
                header = headers.get(chain) or self.by_chain(chain)
                if header is None:
                    folder.remove_marker(kind, key, chain)
                    self.counters["markers_without_chunk"] += 1
                else:
                    headers[chain] = header
        return list(headers.values())

    def _mark(self, header: ChunkHeader) -> None:
        """List a chunk in memory; not any more those that it replaces.

        A growing history stores its last chunk again and again, a little longer each time.
        """
        folder = self._folders[0]
        self.counters["versions_dropped"] += len(folder.add_markers(header))
        if len(header) < HEAD_LENGTH or header.domain is Domain.LINEAGE:
            return
        for chain in folder.listed("heads", head_key(self.tenant, header.tokens)):
            try:
                other = self.by_chain(chain)
            except OSError:  # counted there; what cannot be read is no reason to give up this chunk
                continue
            if other is None or other.parent != header.parent or other.domain != header.domain:
                continue
            if len(other) < len(header) and (header.tokens[: len(other)] == other.tokens).all():
                folder.supersede(other)

    def _promote(self, header: ChunkHeader, data: bytearray) -> None:
        """Put a chunk that was read from the disk into memory too, if that drives nothing out."""
        versions = self._folders[0].listed("content", header.content)
        if len(versions) >= MAX_VERSIONS or not self._memory.has_room(len(data)):
            self.counters["promote_no_room"] += 1
            return
        try:
            write_bytes(self._folders[0].path(header.chain), data)
            self._memory.wrote(len(data))
            self._folders[0].add_markers(header)
        except OSError as error:
            self.counters[f"promote_failed_{io_reason(error)}"] += 1
        else:
            self.counters["promoted"] += 1

    def _quarantine(self, folder: ChunkFolder, chain: str, damage: Damage) -> None:
        self._headers.pop(chain, None)
        folder.quarantine(folder.path(chain))
        self.counters["quarantined"] += 1
        self.counters[f"quarantined_{damage}"] += 1

    def _count_unreadable(self, folder: ChunkFolder) -> None:
        self.counters["unreadable_memory" if folder is self._folders[0] else "unreadable_disk"] += 1
