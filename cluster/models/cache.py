"""Directories that are built once, used by many processes, and rebuilt when damaged."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

MARKER = "ropewalk-build.json"


def cache_root() -> Path:
    """Where converted models live: `$ROPEWALK_CACHE`, else `$XDG_CACHE_HOME/ropewalk`, else `~/.cache/ropewalk`."""
    if own := os.environ.get("ROPEWALK_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "ropewalk"


def build_once(target: Path, recipe: str, build: Callable[[Path], None]) -> Path:
    """Return `target`, calling `build(empty directory)` first unless an intact build of `recipe` is there.

    The build happens beside `target` and is renamed into place, so readers see all of it or nothing. Of several
    processes one builds while the others wait (where the file system has no locks, each builds and one wins).
    A build counts as intact if its marker names `recipe` and every file has the size and checksum noted there.
    """
    if is_intact(target, recipe):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(f".{target.name}.lock")):
        if is_intact(target, recipe):  # somebody else built it while this process waited
            return target
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            work.chmod(0o755)  # mkdtemp makes it private, but a cache may be shared
            build(work)
            _write_marker(work, recipe)
            _move_into_place(work, target, recipe)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def is_intact(target: Path, recipe: str) -> bool:
    """Whether `target` holds a complete, undamaged build of `recipe`."""
    try:
        marker = json.loads((target / MARKER).read_text())
        return bool(marker["recipe"] == recipe and marker["files"] == _fingerprints(target))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_marker(directory: Path, recipe: str) -> None:
    (directory / MARKER).write_text(json.dumps({"recipe": recipe, "files": _fingerprints(directory)}, indent=1))


def _fingerprints(directory: Path) -> dict[str, str]:
    """xxh3-128 of each file (0.1 s for 270 MB in the page cache: cheap enough to check at every start)."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != MARKER:
            digest = xxhash.xxh3_128()
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            found[str(path.relative_to(directory))] = digest.hexdigest()
    return found


def _move_into_place(work: Path, target: Path, recipe: str) -> None:
    if target.exists():
        discarded = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        with contextlib.suppress(FileNotFoundError):
            target.rename(discarded / "damaged")
        shutil.rmtree(discarded, ignore_errors=True)
    try:
        work.rename(target)
    except OSError:
        if not is_intact(target, recipe):  # not merely another process that was first
            raise


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock; it goes with the process, so a crash leaves nothing to clean up."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # network file systems without locks: the rename alone decides
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
