"""`ropewalk demo`: plain vLLM and Ropewalk on this machine, on the same multi-agent work, side by side."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ropewalk.cluster.cli import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ropewalk.cluster.config import ClusterConfig
    from ropewalk.workloads.config import ReplayConfig
    from ropewalk.workloads.metrics import ReplayResult
    from ropewalk.workloads.programs.gsm8k import HeaderMode

MODEL_SOURCE = "smollm2-135m"
ARMS = ("vllm", "ropewalk")
HEADERS = {
    "turn": "Every prompt begins with a header that changes (time, retrieved text): all behind it is lost to a prefix "
    "cache.",
    "session": "Every prompt begins with a header that changes from session to session: what is behind it is lost to a "
    "prefix cache, but for the session's own history.",
    "none": "Prompts begin with their instructions: a prefix cache finds those, and the session's own history.",
}
REPLICAS = 2
KV_CACHE_GIB = 0.5
"""Room for 22,000 tokens a replica: more than all sessions in flight hold, so plain vLLM loses no prefix hit to it."""
MEMORY_GIB = 12
"""What the four replicas, their engines and Ray take together (seen: 14 GiB with a cache of 1 GiB)."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="compare plain vLLM with Ropewalk on this machine",
        description=f"Start a cluster on this machine with {REPLICAS} replicas of plain vLLM and {REPLICAS} of "
        f"Ropewalk ({MODEL_SOURCE}), replay the same six-agent GSM8K sessions on both in turn, print the "
        "comparison, stop.",
    )
    parser.add_argument("--sessions", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=8, metavar="T", help="requests a session (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")
    parser.add_argument(
        "--headers",
        choices=HEADERS,
        default="turn",
        help="how often the text above the shared instructions changes (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--port", type=int, help="port of the endpoint (default: a free one)")
    parser.add_argument("--keep", action="store_true", help="serve on until Ctrl-C")
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns 1 when the cluster does not start or a request failed, 130 when interrupted."""
    import psutil
    from rich.console import Console

    from ropewalk.cluster.serve.local import LocalCluster, StartError, free_port, port_problem
    from ropewalk.workloads.errors import WorkloadError

    console = Console(highlight=False, soft_wrap=True)
    port = args.port or free_port()
    if problem := port_problem("127.0.0.1", port):
        raise UserError(f"--port {port}: cannot listen there ({problem}); choose another or leave it out")
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {str(args.out)!r}: is a file; give a folder")
    config = cluster_config(port)
    started = time.monotonic()
    try:
        # Checked before anything is started, which takes a minute.
        replays = replay_configs(f"http://127.0.0.1:{port}/v1", args.sessions, args.turns, args.seed, args.headers)
        if (free := psutil.virtual_memory().available / 2**30) < MEMORY_GIB:
            console.print(
                f"warning: the demo needs about {MEMORY_GIB} GiB of memory, and {free:.0f} are free", style="yellow"
            )
        with _interrupted_by(signal.SIGTERM), LocalCluster(config, report=_relay_to(console)) as cluster:
            console.print(
                f"Replaying {args.sessions} sessions of {args.turns} turns on each arm, in turn. "
                f"{HEADERS[args.headers]}"
            )
            results = asyncio.run(_replay(replays))
            write_reports(args.out, results)
            _print_comparison(console, results, args.out)
            console.print(f"took {time.monotonic() - started:.0f} s")
            if args.keep:
                _serve_on(console, cluster.endpoint)
    except WorkloadError as error:
        raise UserError(str(error)) from error
    except StartError as error:
        console.print(f"ropewalk demo: {error}", markup=False, style="red")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if all(_complete(result) for result in results.values()) else 1


def cluster_config(port: int) -> ClusterConfig:
    """Two deployments of one model that differ in nothing but Ropewalk."""
    from ropewalk.cluster.config import ConfigError, is_cpu_build, parse_config

    same: dict[str, Any] = {
        "source": MODEL_SOURCE,
        "replicas": REPLICAS,
        "kv_cache_gib": KV_CACHE_GIB,
        # Only one arm is under load at a time, so its replicas may use the whole machine.
        "cpus_per_replica": max(1, len(os.sched_getaffinity(0)) // REPLICAS),
    }
    if not is_cpu_build():  # the four replicas share one GPU; small ones, so that all fit
        same |= {
            "gpus_per_replica": 1 / (2 * REPLICAS),
            "engine_args": {"gpu_memory_utilization": 0.9 / (2 * REPLICAS)},
        }
    models = [{**same, "name": "vllm", "plain": True}, {**same, "name": "ropewalk", "reuse": "reuse"}]
    try:
        return parse_config({"http": {"port": port}, "models": models}, "demo")
    except ConfigError as error:
        raise UserError(str(error)) from None


def replay_configs(
    endpoint: str, sessions: int, turns: int, seed: int, headers: HeaderMode = "turn"
) -> list[ReplayConfig]:
    """The same work for each arm. Raises `WorkloadError` for figures that make no sense."""
    from ropewalk.workloads.config import ReplayConfig

    return [
        ReplayConfig(
            endpoint=endpoint,
            name=arm,
            model=arm,
            sessions=sessions,
            turns=turns,
            concurrency=REPLICAS,
            seed=seed,
            headers=headers,
            ignore_eos=True,
        )
        for arm in ARMS
    ]


async def _replay(configs: list[ReplayConfig]) -> dict[str, ReplayResult]:
    from rich.console import Console

    from ropewalk.workloads.arms import run_arms
    from ropewalk.workloads.progress import ConsoleProgress

    return await run_arms(configs, progress=ConsoleProgress(Console(stderr=True), "demo"))


def write_reports(directory: Path, results: dict[str, ReplayResult]) -> None:
    """Write `summary.json`, `report.html` and, with every turn's record, `<arm>.json`."""
    from ropewalk.workloads.compare import comparison_dict, comparison_html
    from ropewalk.workloads.report import report_dict, write_html, write_json

    write_json(directory / "summary.json", comparison_dict(results))
    write_html(directory / "report.html", comparison_html(results, "Plain vLLM and Ropewalk"))
    for name, result in results.items():
        write_json(directory / f"{name}.json", report_dict(result))


