"""The studies of routing and of outages: what they count, and what they refuse."""

from __future__ import annotations

import os

import pytest

from ropewalk.cluster.bench import outage, routing
from ropewalk.cluster.bench.queues import longest_uneven_s
from ropewalk.cluster.bench.tables import print_outage, print_routing
from ropewalk.cluster.cli import main
from ropewalk.cluster.serve.application import request_router
from ropewalk.workloads.config import ReplayConfig
from ropewalk.workloads.load import arrival_times
from ropewalk.workloads.metrics import ReplayResult, TurnRecord


def test_unevenness_is_timed_without_pauses():
    lengths = [[1, 1], [4, 0], [4, 1], [3, 3], [5, 1], [5, 1], [5, 1], [5, 1]]
    samples = [(0.5 * number, pair) for number, pair in enumerate(lengths)]
    assert longest_uneven_s(samples, 2) == 1.5


def test_a_difference_of_one_request_cannot_be_balanced():
    samples = [(0.5 * number, [1, 0]) for number in range(5)]
    assert longest_uneven_s(samples, 2) == 0.0
    assert longest_uneven_s(samples, 1) == 2.0


def test_sessions_are_skewed_and_the_same_for_every_arm():
    lengths = routing.session_lengths(400, 3)
    assert lengths == routing.session_lengths(400, 3) != routing.session_lengths(400, 4)
    assert min(lengths) == 1
    assert max(lengths) == routing.MAX_TURNS
    assert sum(lengths) / len(lengths) == pytest.approx(routing.MEAN_TURNS, rel=0.15)


def test_as_many_turns_arrive_as_are_said():
    lengths = routing.session_lengths(40, 5)
    rate = routing.session_rate(lengths, 5, 1.5)
    assert sum(lengths) / arrival_times(5, range(40), rate)[-1] == pytest.approx(1.5)


def test_turns_are_counted_while_there_are_sessions_to_begin():
    def record(session: int, started: float, ended: float) -> TurnRecord:
        return TurnRecord(session, 0, "a", "", 1, started, started, ended=ended)

    records = [record(0, 1.0, 2.0), record(0, 2.0, 3.0), record(1, 1.0, 5.0), record(2, 3.0, 9.0)]
    result = ReplayResult(ReplayConfig(endpoint="http://h"), "m", "s", records, 9.0, 9.0, aborted=False)
    assert routing.saturated_turns_per_s(result) == 1.0


@pytest.mark.parametrize(
    ("arm", "router", "arguments"),
    [
        ("power-of-two", None, None),
        ("prefix-affinity", "PrefixCacheAffinityRouter", {}),
        ("prefix-affinity-4", "PrefixCacheAffinityRouter", {"imbalanced_threshold": 4}),
        ("router", "AgentRouter", {"scheduler": False, "store": False, "mode": "exact"}),
        ("ropewalk", "AgentRouter", {"scheduler": True, "store": True, "mode": "exact"}),
        ("ropewalk-power-of-two", None, None),
    ],
)
def test_each_arm_has_its_router(arm, router, arguments):
    config = routing.cluster_config(routing.ARMS[arm], 8000)
    found = request_router(config, config.models[0])
    if router is None:
        assert found is None
        return
    assert found is not None
    assert found.get_request_router_class().__name__ == router
    assert found.request_router_kwargs == arguments


def figures(turns_per_s: float) -> dict:
    times = {"mean": 10.0, "p50": 9.0, "p95": 20.0}
    return {
        "turns_per_s": turns_per_s,
        "ttft_ms": times,
        "turn_ms": times,
        "cached_token_share": 0.5,
        "mean_queue": 2.0,
        "mean_difference": 1.0,
        "uneven_s": 0.4,
    }


def test_rounds_are_shown_by_their_medians(capsys):
    runs = [{"saturated": figures(speed), "open": figures(1.0)} for speed in (3.0, 7.0, 4.0)]
    print_routing({"model": "m", "rate": 2.5, "arms": {"router": {"title": "ours", "runs": runs}}})
    shown = capsys.readouterr().out
    assert "4.00" in shown
    assert "2.50 turns/s arriving" in shown
    assert "…" not in shown, "no column is cut off"


def test_a_ratio_of_percentiles_has_an_interval():
    base = [[float(10 * session + turn) for turn in range(1, 11)] for session in range(10)]
    same = outage.ratio_of_p95(base, base, 0)
    assert same == {"ratio": 1.0, "low": 1.0, "high": 1.0}, "the same sessions are drawn for both"
    slow = outage.ratio_of_p95([[2 * value for value in values] for values in base], base, 0)
    assert slow["ratio"] == 2.0
    assert slow["low"] > 1.9
    other = outage.ratio_of_p95(base[::-1], base, 0)
    assert other["low"] < 1.0 < other["high"]
    assert outage.ratio_of_p95([[] for _ in base], base, 0) is None
    period = {"requests": 100, "errors": 0, "turn_ms": {"p50": 50.0, "p95": 95.0}, "p95_ratio": same}
    print_outage({"rate": 2.0, "periods": {"undisturbed": period}})


def test_a_machine_without_a_scheduler_is_told():
    with pytest.raises(LookupError):
        outage.scheduler_pid(os.getpid(), timeout_s=0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["routing", "--sessions", "0"], "--sessions must be at least 9"),
        (["routing", "--rounds", "0"], "--rounds must be at least 1"),
        (["routing", "--rate", "0"], "--rate must be above 0"),
        (["routing", "--arms", "nobody"], "invalid choice"),
        (["outage", "--rate", "-1"], "--rate must be above 0"),
        (["outage", "--json", "/proc/nowhere/x.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(arguments, said, capsys):
    try:
        code = main(["bench", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert said in capsys.readouterr().err
