"""`ropewalk bench outage`: what requests notice of a scheduler that is killed, hangs, and comes back.

One cluster under a steady load, in five periods. In each as many sessions arrive at the same moments and are as long,
but other things are said in them:

    undisturbed    the scheduler runs
    again          the same, to see how far two periods differ by themselves
    killed         its process is killed twice; Ray starts it again, and it restores what it had saved
    stopped        its process is stopped (SIGSTOP) for half of the period
    after          the scheduler runs again
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from ropewalk.cluster.bench.output import check_writable
from ropewalk.cluster.bench.routing import ARMS, REPLICAS, cluster_config, load, session_lengths

ARM = "ropewalk"

PERIODS = ("undisturbed", "again", "killed", "stopped", "after")

RUN_IN_SESSIONS = 12

LEAST_S = 30.0
"""Shortest period: the scheduler is killed twice in one, and takes some seconds to be back."""

FOUND_AGAIN_S = 60.0
"""Most seconds that a scheduler takes to be back."""

RESAMPLES = 2000


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the study."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "outage",
        help="what requests notice of a scheduler that dies, hangs and comes back",
        description=(
            "Put a steady load on a cluster, kill its scheduler, stop it, let it go on, and print how many requests "
            "failed and what latency was meanwhile and afterwards."
        ),
    )
    parser.add_argument("--sessions", type=int, default=24, metavar="N", help="a period (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1.2, metavar="R", help="turns a second (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sessions (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures here")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the study; 1 when a request failed. Raises `UserError` for what cannot be run."""
    from ropewalk.cluster.bench.tables import print_outage
    from ropewalk.cluster.cli import UserError
    from ropewalk.cluster.serve.local import LocalCluster, StartError, free_port

    check_writable("--json", args.json)
    if args.sessions < 1:
        raise UserError(f"--sessions must be at least 1, not {args.sessions}")
    if not 0 < args.rate < 1000:
        raise UserError(f"--rate must be above 0 and below 1000, not {args.rate}")
    if (seconds := period_s(args.sessions, args.rate, args.seed)) < LEAST_S:
        raise UserError(
            f"--sessions {args.sessions} --rate {args.rate:g}: periods of {seconds:.0f} s are too short, make it "
            f"{LEAST_S:.0f} s at least"
        )
    report: dict[str, Any] = {}

    def save() -> None:
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")

    try:
        with LocalCluster(cluster_config(ARMS[ARM], free_port())) as cluster:
            asyncio.run(study(cluster, args.sessions, args.rate, args.seed, report, save))
    except StartError as error:
        raise UserError(f"the cluster did not start: {error}") from None
    except (LookupError, TimeoutError) as error:
        print(f"ropewalk bench outage: {error}", file=sys.stderr)
        return 1
    save()
    print_outage(report)
    return 1 if any(period["errors"] for period in report["periods"].values()) else 0


async def study(
    cluster: Any, num_sessions: int, turns_per_s: float, seed: int, report: dict[str, Any], save: Callable[[], None]
) -> None:
    """Run the periods, and put the figures of each into `report`; `save` is called after each."""
    seconds = period_s(num_sessions, turns_per_s, seed)
    disturb: dict[str, Callable[[], Awaitable[None]]] = {
        "killed": lambda: _kill_twice(cluster, seconds),
        "stopped": lambda: _stop_for_a_while(cluster, seconds),
    }
    # Engines run in, caches fill, and the scheduler gets to know the agents.
    await load(cluster.endpoint, RUN_IN_SESSIONS, seed=seed - 1, concurrency=2 * REPLICAS)
    report |= {"rate": turns_per_s, "sessions": num_sessions, "periods": {}}
    begin = time.monotonic()
    for number, name in enumerate(PERIODS):
        print(f"bench: {time.monotonic() - begin:4.0f} s: {name}", file=sys.stderr, flush=True)
        await _until_known(cluster)
        trouble = asyncio.ensure_future(disturb[name]()) if name in disturb else None
        result = await load(cluster.endpoint, num_sessions, seed=seed, words=seed + number, turns_per_s=turns_per_s)
        if trouble is not None:
            await trouble
        latencies = [[r.turn_ms for r in result.answered if r.session == index] for index in range(num_sessions)]
        report["periods"][name] = result.summary() | {"latencies_ms": latencies}
        undisturbed = report["periods"][PERIODS[0]]["latencies_ms"]
        report["periods"][name]["p95_ratio"] = ratio_of_p95(latencies, undisturbed, seed)
        save()
    report["observations_kept"] = (await _until_known(cluster))["observations"]


