"""`ropewalk replay`: run a multi-agent program against any OpenAI chat endpoint and report how it went."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropewalk.workloads.config import ReplayConfig
    from ropewalk.workloads.load import Progress
    from ropewalk.workloads.metrics import ReplayResult

EPILOG = """\
The seed decides everything that is sent: the same options give the same bodies, byte for byte (the report prints their
SHA-256). Replaying a seed against a server that has seen it measures a warm cache; take another seed for a cold one.
Exit code: 0 all turns answered, 1 some failed or the replay was cut short, 2 a mistake in the options."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "replay",
        help="run a multi-agent workload against an OpenAI endpoint",
        description="Run a multi-agent program against any OpenAI chat endpoint and report latency and cached tokens.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", choices=["gsm8k"], help="gsm8k: six agents in a group chat solve maths questions")
    parser.add_argument("--endpoint", default="http://127.0.0.1:8000", metavar="URL", help="default: %(default)s")
    parser.add_argument("--model", help="default: the first model that the endpoint lists")
    parser.add_argument("--api-key", metavar="KEY", help="default: the environment variable OPENAI_API_KEY, if set")

    load = parser.add_argument_group("load")
    load.add_argument("--sessions", type=int, default=8, metavar="N", help="default: %(default)s")
    load.add_argument("--turns", type=int, default=12, metavar="T", help="requests a session (default: %(default)s)")
    shape = load.add_mutually_exclusive_group()
    shape.add_argument(
        "--concurrency", type=int, default=4, metavar="C", help="sessions at a time (default: %(default)s)"
    )
    shape.add_argument(
        "--rate", type=float, metavar="R", help="new sessions a second, Poisson, whatever the server does"
    )
    load.add_argument("--warmup", type=int, default=0, metavar="N", help="first N turns are run but not counted")
    load.add_argument(
        "--timeout", type=float, default=300, metavar="SECONDS", help="for one turn (default: %(default)s)"
    )
    load.add_argument("--deadline", type=float, metavar="SECONDS", help="end the replay after this time")

    content = parser.add_argument_group("content")
    content.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")
    content.add_argument(
        "--dataset",
        metavar="WHAT",
        help="a .jsonl[.gz] or .json file or its folder, 'openai/gsm8k' (through the datasets library), or 'sample'; "
        "default: ../shared/data/gsm8k beside the repository if it is there, else the bundled sample",
    )
    content.add_argument(
        "--headers",
        choices=["turn", "session", "none"],
        default="turn",
        help="how often the text above the shared instructions changes (default: %(default)s)",
    )
    content.add_argument(
        "--anchor-tokens", type=int, metavar="N", help="about how long an agent's own instructions are"
    )
    content.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=3000,
        metavar="N",
        help="older messages are left out above this estimate, characters / 4 (default: %(default)s)",
    )
    content.add_argument("--max-tokens", type=int, default=16, metavar="K", help="reply length (default: %(default)s)")
    content.add_argument("--ignore-eos", action="store_true", help="ask vLLM for replies of exactly --max-tokens")
    content.add_argument(
        "--live", action="store_true", help="feed the endpoint's own replies back, not the recorded ones"
    )

    ropewalk = parser.add_argument_group("Ropewalk endpoints")
    ropewalk.add_argument(
        "--ropewalk", action="store_true", help="send the body field `ropewalk` with session and agent"
    )
    ropewalk.add_argument(
        "--reuse",
        choices=["exact", "reuse", "default"],
        help="reuse mode to ask for; implies --ropewalk (default: the server's)",
    )
    ropewalk.add_argument("--explain", action="store_true", help="ask for token counts by origin; implies --ropewalk")
    ropewalk.add_argument("--no-id-headers", action="store_true", help="do not send x-session-id and x-agent")

    report = parser.add_argument_group("report")
    report.add_argument("--json", type=Path, metavar="FILE", help="write figures and every turn's record")
    report.add_argument("--html", type=Path, metavar="FILE", help="write a page that needs nothing else")
    return parser


