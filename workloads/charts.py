"""Charts as inline SVG and HTML: no script, no external resource, colours from the page's style (light and dark).

Shapes are drawn in a 100 × 100 box that stretches to the width there is; labels are HTML beside it, so that they keep
their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

NUM_BINS = 40
NUM_TICKS = 5
DASHES = ("none", "9 6", "2 4")
"""Patterns of curves, first to third."""


def color(number: int) -> str:
    """CSS colour of series `number`."""
    return f"var(--s{number % 4})"


def histogram(values: Sequence[float], marks: Mapping[str, float], label: str) -> str:
    """Distribution of `values` (milliseconds), with dashed vertical lines at `marks` (name → value)."""
    if not values:
        return _nothing()
    ticks = nice_ticks(max(values))
    counts, edges = np.histogram(values, bins=NUM_BINS, range=(0.0, ticks[-1]))
    heights = nice_ticks(float(counts.max()), whole=True)
    width = 100 / NUM_BINS
    bars = "".join(
        _rect(number * width, 0.9 * width, 0.0, 100 * count / heights[-1], color(1), f"{low:,.0f} ms: {count} turns")
        for number, (count, low) in enumerate(zip(counts, edges[:-1], strict=True))
        if count
    )
    lines = "".join(
        _line("mark", x=100 * value / ticks[-1], title=f"{name}: {format_ms(value)}") for name, value in marks.items()
    )
    named = ", ".join(f"{name} {format_ms(value)}" for name, value in marks.items())
    legend = f'<p class="legend"><span>dashed: {escape(named)}</span></p>' if marks else ""
    return legend + _plot(bars + lines, ticks, heights, "ms", "turns", label)


def ecdf(series: Mapping[str, Sequence[float]], label: str) -> str:
    """Share of turns at or below a latency (milliseconds), one curve for each series."""
    drawn = {name: sorted(values) for name, values in series.items() if values}
    if not drawn:
        return _nothing()
    ticks = nice_ticks(max(values[-1] for values in drawn.values()))
    curves = []
    for number, name in enumerate(series):
        if name not in drawn:
            continue
        values = drawn[name]
        points = ["0,100"]
        for rank, value in enumerate(values, 1):
            x = 100 * value / ticks[-1]
            points += [
                f"{x:.3f},{100 - 100 * (rank - 1) / len(values):.3f}",
                f"{x:.3f},{100 - 100 * rank / len(values):.3f}",
            ]
        points.append("100,0")
        shape = f'<polyline class="curve" stroke="{color(number)}" points="{" ".join(points)}">'
        curves.append(f"{shape}<title>{escape(name)}</title></polyline>")
    return legend(list(series)) + _plot("".join(curves), ticks, [0, 25, 50, 75, 100], "ms", "% of turns", label)


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]],
    xs: Sequence[float],
    ys: Sequence[float],
    units: tuple[str, str],
    label: str,
    *,
    reference: Sequence[tuple[float, float]] = (),
) -> str:
    """One curve through `(x, y)` for each series; `xs` and `ys` are the ticks, from 0, and `units` name the axes.

    A dashed line goes through `reference`. Later curves are dotted, so that those below them can be seen.
    """
    shapes = [f'<polyline class="mark" fill="none" points="{_points(reference, xs, ys)}"/>'] if reference else []
    for number, (name, points) in enumerate(series.items()):
        style = f'class="curve" stroke="{color(number)}" stroke-dasharray="{DASHES[number % len(DASHES)]}"'
        shapes.append(f'<polyline {style} points="{_points(points, xs, ys)}"><title>{escape(name)}</title></polyline>')
    return legend(list(series)) + _plot("".join(shapes), xs, ys, *units, label)


def stacked_columns(columns: Mapping[str, Sequence[float]], parts: Sequence[str], unit: str, label: str) -> str:
    """One column for each key, made of `parts` from the bottom up."""
    tallest = max((sum(values) for values in columns.values()), default=0.0)
    if not tallest:
        return _nothing()
    ticks = nice_ticks(tallest)
    width = 100 / len(columns)
    shapes, names = [], []
    for number, (name, values) in enumerate(columns.items()):
        base = 0.0
        for part, value in enumerate(values):
            height = 100 * value / ticks[-1]
            title = f"{name}, {parts[part]}: {value:,.0f} {unit}"
            shapes.append(_rect((number + 0.1) * width, 0.8 * width, base, height, _part_color(part), title))
            base += height
        if number % max(1, math.ceil(len(columns) / 12)) == 0:
            names.append(f'<span style="left:{(number + 0.5) * width:.2f}%">{escape(name)}</span>')
    key = "".join(
        f'<span><i style="background:{_part_color(number)}"></i>{escape(part)}</span>'
        for number, part in enumerate(parts)
    )
    return f'<p class="legend">{key}</p>' + _frame("".join(shapes), ticks, unit, "".join(names), "turn", label)


def bars(groups: Mapping[str, Mapping[str, float]]) -> str:
    """Horizontal bars of shares (0 to 1): for each group one bar for each series."""
    names = list(dict.fromkeys(name for shares in groups.values() for name in shares))
    cells = []
    for group, shares in groups.items():
        for position, (name, share) in enumerate(shares.items()):
            again = ' class="again" aria-hidden="true"' if position else ""
            fill = color(names.index(name) if len(names) > 1 else 1)
            size = f"width:{100 * min(1.0, max(0.0, share)):.2f}%;background:{fill}"
            bar = f'<div class="track"><div class="fill" style="{size}" title="{escape(name)}"></div></div>'
            cells.append(f'<span{again}>{escape(group)}</span>{bar}<span class="value">{format_share(share)}</span>')
    if not cells:
        return _nothing()
    return (legend(names) if len(names) > 1 else "") + f'<div class="bars">{"".join(cells)}</div>'


def legend(names: Sequence[str]) -> str:
    """Names of series beside their colours."""
    items = "".join(
        f'<span><i style="background:{color(number)}"></i>{escape(name)}</span>' for number, name in enumerate(names)
    )
    return f'<p class="legend">{items}</p>'


def nice_ticks(largest: float, *, whole: bool = False) -> list[float]:
    """Round numbers from 0 to just above `largest`, about five of them; never all zero."""
    largest = max(largest, 1e-9)
    raw = largest / NUM_TICKS
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    if whole:
        step = max(1.0, math.ceil(step))
    return [number * step for number in range(math.ceil(largest / step - 1e-9) + 1)]


def format_ms(value: float | None) -> str:
    """A duration for people: `3.2 ms`, `840 ms`, `12.4 s`."""
    if value is None:
        return "–"
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def format_share(value: float | None) -> str:
    """A share for people: `61.3 %`."""
    return "–" if value is None else f"{100 * value:.1f} %"


def _plot(shapes: str, xs: Sequence[float], ys: Sequence[float], x_unit: str, y_unit: str, label: str) -> str:
    names = "".join(
        f'<span{" class=last" if value == xs[-1] else ""} style="left:{100 * value / xs[-1]:.2f}%">'
        f"{_number(value)}</span>"
        for value in xs
    )
    return _frame(shapes, ys, y_unit, names, x_unit, label)


def _frame(shapes: str, ys: Sequence[float], y_unit: str, names: str, x_unit: str, label: str) -> str:
    """Shapes on a grid; `names` are the labels below, ready-made."""
    grid = "".join(_line("grid", y=100 * value / ys[-1]) for value in ys[1:])
    marks = "".join(f'<span style="bottom:{100 * value / ys[-1]:.2f}%">{_number(value)}</span>' for value in ys)
    box = 'viewBox="0 0 100 100" preserveAspectRatio="none" role="img"'
    return (
        f'<div class="unit">{escape(y_unit)}</div><div class="plot"><div class="ys">{marks}</div>'
        f'<svg {box} aria-label="{escape(label)}">{grid}{shapes}</svg>'
        f'<div class="xs">{names}</div><div class="axis">{escape(x_unit)}</div></div>'
    )


def _points(points: Sequence[tuple[float, float]], xs: Sequence[float], ys: Sequence[float]) -> str:
    return " ".join(f"{100 * x / xs[-1]:.2f},{100 - 100 * y / ys[-1]:.2f}" for x, y in points)


def _rect(x: float, width: float, base: float, height: float, fill: str, title: str) -> str:
    """A rectangle that stands `base` above the bottom of the box."""
    place = f'x="{x:.3f}" width="{width:.3f}" y="{100 - base - height:.3f}" height="{height:.3f}"'
    return f'<rect {place} fill="{fill}"><title>{escape(title)}</title></rect>'


def _line(style: str, *, x: float | None = None, y: float | None = None, title: str = "") -> str:
    """A line across the box: vertical at `x`, or horizontal, `y` above the bottom."""
    across = f'x1="{x:.3f}" x2="{x:.3f}" y1="0" y2="100"' if x is not None else ""
    along = f'x1="0" x2="100" y1="{100 - y:.3f}" y2="{100 - y:.3f}"' if y is not None else ""
    return f'<line class="{style}" {across or along}><title>{escape(title)}</title></line>'


def _part_color(part: int) -> str:
    """Cached parts stand out, computed ones stay in the background."""
    return (color(1), "var(--rest)")[part % 2]


def _number(value: float) -> str:
    return f"{value:,.10g}"


def _nothing() -> str:
    return '<p class="soft">No complete reply, nothing to show.</p>'
