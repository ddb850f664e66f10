"""`ropewalk bench routing`: which replica serves which request, on two replicas, by routers that can be compared.

Each arm is a cluster of its own, started for it and stopped, so that no arm finds what another has computed. It gets
the same two loads, of sessions whose lengths are skewed (most are short, few are long):

    saturation   so many sessions at once that the replicas have always more to do: turns a second, until none is left
    open loop    sessions that arrive at random, at a rate near the saturation of the first arm: TTFT
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.cluster.bench.output import check_writable
from ropewalk.cluster.bench.queues import QueueSampler, longest_uneven_s

if TYPE_CHECKING:
    from ropewalk.workloads.metrics import ReplayResult

MODEL = "smollm2-135m"
REPLICAS = 2

KV_CACHE_GIB = 0.15
"""Room for some 7,000 tokens a replica: less than the sessions of a saturated replica hold."""

ANCHOR_TOKENS = 500
"""Of each agent's system prompt, behind 370 that all share."""

MAX_TURNS = 24
MEAN_TURNS = 6
"""Turns of a session: a geometric number, at most `MAX_TURNS`."""

MAX_PROMPT_TOKENS = 2000
MAX_MODEL_LEN = 4096

AT_ONCE = 8
"""Sessions at a time in saturation."""

LOAD = 0.9
"""Share of the first arm's saturated turns a second at which sessions arrive in the open loop."""

OPEN_SESSIONS = 2
"""Times as many sessions arrive in the open loop as are run in saturation: queues need a while to become what they are
at a rate."""

MAX_TOKENS = 8
"""Answers are cut here, since what routers differ in is prefill."""


@dataclass(frozen=True, slots=True)
class RouterArm:
    """What one arm runs: `settings` of the model in `serve.yaml`, and of the cluster."""

    title: str
    settings: dict[str, Any]
    cluster: dict[str, Any] = field(default_factory=dict)


