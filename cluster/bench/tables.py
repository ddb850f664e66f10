"""The studies' figures as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_report(report: Mapping[str, Any]) -> None:
    """Print what `ropewalk bench reuse` found."""
    console = Console()
    for model, found in report["models"].items():
        if found["lengths"]:
            _print_lengths(console, model, found["lengths"])
        rows = [(f"{entry['length']} tokens", entry["arms"]) for entry in found["lengths"]]
        rows += [(entry["pattern"], entry["arms"]) for entry in found["patterns"]]
        _print_arms(console, model, rows)
        if "gsm8k" in found:
            table = _table(f"{model}: GSM8K", "arm", "right", "same number as full prefill")
            for arm, entry in found["gsm8k"].items():
                table.add_row(arm, share_text(entry["right"]), share_text(entry["same_number_as_full"]))
            console.print(table)


def _print_lengths(console: Console, model: str, entries: Sequence[Mapping[str, Any]]) -> None:
    table = _table(
        f"{model}: a body behind a changed header", "tokens", "recovered", "plain vLLM TTFT", "Ropewalk TTFT", "ratio"
    )
    for entry in entries:
        plain, ours = entry["ttft"]["plain_s"], entry["ttft"]["ropewalk_s"]
        ratio = f"{entry['ttft_ratio']:.1f}x"
        recovered = f"{entry['recovered_share']:.1%}"
        table.add_row(str(entry["length"]), recovered, milliseconds(plain), milliseconds(ours), ratio)
    console.print(table)


def _print_arms(console: Console, model: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    table = _table(
        f"{model}: against full prefill",
        "body",
        "arm",
        "prompts",
        "recovered",
        "KL first",
        "KL next",
        "argmax same",
        "answers right",
        "answers same",
        "perplexity",
    )
    for label, arms in rows:
        for arm, entry in arms.items():
            greedy = entry["greedy"]
            num_greedy = greedy["same"] + greedy["divergence_position"]["count"]
            table.add_row(
                label if arm == "full" else "",
                arm,
                str(entry["kl_first"]["count"]),
                number(entry["recovered_share"]["mean"], ".0%"),
                number(entry["kl_first"]["mean"], ".2g"),
                number(entry["kl_next"]["mean"], ".2g"),
                share_text(entry["argmax_match"]),
                share_text(entry["recall"]),
                f"{greedy['same']}/{num_greedy}",
                number(entry["perplexity"], ".2f"),
            )
        table.add_section()
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 1 or column == "arm" else "right")
    return table


def number(value: float | None, form: str) -> str:
    """A figure in a cell; a dash where there is none."""
    return "–" if value is None else format(value, form)


def share_text(entry: Mapping[str, Any]) -> str:
    """A share with its interval."""
    if entry["share"] is None:
        return "–"
    return f"{entry['share']:.2f} ({entry['low']:.2f}–{entry['high']:.2f})"


def milliseconds(entry: Mapping[str, Any]) -> str:
    """Median and quartiles."""
    return f"{1e3 * entry['median']:.0f} ms ({1e3 * entry['q1']:.0f}–{1e3 * entry['q3']:.0f})"
