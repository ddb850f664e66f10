"""The chunks of one node: content-addressed files that every replica of a model maps.

    <root>/<model fingerprint>/<tenant>/objects/<aa>/<chain key>     the chunk
                                       /content/<content key>/<chain key>   empty: chunks with this content
                                       /heads/<head key>/<chain key>        empty: chunks that begin like this
                                       /anchors/<head key>/<chain key>     empty: chunks that hold this behind an anchor
                                       /quarantine/<chain key>       chunks that failed verification

The file system is the index, so replicas share chunks without a call between them. A marker whose chunk is gone is a
miss. Everything here tolerates files that vanish at any moment, the whole root included.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from ropewalk.cluster.store.chunk import ChunkCorrupt, ChunkHeader, read_chunk, read_header, write_chunk
from ropewalk.kernels.gear import anchors
from ropewalk.kernels.keys import HEAD_LENGTH, head_key

MAX_VERSIONS = 4
"""Chunks kept for one content (computed behind different left contexts); the least recently used goes first."""

MAX_HEADS = 16
"""Chunks listed under one head. Chat templates make many chunks begin alike; a longer list would slow every look-up."""

MAX_ANCHORS = 16
"""Anchors under which a chunk is listed: repetitive text may have one at every token."""

HEADER_CACHE = 4096
"""Headers remembered in the process. Chunks never change, so a remembered header stays true while its file exists."""


_written_since_stock: Counter[Path] = Counter()
"""Bytes that this process wrote under each root since it last counted what is there."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What a root holds, over all models and tenants."""

    num_chunks: int
    num_bytes: int


