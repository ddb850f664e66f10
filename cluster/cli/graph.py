"""`ropewalk graph`: which agents a cluster has seen and who hands over to whom, as text, JSON, GraphML or SVG."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

FORMATS = ("text", "json", "graphml", "svg")

MAX_SVG_EDGES = 150
"""Likeliest hand-overs drawn; more cannot be told apart. GraphML and JSON have all."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "graph", help="show the agents a cluster has seen and their hand-overs", description=__doc__
    )
    parser.add_argument(
        "--endpoint", default="http://127.0.0.1:8000", help="where the cluster answers (default: %(default)s)"
    )
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there instead of to standard output")
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="seconds to wait (default: %(default)s)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Fetch `GET /v1/agents` and render it."""
    from ropewalk.cluster.cli import UserError

    text = render(fetch(args.endpoint, args.timeout), args.format)
    if args.output is None:
        sys.stdout.write(text)
        return 0
    try:
        args.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {str(args.output)!r} cannot be written: {error.strerror}") from error
    print(f"wrote {args.output}")
    return 0


def fetch(endpoint: str, timeout_s: float) -> dict[str, Any]:
    """The body of `GET /v1/agents`. Raises UserError when nothing answers there or it is no Ropewalk."""
    import httpx

    from ropewalk.cluster.cli import UserError, is_local

    base = endpoint.rstrip("/").removesuffix("/v1")
    try:
        response = httpx.get(f"{base}/v1/agents", timeout=timeout_s, trust_env=not is_local(base))
        response.raise_for_status()
        payload = response.json()
    except httpx.ConnectError as error:
        raise UserError(f"nothing answers at --endpoint {endpoint!r}; is `ropewalk serve` running there?") from error
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise UserError(f"--endpoint {endpoint!r} must be a URL such as http://127.0.0.1:8000") from error
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise UserError(f"--endpoint {endpoint!r} answered {status} to GET /v1/agents; is it Ropewalk?") from error
    except httpx.TimeoutException as error:
        raise UserError(f"--endpoint {endpoint!r} did not answer within --timeout {timeout_s:g} s") from error
    except httpx.HTTPError as error:
        raise UserError(f"--endpoint {endpoint!r} failed: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise UserError(f"--endpoint {endpoint!r} answered GET /v1/agents without JSON; is it Ropewalk?") from error
    if not isinstance(payload, dict) or not {"agents", "transitions"} <= payload.keys():
        raise UserError(f"--endpoint {endpoint!r} answered GET /v1/agents without agents; is it Ropewalk?")
    return payload


def render(payload: Mapping[str, Any], form: str) -> str:
    """The payload in one of `FORMATS`, ending in a newline."""
    if form == "json":
        return json.dumps(payload, indent=2, ensure_ascii=False) + "\n"
    if form == "graphml":
        return to_graphml(payload)
    if form == "svg":
        return to_svg(payload)
    return to_text(payload)


def to_text(payload: Mapping[str, Any]) -> str:
    """Two tables: agents, and for each agent who comes next."""
    agents, edges = payload["agents"], payload["transitions"]
    head = (
        f"{len(agents)} agents, {payload.get('handovers', 0)} hand-overs in {payload.get('live_sessions', 0)} live "
        f"sessions, predictability R = {payload.get('predictability', 0.0):.2f}"
    )
    lines = [head]
    if payload.get("complete") is False:
        lines.append(f"incomplete: the scheduler did not answer ({payload.get('reason', 'no reason given')})")
    if not agents:
        lines += ["", "No agent seen yet. Send requests with a system prompt, or with header x-agent."]
        return "\n".join(lines) + "\n"
    rows = [
        [
            agent["id"],
            agent["requests"],
            agent.get("sessions", 0),
            agent.get("anchor_tokens", 0),
            f"{agent.get('survival', 0.0):.2f}",
            len(agent.get("warm_replicas", ())),
        ]
        for agent in agents
    ]
    lines += ["", *_table(["agent", "requests", "sessions now", "anchor tokens", "survival", "warm on"], rows)]
    if edges:
        rows = [[edge["source"], edge["target"], f"{edge['probability']:.2f}", edge["count"]] for edge in edges]
        lines += ["", *_table(["from", "to", "probability", "times"], rows, num_text=2)]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], num_text: int = 1) -> list[str]:
    """Aligned columns: the first `num_text` to the left, the others to the right."""
    cells = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    cells.insert(1, ["-" * width for width in widths])
    return [
        "  ".join(c.ljust(w) if i < num_text else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]


def to_graphml(payload: Mapping[str, Any]) -> str:
    """GraphML for Gephi, yEd, Cytoscape or networkx."""
    import networkx as nx

    graph: nx.DiGraph[str] = nx.DiGraph()
    for agent in payload["agents"]:
        flat = {k: ",".join(map(str, v)) if isinstance(v, list) else v for k, v in agent.items() if k != "id"}
        graph.add_node(_xml_safe(agent["id"]), **{k: _xml_safe(v) for k, v in flat.items()})
    for edge in payload["transitions"]:
        graph.add_edge(
            _xml_safe(edge["source"]), _xml_safe(edge["target"]), count=edge["count"], probability=edge["probability"]
        )
    return "\n".join(nx.generate_graphml(graph)) + "\n"


def _xml_safe(value: Any) -> Any:
    """Without the characters that XML 1.0 cannot hold at all."""
    if not isinstance(value, str):
        return value
    return "".join(
        c for c in value if c in "\t\n" or (ord(c) >= 0x20 and not 0xD800 <= ord(c) <= 0xDFFF and ord(c) < 0xFFFE)
    )


_STYLE = """
  svg { background: #ffffff; font-family: system-ui, sans-serif }
  .edge { fill: none; stroke: #4a6fa5 } .tip { fill: #4a6fa5 }
  .node { fill: #eef3fa; stroke: #2b4a78; stroke-width: 1.5 }
  .name { fill: #14213a; font-size: 13px; font-weight: 600 } .small { fill: #4a5568; font-size: 11px }
  .label { fill: #14213a; font-size: 11px; paint-order: stroke; stroke: #ffffff; stroke-width: 3px }
  @media (prefers-color-scheme: dark) {
    svg { background: #14181f }
    .edge { stroke: #7fa6dd } .tip { fill: #7fa6dd }
    .node { fill: #1f2a3a; stroke: #8fb4e8 }
    .name { fill: #eef3fa } .small { fill: #aab6c8 } .label { fill: #eef3fa; stroke: #14181f }
  }
"""


def to_svg(payload: Mapping[str, Any]) -> str:
    """Agents on a circle, likely neighbours side by side; the thicker an arrow the likelier the hand-over."""
    agents = {agent["id"]: agent for agent in payload["agents"]}
    edges = [e for e in payload["transitions"] if e["source"] in agents and e["target"] in agents]
    edges = sorted(edges, key=lambda e: -e["probability"])[:MAX_SVG_EDGES]
    order = _circle_order(list(agents), edges)
    sizes = {agent: _node_size(agents[agent]) for agent in order}
    widest = max((width for width, _ in sizes.values()), default=0.0)
    # Neighbours must not touch: one node's width and a gap for arrows between them along the circle.
    radius = max(220.0, len(order) * (widest + 60.0) / (2 * math.pi)) if len(order) > 1 else 0.0
    margin_x, margin_y, head = widest / 2 + 60.0, 90.0, 56.0
    width, height = 2 * (radius + margin_x), 2 * (radius + margin_y) + head
    width = max(width, 560.0)
    center_x, center_y = width / 2, head + radius + margin_y
    place = {}
    for i, agent in enumerate(order):
        angle = -math.pi / 2 + 2 * math.pi * i / len(order)
        place[agent] = (center_x + radius * math.cos(angle), center_y + radius * math.sin(angle))
    summary = (
        f"{len(agents)} agents, {payload.get('handovers', 0)} hand-overs, "
        f"predictability R = {payload.get('predictability', 0.0):.2f}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{_attribute(summary)}">',
        f"<style>{_STYLE}</style>",
        f'<text class="name" x="20" y="30">{escape(summary)}</text>',
    ]
    if not agents:
        parts.append('<text class="small" x="20" y="52">No agent seen yet.</text>')
    labels = []
    for edge in edges:
        line, label = _arrow(
            place[edge["source"]], sizes[edge["source"]], place[edge["target"]], sizes[edge["target"]], edge
        )
        parts.append(line)
        labels.append(label)
    for agent in order:
        parts.append(_node(agents[agent], place[agent], sizes[agent]))
    return "\n".join([*parts, *labels, "</svg>"]) + "\n"


def _circle_order(agents: Sequence[str], edges: Sequence[Mapping[str, Any]]) -> list[str]:
    """Start with the busiest agent and go on with the likeliest hand-over to one not placed yet."""
    following: dict[str, list[tuple[float, str]]] = {agent: [] for agent in agents}
    for edge in edges:
        following[edge["source"]].append((edge["probability"], edge["target"]))
    order: list[str] = []
    left = dict.fromkeys(agents)
    while left:
        nearest = max(((p, a) for p, a in following[order[-1]] if a in left), default=None) if order else None
        agent = nearest[1] if nearest else next(iter(left))
        del left[agent]
        order.append(agent)
    return order


def _short(name: str, limit: int = 28) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _node_size(agent: Mapping[str, Any]) -> tuple[float, float]:
    # Seven and a half pixels a character at 13 px; wide scripts take about twice that.
    wide = sum(2 if ord(c) > 0x2E7F else 1 for c in _short(_xml_safe(agent["id"])))
    return max(110.0, 8.0 * wide + 28.0), 44.0


def _node(agent: Mapping[str, Any], at: tuple[float, float], size: tuple[float, float]) -> str:
    (x, y), (width, height) = at, size
    detail = f"{agent['requests']} requests, survival {agent.get('survival', 0.0):.2f}"
    return (
        f"<g><title>{escape(_xml_safe(agent['id']))}: {escape(detail)}</title>"
        f'<rect class="node" x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="10"/><text class="name" x="{x:.1f}" y="{y - 2:.1f}" text-anchor="middle">'
        f'{escape(_short(_xml_safe(agent["id"])))}</text><text class="small" x="{x:.1f}" y="{y + 14:.1f}" '
        f'text-anchor="middle">{agent["requests"]} requests</text></g>'
    )


def _arrow(
    start: tuple[float, float],
    start_size: tuple[float, float],
    end: tuple[float, float],
    end_size: tuple[float, float],
    edge: Mapping[str, Any],
) -> tuple[str, str]:
    """A bent line, so that the two directions between two agents lie apart, and its label near the source."""
    (x1, y1), (x2, y2) = start, end
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    bend = 0.16 * length
    bend_x, bend_y = (x1 + x2) / 2 - bend * (y2 - y1) / length, (y1 + y2) / 2 + bend * (x2 - x1) / length
    x1, y1 = _outline(start, start_size, (bend_x, bend_y))
    tip_x, tip_y = _outline(end, end_size, (bend_x, bend_y))
    distance = math.hypot(tip_x - bend_x, tip_y - bend_y) or 1.0
    ux, uy = (tip_x - bend_x) / distance, (tip_y - bend_y) / distance
    probability = float(edge["probability"])
    weight = 0.8 + 4.2 * probability
    tip = 6.0 + weight
    back_x, back_y = tip_x - ux * tip, tip_y - uy * tip
    left = (back_x - uy * tip / 2, back_y + ux * tip / 2)
    right = (back_x + uy * tip / 2, back_y - ux * tip / 2)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in ((tip_x, tip_y), left, right))
    title = f"{_xml_safe(edge['source'])} → {_xml_safe(edge['target'])}: {probability:.2f} ({edge['count']} times)"
    opacity = 0.35 + 0.65 * probability
    line = (
        f'<g opacity="{opacity:.2f}"><title>{escape(title)}</title>'
        f'<path class="edge" stroke-width="{weight:.1f}" d="M{x1:.1f},{y1:.1f} Q{bend_x:.1f},{bend_y:.1f} '
        f'{back_x:.1f},{back_y:.1f}"/><polygon class="tip" points="{points}"/></g>'
    )
    # A third along the curve: arrows that meet at one agent keep their labels apart.
    t = 0.35
    label_x = (1 - t) ** 2 * x1 + 2 * t * (1 - t) * bend_x + t * t * tip_x
    label_y = (1 - t) ** 2 * y1 + 2 * t * (1 - t) * bend_y + t * t * tip_y + 4
    label = f'<text class="label" x="{label_x:.1f}" y="{label_y:.1f}" text-anchor="middle">{probability:.2f}</text>'
    return line, label if probability >= 0.05 else ""


def _outline(
    center: tuple[float, float], size: tuple[float, float], towards: tuple[float, float]
) -> tuple[float, float]:
    """Where the line from a node's centre to a point leaves the node, two pixels outside."""
    dx, dy = towards[0] - center[0], towards[1] - center[1]
    distance = math.hypot(dx, dy) or 1.0
    inside = min(
        size[0] / 2 * distance / abs(dx) if dx else math.inf, size[1] / 2 * distance / abs(dy) if dy else math.inf
    )
    # Beside a point inside the node itself there is no outline to leave through.
    share = min((inside + 2) / distance, 1.0) if math.isfinite(inside) else 0.0
    return center[0] + dx * share, center[1] + dy * share


def _attribute(text: str) -> str:
    return escape(text, {'"': "&quot;"})
