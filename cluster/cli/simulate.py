"""`ropewalk simulate`: rules of eviction and routers on traces of millions of requests and hundreds of replicas."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ropewalk.cluster.cli import UserError
from ropewalk.scheduler.rules import RULES
from ropewalk.workloads.sequences import SHARED
from ropewalk.workloads.simulate.cache import DoesNotFitError
from ropewalk.workloads.simulate.cluster import Cluster, ClusterSettings
from ropewalk.workloads.simulate.mooncake import BLOCK_SIZE, MooncakeTrace, TraceError
from ropewalk.workloads.simulate.replica import Service
from ropewalk.workloads.simulate.request import Request
from ropewalk.workloads.simulate.routers import ROUTER_SESSIONS, ROUTERS, SNAPSHOT_S, RouterSettings
from ropewalk.workloads.simulate.sessions import WORKLOADS, session_requests
from ropewalk.workloads.traces import SPREAD, TRANSCRIPTS, Sizes

MOONCAKE = "mooncake"
MOONCAKE_FILE = "mooncake/conversation_trace.jsonl.gz"

REQUESTS, QUICK_REQUESTS = 100_000, 6_000
REPLICAS, QUICK_REPLICAS = 16, 4
RETENTION = ("lru", "anchors", "foresight")
ROUTERS_SHOWN = ("round-robin", "p2c", "prefix", "rank")

BUDGET = 1000
"""Blocks of 512 tokens: 63 GiB of KV of an 8B model with 128 KiB a token, about what one GPU of 80 GB has room for."""

SESSION_BUDGET, SESSION_BLOCK_SIZE = 400, 32
"""For generated sessions, whose prompts are as short as `ropewalk bench retention` has them."""

COPIES_PER_REPLICA, SESSIONS_PER_REPLICA = 0.25, 16
"""Load by default: a copy of Mooncake's trace for four replicas, or so many live sessions for one."""

PROGRESS_S = 5.0

