"""How much of an edited text plans recover, and what planning costs: `python -m benchmarks.planner`.

A text is stored behind one header and planned for behind another, after edits (each replaces, inserts or deletes 1 to 8
tokens, at random). Token ids are random, so that nothing is found by chance. No engine: rows are one number a token.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
import torch

from ropewalk.cluster.store.chunk import ChunkHeader
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.kernels.gear import ChunkSizes
from ropewalk.kernels.keys import Tokens, as_tokens, content_key
from ropewalk.scheduler.plan import pieces
from ropewalk.scheduler.planner import PlannerSettings, make_plan

TENANT = "bench"
ARMS = {
    "one pass": PlannerSettings(second_pass=False),
    "anchors too": PlannerSettings(),
    "chunks of 256 to 512, one pass": PlannerSettings(ChunkSizes(384, 256, 512), second_pass=False),
    "chunks of 256 to 512, anchors too": PlannerSettings(ChunkSizes(384, 256, 512)),
}
EDITS_PER_1000 = (0, 1, 4, 16)


def text(rng: random.Random, num_tokens: int) -> Tokens:
    """Random token ids, `[n]`."""
    return as_tokens([rng.randrange(50_000) for _ in range(num_tokens)])


def edit(rng: random.Random, tokens: Tokens, count: int) -> Tokens:
    """Apply `count` edits at random places."""
    for _ in range(count):
        at, length = rng.randrange(len(tokens)), rng.randint(1, 8)
        kind = rng.choice(("replace", "insert", "delete"))
        removed = 0 if kind == "insert" else length
        added = text(rng, 0 if kind == "delete" else length)
        tokens = as_tokens(np.concatenate([tokens[:at], added, tokens[at + removed :]]))
    return tokens


def store_text(store: NodeStore, tokens: Tokens, settings: PlannerSettings) -> None:
    """Store a prompt's chunks as an engine would."""
    for piece in pieces(tokens, TENANT, settings.chunks, (), ()):
        part = tokens[piece.start : piece.end]
        content = content_key(TENANT, part)
        header = ChunkHeader(piece.chain, piece.parent, content, TENANT, piece.domain, piece.start, part)
        store.put(header, torch.zeros(1, len(part), 1, 1))


def measure(root: Path, settings: PlannerSettings, length: int, per_1000: int, repeats: int) -> tuple[float, float]:
    """Return the mean share of the text's tokens that is reused, and the median milliseconds of a plan."""
    rng = random.Random(f"{length}/{per_1000}")
    shares, times = [], []
    for _ in range(repeats):
        store = NodeStore(root, uuid.uuid4().hex, TENANT, 1 << 28)
        body = text(rng, length)
        store_text(store, as_tokens(np.concatenate([text(rng, 128), body])), settings)
        prompt = as_tokens(np.concatenate([text(rng, 97), edit(rng, body, length * per_1000 // 1000), text(rng, 20)]))
        start = time.perf_counter()
        plan = make_plan(prompt, TENANT, store, settings, reuse=True)
        times.append(time.perf_counter() - start)
        shares.append(plan.num_reused / length)
        shutil.rmtree(store.base)
    return float(np.mean(shares)), 1e3 * float(np.median(times))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure what plans recover of edited texts.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ropewalk-planner-"))
    print(f"reused share of the text (mean of {arguments.repeats}), and milliseconds a plan (median)")
    columns = "".join(f"{f'{edits} edits/1000':>22}" for edits in EDITS_PER_1000)
    print(f"{'tokens':>6}  {'arm':<36}{columns}")
    try:
        for length in arguments.lengths:
            for name, settings in ARMS.items():
                cells = ""
                for edits in EDITS_PER_1000:
                    share, milliseconds = measure(root, settings, length, edits, arguments.repeats)
                    cells += f"{share:>12.1%} {milliseconds:>6.1f} ms"
                print(f"{length:>6}  {name:<36}{cells}", flush=True)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
