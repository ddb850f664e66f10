import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.workloads.config import ReplayConfig
from ropewalk.workloads.metrics import ReplayResult, TurnRecord, combined_hash, distribution, summarize

LATENCIES = st.lists(st.floats(0, 1e6), min_size=2, max_size=200)


def record(session=0, turn=0, agent="solver", *, intended=0.0, tokens=(0.2, 0.3), ended=0.4, **fields):
    settings = {"prompt_tokens": 100, "cached_tokens": 25, "completion_tokens": len(tokens), **fields}
    return TurnRecord(
        session=session,
        turn=turn,
        agent=agent,
        body_sha256=f"{session * 16 + turn:064x}",
        estimated_prompt_tokens=90,
        intended=intended,
        started=intended + 0.05,
        ended=ended,
        token_times=list(tokens),
        **settings,
    )


def result(records, **settings):
    config = ReplayConfig(endpoint="http://127.0.0.1:1", **settings)
    return ReplayResult(config, "model", "source", records, wall_s=4.0, measured_s=2.0)


def test_percentiles_of_known_values():
    figures = distribution([10, 20, 30, 40, 50])
    assert figures == {"count": 5, "mean": 30, "p50": 30, "p95": 48, "p99": pytest.approx(49.6), "max": 50}


@settings(deadline=None)
@given(LATENCIES)
def test_percentiles_agree_with_numpy_and_the_standard_library(values):
    figures = distribution(values)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (50, 95, 99):
        assert figures[f"p{percent}"] == pytest.approx(np.percentile(values, percent))
        assert figures[f"p{percent}"] == pytest.approx(cuts[percent - 1], rel=1e-9, abs=1e-6)
    assert figures["mean"] == pytest.approx(statistics.fmean(values))
    assert figures["p50"] <= figures["p95"] <= figures["p99"] <= figures["max"]


def test_nothing_measured_has_no_percentiles():
    assert distribution([]) == {"count": 0, "mean": None, "p50": None, "p95": None, "p99": None, "max": None}


def test_latencies_count_from_when_the_turn_was_due():
    late = record(intended=1.0, tokens=(1.5, 1.6, 1.9), ended=2.0)
    assert late.ttft_ms == pytest.approx(500)
    assert late.turn_ms == pytest.approx(1000)
    assert late.itl_ms == pytest.approx([100, 300])


def test_failed_turns_count_as_errors_and_in_nothing_else():
    figures = summarize([record(), record(error="HTTP 500: x", tokens=(9.0,)), record(error="HTTP 500: x")])
    assert (figures["requests"], figures["errors"], figures["error_kinds"]) == (3, 2, {"HTTP 500: x": 2})
    assert figures["prompt_tokens"] == 100
    assert figures["ttft_ms"]["count"] == figures["turn_ms"]["count"] == 1
    assert figures["ttft_ms"]["max"] == pytest.approx(200)


def test_a_reply_without_cached_tokens_counts_as_none_cached():
    figures = summarize([record(cached_tokens=None), record(cached_tokens=50)])
    assert figures["cached_token_share"] == 0.25
    assert figures["cached_tokens_reported"]
    assert not summarize([record(cached_tokens=None)])["cached_tokens_reported"]


def test_ropewalks_token_counts_are_summed_by_origin():
    records = [record(ropewalk_tokens={"computed": 5, "reused": 7}), record(ropewalk_tokens={"computed": 1}), record()]
    assert summarize(records)["ropewalk_tokens"] == {"computed": 6, "reused": 7}


def test_the_hash_depends_on_what_was_sent_and_not_on_when():
    records = [record(0, 0), record(0, 1), record(1, 0)]
    assert combined_hash(records) == combined_hash(records[::-1])
    assert combined_hash(records) != combined_hash(records[:2])


def test_throughput_counts_answered_turns_in_the_measured_time():
    summary = result(
        [record(0, 0, warmup=True), *(record(0, turn) for turn in range(1, 5)), record(1, error="x")]
    ).summary()
    assert summary["requests"] == 5
    assert summary["turns_per_s"] == 2.0
    assert summary["output_tokens_per_s"] == 4.0


def test_figures_are_grouped_by_agent_busiest_first_and_by_turn():
    made = result([record(0, 0, "planner"), record(0, 1, "solver"), record(1, 1, "solver")])
    assert {name: figures["requests"] for name, figures in made.by_agent().items()} == {"solver": 2, "planner": 1}
    assert list(made.by_agent()) == ["solver", "planner"]
    assert {turn: figures["requests"] for turn, figures in made.by_turn().items()} == {0: 1, 1: 2}
