"""What saving KV costs the requests: throughput of one engine that saves against one that does not.

    python -m benchmarks.saving [--rounds N] [--requests R] [--concurrency C] [--starts S] [--json]

Two engines of SmolLM2-135M serve the same fresh prompts in exact mode, so that nothing is found and everything is
saved. They take turns, one round each and the first of a pair changing each time, so that drift of the machine meets
both alike; the one whose turn it is not is idle. A ratio compares the two rounds of a pair: median and quartiles over
the pairs. `--starts` repeats it all with new engines, for two processes of the same program differ by a per cent or
two.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import time
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.cluster.bench.engine import Engine

PROMPT_TOKENS, ANSWER_TOKENS = 512, 32
BUDGET = 1 << 30
TARGET = 0.97

Round = dict[str, float]


def base() -> Path:
    """A folder on tmpfs, where there is one."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")


async def ask(engine: Engine, tokens: list[int], gaps: list[float]) -> None:
    """Answer one prompt; add the seconds between its tokens to `gaps`."""
    times: list[float] = []
    await engine.ask_async(tokens, max_tokens=ANSWER_TOKENS, ignore_eos=True, times=times)
    gaps += [after - before for before, after in pairwise(times)]


async def play(engine: Engine, prompts: list[list[int]], concurrency: int) -> Round:
    """Answer all prompts, so many at a time; the time until the last one is stored counts, too."""
    waiting, gaps = list(prompts), list[float]()

    async def client() -> None:
        while waiting:
            await ask(engine, waiting.pop(), gaps)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    await engine.client.wait_for_saves()
    seconds = time.perf_counter() - begin
    return {"requests_s": len(prompts) / seconds, "gap_p99_ms": 1e3 * statistics.quantiles(gaps, n=100)[98]}


def compare(args: argparse.Namespace, rng: np.random.Generator) -> tuple[list[tuple[Round, Round]], Any]:
    """Play the rounds on a new pair of engines; pairs of (saving, not saving), and what the saving one counted."""
    roots = [base() / f"ropewalk-bench-{uuid.uuid4().hex}" for _ in range(2)]
    engines: list[Engine] = []
    try:
        for root, save in zip(roots, (True, False), strict=True):
            settings = {"store_budget_bytes": BUDGET, "save": save}
            engines.append(Engine("smollm2-135m", store_root=root, settings=settings))
        pairs = []
        for number in range(args.rounds + 1):
            prompts = rng.integers(1000, 40_000, (args.requests, PROMPT_TOKENS)).tolist()
            pair: list[Round] = [{}, {}]
            for arm in (0, 1) if number % 2 else (1, 0):
                pair[arm] = engines[arm].run(play(engines[arm], prompts, args.concurrency))
            if number:  # the first one warms up
                pairs.append((pair[0], pair[1]))
                ratio = pair[0]["requests_s"] / pair[1]["requests_s"]
                print(f"pair {number} of {args.rounds}: ratio {ratio:.3f}", file=sys.stderr, flush=True)
        return pairs, engines[0].client.status()["counters"]
    finally:
        for engine in engines:
            engine.stop()
        for root in roots:
            with contextlib.suppress(OSError):
                shutil.rmtree(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="pairs of rounds a start (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=16, help="a round (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--starts", type=int, default=1, help="pairs of engines (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    rng = np.random.default_rng(0)
    pairs: list[tuple[Round, Round]] = []
    counters: list[dict[str, int]] = []
    for _ in range(args.starts):
        more, counted = compare(args, rng)
        pairs += more
        counters.append({name: count for name, count in counted.items() if "save" in name or "store" in name})
    report: dict[str, Any] = {"threads": threads, "pairs": len(pairs), "requests": args.requests, "counters": counters}
    for measure in ("requests_s", "gap_p99_ms"):
        saving, plain = ([pair[arm][measure] for pair in pairs] for arm in (0, 1))
        low, middle, high = statistics.quantiles([a / b for a, b in zip(saving, plain, strict=True)], n=4)
        report[measure] = {
            "saving": statistics.median(saving),
            "not_saving": statistics.median(plain),
            "ratio": middle,
            "from": low,
            "to": high,
        }
    if args.json:
        print(json.dumps(report, indent=1))
        return
    print(
        f"SmolLM2-135M, CPU, {threads} threads; {len(pairs)} pairs of rounds of {args.requests} requests, "
        f"{args.concurrency} at a time, {PROMPT_TOKENS} fresh tokens, {ANSWER_TOKENS} generated; median (quartiles)"
    )
    print(f"{'':24} {'saving':>8} {'not':>8} {'ratio':>22}")
    for measure, name in (("requests_s", "requests/s"), ("gap_p99_ms", "between tokens, p99, ms")):
        line = report[measure]
        spread = f"{line['ratio']:.3f} ({line['from']:.3f}-{line['to']:.3f})"
        print(f"{name:24} {line['saving']:8.2f} {line['not_saving']:8.2f} {spread:>22}")
    print(f"target: at least {TARGET} of the requests/s; counted while saving: {json.dumps(counters)}")


if __name__ == "__main__":
    main()
