"""`ropewalk bench reuse`: what position-independent reuse saves, and what it changes in a model's answers."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.cluster.bench.output import check_writable
from ropewalk.cluster.cli import UserError
from ropewalk.cluster.models import EMBEDDED, ModelSourceError, resolve

LENGTHS = (512, 1024, 2048, 4096, 6144)

ROOM = 512
"""Tokens that a prompt may have beside its body, its answer included; patterns have as much again before it."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the study."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "reuse",
        help="position-independent reuse: time, recovered tokens, quality",
        description=(
            "Compare position-independent reuse with full prefill by plain vLLM: time to first token, recovered "
            "tokens, divergence, recall. Prints tables; --json writes all figures."
        ),
    )
    add_models_and_lengths(parser, "of bodies", LENGTHS)
    parser.add_argument(
        "--pattern-length", type=int, default=1536, metavar="TOKENS", help="body length of the patterns"
    )
    parser.add_argument(
        "--skip", nargs="+", default=[], choices=("lengths", "patterns", "gsm8k"), help="parts to leave out"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick",
        action="store_true",
        help="some minutes a model on two cores; slow machines get fewer prompts a length (the default)",
    )
    size.add_argument("--full", action="store_true", help="many more prompts: hours on two cores")
    parser.add_argument(
        "--min-run",
        type=int,
        metavar="TOKENS",
        help="shortest run that is reused (default: as the engine learns it)",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures here")
    return parser


def add_models_and_lengths(parser: argparse.ArgumentParser, what: str, lengths: Sequence[int]) -> None:
    """Add the options that say which models, and texts of which lengths, a study measures."""
    parser.add_argument(
        "--models", nargs="+", default=list(EMBEDDED), metavar="SOURCE", help="default: the embedded ones"
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        metavar="TOKENS",
        help=f"{what} (default: {' '.join(map(str, lengths))}, as far as the model has positions)",
    )


def longest_prompt(lengths: Sequence[int], pattern_length: int) -> int:
    """Tokens of the longest prompt, its answer included."""
    return max(*lengths, pattern_length + ROOM) + ROOM


def lengths_for(model: str, args: argparse.Namespace, default: Sequence[int] = LENGTHS) -> list[int]:
    """Return the body lengths for a model. Raises `UserError` when it is not there, or has too few positions."""
    try:
        config = Path(resolve(model)) / "config.json"
    except ModelSourceError as error:
        raise UserError(f"--models: {error}") from None
    longest = json.loads(config.read_text()).get("max_position_embeddings") if config.is_file() else None
    lengths = args.lengths or [
        length for length in default if longest is None or longest_prompt([length], args.pattern_length) <= longest
    ]
    needed = longest_prompt(lengths or [0], args.pattern_length)
    if longest is not None and needed > longest:
        raise UserError(
            f"--lengths, --pattern-length: prompts of {needed} tokens do not fit {model} ({longest} positions)"
        )
    return list(lengths)


def run(args: argparse.Namespace) -> int:
    """Run the study. Raises `UserError` for what cannot be run."""
    if min([*(args.lengths or ()), args.pattern_length]) < 256:
        raise UserError("--lengths, --pattern-length: at least 256 tokens, or there is nothing to reuse")
    if args.min_run is not None and args.min_run < 1:
        raise UserError(f"--min-run: at least 1 token, not {args.min_run}")
    lengths = {model: lengths_for(model, args) for model in args.models}
    check_writable("--json", args.json)
    from ropewalk.cluster.bench.reuse_study import machine, run_model
    from ropewalk.cluster.bench.tables import print_report

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the engines would stay behind
    start = time.perf_counter()
    report: dict[str, Any] = {"machine": machine(), "seed": args.seed, "dtype": args.dtype, "min_run": args.min_run}
    report["models"] = {}
    for model in args.models:
        report["models"][model] = run_model(model, args, lengths[model])
        if args.json:  # after each model: what was measured is not lost
            report["seconds"] = round(time.perf_counter() - start, 1)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)
    return 0
