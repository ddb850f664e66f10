"""`ropewalk bench splice`: what an edited history costs with and without splices, and whether splices are faithful."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ropewalk.cluster.bench.output import check_writable
from ropewalk.cluster.bench.reuse import add_models_and_lengths, lengths_for
from ropewalk.cluster.cli import UserError
from ropewalk.cluster.models import RECALL_MLA

KEEP = 4
"""Tool results that stay whole, as in docs/examples/evict_tool_output.py. All but the newest stand behind the edit."""

LENGTHS = {RECALL_MLA: (2048, 6144)}
DEFAULT_LENGTHS = (512, 2048)
"""Tokens behind an edit, by model: the recall model's cost little."""
PARTS = ("faithfulness", "exactness", "chained", "policies", "load", "edits", "deep")

DEEP = "deep-mla"
"""In reports: a model of 27 layers with random weights. It only shows what splices follow."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the study."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "splice",
        help="edits of a cached conversation: faithfulness to a float32 reference, time, recall behind the edit",
        description=(
            "Edit conversations in the middle, by splices and by plain vLLM's prefill of the edited prompt. "
            "Prints tables; --json writes all figures."
        ),
    )
    add_models_and_lengths(parser, "of what follows an edit", DEFAULT_LENGTHS)
    parser.add_argument("--skip", nargs="+", default=[], choices=PARTS, help="parts to leave out")
    parser.add_argument(
        "--keep",
        type=int,
        default=KEEP,
        metavar="RESULTS",
        help="tool results that stay whole in sessions that edit at every turn (default: %(default)s)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="some minutes a model on two cores (the default)")
    size.add_argument("--full", action="store_true", help="many more prompts: an hour on two cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures here")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the study. Raises `UserError` for what cannot be run."""
    if min(args.lengths or DEFAULT_LENGTHS) < 256:
        raise UserError("--lengths: at least 256 tokens, or there is nothing to splice")
    if args.keep < 2:
        raise UserError("--keep: at least 2 results, or nothing stands behind an edit")
    args.pattern_length = 0
    lengths = {model: lengths_for(model, args, LENGTHS.get(model, DEFAULT_LENGTHS)) for model in args.models}
    check_writable("--json", args.json)
    from ropewalk.cluster.bench.reuse_study import machine
    from ropewalk.cluster.bench.splice_study import run_deep, run_model
    from ropewalk.cluster.bench.tables import print_splices

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the engines would stay behind
    start = time.perf_counter()
    report: dict[str, Any] = {"machine": machine(), "seed": args.seed, "models": {}}
    for model in [*args.models, *([] if "deep" in args.skip else [DEEP])]:
        report["models"][model] = run_deep(args) if model == DEEP else run_model(model, args, lengths[model])
        report["seconds"] = round(time.perf_counter() - start, 1)
        if args.json:  # after each model: what was measured is not lost
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print_splices(report)
    return 0
