"""`ropewalk status`: models, replicas, store and agents of a running cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from ropewalk.cluster.cli import UserError, is_local

DEFAULT_ENDPOINT = "http://127.0.0.1:8000/v1"
TIMEOUT_S = 15.0


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "status",
        help="show models, replicas, store and agents",
        description="Ask a running cluster for its models, replicas, chunk store and agents.",
    )
    parser.add_argument("--endpoint", default=DEFAULT_ENDPOINT, help=f"base URL (default {DEFAULT_ENDPOINT})")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the cluster's state. Returns 1 when a model has no replica that answers."""
    report = fetch(args.endpoint)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_tables(report)
    return 0 if all(model["ready"] for model in report["models"]) else 1


def fetch(endpoint: str) -> dict[str, Any]:
    """Everything that the status routes say. Raises `UserError` when there is no Ropewalk at `endpoint`."""
    import httpx

    base = endpoint.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(base_url=base, timeout=TIMEOUT_S, trust_env=not is_local(base)) as client:
            answers = {name: client.get(f"/v1/{name}") for name in ("replicas", "agents")}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UserError(f"--endpoint {endpoint}: no answer ({error or type(error).__name__})") from None
    for name, answer in answers.items():
        if answer.status_code != 200:
            raise UserError(
                f"--endpoint {endpoint}: GET /v1/{name} answered {answer.status_code}; is this a Ropewalk endpoint?"
            )
    return {"models": answers["replicas"].json()["models"], "agents": answers["agents"].json()}


def _print_tables(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    models = Table(title="Models and replicas", title_justify="left")
    for column in ("model", "replica", "state", "reuse", "RoPE", "requests", "store", "notes"):
        models.add_column(column, no_wrap=column in ("model", "state"), min_width=7 if column == "store" else None)
    for model in report["models"]:
        if not model["replicas"]:
            models.add_row(model["name"], "-", f"0 of {model['wanted']} ready", "", "", "", "", model["message"])
        for replica in model["replicas"]:
            models.add_row(
                model["name"],
                replica["replica"],
                replica["state"].lower(),
                _reuse(model, replica),
                _rope(replica),
                str(replica.get("counters", {}).get("requests", "")),
                _store(replica.get("store")),
                replica.get("unreachable", ""),
            )
    console.print(models)

    graph = report["agents"]
    agents = Table(title="Agents", title_justify="left")
    for column in ("agent", "requests", "sessions", "anchor tokens", "survival", "next"):
        agents.add_column(column)
    following: dict[str, list[str]] = {}
    for edge in sorted(graph.get("transitions", []), key=lambda edge: -edge["probability"]):
        following.setdefault(edge["source"], []).append(f"{edge['target']} {edge['probability']:.0%}")
    for agent in graph.get("agents", []):
        agents.add_row(
            agent["id"],
            str(agent["requests"]),
            str(agent["sessions"]),
            str(agent["anchor_tokens"]),
            f"{agent['survival']:.2f}",
            ", ".join(following.get(agent["id"], [])[:3]),
        )
    if graph.get("agents"):
        console.print(agents)
    else:
        console.print(f"Agents: none seen yet{' (' + graph['reason'] + ')' if graph.get('reason') else ''}")


def _reuse(model: Mapping[str, Any], replica: Mapping[str, Any]) -> str:
    if model["plain"]:
        return "plain vLLM"
    reason = replica.get("refused") or replica.get("reuse_refused")
    return f"off: {reason}" if reason else str(replica.get("default_mode", ""))


def _rope(replica: Mapping[str, Any]) -> str:
    """The kind of RoPE found, and how far turned keys were from computed ones (relative L2, see docs/reuse.md)."""
    rotary, error = replica.get("rotary"), replica.get("turn_error")
    if not rotary:
        return ""
    parts = [str(rotary["rope"])]
    if "size" in rotary:
        parts.append(f"{rotary['size']} {'neighbours' if rotary['interleaved'] else 'halves'}")
    if rotary.get("source") == "configuration":
        parts.append("by configuration")
    if error is not None:
        parts.append(f"turn error {error:.1e}")
    return ", ".join(parts)


def _store(store: Mapping[str, Any] | None) -> str:
    if not store:
        return ""
    shown = _tier(store)
    return f"{shown}; on disk {_tier(store['disk'])}" if "disk" in store else shown


def _tier(tier: Mapping[str, Any]) -> str:
    return f"{tier['num_chunks']} chunks, {tier['num_bytes'] / 2**20:.1f} of {tier['budget_bytes'] / 2**20:.0f} MiB"
