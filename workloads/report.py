"""The report of one replay: JSON with every turn, and one HTML page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from ropewalk.workloads import charts
from ropewalk.workloads.charts import format_ms, format_share
from ropewalk.workloads.metrics import ReplayResult

REPORT_VERSION = 1


def report_dict(result: ReplayResult) -> dict[str, Any]:
    """Everything about a replay: settings, summary, figures by agent and by turn, and every turn's record."""
    return {
        "version": REPORT_VERSION,
        "settings": result.config.to_dict(),
        "summary": result.summary(),
        "agents": result.by_agent(),
        "by_turn": {str(turn): figures for turn, figures in result.by_turn().items()},
        "turns": [record.to_dict() for record in result.records],
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path`, making its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def write_html(path: Path, page: str) -> None:
    """Write a page to `path`, making its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, "utf-8")


def report_html(result: ReplayResult) -> str:
    """One replay as a page."""
    summary = result.summary()
    config = result.config
    ttft = [record.ttft_ms for record in result.answered if record.ttft_ms is not None]
    marks = {name: summary["ttft_ms"][name] for name in ("p50", "p95") if summary["ttft_ms"][name] is not None}
    agents = result.by_agent()
    load = (
        f"{config.concurrency} sessions at a time" if config.rate is None else f"{config.rate:g} new sessions a second"
    )
    parts = [
        f"<h1>Replay of {escape(config.program)}</h1>",
        f'<p class="soft">{config.sessions} sessions of {config.turns} turns, {load}, model {escape(result.model)}, '
        f"at {escape(config.endpoint)}{', ended early' if result.aborted else ''}</p>",
        cards(summary),
        section(
            "Time to first token",
            charts.histogram(ttft, marks, "Histogram of time to first token in milliseconds"),
        ),
        section(
            "By agent", table(AGENT_COLUMNS, (agent_row(name, figures, summary) for name, figures in agents.items()))
        ),
        section(
            "Share of prompt tokens from cache, by agent",
            charts.bars({name: {"cached": figures["cached_token_share"]} for name, figures in agents.items()})
            + cache_note(summary),
        ),
        section(
            "Prompt tokens by turn of the session (mean)",
            charts.stacked_columns(
                {str(turn + 1): prompt_parts(figures) for turn, figures in result.by_turn().items()},
                ("from cache", "computed"),
                "tokens",
                "Mean prompt tokens by position of the turn in its session, from cache and computed",
            ),
        ),
        section("Latency", latency_table({config.name: summary})),
        errors_section({config.name: summary}),
        section("What was run", settings_table({config.name: result})),
    ]
    return page(f"Replay of {config.program}", parts)


def page(title: str, parts: Iterable[str]) -> str:
    """Put the parts on the common page."""
    template = Template((files("ropewalk.workloads") / "page.html").read_text("utf-8"))
    return template.substitute(title=escape(title), body="\n".join(part for part in parts if part))


def section(title: str, content: str) -> str:
    """A titled block."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def cards(summary: Mapping[str, Any]) -> str:
    """The figures one looks for first."""
    shown = [
        (format_ms(summary["ttft_ms"]["mean"]), "TTFT, mean"),
        (format_ms(summary["ttft_ms"]["p95"]), "TTFT, p95"),
        (format_ms(summary["turn_ms"]["mean"]), "turn, mean"),
        (format_share(summary["cached_token_share"]), "prompt tokens from cache"),
        (f"{summary['turns_per_s']:.2f}", "turns a second"),
    ]
    answered = summary["requests"] - summary["errors"]
    outcome = (f"{answered} / {summary['requests']}", "turns answered", summary["errors"] > 0)
    return card_grid([*((value, name, False) for value, name in shown), outcome])


def card_grid(shown: Iterable[tuple[str, str, bool]]) -> str:
    """Cards of (figure, what it is, whether it is bad news)."""
    items = "".join(
        f'<div class="card"><b{" class=bad" if bad else ""}>{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name, bad in shown
    )
    return f'<div class="cards">{items}</div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    """A table that scrolls sideways on narrow screens. Cells are text and are escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    thead = f"<thead><tr>{head}</tr></thead>" if columns else ""
    return f'<div class="scroll"><table class="{style}">{thead}<tbody>{body}</tbody></table></div>'


AGENT_COLUMNS = ("agent", "turns", "prompt tokens", "of all", "cached", "TTFT p50", "TTFT p95", "turn mean", "errors")


def agent_row(name: str, figures: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """One line of the table by agent."""
    share = figures["prompt_tokens"] / summary["prompt_tokens"] if summary["prompt_tokens"] else None
    return [
        name,
        f"{figures['requests']}",
        f"{figures['prompt_tokens']:,}",
        format_share(share),
        format_share(figures["cached_token_share"]),
        format_ms(figures["ttft_ms"]["p50"]),
        format_ms(figures["ttft_ms"]["p95"]),
        format_ms(figures["turn_ms"]["mean"]),
        f"{figures['errors']}",
    ]


def latency_table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """TTFT, turn and inter-token latency of one or more arms."""
    rows = []
    for title, key in (("time to first token", "ttft_ms"), ("whole turn", "turn_ms"), ("between tokens", "itl_ms")):
        for name, summary in summaries.items():
            figures = summary[key]
            label = f"{title}, {name}" if len(summaries) > 1 else title
            rows.append([label, *(format_ms(figures[column]) for column in ("mean", "p50", "p95", "p99", "max"))])
    return table(("", "mean", "p50", "p95", "p99", "max"), rows)


def errors_section(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """What went wrong and how often; "" if nothing did."""
    rows = [
        [name, f"{count}", kind]
        for name, summary in summaries.items()
        for kind, count in summary["error_kinds"].items()
    ]
    return section("Errors", table(("arm", "turns", "what happened"), rows)) if rows else ""


def cache_note(summary: Mapping[str, Any]) -> str:
    """Says so if the endpoint reported no cached tokens at all."""
    if summary["cached_tokens_reported"]:
        return ""
    return '<p class="soft small">The endpoint reported no cached tokens (vLLM: --enable-prompt-tokens-details).</p>'


def settings_table(results: Mapping[str, ReplayResult]) -> str:
    """Everything needed to run this again, a column for each arm."""
    columns = []
    for result in results.values():
        summary = result.summary()
        warmup = summary["warmup"]
        columns.append(
            {
                "questions": result.source,
                "SHA-256 of bodies": summary["body_sha256"],
                **result.config.to_dict(),
                "model": result.model,
                "excluded as warm-up": f"{warmup['requests']} turns ({warmup['errors']} errors)",
            }
        )
    names = dict.fromkeys(name for column in columns for name in column if column[name] is not None)
    rows = [[name, *("–" if column[name] is None else f"{column[name]}" for column in columns)] for name in names]
    return table(["", *results] if len(columns) > 1 else (), rows, "settings")


def prompt_parts(figures: Mapping[str, Any]) -> tuple[float, float]:
    """Mean prompt tokens of a turn: from cache, computed."""
    count = max(1, figures["requests"] - figures["errors"])
    cached = figures["cached_tokens"] / count
    return cached, figures["prompt_tokens"] / count - cached
