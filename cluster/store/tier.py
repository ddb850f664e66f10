"""One root of the store with a budget: memory, or the disk below it. What memory has no room for moves to the disk.

Budgets are of whole roots, over all models and tenants, and several processes share a root. Only one at a time makes
room; the others go on meanwhile. What goes first:

    1. what is put aside as damaged, and files of dead writers
    2. chunks that a longer one replaces
    3. chunks by what replicas say that they are worth (`worth.py`); where none says anything, least recently used first
    4. pinned ones: their time of last use is later than now
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ropewalk.cluster.store.chunk import ChunkCorrupt, parse_chunk, write_bytes
from ropewalk.cluster.store.folder import SUPERSEDED, ChunkFolder, children
from ropewalk.cluster.store.worth import FOLDER, Worths, read_worths
from ropewalk.cluster.store.worth import STALE_S as WORTH_STALE_S

STALE_S = 600.0
"""Age of a temporary file whose writer must be dead: a chunk takes milliseconds to write."""

TENANT_FOLDER = re.compile(r"[0-9a-f]{16}")
"""Only what lies in folders of such names is ever removed, whatever directory somebody calls a root."""

_allowance: dict[Path, int] = {}
"""Bytes that this process may still write under each root before it looks again how much is there."""

_full: set[Path] = set()
"""Roots that had no room when this process last looked: only what is to be stored makes room there."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What a root holds, over all models and tenants. `num_bytes` counts everything that takes room."""

    num_chunks: int
    num_bytes: int
    num_quarantined: int = 0


class Entry(NamedTuple):
    """A file that takes room. `kind` is `objects`, `quarantine` or `temporary`."""

    kind: str
    path: Path
    mtime: float
    size: int

    @property
    def folder(self) -> ChunkFolder:
        return ChunkFolder(self.path.parents[2 if self.path.parent.parent.name == "objects" else 1])

    @property
    def model(self) -> str:
        """Name of the folder of its model and rank."""
        return self.folder.base.parent.name

    @property
    def is_worthless(self) -> bool:
        return self.kind == "quarantine" or (self.kind == "temporary" and time.time() - self.mtime > STALE_S)


