"""Sessions' histories in files, one each, beside the chunks that they name: shared by the replicas of a node, and there
again after a restart.

    <root>/<model fingerprint>/<tenant>/sessions/<hash of the session>

A history is small (4 bytes a token, 32 a chunk) and only says where KV is to be found; what it names is verified when
it is used. A file that cannot be trusted is removed: that session's next prompt is computed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ropewalk.agents.history import Branch, History
from ropewalk.agents.lineage import Lineage, Mark, Rows
from ropewalk.cluster.store.chunk import write_bytes
from ropewalk.cluster.store.tier import STALE_S
from ropewalk.kernels.keys import as_tokens

FORMAT = "ropewalk-session/1"

REMEMBERED = 64
"""Histories that a process keeps in memory, beside their files."""

MAX_BYTES = 256 << 20
"""Of a tenant's histories on a node: some megabytes each where eight branches have 100,000 tokens."""

EXPIRY_INTERVAL_S = 60.0
"""Seconds between two looks for sessions that are idle for too long or too many."""


class SessionFiles:
    """Histories of one model's and tenant's sessions. For one thread; other processes may use the same folder.

    `ttl_s`: seconds without use after which a session is forgotten. `max_sessions`: beyond that, those that were not
    used longest are. `counters` counts what happened.
    """

    def __init__(self, base: Path, ttl_s: float = 3600.0, max_sessions: int = 1024) -> None:
        self._folder = base / "sessions"
        self.ttl_s, self.max_sessions = ttl_s, max_sessions
        self.counters: Counter[str] = Counter()
        self._read: OrderedDict[str, tuple[tuple[int, int], History]] = OrderedDict()
        self._next_expiry = 0.0

    def get(self, session: str) -> History:
        """Return a session's history as last written by anybody; an empty one when there is none. Not to be mutated."""
        path = self._path(session)
        try:
            stat = path.stat()
        except OSError:
            self._read.pop(session, None)
            return History()
        version = (stat.st_mtime_ns, stat.st_ino)
        known = self._read.get(session)
        if known is None or known[0] != version:
            known = (version, self._load(path, session))
            self._read[session] = known
            if len(self._read) > REMEMBERED:
                self._read.popitem(last=False)
        self._read.move_to_end(session)
        return known[1]

    def update(self, session: str, change: Callable[[History], None]) -> bool:
        """Change a session's history and write it, under a lock of its own: what others have noted stays.

        False, and counted (`session_failed`), when the file system refuses: what is held stays as it was.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._locked(session):
                history = _copy(self.get(session))
                change(history)
                history.epoch = history.epoch or uuid.uuid4().hex
                write_bytes(self._path(session), _dump(session, history))
            self.expire()
        except OSError:
            self.counters["session_failed"] += 1
            return False
        return True

    def delete(self, session: str) -> bool:
        """Forget a session; False when there was none."""
        self._read.pop(session, None)
        try:
            self._path(session).unlink()
        except OSError:
            return False
        return True

    def names(self) -> list[str]:
        """Return the sessions there are, most recently used first."""
        found = []
        for path in self._paths():
            with contextlib.suppress(OSError, SafetensorError, KeyError, ValueError), safe_open(path, "np") as file:
                found.append((path.stat().st_mtime, json.loads(file.metadata()["about"])["session"]))
        return [name for _, name in sorted(found, reverse=True)]

    def expire(self) -> None:
        """Remove sessions that are idle for too long, and the oldest beyond the quota; looks once a minute."""
        now = time.time()
        if now < self._next_expiry:
            return
        self._next_expiry = now + EXPIRY_INTERVAL_S
        found = []
        for path in self._paths():
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((now - stat.st_mtime, stat.st_size, path))
        total = 0
        for number, (age, size, path) in enumerate(sorted(found)):
            total += size
            if age > self.ttl_s or number >= self.max_sessions or total > MAX_BYTES:
                path.unlink(missing_ok=True)
                self.counters["session_expired"] += 1
        for path in self._folder.glob(".*.tmp"):  # of writers that were killed
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > STALE_S:
                    path.unlink()

    def _path(self, session: str) -> Path:
        return self._folder / xxhash.xxh3_128_hexdigest(session.encode())

    def _paths(self) -> list[Path]:
        try:
            return [self._folder / name for name in os.listdir(self._folder) if not name.startswith(".")]
        except OSError:
            return []

    def _load(self, path: Path, session: str) -> History:
        try:
            history = _parse(path.read_bytes(), session)
        except OSError:
            return History()
        except (ValueError, LookupError, TypeError, SafetensorError, AssertionError):
            self.counters["session_damaged"] += 1
            path.unlink(missing_ok=True)
            return History()
        if time.time() - max((branch.used_s for branch in history.branches), default=0.0) > self.ttl_s:
            history.branches.clear()
        return history

    @contextlib.contextmanager
    def _locked(self, session: str) -> Iterator[None]:
        # One of 256 locks, so that a writer that hangs stops few others.
        with open(self._folder / f".lock-{self._path(session).name[:2]}", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _copy(history: History) -> History:
    return History(list(history.branches), history.amortize, history.forgotten, history.epoch)


def _dump(session: str, history: History) -> bytes:
    arrays: dict[str, np.ndarray] = {}
    branches = []
    for number, branch in enumerate(history.branches):
        rows = branch.lineage.rows
        arrays[f"tokens.{number}"] = branch.lineage.tokens
        arrays[f"rows.{number}"] = np.asarray([(r.start, r.end, r.offset, r.source) for r in rows], np.int64).reshape(
            -1, 4
        )
        if branch.sent is not None:
            arrays[f"sent.{number}"] = branch.sent
        branches.append(
            {
                "chunks": [r.chunk for r in rows],
                "marks": [list(mark) for mark in branch.lineage.marks],
                "used_s": branch.used_s,
            }
        )
    about = json.dumps(
        {
            "session": session,
            "branches": branches,
            "amortize": history.amortize,
            "forgotten": history.forgotten,
            "epoch": history.epoch,
        }
    )
    return bytes(save(arrays, {"format": FORMAT, "about": about, "checksum": _checksum(about, arrays)}))


def _parse(data: bytes, session: str) -> History:
    """Read what `_dump` wrote. Raises one of several errors when it was altered or belongs to another session."""
    from safetensors.numpy import load

    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    arrays = load(data)
    if metadata["format"] != FORMAT or metadata["checksum"] != _checksum(metadata["about"], arrays):
        raise ValueError("damaged")
    about = json.loads(metadata["about"])
    if about["session"] != session:
        raise ValueError("another session's")
    branches = []
    for number, entry in enumerate(about["branches"]):
        rows = tuple(
            Rows(int(start), int(end), chunk, int(offset), int(source))
            for (start, end, offset, source), chunk in zip(arrays[f"rows.{number}"], entry["chunks"], strict=True)
        )
        marks = tuple(Mark(int(start), str(label)) for start, label in entry["marks"])
        lineage = Lineage(as_tokens(arrays[f"tokens.{number}"]), rows, marks)
        lineage.check_integrity()
        sent = arrays.get(f"sent.{number}")
        branches.append(Branch(lineage, None if sent is None else as_tokens(sent), float(entry["used_s"])))
    return History(branches, bool(about["amortize"]), bool(about["forgotten"]), str(about["epoch"]))


def _checksum(about: str, arrays: dict[str, np.ndarray]) -> str:
    hasher = xxhash.xxh3_64()
    hasher.update(about.encode())
    for name in sorted(arrays):
        hasher.update(f"{name} {arrays[name].shape}".encode())
        hasher.update(np.ascontiguousarray(arrays[name]).tobytes())
    return hasher.hexdigest()
