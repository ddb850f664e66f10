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
from ropewalk.workloads.traces import TraceTurn

TOLERANCE = 0.01
"""How far the hit rates may be apart."""

AT_ONCE_S = 1e-9
"""Seconds of a step: turns are asked one after the other, as the engine is."""


def simulated_hit_rate(turns: Sequence[TraceTurn], num_blocks: int, rule: str) -> float:
    """Return the hit rate of one replica that answers turns one after the other."""
    service = Service(prefill_tokens_per_s=1 / AT_ONCE_S, decode_s=AT_ONCE_S, decode_s_per_request=0.0)
    # vLLM keeps one block for itself.
    cluster = Cluster(ClusterSettings(1, num_blocks - 1, BLOCK_SIZE, rule, service), RoundRobin(1))
    cluster.run(from_turns(turns, BLOCK_SIZE))
    return float(cluster.report()["hit_rate"])


def validate(workload: str, turns: Sequence[TraceTurn], num_blocks: int, rules: Sequence[str]) -> dict[str, Any]:
    """Replay turns on an engine with a tiny model, and in the simulator, once for each rule; return both hit rates."""
    from ropewalk.cluster.models.tiny import SERVED, write

    for name in ("vllm", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Generating answers would take nearly all the time. What they say is part of later prompts all the same.
    turns = [replace(turn, output=turn.output[:1]) for turn in turns]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write(next(family for family in SERVED if family.name == MODEL), Path(folder) / "model")
        for rule in rules:
            rates, _ = replay(model, Path(folder) / rule, num_blocks, rule, {workload: turns})
            simulated = simulated_hit_rate(turns, num_blocks, rule)
            found.append({"rule": rule, "engine": rates[workload], "simulator": simulated})
    return {
        "workload": workload,
        "turns": len(turns),
        "blocks": num_blocks,
        "rules": found,
        "agree": all(abs(entry["engine"] - entry["simulator"]) <= TOLERANCE for entry in found),
    }
