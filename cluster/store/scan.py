"""Goes through everything under a root and repairs it: damaged chunks, markers, files of dead writers.

Each step handles one file, so that a caller decides how much is done at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import xxhash

from ropewalk.cluster.store.chunk import ChunkCorrupt, ChunkHeader, Damage, parse_chunk, verify_names
from ropewalk.cluster.store.folder import KINDS, ChunkFolder
from ropewalk.cluster.store.tier import STALE_S, tenant_folders

logger = logging.getLogger(__name__)

SHARE = 0.1
"""Part of the time that a scan in the background works."""

NICENESS = 19


def scan(root: Path) -> Iterator[str]:
    """Yield what was found at each file under a root, and repaired; the names are those of docs/reuse.md.

    Damaged chunks are quarantined, missing markers made, markers without a chunk and temporary files of dead writers
    removed. Others may use the root meanwhile. A root that is not there has nothing to scan.
    """
    for base in tenant_folders(root):
        folder = ChunkFolder(base)
        for path in folder.files("objects"):
            if path.name.startswith("."):
                yield from _scan_temporary(path)
            else:
                yield from _scan_chunk(folder, path)
        for marker in folder.files(*KINDS):
            if not os.path.exists(folder.path(marker.name)):
                folder.remove_marker(marker.parent.parent.name, marker.parent.name, marker.name)
                yield "markers_removed"


def _scan_chunk(folder: ChunkFolder, path: Path) -> Iterator[str]:
    try:
        # A copy, not mapped: a disk that fails when a page is read would kill the process.
        header, _ = parse_chunk(bytearray(path.read_bytes()), path.name)
        _verify_place(header, path)
        yield from ["markers_rebuilt"] * folder.rebuild_markers(header)
    except ChunkCorrupt as error:
        logger.warning("Quarantined %s: %s", path, error)
        folder.quarantine(path)
        yield f"quarantined_{error.damage}"
    except FileNotFoundError:
        yield "vanished"
    except OSError as error:
        logger.warning("Cannot read %s: %s", path, error)
        yield "unreadable"
    else:
        yield "chunks"


def _verify_place(header: ChunkHeader, path: Path) -> None:
    """Check that a chunk lies where its name and its tenant want it. Raises `ChunkCorrupt`."""
    verify_names(header, path.name)
    tenant, prefix = path.parents[2].name, path.parent.name
    if prefix != header.chain[:2] or tenant != xxhash.xxh3_64_hexdigest(header.tenant.encode()):
        raise ChunkCorrupt(f"{path.name}: does not belong into {tenant}/objects/{prefix}", Damage.WRONG_NAME)


def _scan_temporary(path: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > STALE_S:
            path.unlink()
            yield "temporaries_removed"


class BackgroundScan:
    """One scan of a root in a thread of low priority. `counters` tells what it has found so far, `state` how far it is.

    `state` is `running`, `done`, `stopped`, `failed` or `elsewhere`: another process scans this root.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.counters: Counter[str] = Counter()
        self.state = "running"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-scan", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it within one file's time."""
        self._stopping.set()
        self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; tell whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread alone, on Linux
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(self.root / ".scanning", "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.state = self._scan()
        except BlockingIOError:
            self.state = "elsewhere"
        except OSError as error:
            logger.warning("The integrity scan of %s ended early: %s", self.root, error)
            self.state = "failed"

    def _scan(self) -> str:
        start = time.monotonic()
        for found in scan(self.root):
            self.counters[found] += 1
            worked = time.monotonic() - start
            if self._stopping.wait(worked * (1 / SHARE - 1)):
                return "stopped"
            start = time.monotonic()
        return "done"