PLAIN = {"plain": True}
ARMS = {
    "power-of-two": RouterArm("vLLM, power of 2", PLAIN | {"router": "power-of-two"}),
    "prefix-affinity": RouterArm("vLLM, prefix", PLAIN | {"router": "prefix-affinity"}),
    "prefix-affinity-4": RouterArm(
        "vLLM, prefix, at most 4",
        PLAIN | {"router": "prefix-affinity", "router_args": {"imbalanced_threshold": 4}},
    ),
    "router": RouterArm("vLLM, Ropewalk's router", PLAIN | {"router": "ropewalk"}),
    "ropewalk-power-of-two": RouterArm("Ropewalk, power of 2", {"router": "power-of-two"}),
    "ropewalk": RouterArm("Ropewalk", {}),
    "ropewalk-prewarm": RouterArm("Ropewalk, prewarming", {}, {"prewarm": {"enabled": True}}),
}
DEFAULT_ARMS = ("power-of-two", "prefix-affinity", "prefix-affinity-4", "router", "ropewalk")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the study."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "routing",
        help="which replica serves which request: routers on two replicas",
        description=(
            "Start two replicas for each router, one router after the other, and put the same skewed load on them: "
            "saturated, and at random arrivals near saturation. Prints TTFT, turns a second, and how even the queues "
            "were."
        ),
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT_ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument(
        "--sessions",
        type=int,
        default=24,
        metavar="N",
        help="in saturation, twice as many in the open loop (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="times that each arm is run, in turn")
    parser.add_argument(
        "--rate", type=float, metavar="R", help="turns a second that arrive (default: by the first arm)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sessions (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures here")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the study. Raises `UserError` for what cannot be run."""
    from ropewalk.cluster.bench.tables import print_routing
    from ropewalk.cluster.cli import UserError
    from ropewalk.cluster.serve.local import StartError

    check_writable("--json", args.json)
    for name, least in (("sessions", AT_ONCE + 1), ("rounds", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} must be at least {least}, not {getattr(args, name)}")
    if args.rate is not None and not 0 < args.rate < 1000:
        raise UserError(f"--rate must be above 0 and below 1000, not {args.rate}")
    report: dict[str, Any] = {"model": MODEL, "seed": args.seed, "sessions": args.sessions, "rate": args.rate}
    report["arms"] = {name: {"title": ARMS[name].title, "runs": []} for name in dict.fromkeys(args.arms)}
    begin = time.monotonic()
    for number in range(args.rounds):
        for name in report["arms"]:
            print(f"bench: {time.monotonic() - begin:4.0f} s: {ARMS[name].title}", file=sys.stderr, flush=True)
            try:
                result = measure(ARMS[name], args.sessions, args.seed + 2 * number, report["rate"])
            except StartError as error:
                raise UserError(f"the cluster did not start: {error}") from None
            except NothingAnsweredError as error:
                print(f"ropewalk bench routing: {ARMS[name].title}: {error}", file=sys.stderr)
                return 1
            report["rate"] = report["rate"] or LOAD * result["saturated"]["turns_per_s"]
            report["arms"][name]["runs"].append(result)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    print_routing(report)
    failed = sum(load["errors"] for arm in report["arms"].values() for one in arm["runs"] for load in one.values())
    return 1 if failed else 0


class NothingAnsweredError(RuntimeError):
    """A load of which nothing can be measured."""


def measure(arm: RouterArm, num_sessions: int, seed: int, turns_per_s: float | None) -> dict[str, Any]:
    """Start the arm's cluster, put both loads on it, and return the figures of each, by name."""
    from ropewalk.cluster.serve.local import LocalCluster, free_port

    with LocalCluster(cluster_config(arm, free_port())) as cluster:
        asyncio.run(load(cluster.endpoint, 4, seed=seed - 1, concurrency=REPLICAS))  # engines run in
        saturated = sample(cluster, num_sessions, seed, concurrency=AT_ONCE)
        rate = turns_per_s or LOAD * saturated["turns_per_s"]
        return {
            "saturated": saturated,
            "open": sample(cluster, OPEN_SESSIONS * num_sessions, seed + 1, turns_per_s=rate),
        }


def cluster_config(arm: RouterArm, port: int) -> Any:
    """Settings of the cluster: one model, all cores for its replicas."""
    from ropewalk.cluster.config import parse_config

    model = {"source": MODEL, "replicas": REPLICAS, "kv_cache_gib": KV_CACHE_GIB, "max_model_len": MAX_MODEL_LEN}
    return parse_config({"http": {"port": port}, "models": [model | arm.settings], **arm.cluster}, "bench")


def sample(cluster: Any, num_sessions: int, seed: int, **how: Any) -> dict[str, Any]:
    """Put a load on a cluster, and return its figures and those of the queues meanwhile."""
    with QueueSampler(cluster) as sampler:
        result = asyncio.run(load(cluster.endpoint, num_sessions, seed=seed, **how))
    if not result.answered:
        raise NothingAnsweredError(f"no request was answered: {result.summary()['error_kinds']}")
    figures = result.summary()
    if "concurrency" in how:
        figures["turns_per_s"] = saturated_turns_per_s(result)
    queues = [lengths for _, lengths in sampler.samples]
    return figures | {
        "uneven_s": longest_uneven_s(sampler.samples, 2),
        "uneven_by_one_s": longest_uneven_s(sampler.samples, 1),
        "mean_queue": sum(map(sum, queues)) / REPLICAS / max(len(queues), 1),
        "mean_difference": sum(max(lengths) - min(lengths) for lengths in queues) / max(len(queues), 1),
    }


async def load(
    endpoint: str,
    num_sessions: int,
    *,
    seed: int,
    words: int | None = None,
    concurrency: int = 1,
    turns_per_s: float | None = None,
) -> ReplayResult:
    """Run sessions: `concurrency` at a time, or as they arrive, so that `turns_per_s` are asked for until the last one.

    `seed` decides how long sessions are and when they arrive, and, unless `words` does, what is said in them.
    """
    from ropewalk.workloads.client import ChatClient
    from ropewalk.workloads.config import ReplayConfig
    from ropewalk.workloads.load import Arm, prepare

    lengths = session_lengths(num_sessions, seed)
    config = ReplayConfig(
        endpoint=endpoint,
        sessions=num_sessions,
        turns=MAX_TURNS,
        headers="none",
        anchor_tokens=ANCHOR_TOKENS,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        concurrency=concurrency,
        rate=None if turns_per_s is None else session_rate(lengths, seed, turns_per_s),
        seed=seed,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    )
    program, sessions = prepare(config if words is None else replace(config, seed=words))
    skewed = [replace(one, turns=one.turns[:length]) for one, length in zip(sessions, lengths, strict=True)]
    async with ChatClient(config) as client:
        arm = Arm(config, program, client, await client.resolve_model(None), time.perf_counter())
        await arm.run_block(skewed)
        return arm.result()


def session_rate(lengths: Sequence[int], seed: int, turns_per_s: float) -> float:
    """Return how many sessions a second have to arrive for `turns_per_s`, given how long these are and their gaps."""
    from ropewalk.workloads.load import arrival_times

    last = arrival_times(seed, range(len(lengths)), 1.0)[-1]
    return turns_per_s * last / sum(lengths)


def saturated_turns_per_s(result: ReplayResult) -> float:
    """Return turns a second while there were sessions to begin: after that, fewer and fewer are at work."""
    begun: dict[int, float] = {}
    for record in result.records:
        begun[record.session] = min(record.started, begun.get(record.session, record.started))
    begin, end = min(begun.values()), max(begun.values())
    return sum(record.ended <= end for record in result.answered) / (end - begin)


def session_lengths(num_sessions: int, seed: int) -> list[int]:
    """Draw how many turns each session has."""
    rng = random.Random(f"{seed}/lengths")
    return [min(int(rng.expovariate(1 / (MEAN_TURNS - 0.5))) + 1, MAX_TURNS) for _ in range(num_sessions)]