def run(args: argparse.Namespace) -> int:
    """Replay, print the figures, write the reports."""
    from rich.console import Console

    from ropewalk.cluster.cli import UserError
    from ropewalk.workloads.errors import WorkloadError
    from ropewalk.workloads.progress import ConsoleProgress
    from ropewalk.workloads.report import report_dict, report_html, write_html, write_json

    for option, path in (("--json", args.json), ("--html", args.html)):
        if path is not None and path.is_dir():
            raise UserError(f"{option} {str(path)!r}: is a folder; give the name of a file")
    try:
        config = _config(args)
        result = asyncio.run(_replay(config, ConsoleProgress(Console(stderr=True), f"replay {config.program}")))
    except WorkloadError as error:
        raise UserError(str(error)) from error

    console = Console()
    _print_summary(console, result)
    try:
        if args.json is not None:
            write_json(args.json, report_dict(result))
            console.print(f"figures: {args.json}", highlight=False, soft_wrap=True)
        if args.html is not None:
            write_html(args.html, report_html(result))
            console.print(f"page: {args.html}", highlight=False, soft_wrap=True)
    except OSError as error:
        raise UserError(f"report cannot be written: {error}") from error
    return 1 if result.aborted or any(record.error is not None for record in result.records) else 0


def _config(args: argparse.Namespace) -> ReplayConfig:
    from ropewalk.workloads.config import ReplayConfig

    return ReplayConfig(
        endpoint=args.endpoint,
        program=args.program,
        model=args.model,
        sessions=args.sessions,
        turns=args.turns,
        concurrency=args.concurrency,
        rate=args.rate,
        seed=args.seed,
        dataset=args.dataset,
        headers=args.headers,
        anchor_tokens=args.anchor_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        live=args.live,
        ropewalk=args.ropewalk,
        reuse=args.reuse,
        explain=args.explain,
        id_headers=not args.no_id_headers,
        api_key=args.api_key or os.environ.get("OPENAI_API_KEY") or None,
        timeout_s=args.timeout,
        deadline_s=args.deadline,
        warmup_turns=args.warmup,
    )


async def _replay(config: ReplayConfig, progress: Progress) -> ReplayResult:
    """Run with the first Ctrl-C ending the replay in order (report included); a second one as usual."""
    from ropewalk.workloads.load import run_replay

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    return await run_replay(config, progress=progress, stop=stop)


def _print_summary(console: Any, result: ReplayResult) -> None:
    from rich.table import Table

    from ropewalk.workloads.charts import format_ms, format_share

    summary = result.summary()
    table = Table(title=f"{result.config.program} on {result.model}{' (cut short)' if result.aborted else ''}")
    table.add_column("")
    for column in ("mean", "p50", "p95", "p99"):
        table.add_column(column, justify="right")
    for title, key in (("time to first token", "ttft_ms"), ("whole turn", "turn_ms"), ("between tokens", "itl_ms")):
        table.add_row(title, *(format_ms(summary[key][column]) for column in ("mean", "p50", "p95", "p99")))
    console.print(table)

    cached = format_share(summary["cached_token_share"])
    note = "" if summary["cached_tokens_reported"] else " (none reported by the endpoint)"
    lines = [
        f"turns {summary['requests']}, errors {summary['errors']}, {summary['turns_per_s']:.2f} turns/s",
        f"prompt tokens {summary['prompt_tokens']:,}, of which {cached} from cache{note}; "
        f"generated {summary['completion_tokens']:,}",
        f"questions: {result.source}",
        f"bodies: SHA-256 {summary['body_sha256']}",
    ]
    if summary["warmup"]["requests"]:
        lines.insert(
            1, f"warm-up {summary['warmup']['requests']} turns, {summary['warmup']['errors']} errors, not counted above"
        )
    lines += [f"  {count} × {kind}" for kind, count in list(summary["error_kinds"].items())[:5]]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
