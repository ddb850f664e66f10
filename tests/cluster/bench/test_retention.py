"""The study of retention: its figures from an engine and from the model of its cache, and what it refuses."""

from __future__ import annotations

import json

import pytest

from ropewalk.cluster.bench import retention
from ropewalk.cluster.cli import main

TOLD = retention.TOLD
SMALL = ["bench", "retention", "--workloads", "selector", "--sessions", "8"]


def test_the_model_alone_says_what_each_rule_is_worth(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main([*SMALL, "--budgets", "100", "200", "--model-only", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [entry["blocks"] for entry in report["cells"]] == [100, 200]
    for entry in report["cells"]:
        assert set(entry["model"]) == set(retention.ARMS)
        assert max(entry["model"].values()) <= entry["optimum"] <= entry["unlimited"]
        assert entry["gap"] == pytest.approx(entry["optimum"] - entry["model"]["lru"])
        assert entry["closed"]["lru"] == 0.0
        assert entry["prediction_adds"] == pytest.approx(entry["model"]["foresight"] - entry["model"]["anchors"])
    shown = capsys.readouterr().out
    assert "optimum" in shown
    assert "prediction adds" in shown


@pytest.mark.engine
def test_an_engine_keeps_what_the_model_says(tmp_path, capsys):
    """Hit rates of vLLM with few blocks and those of the model of its cache: within a point of each other."""
    path = tmp_path / "out.json"
    assert main([*SMALL, "--budgets", "110", "--arms", "lru", "foresight", TOLD, "--json", str(path)]) == 0
    (entry,) = json.loads(path.read_text())["cells"]
    assert set(entry["engine"]) == {"lru", "foresight", TOLD}
    for arm, rate in entry["engine"].items():
        assert rate == pytest.approx(entry["model"][arm], abs=0.01), arm
    assert entry["engine"]["foresight"] > entry["engine"]["lru"] + 0.05
    assert "differs from the engine by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workloads", "magentic-one", "--data", "/nowhere"], "--data"),
        (["--workloads", "selector", "--budgets", "20"], "--budgets: a turn takes up to"),
        (["--sessions", "0"], "--sessions must be at least 1"),
        (["--spread", "-1"], "--spread must be 0 to 5"),
        (["--workloads", "nobody"], "invalid choice"),
        (["--json", "/proc/nowhere/x.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(arguments, said, capsys):
    try:
        code = main(["bench", "retention", "--model-only", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_without_the_public_runs_the_chats_are_studied(tmp_path, capsys):
    arguments = ["bench", "retention", "--quick", "--sessions", "3", "--budgets", "100", "--model-only"]
    assert main([*arguments, "--data", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "no magentic-one under" in captured.err
    assert "selector: " in captured.out
