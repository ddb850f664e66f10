"""`ropewalk bench`: studies in this process, most of them on real engines."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

STUDIES = ("reuse", "roc", "splice", "predict", "scheduler", "retention", "routing", "outage")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the subcommand with its studies."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure what reuse, splices and learning save and what they change",
        description="Measure, in this process, what reuse, splices and learning save and what they change.",
    )
    studies = parser.add_subparsers(dest="study", required=True, metavar="STUDY")
    for name in STUDIES:
        module = importlib.import_module(f"ropewalk.cluster.bench.{name}")
        module.add_parser(studies).set_defaults(run_study=module.run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run one study and return its exit code."""
    return int(args.run_study(args))