def period_s(num_sessions: int, turns_per_s: float, seed: int) -> float:
    """Return for how long sessions arrive."""
    return sum(session_lengths(num_sessions, seed)) / turns_per_s


def ratio_of_p95(latencies: list[list[float]], base: list[list[float]], seed: int) -> dict[str, float] | None:
    """Return the ratio of 95th percentiles, and the 95 % interval of its bootstrap; None where a period has no answer.

    Both hold the latencies of each session. Whole sessions are drawn, the same ones for both, so that the interval is
    about which sessions there are, not about what else differs between two periods: that is what the second undisturbed
    period shows.
    """
    import numpy as np

    def p95(values: list[list[float]], drawn: Iterable[int]) -> float | None:
        found = [value for index in drawn for value in values[index]]
        return float(np.percentile(found, 95)) if found else None

    def ratio(drawn: Iterable[int]) -> float | None:
        one, other = p95(latencies, drawn), p95(base, drawn)
        return None if one is None or other is None else one / other

    rng = np.random.default_rng(seed)
    whole = ratio(range(len(base)))
    draws = [ratio(rng.integers(len(base), size=len(base))) for _ in range(RESAMPLES)]
    found = [value for value in draws if value is not None]
    if whole is None or not found:
        return None
    low, high = np.percentile(found, (2.5, 97.5))
    return {"ratio": whole, "low": float(low), "high": float(high)}


async def _kill_twice(cluster: Any, seconds: float) -> None:
    for _ in range(2):
        await asyncio.sleep(seconds / 3)
        # In a thread: it may have to wait, and the load is put on by this one.
        os.kill(await asyncio.to_thread(scheduler_pid, cluster.pid), signal.SIGKILL)


async def _stop_for_a_while(cluster: Any, seconds: float) -> None:
    await asyncio.sleep(seconds / 4)
    pid = await asyncio.to_thread(scheduler_pid, cluster.pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds / 2)
    finally:
        os.kill(pid, signal.SIGCONT)


def scheduler_pid(cluster_pid: int, timeout_s: float = FOUND_AGAIN_S) -> int:
    """Return the scheduler's process among those of a local cluster. Raises LookupError when none is found in time."""
    import psutil

    deadline = time.monotonic() + timeout_s
    while True:
        for process in psutil.Process(cluster_pid).children(recursive=True):
            try:
                if "SchedulerService" in " ".join(process.cmdline()):
                    return int(process.pid)
            except psutil.Error:  # it has just ended
                continue
        if time.monotonic() > deadline:
            raise LookupError("the cluster has no scheduler")
        time.sleep(0.2)  # Ray takes a moment to start it again


async def _until_known(cluster: Any) -> dict[str, Any]:
    """Wait until the scheduler itself answers; return what it says."""
    import httpx

    deadline = time.monotonic() + FOUND_AGAIN_S
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            answer: dict[str, Any] = (await client.get(f"{cluster.endpoint}/agents", timeout=30)).json()
            if answer.get("complete"):
                return answer
            if time.monotonic() > deadline:
                raise TimeoutError(f"the scheduler is not back after {FOUND_AGAIN_S} s: {answer.get('reason')}")
            await asyncio.sleep(0.2)
