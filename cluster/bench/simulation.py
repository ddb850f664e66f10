"""The simulator held against vLLM: the same turns, the same rule, the same few blocks; hit rates beside each other."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropewalk.cluster.bench.retention import BLOCK_SIZE, MODEL, replay
from ropewalk.workloads.simulate.cluster import Cluster, ClusterSettings
from ropewalk.workloads.simulate.replica import Service
from ropewalk.workloads.simulate.routers import RoundRobin
from ropewalk.workloads.simulate.sessions import from_turns
from ropewalk.workloads.traces import TraceTurn, in_waves

TOLERANCE = 0.01
"""How far the hit rates may be apart."""

TOGETHER = 4
"""Turns that are asked together."""

NUM_OUTPUT = 8
"""Tokens of their answers, so that they hold their blocks for some steps side by side. What the tiny model says is no
part of later prompts, which have the trace's answers."""

SERVICE = Service(prefill_tokens_per_s=1e9, decode_s=1e-4, decode_s_per_request=0.0)
"""So fast that whatever comes at one time is answered before the next, and that together all are under way at once."""


def simulated_hit_rate(turns: Sequence[TraceTurn], num_blocks: int, rule: str) -> float:
    """Return the hit rate of one replica whose answers nobody asks for again."""
    # vLLM keeps one block for itself.
    cluster = Cluster(ClusterSettings(1, num_blocks - 1, BLOCK_SIZE, rule, SERVICE), RoundRobin(1))
    cluster.run(r._replace(blocks=r.blocks[: r.num_prompt // BLOCK_SIZE]) for r in from_turns(turns, BLOCK_SIZE))
    return float(cluster.report()["hit_rate"])


def validate(workload: str, turns: Sequence[TraceTurn], num_blocks: int, rules: Sequence[str]) -> dict[str, Any]:
    """Replay turns on an engine with a tiny model, and in the simulator, for each rule, one after the other and some at
    a time; return all hit rates."""
    from ropewalk.cluster.models.tiny import SERVED, write

    for name in ("vllm", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    traces = {
        "one by one": [replace(turn, output=turn.output[:1]) for turn in turns],
        f"{TOGETHER} together": in_waves([replace(turn, output=turn.output[:NUM_OUTPUT]) for turn in turns], TOGETHER),
    }
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write(next(family for family in SERVED if family.name == MODEL), Path(folder) / "model")
        for rule in rules:
            rates, _ = replay(model, Path(folder) / rule, num_blocks, rule, traces)
            for asked, rate in rates.items():
                simulated = simulated_hit_rate(traces[asked], num_blocks, rule)
                found.append({"rule": rule, "asked": asked, "engine": rate, "simulator": simulated})
    return {
        "workload": workload,
        "turns": len(turns),
        "blocks": num_blocks,
        "rules": found,
        "agree": all(abs(entry["engine"] - entry["simulator"]) <= TOLERANCE for entry in found),
    }
