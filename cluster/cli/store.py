"""`ropewalk store`: what a chunk store on this machine holds, and a scan that repairs it."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from ropewalk.cluster.cli import UserError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "store",
        help="show or repair a chunk store on this machine",
        description="Look into a chunk store on this machine. Engines may use it meanwhile.",
    )
    parser.add_argument(
        "action",
        choices=("usage", "scan"),
        help="usage: count chunks and bytes; scan: verify every chunk, put damaged ones aside, mend markers",
    )
    parser.add_argument("--root", type=Path, help="the store's root, in memory or on disk (default: this user's)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print what was found. Returns 1 when a scan met chunks that are damaged or cannot be read."""
    root = _root(args.root)
    report = _usage(root) if args.action == "usage" else _scan(root)
    if args.json:
        print(json.dumps({"root": str(root), **report}, indent=2))
    else:
        print(root)
        for name, number in report.items():
            print(f"  {name.replace('_', ' ').removeprefix('num ')}: {number}")
    is_damaged = any(name.startswith(("quarantined", "unreadable")) for name in report)
    return 1 if args.action == "scan" and is_damaged else 0


def _root(given: Path | None) -> Path:
    """The directory to look into. Raises `UserError`."""
    from ropewalk.cluster.engine.settings import default_store_root

    root = given if given is not None else default_store_root()
    if not root.is_dir():
        what = "is not a directory" if root.exists() else "there is no such directory"
        hint = "" if given is not None else "; give the one that `ropewalk serve` prints"
        raise UserError(f"--root {root}: {what}{hint}")
    if not os.access(root, os.R_OK | os.X_OK):
        raise UserError(f"--root {root}: cannot be read by this user")
    return root


def _usage(root: Path) -> dict[str, int]:
    from dataclasses import asdict

    from ropewalk.cluster.store.tier import Tier

    return asdict(Tier(root, 1, Counter()).usage())


def _scan(root: Path) -> dict[str, int]:
    from ropewalk.cluster.store.scan import scan

    return {"chunks": 0, **Counter(scan(root))}
