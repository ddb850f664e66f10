"""The result of `ropewalk bench roc` for people: a table for the terminal, a page with the curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from ropewalk.cluster.bench.roc import FULL_BLOCKS
from ropewalk.workloads import charts
from ropewalk.workloads.report import page, section, table

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("rows", "AUC\n(± 95 %)", "min\n(layer)", "median", "max", "cosine\nsame", "cosine\nother")
"""AUC of all layers' pairs in one ranking; then AUC by layer; then mean cosines of same and different content."""

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SIDE_BY_SIDE = "display:grid;grid-template-columns:repeat(auto-fit,minmax(17rem,1fr));gap:1rem 2rem"


def describe(result: Mapping[str, Any]) -> str:
    """What was compared, in one line."""
    figures = next(iter(result["kinds"].values()))["layers"][0]
    positions = ", ".join(map(str, result["positions"]))
    return (
        f"{result['attention']}, {result['num_layers']} layers, {result['dtype']}; {result['blocks']} blocks of "
        f"{result['block_tokens']} token(s) (the paper: {FULL_BLOCKS} blocks) at positions {positions}; a layer has "
        f"{figures['same']['pairs']:,} same-content and {figures['different']['pairs']:,} different-content pairs"
    )


def table_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """A line for each kind of rows, as `COLUMNS`."""
    lines = []
    for kind, summary in result["kinds"].items():
        areas = [layer["auc"] for layer in summary["layers"]]
        lowest = int(np.argmin(areas))
        total = summary["all_layers"]
        lines.append(
            [
                kind,
                f"{total['auc']:.3f} ± {max(total['high'] - total['auc'], total['auc'] - total['low']):.3f}",
                f"{areas[lowest]:.3f} ({lowest})",
                f"{np.median(areas):.3f}",
                f"{max(areas):.3f}",
                f"{total['same']['mean']:.3f}",
                f"{total['different']['mean']:.3f}",
            ]
        )
    return lines


def print_result(console: Console, result: Mapping[str, Any]) -> None:
    """Print one model's table."""
    from rich.table import Table

    shown = Table(*COLUMNS, title=f"{result['model']}: ROC AUC of same against different content", title_justify="left")
    for line in table_rows(result):
        shown.add_row(*line)
    console.print(shown)
    console.print(f"{describe(result)}; {result['seconds']} s", soft_wrap=True)


def page_of(results: Sequence[Mapping[str, Any]]) -> str:
    """All models on one page: area by layer and ROC curves side by side, the table below."""
    title = "Is the KV of the same content recognisable at another position?"
    parts = [
        f"<h1>{title}</h1>",
        '<p class="soft">Cosine of rows, token by token. Same content: one block at two positions, behind different '
        "texts. Different content: two blocks at one position. An area of 1 says that content alone decides, 0.5 "
        "(dashed) that nothing can be told, less that position outweighs content.</p>",
    ]
    for result in results:
        areas = {
            kind: [(float(number), layer["auc"]) for number, layer in enumerate(summary["layers"])]
            for kind, summary in result["kinds"].items()
        }
        layers = charts.nice_ticks(max(result["num_layers"] - 1, 1), whole=True)
        by_layer = charts.curves(
            areas,
            layers,
            SHARES,
            ("layer", "ROC AUC"),
            f"Area under the ROC curve by layer, {result['model']}",
            reference=[(0, 0.5), (layers[-1], 0.5)],
        )
        roc = charts.curves(
            {kind: summary["roc"] for kind, summary in result["kinds"].items()},
            SHARES,
            SHARES,
            ("different-content pairs taken for same", "same-content pairs recognised"),
            f"ROC curves over all layers, {result['model']}",
            reference=[(0, 0), (1, 1)],
        )
        content = (
            f'<p class="soft small">{escape(describe(result))}</p><div style="{SIDE_BY_SIDE}"><div>{by_layer}</div>'
            f"<div>{roc}</div></div>{table(COLUMNS, table_rows(result))}"
        )
        parts.append(section(result["model"], content))
    return page(title, parts)
