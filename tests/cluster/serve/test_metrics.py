"""Ropewalk's metrics in Prometheus' text format."""

from prometheus_client.parser import text_string_to_metric_families

from ropewalk.cluster.serve.metrics import render

MODELS = [
    {
        "name": "tiny",
        "ready": 2,
        "replicas": [
            {
                "replica": "a",
                "turn_error": 0.0031,
                "min_run": 48,
                "reuse_refused": None,
                "counters": {"tokens_reused": 900, "fallback_chunk_corrupt": 2, "requests": 7},
                "store": {"num_bytes": 1000, "num_chunks": 3},
                "prewarm": {
                    "counters": {"started": 5, "finished": 3, "cancelled_request": 2},
                    "tokens": {"loaded": 700, "used": 500, "wasted": 100},
                    "decisions": {"all-warm": 4},
                    "budget": {"paused": True, "waste": 0.25},
                },
            },
            {"replica": "b", "turn_error": None, "reuse_refused": "no rotary embedding", "counters": {}},
            {"replica": "c", "unreachable": "TimeoutError"},
        ],
    },
    {"name": "plain", "ready": 1, "replicas": [{"replica": "d", "pid": 1}]},
]


def samples() -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(render(MODELS).decode())
    order = ("model", "replica", "source", "reason", "event", "outcome", "kind")
    return {
        (s.name, *(s.labels[label] for label in order if label in s.labels)): s.value
        for family in families
        for s in family.samples
    }


def test_counters_and_gauges_carry_model_replica_and_reason():
    found = samples()
    assert found["ropewalk_prompt_tokens_total", "tiny", "a", "reused"] == 900
    assert found["ropewalk_fallbacks_total", "tiny", "a", "chunk_corrupt"] == 2
    assert found["ropewalk_events_total", "tiny", "a", "requests"] == 7
    assert found["ropewalk_turn_error", "tiny", "a"] == 0.0031
    assert found["ropewalk_store_bytes", "tiny", "a"] == 1000


def test_prewarms_are_shown_by_outcome_with_their_tokens_and_budget():
    found = samples()
    assert found["ropewalk_prewarms_total", "tiny", "a", "cancelled_request"] == 2
    assert found["ropewalk_prewarm_tokens_total", "tiny", "a", "used"] == 500
    assert found["ropewalk_prewarm_decisions_total", "tiny", "a", "all-warm"] == 4
    assert found["ropewalk_prewarm_paused", "tiny", "a"] == 1
    assert found["ropewalk_prewarm_waste", "tiny", "a"] == 0.25
    assert ("ropewalk_prewarm_paused", "tiny", "b") not in found


def test_a_refused_replica_is_shown_as_one_without_reuse():
    found = samples()
    assert found["ropewalk_reuse_enabled", "tiny", "a"] == 1
    assert found["ropewalk_reuse_enabled", "tiny", "b"] == 0
    assert ("ropewalk_turn_error", "tiny", "b") not in found


def test_plain_and_unreachable_replicas_are_counted_and_no_more():
    found = samples()
    assert found["ropewalk_replicas_ready", "plain"] == 1
    assert not [key for key in found if "c" in key or "d" in key]