VALIDATION_SESSIONS, VALIDATION_BUDGET, VALIDATION_RULES = 8, 110, ("lru", "foresight")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "simulate",
        help="try rules of eviction and routers on a simulated cluster: millions of requests, hundreds of replicas",
        description=(
            "Run a trace through a model of a cluster, once for each rule of eviction and router; print hit rates, "
            "times and imbalance. docs/simulate.md describes the model."
        ),
    )
    trace = parser.add_argument_group("trace")
    names = (MOONCAKE, *WORKLOADS)
    trace.add_argument("--workload", choices=names, metavar="NAME", help=f"of {', '.join(names)} (default: {MOONCAKE})")
    trace.add_argument("--trace", type=Path, metavar="FILE", help="another trace in Mooncake's format, plain or .gz")
    trace.add_argument("--data", type=Path, default=SHARED, metavar="DIR", help="public data (default: %(default)s)")
    trace.add_argument("--requests", type=int, metavar="N", help=f"default: {REQUESTS:,}; {QUICK_REQUESTS:,} if quick")
    trace.add_argument("--speed", type=float, default=1.0, metavar="X", help="divide all times (default: %(default)g)")
    trace.add_argument(
        "--at-once",
        type=int,
        metavar="N",
        help="copies of the trace side by side (default: one for four replicas), or live sessions "
        f"(default: {SESSIONS_PER_REPLICA} a replica)",
    )
    trace.add_argument("--programs", type=int, default=1, metavar="N", help="programs that generated sessions are of")
    trace.add_argument("--scale", type=int, default=1, metavar="N", help="multiply lengths of generated sessions")
    trace.add_argument(
        "--spread", type=float, default=SPREAD, metavar="S", help="of generated pauses (default: %(default)g)"
    )
    trace.add_argument("--seed", type=int, default=0, help="of sessions and random routers (default: %(default)s)")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--replicas", type=int, metavar="N", help=f"default: {REPLICAS}; {QUICK_REPLICAS} if quick")
    cluster.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        metavar="BLOCKS",
        help=f"of each replica (default: {BUDGET}; {SESSION_BUDGET} for generated sessions)",
    )
    cluster.add_argument(
        "--block-size", type=int, metavar="N", help=f"tokens; traces have {BLOCK_SIZE} (default: {SESSION_BLOCK_SIZE})"
    )
    cluster.add_argument("--retention", nargs="+", choices=RULES, metavar="RULE", help=f"of {', '.join(RULES)}")
    cluster.add_argument("--routers", nargs="+", choices=ROUTERS, metavar="NAME", help=f"of {', '.join(ROUTERS)}")
    cluster.add_argument("--told", action="store_true", help="clients say when a session ends")
    cluster.add_argument(
        "--imbalance",
        type=float,
        default=math.inf,
        metavar="N",
        help="prefix: most that balanced queues differ by",
    )
    cluster.add_argument(
        "--snapshot-s", type=float, default=SNAPSHOT_S, metavar="S", help="rank: age of snapshots; 0: no scheduler"
    )
    cluster.add_argument(
        "--router-sessions",
        type=int,
        default=ROUTER_SESSIONS,
        metavar="N",
        help="rank: sessions that the router remembers (default: %(default)s)",
    )
    service = Service()
    for field, text in (
        ("prefill_tokens_per_s", "tokens that a replica prefills a second"),
        ("decode_s", "seconds of a step that decodes"),
        ("decode_s_per_request", "and for each request in it"),
        ("max_running", "requests that decode at once"),
        ("chunk", "tokens of prefill in a step"),
    ):
        default = getattr(service, field)
        cluster.add_argument(
            f"--{field.replace('_', '-')}", type=type(default), default=default, help=f"{text} (default: %(default)g)"
        )
    parser.add_argument("--quick", action="store_true", help="a small cluster: a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument(
        "--validate",
        action="store_true",
        help="compare hit rates with those of a real engine instead: exit code 1 if they are more than a point apart",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Simulate every arm and print tables. Raises `UserError` for what cannot be simulated."""
    from ropewalk.cluster.bench.output import check_writable

    check_writable("--json", args.json)
    _check(args)
    return _validate(args) if args.validate else _simulate(args)


def _check(args: argparse.Namespace) -> None:
    for name in ("requests", "at_once", "programs", "scale", "replicas", "block_size", "router_sessions"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for budget in args.budgets or ():
        if budget < 1:
            raise UserError(f"--budgets must be at least 1, not {budget}")
    if not 0 < args.speed < math.inf:
        raise UserError(f"--speed must be above 0, not {args.speed}")
    if args.programs > 1 and args.workload in TRANSCRIPTS:
        raise UserError(f"--programs: {args.workload} is one program; its agents are as recorded")
    if not 0 <= args.spread <= 5:
        raise UserError(f"--spread must be 0 to 5, not {args.spread}")
    for name in ("imbalance", "snapshot_s"):
        if not getattr(args, name) >= 0:
            raise UserError(f"--{name.replace('_', '-')} must be at least 0, not {getattr(args, name)}")
    if args.trace is not None and args.workload not in (None, MOONCAKE):
        raise UserError(f"--trace is a trace of its own: leave out --workload {args.workload}")


def _simulate(args: argparse.Namespace) -> int:
    from ropewalk.cluster.bench.tables import print_simulation

    num_replicas = args.replicas or (QUICK_REPLICAS if args.quick else REPLICAS)
    num_requests = args.requests or (QUICK_REQUESTS if args.quick else REQUESTS)
    workload, block_size, source = _source(args, num_replicas, num_requests)
    budgets = args.budgets or [SESSION_BUDGET if workload in WORKLOADS else BUDGET]
    try:
        service = Service(**{name: getattr(args, name) for name in Service.__dataclass_fields__})
    except ValueError as error:
        raise UserError(f"--{str(error).replace('_', '-')}") from None
    report: dict[str, Any] = {
        "workload": workload,
        "replicas": num_replicas,
        "block_size": block_size,
        "seed": args.seed,
        "speed": args.speed,
        "told": args.told,
        "service": {name: getattr(service, name) for name in Service.__dataclass_fields__},
        "arms": [],
    }
    arms = list(itertools.product(budgets, args.retention or RETENTION, args.routers or ROUTERS_SHOWN))
    for number, (budget, retention, router) in enumerate(arms, 1):
        settings = ClusterSettings(num_replicas, budget, block_size, retention, service, args.told)
        known = RouterSettings(
            num_replicas, budget, block_size, args.imbalance, args.snapshot_s, args.router_sessions, args.seed
        )
        cluster = Cluster(settings, ROUTERS[router](known))
        label = f"{number}/{len(arms)}: {budget} blocks, {retention}, {router}"
        begin = time.perf_counter()
        try:
            cluster.run(source(), _progress(label, num_requests))
        except DoesNotFitError as error:
            raise UserError(f"--budgets: {error}") from None
        wall_s = time.perf_counter() - begin
        figures = cluster.report()
        if figures["overloaded"]:
            waiting = f"{cluster.num_requests - cluster.num_answered:,} requests wait after {cluster.num_requests:,}"
            behind = f"answers take until {figures['simulated_s']:,.0f} s, far behind the last request"
            print(
                f"simulate: {label}: overloaded: {waiting if cluster.is_overloaded else behind}; give it more "
                "--replicas or a lower --speed",
                file=sys.stderr,
            )
        reasons = dict(getattr(cluster.router, "reasons", {}))
        found = {"wall_s": wall_s, "simulated_per_s": cluster.num_requests / wall_s, "reasons": reasons}
        arm = {"blocks": budget, "retention": retention, "router": router}
        report["arms"].append(arm | figures | found)
    _write(args.json, report)
    print_simulation(report)
    return 0


def _source(
    args: argparse.Namespace, num_replicas: int, num_requests: int
) -> tuple[str, int, Callable[[], Iterator[Request]]]:
    """Return the workload's name, its block size, and what begins its requests anew."""
    workload = args.workload or MOONCAKE
    if workload == MOONCAKE:
        if args.block_size not in (None, BLOCK_SIZE):
            raise UserError(f"--block-size: blocks of a trace have {BLOCK_SIZE} tokens, not {args.block_size}")
        path = args.trace or args.data / MOONCAKE_FILE
        try:
            trace = MooncakeTrace(path)
        except TraceError as error:
            more = "" if args.trace else f"; give --data, or --workload {WORKLOADS[0]}"
            raise UserError(f"{'--trace' if args.trace else '--data'}: {error}{more}") from None
        copies = args.at_once or max(1, math.ceil(COPIES_PER_REPLICA * num_replicas))
        name = args.trace.name if args.trace else MOONCAKE
        return name, BLOCK_SIZE, lambda: trace.requests(num_requests, args.speed, copies)
    block_size = args.block_size or SESSION_BLOCK_SIZE
    sizes = Sizes(concurrency=args.at_once or SESSIONS_PER_REPLICA * num_replicas, spread=args.spread)
    options = {name: getattr(args, name) for name in ("seed", "programs", "scale", "speed")}

    def generated() -> Iterator[Request]:
        try:
            turns = session_requests(workload, block_size, sizes=sizes, folder=args.data, **options)
        except OSError as error:
            raise UserError(f"--data: {error}") from None
        return itertools.islice(turns, num_requests)

    return workload, block_size, generated


def _progress(label: str, num_requests: int) -> Callable[[int], None]:
    begin = last = time.monotonic()

    def show(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_S:
            last = now
            speed = done / (now - begin)
            print(
                f"simulate: {label}: {done:,} of {num_requests:,} requests, {speed:,.0f} a second, "
                f"{(num_requests - done) / speed:,.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    return show


def _validate(args: argparse.Namespace) -> int:
    from ropewalk.cluster.bench.simulation import NUM_OUTPUT, TOLERANCE, validate
    from ropewalk.cluster.bench.tables import print_validation
    from ropewalk.workloads.traces import chat, transcripts

    workload = args.workload or WORKLOADS[0]
    if workload == MOONCAKE or args.trace is not None:
        raise UserError(f"--validate needs a workload with tokens: one of {', '.join(WORKLOADS)}")
    sizes = Sizes(spread=args.spread)
    try:
        if workload in TRANSCRIPTS:
            turns = transcripts(workload, args.data, args.seed, sizes, VALIDATION_SESSIONS)
        else:
            turns = chat(workload, VALIDATION_SESSIONS, args.seed, sizes)
    except OSError as error:
        raise UserError(f"--data: {error}") from None
    turns = turns[: args.requests]
    budget = (args.budgets or [VALIDATION_BUDGET])[0]
    largest = max(-(-(len(turn.prompt) + NUM_OUTPUT) // SESSION_BLOCK_SIZE) for turn in turns)
    if budget <= largest:
        raise UserError(f"--budgets: a turn takes up to {largest} blocks, so {budget} are too few")
    report = validate(workload, turns, budget, args.retention or VALIDATION_RULES)
    _write(args.json, report)
    print_validation(report)
    if not report["agree"]:
        print(f"simulate: engine and simulator are more than {100 * TOLERANCE:.0f} point apart", file=sys.stderr)
    return 0 if report["agree"] else 1


def _write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")