class Tier:
    """The files under one root. `below` is where chunks move to, if anywhere. `worth_root` is the root beside whose
    chunks replicas say what chunks are worth, if not this one.

    What happens is counted in `counters`, under names that begin with `prefix`.
    """

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        counters: Counter[str],
        prefix: str = "",
        below: Tier | None = None,
        worth_root: Path | None = None,
    ) -> None:
        if budget_bytes <= 0:
            raise ValueError(f"store budget must be positive, not {budget_bytes!r}")
        self.root = root
        self.budget_bytes = budget_bytes
        self.below = below
        self.worth_folder = (worth_root or root) / FOLDER
        self._counters = counters
        self._prefix = prefix
        # Taking stock walks the whole root, so each process does it once per fiftieth of the budget written.
        self._slack = budget_bytes // 50

    # Room

    def make_room(self, size: int) -> bool:
        """Make room for a file of `size` bytes that is about to be written; False when there cannot be any."""
        if size > self.budget_bytes // 2:
            return False
        if _allowance.get(self.root, 0) < size:
            if self.evict(self.budget_bytes - self._slack - size) > self.budget_bytes - size:
                return False
            _allowance[self.root] = max(self._slack, size)
            _full.discard(self.root)
        return True

    def has_room(self, size: int) -> bool:
        """Tell whether a file of `size` bytes fits in without anything being removed, as far as this process knows."""
        if _allowance.get(self.root, 0) < size and self.root not in _full:
            wanted = max(self._slack, size)
            if self.usage().num_bytes + wanted <= self.budget_bytes:
                _allowance[self.root] = wanted
            else:
                _full.add(self.root)
        return _allowance.get(self.root, 0) >= size

    def wrote(self, size: int) -> None:
        """Note that `size` bytes were written."""
        _allowance[self.root] = _allowance.get(self.root, 0) - size

    def evict(self, target_bytes: int) -> int:
        """Remove worthless files, then chunks, those that are worth least first, until the root holds at most
        `target_bytes`.

        Returns the bytes that are left. Only one process evicts at a time: another's call removes nothing.
        """
        with contextlib.suppress(OSError), self._locked() as locked:
            entries = list(self.entries())
            used = sum(entry.size for entry in entries)
            if not locked or used <= target_bytes:
                return used
            worths = self._worths(WORTH_STALE_S)
            for entry in sorted(entries, key=_order(worths)):
                if used <= target_bytes:
                    break
                if entry.kind == "temporary" and not entry.is_worthless:
                    continue  # somebody is writing it
                self._remove(entry, worths)
                used -= entry.size
            return used
        return 0

    def _worths(self, max_age_s: float) -> Worths:
        found = Counter[str]()
        worths = read_worths(self.worth_folder, time.time(), found, max_age_s=max_age_s)
        for name, count in found.items():
            self._counters[self._prefix + name] += count
        return worths

    def _remove(self, entry: Entry, worths: Worths) -> None:
        if entry.kind != "objects":
            with contextlib.suppress(OSError):
                entry.path.unlink()
            self._count(f"evicted_{entry.kind}")
            return
        if self.below is not None and entry.mtime != SUPERSEDED:
            self._demote(entry)
        entry.folder.delete(entry.path.name)
        self._count("evicted")
        self._count("evicted_known" if worths.knows(entry.model, entry.path.name) else "evicted_unknown")

    def _count(self, name: str) -> None:
        self._counters[self._prefix + name] += 1

    # The tier below

    def flush(self, timeout_s: float) -> int:
        """Copy chunks to the tier below, those worth most first, until all are there, it is full or time is up.

        The last word of replicas counts however old it is: they may have ended by now. Returns the number of chunks
        copied.
        """
        deadline, num_copied = time.monotonic() + timeout_s, 0
        if self.below is None:
            return 0
        room = self.below.budget_bytes - self.below._slack  # others would only drive these out again
        for entry in sorted(self.entries(), key=_order(self._worths(math.inf)), reverse=True):
            room -= entry.size
            if time.monotonic() > deadline or room < 0:
                break
            if entry.kind == "objects" and entry.mtime != SUPERSEDED:
                num_copied += self._demote(entry)
        return num_copied

    def _demote(self, entry: Entry) -> bool:
        """Copy a chunk to the tier below unless it is there, verified, with its time of last use. True when copied."""
        below = self.below
        assert below is not None
        target = below.root / entry.path.relative_to(self.root)
        outcome = "demoted"
        try:
            if target.exists():
                outcome = "demoted_present"
            else:
                data = bytearray(entry.path.read_bytes())
                header, _ = parse_chunk(data, entry.path.name)
                if below.make_room(len(data)):
                    write_bytes(target, data)
                    below.wrote(len(data))
                    ChunkFolder(target.parents[2]).add_markers(header)
                else:
                    outcome = "demote_failed_over_budget"
            if outcome != "demote_failed_over_budget":
                os.utime(target, (entry.mtime, entry.mtime))
        except ChunkCorrupt as error:
            outcome = f"demote_failed_{error.damage}"
        except FileNotFoundError:
            outcome = "demote_failed_vanished"
        except OSError as error:
            outcome = f"demote_failed_{io_reason(error)}"
        self._count(outcome)
        return outcome == "demoted"

    # What is there

    def usage(self) -> StoreUsage:
        """Count what is under the root."""
        entries = list(self.entries())
        kinds = Counter(entry.kind for entry in entries)
        return StoreUsage(kinds["objects"], sum(entry.size for entry in entries), kinds["quarantine"])

    def entries(self) -> Iterator[Entry]:
        """Yield every file that takes room, in no order."""
        for base in tenant_folders(self.root):
            for parent in children(base / "objects"):
                yield from _files(parent, "objects")
            yield from _files(base / "quarantine", "quarantine")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Yield whether this process is the one that may remove files."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.root / ".evicting", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True


def tenant_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of all models and tenants under a root."""
    for model in children(root):
        for base in children(model):
            if TENANT_FOLDER.fullmatch(base.name):
                yield base


def _order(worths: Worths) -> Callable[[Entry], tuple[float, ...]]:
    """Return a key that sorts by what goes first."""
    now = time.time()

    def key(entry: Entry) -> tuple[float, ...]:
        if not worths or entry.kind != "objects":
            return (not entry.is_worthless, entry.mtime)
        if entry.mtime == SUPERSEDED or entry.mtime > now:
            return (1 if entry.mtime == SUPERSEDED else 3, entry.mtime)
        return (2, *worths.rank(entry.model, entry.path.name, entry.mtime, now))

    return key


def _files(parent: Path, kind: str) -> Iterator[Entry]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(parent):
            with contextlib.suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                is_temporary = entry.name.startswith(".")
                yield Entry("temporary" if is_temporary else kind, parent / entry.name, stat.st_mtime, stat.st_size)


_IO_REASONS = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "no_space",
    errno.EACCES: "not_permitted",
    errno.EPERM: "not_permitted",
    errno.EROFS: "not_permitted",
    errno.ENOENT: "no_folder",
    errno.ENOTDIR: "no_folder",
    errno.EEXIST: "no_folder",
    errno.EMFILE: "too_many_files",
    errno.ENFILE: "too_many_files",
}


def io_reason(error: OSError) -> str:
    """Return a short, stable name for why the file system refused."""
    return _IO_REASONS.get(error.errno or 0, "io_error")
