"""`ropewalk demo`: both arms get the same work and the same engines, and mistakes are told before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ropewalk.cluster.cli import main
from ropewalk.cluster.cli.demo import ARMS, cluster_config, replay_configs, write_reports
from ropewalk.workloads.arms import check_arms
from ropewalk.workloads.metrics import ReplayResult, TurnRecord


def _record(turn: int) -> TurnRecord:
    start = float(turn)
    return TurnRecord(
        session=0,
        turn=turn,
        agent="planner",
        body_sha256=f"{turn:064x}",
        estimated_prompt_tokens=100,
        intended=start,
        started=start,
        ended=start + 0.5,
        token_times=[start + 0.2, start + 0.3],
        prompt_tokens=100,
        cached_tokens=50,
        completion_tokens=2,
        finish_reason="length",
        status=200,
    )


def test_the_deployments_differ_in_nothing_but_ropewalk() -> None:
    plain, ours = cluster_config(8123).models
    assert (plain.name, ours.name) == ARMS
    assert plain.plain
    assert not ours.plain
    assert ours.reuse == "reuse"
    differing = {"name", "plain", "reuse"}
    assert plain.model_dump(exclude=differing) == ours.model_dump(exclude=differing)


def test_the_arms_are_asked_for_the_same_work() -> None:
    configs = replay_configs("http://127.0.0.1:8123/v1", sessions=3, turns=4, seed=7)
    check_arms(configs)
    assert [(config.name, config.model) for config in configs] == [(arm, arm) for arm in ARMS]
    assert not any(config.sends_ropewalk_field for config in configs)  # the bodies are equal but for the model's name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sessions", "0"], "sessions=0: must be at least 1"),
        (["--turns", "-1"], "turns=-1: must be at least 1"),
        (["--out", __file__], "is a file; give a folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_summary_holds_what_a_script_looks_for(tmp_path: Path) -> None:
    results = {
        config.name: ReplayResult(config, config.name, "sample", [_record(turn) for turn in range(4)], 2.0, 2.0)
        for config in replay_configs("http://127.0.0.1:8123/v1", sessions=1, turns=4, seed=0)
    }
    write_reports(tmp_path, results)
    arms = json.loads((tmp_path / "summary.json").read_text())["arms"]
    assert set(arms) == {"vllm", "ropewalk"}
    for arm in arms.values():
        assert (arm["requests"], arm["errors"]) == (4, 0)
        assert arm["cached_token_share"] == 0.5
        assert arm["turns_per_s"] == 2.0
        assert set(arm["ttft_ms"]) >= {"mean", "p50", "p95", "p99"}
        assert set(arm["turn_ms"]) >= {"mean", "p50", "p95", "p99"}
    assert "<html" in (tmp_path / "report.html").read_text()
