"""The files of one model's and tenant's chunks under one root: the chunks, the markers that list them, quarantine.

    <root>/<model fingerprint>/<tenant>/objects/<aa>/<chain key>     the chunk
                                       /content/<content key>/<chain key>   empty: chunks with this content
                                       /heads/<head key>/<chain key>        empty: chunks that begin like this
                                       /anchors/<head key>/<chain key>      empty: chunks that hold this at an anchor
                                       /quarantine/<chain key>       chunks that failed verification

Several processes work on it without a lock, and anything may vanish at any moment, the whole root included.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ropewalk.cluster.store.chunk import ChunkCorrupt, ChunkHeader, read_header
from ropewalk.kernels.gear import anchors
from ropewalk.kernels.keys import HEAD_LENGTH, Domain, Tokens, head_key

MAX_VERSIONS = 4
"""Chunks kept for one content (computed behind different left contexts); the least recently stored goes first."""

MAX_HEADS = 16
"""Chunks listed under one head. Chat templates make many chunks begin alike; a longer list would slow every look-up."""

MAX_ANCHORS = 16
"""Anchors under which a chunk is listed: repetitive text may have one at every token."""

KINDS = ("content", "heads", "anchors")
"""Kinds of markers."""

_LIMITS = {"content": MAX_VERSIONS, "heads": MAX_HEADS, "anchors": MAX_VERSIONS}

SUPERSEDED = 0.0
"""Time of last use, in seconds since the epoch, of chunks that a longer one replaces: nothing lists them any more."""


class ChunkFolder:
    """Names and moves files; what is in them is checked by whoever reads them."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def path(self, chain: str) -> Path:
        """Return where the chunk of this name lies, if it is there."""
        return self.base / "objects" / chain[:2] / chain

    def listed(self, kind: str, key: str) -> list[str]:
        """Return the chain keys listed under a key of one of `KINDS`, most recently stored first."""
        try:
            entries = [(entry.stat().st_mtime, entry.name) for entry in os.scandir(self.base / kind / key)]
        except OSError:
            return []
        return [name for _, name in sorted(entries, reverse=True)]

    def is_listed(self, chain: str, content: str) -> bool:
        """Tell whether a chunk has been stored with all its markers, or is no longer listed since a longer one is."""
        try:
            is_superseded = self.path(chain).stat().st_mtime == SUPERSEDED
        except OSError:
            return False
        return is_superseded or os.path.exists(self.base / "content" / content / chain)  # the last one made

    def add_markers(self, header: ChunkHeader) -> list[str]:
        """List a chunk that lies here; return the versions of its content that were deleted to bound their number.

        Raises `OSError`.
        """
        dropped = []
        for folder in self._marker_folders(header):
            _touch(folder / header.chain)
            kind, key = folder.parent.name, folder.name
            for chain in self.listed(kind, key)[_LIMITS[kind] :]:
                if kind == "content":
                    self.delete(chain)
                    dropped.append(chain)
                self.remove_marker(kind, key, chain)
        return dropped

    def rebuild_markers(self, header: ChunkHeader) -> int:
        """Rebuild missing markers of a chunk, older than those that are there; return how many. Raises `OSError`.

        Not those that bounds keep out, and none for a chunk that a longer one replaces.
        """
        stat = self.path(header.chain).stat()
        if stat.st_mtime == SUPERSEDED:
            return 0
        num_rebuilt = 0
        for folder in self._marker_folders(header):
            marker, kind = folder / header.chain, folder.parent.name
            if not marker.exists() and len(self.listed(kind, folder.name)) < _LIMITS[kind]:
                _touch(marker)
                os.utime(marker, (stat.st_mtime, stat.st_mtime))
                num_rebuilt += 1
        return num_rebuilt

    def supersede(self, header: ChunkHeader) -> None:
        """List a chunk no more, and make it the first to go.

        A plan that is being carried out may name it, so it stays until room is needed.
        """
        for folder in self._marker_folders(header):
            self.remove_marker(folder.parent.name, folder.name, header.chain)
        with contextlib.suppress(OSError):
            os.utime(self.path(header.chain), (SUPERSEDED, SUPERSEDED))

    def delete(self, chain: str) -> None:
        """Remove a chunk and its markers."""
        path = self.path(chain)
        with contextlib.suppress(OSError, ChunkCorrupt):
            for folder in self._marker_folders(read_header(path)):
                self.remove_marker(folder.parent.name, folder.name, chain)
        with contextlib.suppress(OSError):
            path.unlink()

    def quarantine(self, path: Path) -> None:
        """Put a damaged file of this folder aside, for inspection until its space is needed. Nothing reads it again."""
        target = self.base / "quarantine" / path.name
        with contextlib.suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)

    def remove_marker(self, kind: str, key: str, chain: str) -> None:
        """List a chunk no more under a key of one of `KINDS`."""
        folder = self.base / kind / key
        with contextlib.suppress(OSError):
            (folder / chain).unlink(missing_ok=True)
            folder.rmdir()  # refuses while it lists others

    def files(self, *kinds: str) -> Iterator[Path]:
        """Yield what lies two folders deep under `objects` or one of `KINDS`."""
        for kind in kinds:
            for folder in children(self.base / kind):
                yield from children(folder)

    def chains(self) -> Iterator[str]:
        """Yield the names of the chunks that lie here. Without a `Path` each: replicas ask every other second."""
        base = str(self.base / "objects")
        with contextlib.suppress(OSError):
            for parent in os.listdir(base):
                with contextlib.suppress(OSError):
                    yield from (name for name in os.listdir(f"{base}/{parent}") if not name.startswith("."))

    def _marker_folders(self, header: ChunkHeader) -> list[Path]:
        """Folders of the markers of a chunk, in the order in which they are made.

        None for one that only its session may be served, which knows its name.
        """
        if header.domain is Domain.LINEAGE:
            return []
        folders = [self.base / "anchors" / key for key in sorted(anchor_keys(header.tenant, header.tokens))]
        if len(header) >= HEAD_LENGTH:
            folders.append(self.base / "heads" / head_key(header.tenant, header.tokens))
        return [*folders, self.base / "content" / header.content]


def anchor_keys(tenant: str, tokens: Tokens) -> set[str]:
    """Return the head keys under which a chunk of these tokens is listed as holding them at an anchor."""
    starts = [start for start in anchors(tokens) if start + HEAD_LENGTH <= len(tokens)][:MAX_ANCHORS]
    return {head_key(tenant, tokens[start:]) for start in starts}


def children(folder: Path) -> list[Path]:
    """Return what is in a folder; nothing when it is gone or cannot be read."""
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _touch(marker: Path) -> None:
    """Make a marker or renew it. Twice, because another process may remove an empty folder in between."""
    for is_last in (False, True):
        marker.parent.mkdir(parents=True, exist_ok=True)
        try:
            marker.touch()
        except FileNotFoundError:
            if is_last:
                raise
        else:
            return
