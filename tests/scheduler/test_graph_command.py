"""`ropewalk graph` draws what the scheduler learned, whatever the agents are called."""

from __future__ import annotations

import json
import socket
import threading
import xml.etree.ElementTree as ET
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.cluster.cli import UserError, graph, main
from ropewalk.scheduler.graph import graph_payload
from ropewalk.scheduler.state import Observation, SchedulerState


def learned(agents: list[str]) -> SchedulerState:
    state = SchedulerState()
    for i, agent in enumerate(agents):
        state.observe(Observation("s", agent, None, "m", "r0", "n0", float(i), prompt_tokens=100))
    return state


PAYLOAD = graph_payload(learned(["planner", "coder", "critic", "planner", "coder"]))
names = st.lists(st.text(st.characters(), max_size=40), max_size=12)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_text_lists_agents_and_who_follows() -> None:
    lines = graph.render(PAYLOAD, "text").splitlines()
    assert lines[0].startswith("3 agents, 4 hand-overs in 1 live sessions")
    assert ["planner", "coder", "2"] in [[*line.split()[:2], line.split()[-1]] for line in lines if line]


def test_no_agents_are_explained() -> None:
    empty = graph_payload(SchedulerState())
    assert "No agent seen yet" in graph.render(empty, "text")
    assert "No agent seen yet" in graph.render(empty, "svg")
    assert "No agent seen yet" not in graph.render(PAYLOAD, "svg")


def test_a_payload_without_the_scheduler_says_so() -> None:
    stale = {**graph_payload(SchedulerState().snapshot()), "reason": "scheduler-died"}
    assert "incomplete: the scheduler did not answer (scheduler-died)" in graph.render(stale, "text")


@given(names)
@settings(max_examples=40, deadline=None)
def test_every_format_takes_every_name(agents: list[str]) -> None:
    payload = json.loads(json.dumps(graph_payload(learned(agents))))
    assert json.loads(graph.render(payload, "json")) == payload
    root = ET.fromstring(graph.render(payload, "svg"))
    rectangles = root.findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(rectangles) == len(payload["agents"])
    parsed = nx.parse_graphml(graph.render(payload, "graphml"))
    assert parsed.number_of_edges() == len(payload["transitions"])
    graph.render(payload, "text")


def test_graphml_carries_counts_and_probabilities() -> None:
    parsed = nx.parse_graphml(graph.render(PAYLOAD, "graphml"))
    assert parsed.edges["planner", "coder"]["count"] == 2
    assert parsed.nodes["planner"]["requests"] == 2


def test_the_drawing_knows_dark_and_light() -> None:
    text = graph.render(PAYLOAD, "svg")
    assert "prefers-color-scheme: dark" in text
    assert "planner → coder" in text


def arguments(*words: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    graph.add_parser(parser.add_subparsers())
    return parser.parse_args(["graph", *words])


def test_nothing_listening_is_a_users_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    assert main(["graph", "--endpoint", endpoint]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert endpoint in shown


@pytest.mark.parametrize("endpoint", ["127.0.0.1:8000", "ftp://127.0.0.1", "nonsense"])
def test_an_endpoint_that_is_no_url_is_a_users_error(endpoint: str) -> None:
    with pytest.raises(UserError, match="--endpoint"):
        graph.run(arguments("--endpoint", endpoint))


def test_another_server_is_a_users_error() -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"[]" if self.path.startswith("/other") else b""
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(UserError, match="answered 404"):
            graph.run(arguments("--endpoint", f"{base}/v1"))
        with pytest.raises(UserError, match="without agents"):
            graph.run(arguments("--endpoint", f"{base}/other"))
    finally:
        server.shutdown()
        server.server_close()


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "fetch", lambda endpoint, timeout_s: PAYLOAD)
    with pytest.raises(UserError, match="--output"):
        graph.run(arguments("--output", str(tmp_path / "missing" / "x.svg")))
    assert graph.run(arguments("--format", "svg", "--output", str(tmp_path / "x.svg"))) == 0
    assert (tmp_path / "x.svg").read_text() == graph.render(PAYLOAD, "svg")
