"""`ropewalk simulate`: tables and JSON, what it refuses, and what a real engine says to its hit rates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ropewalk.cluster.bench import simulation
from ropewalk.cluster.cli import main
from ropewalk.scheduler.foresight import Foresight
from ropewalk.scheduler.retention import Retention
from ropewalk.workloads.block_cache import hit_rate
from ropewalk.workloads.traces import chat


def write_trace(path, num_requests=40):
    """Sessions of five turns, each a block longer than the one before."""
    rows = [
        {
            "timestamp": 500 * number,
            "input_length": 512 * (3 + number % 5) + 9,
            "output_length": 10,
            "hash_ids": [0, *(100 * (number // 5) + depth for depth in range(2 + number % 5))],
        }
        for number in range(num_requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_rule_and_router_gets_a_row_and_all_figures_are_in_the_json(tmp_path, capsys):
    trace, out = write_trace(tmp_path / "t.jsonl"), tmp_path / "out.json"
    arguments = ["--retention", "lru", "foresight", "--routers", "p2c", "rank", "--budgets", "40", "80"]
    common = ["simulate", "--trace", str(trace), "--requests", "300", "--replicas", "3", "--json", str(out)]
    assert main([*common, *arguments]) == 0
    report = json.loads(out.read_text())
    arms = [(arm["blocks"], arm["retention"], arm["router"]) for arm in report["arms"]]
    assert arms == [(b, rule, name) for b in (40, 80) for rule in ("lru", "foresight") for name in ("p2c", "rank")]
    for arm in report["arms"]:
        assert arm["answered"] == arm["requests"] == 300
        assert 0 <= arm["hit_rate"] < 1
        assert set(arm["ttft_s"]) == set(arm["turn_s"]) == {"mean", "p50", "p95", "p99"}
        assert arm["simulated_per_s"] > 0
    assert sum(report["arms"][1]["reasons"].values()) == 300
    captured = capsys.readouterr()
    assert "3 replicas with 80 blocks of 512 tokens" in captured.out
    assert captured.err == ""


def test_generated_sessions_need_no_data(tmp_path, capsys):
    arguments = ["--workload", "debate", "--requests", "200", "--replicas", "2", "--routers", "prefix", "--told"]
    assert main(["simulate", *arguments, "--data", str(tmp_path)]) == 0
    assert "debate: 200 requests" in capsys.readouterr().out


def test_an_overloaded_cluster_is_said(tmp_path, capsys):
    trace = write_trace(tmp_path / "t.jsonl")
    slow = ["--prefill-tokens-per-s", "1", "--retention", "lru", "--routers", "p2c", "--replicas", "1"]
    assert main(["simulate", "--trace", str(trace), "--requests", "9000", *slow]) == 0
    captured = capsys.readouterr()
    assert "overloaded" in captured.err
    assert "over-" in captured.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--requests", "0"], "--requests must be at least 1, not 0"),
        (["--replicas", "-1"], "--replicas must be at least 1, not -1"),
        (["--budgets", "0"], "--budgets must be at least 1, not 0"),
        (["--speed", "0"], "--speed must be above 0"),
        (["--workload", "captain-agent", "--programs", "2"], "--programs: captain-agent is one program"),
        (["--speed", "nan"], "--speed must be above 0"),
        (["--decode-s", "0"], "--decode-s must be above 0"),
        (["--router-sessions", "0"], "--router-sessions must be at least 1"),
        (["--imbalance", "-1"], "--imbalance must be at least 0"),
        (["--budgets", "3"], "--budgets: a request of"),
        (["--block-size", "16"], "blocks of a trace have 512 tokens"),
        (["--workload", "selector"], "leave out --workload selector"),
        (["--json", "/proc/nowhere/x.json"], "cannot be written"),
        (["--validate"], "--validate needs a workload with tokens"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_line(arguments, said, tmp_path, capsys):
    trace = write_trace(tmp_path / "t.jsonl")
    assert main(["simulate", "--trace", str(trace), "--requests", "50", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("ropewalk simulate: ")
    assert said in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--data: "),
        (["--workload", "captain-agent"], "--data: "),
        (["--trace", "nowhere.jsonl"], "--trace: nowhere.jsonl cannot be read"),
        (["--validate", "--workload", "selector", "--budgets", "20"], "--budgets: a turn takes up to"),
    ],
)
def test_data_that_are_not_there_are_said_in_a_line(arguments, said, tmp_path, capsys):
    assert main(["simulate", "--data", str(tmp_path), *arguments]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(("name", "rule"), [("lru", Retention), ("foresight", Foresight)])
def test_one_replica_asked_in_turn_is_the_model_of_one_cache(name, rule):
    turns = [replace(turn, output=turn.output[:1]) for turn in chat("selector", 6)]
    simulated = simulation.simulated_hit_rate(turns, 111, name)
    assert simulated == pytest.approx(hit_rate(turns, 110, simulation.BLOCK_SIZE, rule()), abs=1e-9)


@pytest.mark.engine
def test_an_engine_hits_what_the_simulator_says(tmp_path, capsys):
    """vLLM with few blocks and the simulator: hit rates within a point."""
    out = tmp_path / "out.json"
    arguments = ["--requests", "60", "--budgets", "90", "--retention", "foresight"]
    assert main(["simulate", "--validate", "--workload", "pipeline", *arguments, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [entry["asked"] for entry in report["rules"]] == ["one by one", "4 together"]
    for entry in report["rules"]:
        assert entry["simulator"] == pytest.approx(entry["engine"], abs=0.01)
        assert entry["engine"] > 0.2
    assert "foresight" in capsys.readouterr().out


def test_validation_fails_when_they_are_apart(monkeypatch, capsys):
    found = [{"rule": "lru", "asked": "one by one", "engine": 0.4, "simulator": 0.42}]
    report = {"workload": "selector", "turns": 3, "blocks": 110, "rules": found, "agree": False}
    monkeypatch.setattr(simulation, "validate", lambda *_: report)
    assert main(["simulate", "--validate"]) == 1
    captured = capsys.readouterr()
    assert "+2.00" in captured.out
    assert "more than 1 point apart" in captured.err