def _print_comparison(console: Console, results: dict[str, ReplayResult], directory: Path) -> None:
    from ropewalk.workloads.compare import comparison_table, same_bodies

    summaries = {name: result.summary() for name, result in results.items()}
    cores = len(os.sched_getaffinity(0))
    console.print(comparison_table(summaries, f"{MODEL_SOURCE}, {REPLICAS} replicas an arm, {cores} cores"))
    if not same_bodies(summaries):
        console.print("The arms did not answer the same requests: the figures cannot be compared.", style="red")
    for name, summary in summaries.items():
        for kind, count in list(summary["error_kinds"].items())[:5]:
            console.print(f"{name}: {count} x {kind}", markup=False, style="red")
    console.print(f"report: {directory / 'report.html'}", markup=False)
    console.print(f"figures: {directory / 'summary.json'}", markup=False)


def _complete(result: ReplayResult) -> bool:
    return not result.aborted and all(record.error is None for record in result.records)


def _serve_on(console: Console, endpoint: str) -> None:
    console.print(f"\nserving {' and '.join(ARMS)} at {endpoint}; stop with Ctrl-C", markup=False)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


def _relay_to(console: Console) -> Any:
    def relay(line: str) -> None:
        if line.startswith("["):  # progress; the hints of `ropewalk serve` would mislead here
            console.print(line, markup=False)

    return relay


@contextlib.contextmanager
def _interrupted_by(number: signal.Signals) -> Iterator[None]:
    """Treat a signal as Ctrl-C, so that everything started is stopped."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)
