"""`ropewalk bench retention`: what rules of eviction are worth at tight block budgets, on a real engine."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from ropewalk.cluster.bench.output import add_data_and_json, check_writable
from ropewalk.scheduler.foresight import Foresight
from ropewalk.scheduler.retention import Retention, TtlPin
from ropewalk.scheduler.rules import RULES
from ropewalk.workloads.block_cache import Clairvoyant, Foretold, hit_rate
from ropewalk.workloads.traces import PATTERNS, SPREAD, TRANSCRIPTS, Sizes, TraceTurn, chat, transcripts

BLOCK_SIZE = 32
BUDGETS = (100, 150, 200, 300, 400)
QUICK_BUDGETS = (100, 200, 400)
QUICK_WORKLOADS = ("selector", "random", *TRANSCRIPTS)

OURS = "foresight"
TOLD = "foresight, told"
ARMS = (*RULES, TOLD)
"""Arms that run on the engine. *Told*: the client says when a session ends (`DELETE /v1/sessions/{id}`)."""

NUM_SESSIONS, QUICK_SESSIONS = 60, 20
TTLS = (1.0, 3.0, 10.0)
"""Other seconds that blocks are pinned for, in the model alone: the best of them is reported."""

MODEL = "Qwen2.5"
"""Architecture of the tiny model with random weights: which blocks are hit does not depend on what a model says."""

BATCH = 16384
"""Tokens of a step: turns that are asked together are all begun in one."""

AT_ONCE = 2
"""Engines side by side: hit rates do not depend on their speed."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the study."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "retention",
        help="which blocks to keep when there are too few: rules of eviction, on a real engine",
        description=(
            "Replay multi-agent sessions, turn by turn, on vLLM with few blocks, with each rule of eviction; print "
            "hit rates beside those of the clairvoyant optimum, computed from the same turns."
        ),
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer workloads, budgets and sessions: less than ten minutes"
    )
    workloads = (*PATTERNS, *TRANSCRIPTS)
    parser.add_argument("--workloads", nargs="+", choices=workloads, metavar="NAME", help=f"of {', '.join(workloads)}")
    parser.add_argument("--budgets", nargs="+", type=int, metavar="BLOCKS", help=f"blocks of {BLOCK_SIZE} tokens")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, metavar="RULE", help=f"of {'; '.join(ARMS)}")
    parser.add_argument("--sessions", type=int, metavar="N", help="sessions a workload")
    parser.add_argument("--seed", type=int, default=0, help="of the sessions (default: %(default)s)")
    parser.add_argument(
        "--spread",
        type=float,
        default=SPREAD,
        metavar="S",
        help="standard deviation of the logarithm of pauses between turns (default: %(default)s)",
    )
    parser.add_argument(
        "--model-only", action="store_true", help="no engine: the model of its cache, which takes seconds"
    )
    add_data_and_json(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the study. Raises `UserError` for what cannot be run."""
    from ropewalk.cluster.bench.tables import print_retention
    from ropewalk.cluster.cli import UserError

    check_writable("--json", args.json)
    if args.sessions is not None and args.sessions < 1:
        raise UserError(f"--sessions must be at least 1, not {args.sessions}")
    if not 0 <= args.spread <= 5:
        raise UserError(f"--spread must be 0 to 5, not {args.spread}")
    sizes = Sizes(spread=args.spread)
    budgets = args.budgets or (QUICK_BUDGETS if args.quick else BUDGETS)
    num_sessions = args.sessions or (QUICK_SESSIONS if args.quick else NUM_SESSIONS)
    traces = {}
    for name in args.workloads or (QUICK_WORKLOADS if args.quick else (*PATTERNS, *TRANSCRIPTS)):
        if name in PATTERNS:
            traces[name] = chat(name, num_sessions, args.seed, sizes)
            continue
        try:
            traces[name] = transcripts(name, args.data, args.seed, sizes, num_sessions)
        except OSError as error:
            if args.workloads:
                raise UserError(f"--data: {error}; get the runs from {WHO_AND_WHEN}") from None
            print(f"bench: no {name} under {args.data}: left out", file=sys.stderr)
    # Generating answers would take nearly all the time. What they say is part of later prompts all the same.
    traces = {name: [replace(turn, output=turn.output[:1]) for turn in turns] for name, turns in traces.items()}
    largest = max(max(-(-(len(t.prompt) + len(t.output)) // BLOCK_SIZE) for t in turns) for turns in traces.values())
    if min(budgets) <= largest:
        raise UserError(f"--budgets: a turn takes up to {largest} blocks, so {min(budgets)} are too few")
    report = {
        "block_size": BLOCK_SIZE,
        "seed": args.seed,
        "spread": args.spread,
        "workloads": {name: describe(turns) for name, turns in traces.items()},
        "cells": [cell(name, turns, budget, args.arms) for name, turns in traces.items() for budget in budgets],
    }
    if not args.model_only:
        measure(report["cells"], traces, args.arms)
    for entry in report["cells"]:
        conclude(entry)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print_retention(report)
    return 0


WHO_AND_WHEN = "https://github.com/mingyin1/Agents_Failure_Attribution (as whowhen/*.jsonl.gz)"


def describe(turns: Sequence[TraceTurn]) -> dict[str, Any]:
    """Return what a workload is like."""
    return {
        "sessions": len({turn.session for turn in turns}),
        "agents": len({turn.agent for turn in turns}),
        "turns": len(turns),
        "prompt_tokens": sum(len(turn.prompt) for turn in turns) / len(turns),
    }


def cell(workload: str, turns: Sequence[TraceTurn], budget: int, arms: Sequence[str]) -> dict[str, Any]:
    """Return hit rates of one workload at one budget, by the model of a cache."""

    def model(rule: Retention, **options: Any) -> float:
        # vLLM keeps one block for itself.
        return hit_rate(turns, budget - 1, BLOCK_SIZE, rule, **options)

    rules = {name: RULES[name]() for name in arms if name in RULES}
    return {
        "workload": workload,
        "blocks": budget,
        "optimum": model(Clairvoyant(turns, BLOCK_SIZE)),
        "speakers_told": model(Foretold(turns)),
        "unlimited": hit_rate(turns, 1 << 20, BLOCK_SIZE, Retention()),
        "model": {name: model(rule) for name, rule in rules.items()}
        | ({TOLD: model(Foresight(), told=True)} if TOLD in arms else {}),
        "model_other_ttls": {str(ttl_s): model(TtlPin(ttl_s)) for ttl_s in TTLS},
    }


def measure(cells: Sequence[dict[str, Any]], traces: Mapping[str, Sequence[TraceTurn]], arms: Sequence[str]) -> None:
    """Measure every cell on the engine: one engine for each budget and rule, all workloads one after the other."""
    from ropewalk.cluster.models.tiny import SERVED, write

    for name in ("vllm", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    begin = time.monotonic()
    jobs = [(budget, arm) for budget in dict.fromkeys(entry["blocks"] for entry in cells) for arm in arms]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        model = write(next(family for family in SERVED if family.name == MODEL), Path(folder) / "model")

        def one(job: tuple[int, str]) -> tuple[dict[str, float], float]:
            budget, arm = job
            print(f"bench: {time.monotonic() - begin:3.0f} s: {budget} blocks, {arm}", file=sys.stderr, flush=True)
            return replay(model, Path(folder) / f"{budget}-{arm}", budget, arm, traces)

        for (budget, arm), (rates, cost_s) in zip(jobs, pool.map(one, jobs), strict=True):
            for entry in cells:
                if entry["blocks"] == budget:
                    entry.setdefault("engine", {})[arm] = rates[entry["workload"]]
                    entry.setdefault("seconds_per_turn", {})[arm] = cost_s


def replay(
    model: Path, store: Path, budget: int, arm: str, traces: Mapping[str, Sequence[TraceTurn]]
) -> tuple[dict[str, float], float]:
    """Return the hit rate of each workload on one engine, and the median seconds of a turn.

    Turns of one and the same time are asked together, all others one after the other.
    """
    import statistics

    from ropewalk.cluster.bench.engine import Engine

    longest = max(len(t.prompt) + len(t.output) for turns in traces.values() for t in turns) + 1
    engine = Engine(
        str(model),
        store_root=store,
        settings={"save": False, "retention": OURS if arm == TOLD else arm},
        threads=1,
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_batched_tokens=max(longest, BATCH),
        num_gpu_blocks_override=budget,
        block_size=BLOCK_SIZE,
        dtype="bfloat16",
    )
    rates, seconds = {}, []
    try:
        for name, turns in traces.items():
            engine.forget_everything()
            num_cached = num_tokens = 0
            for _, together in groupby(turns, attrgetter("time_s")):
                asked = list(together)
                start = time.perf_counter()
                answers = engine.gather(
                    [
                        engine.ask_async(
                            turn.prompt,
                            session=turn.session,
                            agent=turn.agent,
                            at_s=turn.time_s,
                            max_tokens=len(turn.output),
                            ignore_eos=True,
                        )
                        for turn in asked
                    ]
                )
                seconds.append((time.perf_counter() - start) / len(asked))
                num_cached += sum(answer.num_cached for answer in answers)
                num_tokens += sum(len(turn.prompt) for turn in asked)
                for turn in asked:
                    if arm == TOLD and turn.is_last:
                        engine.client.end_session("default", turn.session)
            rates[name] = num_cached / num_tokens
    finally:
        engine.stop()
    return rates, statistics.median(seconds)


def conclude(entry: dict[str, Any]) -> None:
    """Add what the hit rates say: the gap between plain vLLM and the optimum, and how much of it each rule closes."""
    rates = entry.get("engine") or entry["model"]
    if "lru" not in rates:
        return
    gap = entry["optimum"] - rates["lru"]
    entry["gap"] = gap
    entry["closed"] = {name: (rate - rates["lru"]) / gap if gap > 0 else None for name, rate in rates.items()}
    if OURS in rates and "anchors" in rates:
        entry["prediction_adds"] = rates[OURS] - rates["anchors"]
