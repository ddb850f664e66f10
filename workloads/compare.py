"""Two or more arms on the same work, side by side: a table for the terminal, JSON, and a page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from rich.table import Table

from ropewalk.workloads import charts
from ropewalk.workloads.charts import format_ms, format_share
from ropewalk.workloads.metrics import ReplayResult
from ropewalk.workloads.report import card_grid, errors_section, page, section, settings_table, table

Summaries = Mapping[str, Mapping[str, Any]]

LATENCIES = (("TTFT", "ttft_ms"), ("turn", "turn_ms"), ("ITL", "itl_ms"))
STATISTICS = ("mean", "p50", "p95", "p99")


def comparison_dict(results: Mapping[str, ReplayResult]) -> dict[str, Any]:
    """`{"arms": {name: summary}, "same_bodies": bool}`; `same_bodies` says that all arms did the same work."""
    arms = {name: result.summary() for name, result in results.items()}
    return {"arms": arms, "same_bodies": same_bodies(arms)}


def same_bodies(summaries: Summaries) -> bool:
    """Whether all arms sent the same bodies."""
    return len({summary["body_sha256"] for summary in summaries.values()}) == 1


def comparison_rows(summaries: Summaries) -> list[list[str]]:
    """Rows of text: metric, a value for each arm, then each later arm against the first (ratio; points for a share)."""
    names = list(summaries)
    first, others = summaries[names[0]], [summaries[name] for name in names[1:]]
    rows = [
        ["turns", *(f"{s['requests']}" for s in summaries.values()), *("" for _ in others)],
        ["errors", *(f"{s['errors']}" for s in summaries.values()), *("" for _ in others)],
        [
            "cached share",
            *(format_share(s["cached_token_share"]) for s in summaries.values()),
            *(f"{100 * (s['cached_token_share'] - first['cached_token_share']):+.1f} points" for s in others),
        ],
    ]
    for title, key in LATENCIES:
        for statistic in STATISTICS:
            values = [summary[key][statistic] for summary in summaries.values()]
            rows.append(
                [f"{title} {statistic}", *map(format_ms, values), *(_ratio(value, values[0]) for value in values[1:])]
            )
    speeds = [summary["turns_per_s"] for summary in summaries.values()]
    rows.append(["turns/s", *(f"{speed:.2f}" for speed in speeds), *(_ratio(speed, speeds[0]) for speed in speeds[1:])])
    return rows


def comparison_columns(summaries: Summaries) -> list[str]:
    """Headings for `comparison_rows`."""
    names = list(summaries)
    if len(names) == 2:
        return ["", *names, "ratio"]
    return ["", *names, *(f"{name} / {names[0]}" for name in names[1:])]


def comparison_table(summaries: Summaries, title: str | None = None) -> Table:
    """For `rich.console.Console.print`."""
    columns = comparison_columns(summaries)
    result = Table(title=title)
    result.add_column(columns[0])
    for column in columns[1:]:
        result.add_column(column, justify="right")
    for row in comparison_rows(summaries):
        result.add_row(*row)
    return result


def comparison_html(results: Mapping[str, ReplayResult], title: str = "Comparison") -> str:
    """The arms as a page: figures, distribution of TTFT, cached share by agent and by turn."""
    summaries = {name: result.summary() for name, result in results.items()}
    first = next(iter(results.values()))
    names = list(results)
    agents = list(dict.fromkeys(agent for result in results.values() for agent in result.by_agent()))
    by_agent = {name: result.by_agent() for name, result in results.items()}
    same = "All arms sent the same bodies." if same_bodies(summaries) else "The arms did not send the same bodies."
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(" against ".join(reversed(names)))}: {first.config.sessions} sessions of '
        f"{first.config.turns} turns of {escape(first.config.program)}, taking turns. {same}</p>",
        _cards(summaries),
        section(
            "Time to first token",
            charts.ecdf(_ttfts(results), "Share of turns by time to first token, one curve an arm"),
        ),
        section("Figures", table(comparison_columns(summaries), comparison_rows(summaries))),
        section(
            "Share of prompt tokens from cache, by agent",
            charts.bars(
                {
                    agent: {
                        name: by_agent[name][agent]["cached_token_share"] for name in names if agent in by_agent[name]
                    }
                    for agent in agents
                }
            ),
        ),
        errors_section(summaries),
        section("What was run", settings_table(results)),
    ]
    return page(title, parts)


def _cards(summaries: Summaries) -> str:
    names = list(summaries)
    first = summaries[names[0]]
    cards = []
    for name in names[1:]:
        other = summaries[name]
        points = 100 * (other["cached_token_share"] - first["cached_token_share"])
        cards += [
            (_ratio(other["ttft_ms"]["mean"], first["ttft_ms"]["mean"]), f"mean TTFT, {name} / {names[0]}"),
            (_ratio(other["turn_ms"]["mean"], first["turn_ms"]["mean"]), f"mean turn, {name} / {names[0]}"),
            (f"{points:+.1f}", f"points of cached share, {name} over {names[0]}"),
        ]
    errors = sum(summary["errors"] for summary in summaries.values())
    return card_grid(
        [*((value, text, False) for value, text in cards), (f"{errors}", "errors in all arms", errors > 0)]
    )


def _ttfts(results: Mapping[str, ReplayResult]) -> dict[str, list[float]]:
    return {
        name: [record.ttft_ms for record in result.answered if record.ttft_ms is not None]
        for name, result in results.items()
    }


def _ratio(value: float | None, base: float | None) -> str:
    return "–" if value is None or not base else f"{value / base:.2f}"
