"""What replicas expect of chunks, in files beside them: whoever needs room reads these, and what is worth least goes.

    <root>/.worth/<replica>     a line of JSON · a record for each chunk · a checksum

Each replica says how soon it expects to use a chunk again, and what a byte of its model's KV costs to compute. A chunk
is worth the seconds of prefill that a byte of it is expected to spare per second:

    worth(chunk) = Σ over replicas  rate · cost of a byte       as far as a replica says something of it
                 = cost of a byte / (time since its last use + pause)       of a chunk that nobody knows

Rates of replicas are added, not their maximum taken: uses by two of them are two uses, and each spares a prefill. The
second line is what the last use says alone (`scheduler/foresight.py`): a chunk that was stored a moment ago is worth
something before anybody has spoken of it. It holds too, if it says more, for a chunk that was used well after those
have used it who speak of it: by somebody who says nothing. Without any file, the order is that of last use.

Nobody has to believe these files: what cannot be read is ignored and counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from ropewalk.cluster.store.chunk import write_bytes

FORMAT = "ropewalk-worth/1"

FOLDER = ".worth"

STALE_S = 60.0
"""Seconds after which a replica's word counts no more: it is dead, or has had no turn since, and its sessions are gone.

Process ids would say less: they mean nothing in another container, and what a dead replica's sessions need is right
as long as they may come back elsewhere."""

SKEW_S = 5.0
"""Seconds that a file may come from the future."""

MAX_CHUNKS = 8192
"""Chunks that a replica says something of: those used last."""

MAX_FILES = 64
"""Files that are read, newest first."""

_RECORD = np.dtype([("chain", "V16"), ("rate", "<f4"), ("depth", "<i4"), ("used_s", "<f8")])
_MAX_LINE = 1024
_MAX_BYTES = _MAX_LINE + MAX_CHUNKS * _RECORD.itemsize + 8
_NAME = re.compile(r"[0-9a-f]{32}")
_RANK = re.compile(r"-r\d+$")


class Claim(NamedTuple):
    """What a replica says of a chunk: uses expected a second, when it was used last (seconds since the epoch), and how
    many chunks stand before it."""

    chain: bytes
    rate: float
    used_s: float
    depth: int


@dataclass(frozen=True, slots=True)
class Worth:
    """What a replica says of its `model`'s chunks: at `time_s` (since the epoch), with turns of a session `pause_s`
    apart in the mean. `cost` is what a byte of KV costs to compute, in seconds; 0: not known."""

    model: str
    time_s: float
    pause_s: float
    cost: float
    claims: Sequence[Claim]

    def __post_init__(self) -> None:
        if not self.pause_s > 0 or self.cost < 0 or not all(map(math.isfinite, (self.time_s, self.pause_s, self.cost))):
            raise ValueError(f"time {self.time_s!r}, pause {self.pause_s!r}, cost {self.cost!r}")

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        head = {"format": FORMAT, "model": self.model, "time_s": self.time_s, "pause_s": self.pause_s}
        line = json.dumps({**head, "cost": self.cost, "chunks": len(self.claims)}).encode() + b"\n"
        records = np.zeros(len(self.claims), _RECORD)
        if self.claims:
            chains, rates, used, depths = zip(*self.claims, strict=True)
            records["chain"] = np.frombuffer(b"".join(chains), "V16")
            records["rate"], records["used_s"], records["depth"] = rates, used, depths
        data = line + records.tobytes()
        return data + _checksum(data)

    @classmethod
    def from_bytes(cls, data: bytes) -> Worth:
        """The inverse. Raises `ValueError`, `KeyError`, `TypeError`, `OverflowError` or `RecursionError` for what is no
        such content."""
        body, checksum = data[:-8], data[-8:]
        if _checksum(body) != checksum:
            raise ValueError("the checksum does not fit")
        line, _, rest = body.partition(b"\n")
        if len(line) > _MAX_LINE:
            raise ValueError(f"a first line of {len(line)} bytes")
        head = json.loads(line)
        if head["format"] != FORMAT or len(rest) != head["chunks"] * _RECORD.itemsize:
            raise ValueError(f"{head['format']!r}, {head['chunks']!r} chunks in {len(rest)} bytes")
        records = np.frombuffer(rest, _RECORD)
        rates, used = records["rate"], records["used_s"]
        if not (np.isfinite(rates).all() and (rates >= 0).all() and np.isfinite(used).all()):
            raise ValueError("rates or times that are none")
        columns = (records["chain"].tolist(), rates.tolist(), used.tolist(), records["depth"].tolist())
        claims = [Claim(*claim) for claim in zip(*columns, strict=True)]
        time_s, pause_s, cost = (float(head[name]) for name in ("time_s", "pause_s", "cost"))
        return cls(str(head["model"]), time_s, pause_s, cost, claims)


def _checksum(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)


class Rank(NamedTuple):
    """What orders chunks for eviction, lowest first: worth, last use; among equals the last one of a chain goes first,
    since it is of use only behind those before it."""

    worth: float
    used_s: float
    before: int


class Worths:
    """What all replicas that share a root say. False when they say nothing."""

    def __init__(self, files: Iterable[Worth]) -> None:
        self._files: defaultdict[str, list[tuple[Worth, dict[bytes, Claim]]]] = defaultdict(list)
        everything = list(files)
        for file in everything:
            self._files[file.model].append((file, {claim.chain: claim for claim in file.claims}))
        self._cost = _mean([file.cost for file in everything if file.cost]) or 1.0
        self._pause_s = _mean([file.pause_s for file in everything]) or 1.0
        self._costs = {
            model: _mean([file.cost for file, _ in of_model if file.cost]) or self._cost
            for model, of_model in self._files.items()
        }

    def __bool__(self) -> bool:
        return bool(self._files)

    def knows(self, folder: str, chain: str) -> bool:
        """Tell whether anybody says something of a chunk. `folder` is that of its model and rank."""
        key = _key(chain)
        return any(key in claims for _, claims in self._files.get(_RANK.sub("", folder), ()))

    def rank(self, folder: str, chain: str, mtime: float, now_s: float) -> Rank:
        """Return what orders a chunk last used at `mtime`, as its file says."""
        model, key = _RANK.sub("", folder), _key(chain)
        files = self._files.get(model, ())
        cost = self._costs.get(model, self._cost)
        worth, used_s, depth, is_known = 0.0, mtime, 0, False
        for file, claims in files:
            claim = claims.get(key)
            if claim is not None:
                used_s = max(used_s, claim.used_s) if is_known else claim.used_s
                worth += claim.rate * (file.cost or cost)
                depth, is_known = max(depth, claim.depth), True
        by_use = cost / (max(now_s - mtime, 0.0) + self._pause_s)
        if not is_known or is_told(mtime):
            return Rank(by_use, mtime, -depth)
        if mtime > used_s + self._pause_s:
            worth = max(worth, by_use)
        return Rank(worth, used_s, -depth)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def _key(chain: str) -> bytes:
    try:
        return bytes.fromhex(chain)
    except ValueError:
        return b""  # no chunk of ours, so that nobody knows it


def told(time_s: float) -> float:
    """Return a time of last use that somebody asked for: it counts for itself, whatever replicas expect.

    A whole second, which no clock shows when a chunk is read.
    """
    return float(math.floor(time_s))


def is_told(mtime: float) -> bool:
    """Tell whether a time of last use was made by `told`."""
    return mtime == math.floor(mtime)


# Files


def read_worths(folder: Path, now_s: float, count: Counter[str], *, max_age_s: float = STALE_S) -> Worths:
    """Read what replicas say, and remove what is older than `max_age_s`. `count` counts files that were not heeded:
    `worth_stale`, `worth_damaged`, `worth_too_many`."""
    found = []
    for path in _paths(folder):
        with contextlib.suppress(OSError):
            found.append((path.stat(follow_symlinks=False).st_mtime, path))
    found.sort(reverse=True)
    count["worth_too_many"] += len(found[MAX_FILES:])
    heeded = []
    for mtime, path in found[:MAX_FILES]:
        is_old = mtime < now_s - max_age_s
        try:
            worth = Worth.from_bytes(_read(path))
            if worth.time_s > now_s + SKEW_S:
                raise ValueError(f"said {worth.time_s - now_s} seconds from now")
        except FileNotFoundError:
            continue  # taken back meanwhile
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            count["worth_damaged"] += 1
        else:
            if worth.time_s >= now_s - max_age_s:
                heeded.append(worth)
                continue
            count["worth_stale"] += 1
        if is_old and _NAME.fullmatch(path.name):
            _unlink(path)
    return Worths(heeded)


def write_worth(folder: Path, replica: str, worth: Worth) -> None:
    """Say something, in place of what `replica` said before. Raises `OSError`."""
    assert _NAME.fullmatch(replica), replica
    write_bytes(folder / replica, worth.to_bytes())


def remove_worths(folder: Path) -> None:
    """Remove all files: they name chunks that are to be forgotten. Replicas say again what they expect of the rest."""
    if folder.is_dir():
        with locked(folder):
            for path in [*_paths(folder), *folder.glob(".*.tmp")]:
                _unlink(path)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold everybody else off who looks which chunks there are and writes that down, or removes such files.

    Waits. Raises `OSError`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _paths(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:
        return []


def _read(path: Path) -> bytes:
    """Read a plain file that is not too large. Raises `OSError` and `ValueError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise ValueError(f"no file, or one of {status.st_size} bytes")
        return file.read(_MAX_BYTES + 1)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
