"""`ropewalk bench roc`: is the KV of one content at two positions closer than the KV of two contents at one position?

An area under the ROC curve near 1 says that position and left context change a row less than content does; near 0.5 or
below, that they drown it. What is done: `roc_study`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ropewalk.cluster.bench.output import check_writable
from ropewalk.cluster.models import EMBEDDED, ModelSourceError, resolve
from ropewalk.kernels.keys import HEAD_LENGTH

POSITIONS = (0, 512, 1024, 2048, 3584)
"""Irminsul's, section "Feasibility"."""

BLOCK_TOKENS = 64
"""Ours: the paper gives no length."""

QUICK_BLOCKS, FULL_BLOCKS = 100, 500
"""The paper has 500; 100 take some two minutes a model on two cores."""

GROUP = 4
"""Blocks whose pairs are compared with each other. No pair joins two groups, so groups are independent."""


@dataclass(frozen=True, slots=True)
class Study:
    """What is studied. Lengths and positions are in tokens. Raises `ValueError` for numbers that make no study."""

    blocks: int
    positions: tuple[int, ...] = POSITIONS
    block_tokens: int = BLOCK_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.blocks < 2 * GROUP or self.blocks % GROUP:
            raise ValueError(f"--blocks must be a multiple of {GROUP}, at least {2 * GROUP}, not {self.blocks}")
        if self.block_tokens < 1:
            raise ValueError(f"--block-tokens must be positive, not {self.block_tokens}")
        if len(set(self.positions)) < 2 or min(self.positions) < 0 or len(set(self.positions)) < len(self.positions):
            raise ValueError(f"--positions must be two or more different positions from 0 on, not {self.positions}")

    @property
    def filler_tokens(self) -> int:
        return max(*self.positions, HEAD_LENGTH)

    @property
    def longest_prompt(self) -> int:
        return max(self.positions) + self.block_tokens + HEAD_LENGTH


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the study."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "roc",
        help="tell whether KV of the same content at other positions is recognisable: ROC AUC by layer",
        description="Compare the KV of the same content at different positions, behind different texts, with the KV of "
        "other content at the same position: ROC AUC for each layer and part of a row.",
    )
    parser.add_argument("--model", action="append", help=f"may be repeated (default: {' and '.join(EMBEDDED)})")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help=f"{QUICK_BLOCKS} blocks (the default)")
    size.add_argument("--full", action="store_true", help=f"{FULL_BLOCKS} blocks, as in the paper")
    size.add_argument("--blocks", type=int, metavar="N", help=f"so many blocks, a multiple of {GROUP}")
    parser.add_argument("--positions", metavar="P,P,…", help=f"default: {','.join(map(str, POSITIONS))}")
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write an HTML page with the curves there")
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure one model after the other and report."""
    from rich.console import Console

    from ropewalk.cluster.bench.material import TooLittleText
    from ropewalk.cluster.bench.roc_report import page_of, print_result
    from ropewalk.cluster.bench.roc_study import NotMeasurable, measure
    from ropewalk.cluster.cli import UserError

    console = Console(highlight=False)
    try:
        study = _study(args)
        models = args.model or list(EMBEDDED)
        for model in models:
            _check_length(model, study)
    except (ValueError, ModelSourceError) as error:
        raise UserError(str(error)) from None
    for option in ("json", "plot"):
        check_writable(f"--{option}", getattr(args, option))
    results = []
    for model in models:
        with console.status(f"{model}: starting an engine") as status:
            try:
                result = measure(model, study, lambda text: status.update(text))
            except TooLittleText as error:
                raise UserError(f"--model {model!r}: {error}; choose fewer --blocks") from None
            except NotMeasurable as error:
                raise UserError(f"--model {model!r} cannot be studied: {error}") from None
        results.append(result)
        print_result(console, result)
        if args.json is not None:
            args.json.write_text(json.dumps({"study": asdict(study), "models": results}, indent=1) + "\n", "utf-8")
        if args.plot is not None:
            args.plot.write_text(page_of(results), "utf-8")
    return 0


def _study(args: argparse.Namespace) -> Study:
    blocks = args.blocks if args.blocks is not None else FULL_BLOCKS if args.full else QUICK_BLOCKS
    positions: tuple[int, ...] = POSITIONS
    if args.positions is not None:
        try:
            positions = tuple(int(part) for part in args.positions.split(","))
        except ValueError:
            raise ValueError(f"--positions must be numbers with commas between, not {args.positions!r}") from None
    return Study(blocks, positions, args.block_tokens, args.seed)


def _check_length(model: str, study: Study) -> None:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(resolve(model)).get_text_config()
    except OSError as error:
        raise ValueError(f"--model {model!r} cannot be loaded: {str(error).splitlines()[0]}") from None
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and study.longest_prompt >= longest:
        raise ValueError(
            f"--positions up to {max(study.positions)} need prompts of {study.longest_prompt} tokens; "
            f"--model {model!r} takes fewer than {longest}"
        )
