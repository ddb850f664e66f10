"""`ropewalk bench predict`: how well the next agent, tool or command is foretold, online, by how much of the past."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.cluster.bench.output import add_data_and_json, check_writable
from ropewalk.cluster.cli import UserError
from ropewalk.scheduler.markov import MAX_ORDER, VariableOrder, top_hits
from ropewalk.workloads.sequences import SOURCES, Sequences, SequencesError, public_sequences, read_sequences

PAPER = "first order, as in the paper"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the study."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "predict",
        help="how well the next agent, tool or command is foretold",
        description=(
            "Go through sequences once, predict each element from those before it, then learn it. Prints how often the "
            "first guess, and the first three, were right."
        ),
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="a sequence a line: names parted by blanks, or JSON lists"
    )
    add_data_and_json(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the study. Raises `UserError` for files that hold no sequences."""
    check_writable("--json", args.json)
    try:
        found = [read_sequences(path) for path in args.files]
    except SequencesError as error:
        raise UserError(str(error)) from None
    if not args.files:
        try:
            found = public_sequences(args.data)
        except OSError as error:
            raise UserError(f"--data: {error}") from None
        if not found:
            homes = "; ".join(f"{name}: {home}" for name, home in SOURCES.items())
            raise UserError(f"--data: {args.data} holds none of the public runs ({homes}); or name files of sequences")
    from ropewalk.cluster.bench.tables import print_predictions

    report = {"sets": [study(sequences) for sequences in found]}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print_predictions(report)
    return 0


def study(sequences: Sequences) -> dict[str, Any]:
    """Return how often each learner was right on one set of sequences, from nothing on."""
    learners = {f"order {order}": VariableOrder(order) for order in range(MAX_ORDER + 1)}
    learners[PAPER] = VariableOrder(1, smoothing="additive", half_life=float("inf"))
    arms = {name: top_hits(sequences.sequences, learner) for name, learner in learners.items()}
    arms = {"majority": majority_hits(sequences.sequences), **arms}
    return {
        "name": sequences.name,
        "elements": sequences.elements,
        "sequences": len(sequences.sequences),
        "different": len({element for sequence in sequences.sequences for element in sequence}),
        "arms": arms,
    }


def majority_hits(sequences: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The guess that knows no past: what has been most frequent so far."""
    seen: Counter[str] = Counter()
    count = first = three = 0
    for sequence in sequences:
        for position, element in enumerate(sequence):
            if position:
                ranked = [name for name, _ in sorted(seen.items(), key=lambda item: (-item[1], item[0]))[:3]]
                count += 1
                first += ranked[:1] == [element]
                three += element in ranked
            seen[element] += 1
    return {"predictions": count, "top_1": first, "top_3": three}
