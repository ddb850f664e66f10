"""Options that studies share: where their data lies, and where their figures are written."""

from __future__ import annotations

import argparse
from pathlib import Path

from ropewalk.cluster.cli import UserError
from ropewalk.workloads.sequences import SHARED


def add_data_and_json(parser: argparse.ArgumentParser) -> None:
    """Add the options of studies of the public runs."""
    parser.add_argument(
        "--data", type=Path, default=SHARED, metavar="DIR", help="folder with the public runs (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures here")


def check_writable(option: str, path: Path | None) -> None:
    """Make sure, before anything is measured, that a file can be written. Raises `UserError` when it cannot."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from None