class NodeStore:
    """Chunks of one model and tenant under a root that several models, tenants and processes share.

    `budget_bytes` bounds the whole root: `put` evicts the least recently used chunks of anybody when it is exceeded.
    `counters` counts what happened in this process, by name.
    """

    def __init__(self, root: Path, fingerprint: str, tenant: str, budget_bytes: int) -> None:
        if budget_bytes <= 0:
            raise ValueError(f"store budget must be positive, not {budget_bytes!r}")
        self.root = root
        self.tenant = tenant
        self.budget_bytes = budget_bytes
        self.counters: Counter[str] = Counter()
        # The tenant's name comes from outside: only its hash becomes part of a path.
        self.base = root / fingerprint / xxhash.xxh3_64_hexdigest(tenant.encode())
        self._headers: OrderedDict[str, ChunkHeader] = OrderedDict()

    # Look-ups

    def contains(self, chain: str) -> bool:
        """Tell whether the chunk's file is there."""
        return os.path.exists(self._object(chain))  # unlike `Path.exists`, this never raises

    def by_chain(self, chain: str) -> ChunkHeader | None:
        """Return the header of the chunk of this name, or None."""
        path = self._object(chain)
        header = self._headers.get(chain)
        if header is not None:
            if os.path.exists(path):
                self._headers.move_to_end(chain)
                return header
            del self._headers[chain]
            return None
        try:
            header = read_header(path)
        except FileNotFoundError:
            return None
        except ChunkCorrupt:
            self.quarantine(chain)
            return None
        if header.chain != chain or header.tenant != self.tenant:
            self.quarantine(chain)
            return None
        self._headers[chain] = header
        if len(self._headers) > HEADER_CACHE:
            self._headers.popitem(last=False)
        return header

    def by_content(self, content: str) -> list[ChunkHeader]:
        """Return the chunks listed under a content key, most recently stored first."""
        return self._listed(self.base / "content" / content)

    def by_head(self, head: str) -> list[ChunkHeader]:
        """Return the chunks listed under a head key, most recently stored first."""
        return self._listed(self.base / "heads" / head)

    def by_anchor(self, head: str) -> list[ChunkHeader]:
        """Return the chunks that hold, behind an anchor, what has this head key, newest first."""
        return self._listed(self.base / "anchors" / head)

    def read(self, chain: str) -> tuple[ChunkHeader, torch.Tensor]:
        """Read, verify and mark as used: header and rows `[L, n, ...]`, mapped, not to be written to.

        Raises `FileNotFoundError` when it is gone and `ChunkCorrupt` when it was damaged (it is quarantined then).
        """
        path = self._object(chain)
        try:
            header, rows = read_chunk(path)
            if header.chain != chain or header.tenant != self.tenant:
                raise ChunkCorrupt(f"{chain}: the file holds chunk {header.chain}")
        except ChunkCorrupt:
            self.quarantine(chain)
            raise
        with contextlib.suppress(OSError):
            os.utime(path)
        self.counters["reads"] += 1
        return header, rows

    # Changes

    def put(self, header: ChunkHeader, rows: torch.Tensor) -> bool:
        """Store a chunk, unless it is there already. `rows` is `[L, n, ...]`.

        Returns False, and counts the reason, when there is no room or the file system refuses.
        """
        assert header.tenant == self.tenant, (header.tenant, self.tenant)
        if self.contains(header.chain):
            self.counters["put_present"] += 1
            return True
        size = rows.numel() * rows.element_size()
        if not self._make_room(size):
            self.counters["put_over_budget"] += 1
            return False
        try:
            _written_since_stock[self.root] += write_chunk(self._object(header.chain), header, rows)
            self._mark(self.base / "content" / header.content, header.chain, MAX_VERSIONS, drop_chunks=True)
            if len(header) >= HEAD_LENGTH:
                folder = self.base / "heads" / head_key(self.tenant, header.tokens)
                self._mark(folder, header.chain, MAX_HEADS, drop_chunks=False)
                self._drop_superseded(header, folder)
            for folder in _anchor_folders(self.base, header):
                self._mark(folder, header.chain, MAX_VERSIONS, drop_chunks=False)
        except OSError as error:
            self.counters["put_no_space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "put_failed"] += 1
            return False
        self.counters["puts"] += 1
        return True

    def quarantine(self, chain: str) -> None:
        """Take a damaged chunk out of service; its file is kept aside for inspection until its space is needed."""
        self._headers.pop(chain, None)
        target = self.base / "quarantine" / chain
        with contextlib.suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._object(chain).rename(target)
        self.counters["quarantined"] += 1

    def evict(self, target_bytes: int) -> int:
        """Remove quarantined, then least recently used chunks until the root holds at most `target_bytes`.

        Returns the bytes that are left. Only one process evicts at a time: another's call returns at once.
        """
        with contextlib.suppress(OSError), self._eviction_lock() as locked:
            entries = sorted(self._scan(), key=lambda entry: (entry[0].parent.name != "quarantine", entry[1]))
            used = sum(size for _, _, size in entries)
            for path, _, size in entries if locked else ():
                if used <= target_bytes:
                    break
                _delete(path)
                used -= size
                self.counters["evicted"] += 1
            return used
        return 0

    # Reports

    def usage(self) -> StoreUsage:
        """Count the chunks and bytes under the root (all models and tenants)."""
        sizes = [size for _, _, size in self._scan()]
        return StoreUsage(len(sizes), sum(sizes))

    def check_integrity(self) -> list[str]:
        """Verify every chunk of this model and tenant and its markers; return what is wrong, a line each."""
        wrong = []
        for path in self.base.glob("objects/*/*"):
            try:
                header, _ = read_chunk(path)
            except (ChunkCorrupt, FileNotFoundError) as error:
                wrong.append(str(error))
                continue
            if header.chain != path.name:
                wrong.append(f"{path.name}: holds chunk {header.chain}")
        for marker in [found for kind in ("content", "heads", "anchors") for found in self.base.glob(f"{kind}/*/*")]:
            if not marker.name.startswith(".") and not self.contains(marker.name):
                wrong.append(f"{marker.parent.parent.name}: marker without chunk {marker.name}")
        return wrong

    # Internals

    def _object(self, chain: str) -> Path:
        return self.base / "objects" / chain[:2] / chain

    def _listed(self, folder: Path) -> list[ChunkHeader]:
        headers = []
        for name in _by_age(folder):
            header = self.by_chain(name)
            if header is None:
                with contextlib.suppress(OSError):
                    (folder / name).unlink()
            else:
                headers.append(header)
        return headers

    def _mark(self, folder: Path, chain: str, limit: int, *, drop_chunks: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / chain).touch()
        for name in _by_age(folder)[limit:]:
            if drop_chunks:
                _delete(self._object(name))
                self.counters["versions_dropped"] += 1
            (folder / name).unlink(missing_ok=True)

    def _drop_superseded(self, header: ChunkHeader, heads: Path) -> None:
        """List shorter chunks of the same place no more: a growing history stores its last chunk again and again.

        A plan that is being carried out may name them, so they stay until room is needed, and go first then.
        """
        for other in self._listed(heads):
            same_place = other.parent == header.parent and other.domain == header.domain and len(other) < len(header)
            if same_place and (header.tokens[: len(other)] == other.tokens).all():
                (heads / other.chain).unlink(missing_ok=True)
                (self.base / "content" / other.content / other.chain).unlink(missing_ok=True)
                for folder in _anchor_folders(self.base, other):
                    (folder / other.chain).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    os.utime(self._object(other.chain), (0, 0))

    def _make_room(self, size: int) -> bool:
        if size > self.budget_bytes // 2:
            return False
        # Taking stock walks the whole root, so each process does it once per fiftieth of the budget written.
        slack = self.budget_bytes // 50
        if self.root in _written_since_stock and _written_since_stock[self.root] + size < slack:
            return True
        _written_since_stock[self.root] = 0
        return self.evict(self.budget_bytes - slack - size) <= self.budget_bytes - size

    def _scan(self) -> Iterator[tuple[Path, float, int]]:
        for pattern in ("*/*/objects/*/*", "*/*/quarantine/*"):
            for path in self.root.glob(pattern):
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    yield path, stat.st_mtime, stat.st_size

    @contextlib.contextmanager
    def _eviction_lock(self) -> Iterator[bool]:
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.root / ".evicting", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True


def _delete(path: Path) -> None:
    """Remove a chunk's file with its markers, of whatever model and tenant it is."""
    with contextlib.suppress(OSError, ChunkCorrupt):
        header = read_header(path)
        base = path.parents[2]
        folders = [base / "content" / header.content]
        if len(header) >= HEAD_LENGTH:
            folders.append(base / "heads" / head_key(header.tenant, header.tokens))
        folders += _anchor_folders(base, header)
        for folder in folders:
            (folder / header.chain).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()  # refuses while it lists others
    path.unlink(missing_ok=True)


def _anchor_folders(base: Path, header: ChunkHeader) -> set[Path]:
    """Return the folders that list a chunk by what stands in it."""
    starts = [start for start in anchors(header.tokens) if start + HEAD_LENGTH <= len(header)][:MAX_ANCHORS]
    return {base / "anchors" / head_key(header.tenant, header.tokens[start:]) for start in starts}


def _by_age(folder: Path) -> list[str]:
    """Return the markers in a folder, newest first; none when there is no folder."""
    try:
        entries = [(entry.stat().st_mtime, entry.name) for entry in os.scandir(folder)]
    except OSError:
        return []
    return [name for _, name in sorted(entries, reverse=True)]
