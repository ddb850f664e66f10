"""What it costs an engine to say what its chunks are worth, and whoever makes room to heed it.

    python -m benchmarks.store_worth [--seconds S] [--rate R] [--json]

No engine: requests end at a fixed rate, of sessions whose six agents mostly take turns. Printed are microseconds of the
engine's thread per request (wall clock, with the thread that writes beside it): to learn of a turn, which the cache of
blocks needs anyway, and to note and weigh chunks; what it takes to read the file, and to rank a chunk by it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ropewalk.cluster.engine.settings import EngineSettings
from ropewalk.cluster.engine.stores import OpenStores
from ropewalk.cluster.engine.worth import ChunkWorth
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.cluster.store.worth import FOLDER, read_worths
from ropewalk.kernels.keys import Domain
from ropewalk.scheduler.foresight import Foresight
from ropewalk.scheduler.plan import Piece, empty_plan

CASES = ((8, 60), (64, 40), (256, 30))
"""Sessions, and chunks of each."""

BUDGET, PAUSE_S, NUM_AGENTS = 1 << 30, 3.2, 6


def measure(num_sessions: int, num_chunks: int, args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Return what one case costs."""
    settings = EngineSettings(store_root=root, store_budget_bytes=BUDGET)
    worth, rule, rng = ChunkWorth(settings, OpenStores(settings, BUDGET, None, 0)), Foresight(), random.Random(0)
    worth.spared_s = 1e-4
    objects = NodeStore(root, "model-r0", "t", BUDGET).base / "objects"
    prompts = []
    for _ in range(num_sessions):
        chains = [f"{rng.getrandbits(128):032x}" for _ in range(num_chunks)]
        prompts.append([Piece(n, n + 1, chain, "", Domain.EXACT) for n, chain in enumerate(chains)])
        for chain in chains:
            (objects / chain[:2]).mkdir(parents=True, exist_ok=True)
            (objects / chain[:2] / chain).touch()
    agents, learning, noting = [0] * num_sessions, list[float](), list[float]()
    until = time.monotonic() + args.seconds
    while time.monotonic() < until:
        number = rng.randrange(num_sessions)
        session, agent = f"s{number}", f"a{agents[number]}"
        agents[number] = (agents[number] + 1) % NUM_AGENTS if rng.random() < 0.8 else rng.randrange(NUM_AGENTS)
        begin = time.perf_counter()
        rule.begin(session, agent, len(noting) * PAUSE_S / num_sessions)
        learned = time.perf_counter()
        worth.note(rule, f"r{len(noting)}", (session, agent), ("model", "t"), empty_plan(1), prompts[number])
        noting.append(1e6 * (time.perf_counter() - learned))
        learning.append(1e6 * (learned - begin))
        time.sleep(1 / args.rate)  # the pause between two requests is part of what is measured
    worth.close()
    begin = time.perf_counter()
    worths = read_worths(root / FOLDER, time.time(), Counter())
    read = time.perf_counter()
    chains = [piece.chain for pieces in prompts for piece in pieces]
    known = [worths.rank("model-r0", chain, time.time() - 1.5, time.time()) for chain in chains]
    return {
        "sessions": num_sessions,
        "chunks": len(chains),
        "requests": len(noting),
        "learn_us": statistics.median(learning),
        "note_us": statistics.median(noting),
        "note_mean_us": statistics.fmean(noting),
        "note_p99_us": statistics.quantiles(noting, n=100)[98],
        "file_bytes": sum(path.stat().st_size for path in (root / FOLDER).glob("[0-9a-f]*")),
        "read_ms": 1e3 * (read - begin),
        "rank_us": 1e6 * (time.perf_counter() - read) / len(known),
        "words": worth.take_counters()["worth_published"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="a case (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=40, help="requests a second (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    cases = []
    for case in CASES:
        root = Path(tempfile.mkdtemp(dir=base))
        try:
            cases.append(measure(*case, args, root))
        finally:
            shutil.rmtree(root)
    if args.json:
        print(json.dumps(cases, indent=1))
        return
    print(f"{args.rate:.0f} requests a second for {args.seconds:.0f} s; engine's thread per request in us")
    print("sessions chunks   learn   note   mean    p99   share     file, bytes  read, ms  rank, us")
    for case in cases:
        print(
            f"{case['sessions']:8} {case['chunks']:6} {case['learn_us']:7.0f} {case['note_us']:6.0f}"
            f" {case['note_mean_us']:6.0f} {case['note_p99_us']:6.0f} {case['note_mean_us'] * args.rate / 1e4:6.2f} %"
            f" {case['file_bytes']:15} {case['read_ms']:9.1f} {case['rank_us']:9.1f}"
        )


if __name__ == "__main__":
    main()
