"""Where the studies' figures are written."""

from __future__ import annotations

from pathlib import Path

from ropewalk.cluster.cli import UserError


def check_writable(option: str, path: Path | None) -> None:
    """Make sure, before anything is measured, that a file can be written. Raises `UserError` when it cannot."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from None
