"""The command line: `ropewalk serve | status | store | replay | graph | demo | bench | simulate`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

COMMANDS = ("serve", "status", "store", "replay", "graph", "demo", "bench", "simulate")


class UserError(Exception):
    """A mistake in what the user gave: printed as one line, exit code 2."""


def is_local(url: str) -> bool:
    """Whether a URL is of this machine: a proxy from the environment is for the outside world."""
    return urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code (2 for a user's mistake)."""
    parser = argparse.ArgumentParser(prog="ropewalk", description="Serving for multi-agent LLM programs.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"ropewalk.cluster.cli.{name}")
        module.add_parser(subparsers).set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except UserError as error:
        print(f"ropewalk {args.command}: {error}", file=sys.stderr)
        return 2
