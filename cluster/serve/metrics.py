"""What replicas count, in Prometheus' text format: `GET /metrics`.

vLLM's and Ray Serve's own metrics are exported by Ray (`ray metrics`); these are Ropewalk's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES = {
    "turn_error": ("ropewalk_turn_error", "Relative L2 error of turned keys in the turn probe at start"),
    "min_run": ("ropewalk_min_run_tokens", "Shortest run from the store that is worth a stage, learned"),
    "prefill_us_per_token": ("ropewalk_prefill_microseconds_per_token", "Learned cost of prefilling one token"),
    "stage_ms": ("ropewalk_stage_milliseconds", "Learned cost of a stage"),
}
_FAMILIES = {
    "tokens_": ("ropewalk_prompt_tokens", "source", "Prompt tokens by where their KV came from"),
    "fallback_": ("ropewalk_fallbacks", "reason", "Planned KV that had to be computed, by reason (docs/reuse.md)"),
}
_LABELS = ("model", "replica")


def render(models: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the metrics of all replicas. `models` is what `GET /v1/replicas` shows."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(models))
    return generate_latest(registry)


class _Collector:
    def __init__(self, models: Sequence[Mapping[str, Any]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("ropewalk_replicas_ready", "Replicas that answer requests", labels=["model"])
        for model in self._models:
            ready.add_metric([model["name"]], model["ready"])
        yield ready
        replicas = [(model["name"], replica) for model in self._models for replica in model["replicas"]]
        yield from _gauges(replicas)
        yield from _prewarming(replicas)
        yield from _counters(replicas)


def _gauges(replicas: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Metric]:
    for key, (name, text) in _GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        for model, replica in replicas:
            if replica.get(key) is not None:
                family.add_metric([model, replica["replica"]], float(replica[key]))
        yield family
    allowed = GaugeMetricFamily("ropewalk_reuse_enabled", "1 where position-independent reuse is on", labels=_LABELS)
    size = GaugeMetricFamily("ropewalk_store_bytes", "Bytes of the node's store, all models", labels=_LABELS)
    chunks = GaugeMetricFamily("ropewalk_store_chunks", "Chunks of the node's store, all models", labels=_LABELS)
    for model, replica in replicas:
        labels = [model, replica["replica"]]
        if "reuse_refused" in replica:
            allowed.add_metric(labels, replica["reuse_refused"] is None)
        if "store" in replica:
            size.add_metric(labels, replica["store"]["num_bytes"])
            chunks.add_metric(labels, replica["store"]["num_chunks"])
    yield from (allowed, size, chunks)


def _prewarming(replicas: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Metric]:
    families = {
        "counters": ("ropewalk_prewarms", "outcome", "Anchors warmed in idle time, by what became of it"),
        "tokens": ("ropewalk_prewarm_tokens", "kind", "Tokens of prewarms, by source and by what became of them"),
        "decisions": ("ropewalk_prewarm_decisions", "reason", "Why anchors were warmed or not, when that changed"),
    }
    counted = [(model, replica, replica["prewarm"]) for model, replica in replicas if replica.get("prewarm")]
    for key, (name, label, text) in families.items():
        family = CounterMetricFamily(name, text, labels=[*_LABELS, label])
        for model, replica, prewarm in counted:
            for value, count in prewarm[key].items():
                family.add_metric([model, replica["replica"], value], count)
        yield family
    paused = GaugeMetricFamily("ropewalk_prewarm_paused", "1 while too much was prewarmed for nothing", labels=_LABELS)
    waste = GaugeMetricFamily(
        "ropewalk_prewarm_waste", "Share of prewarmed tokens that were not used, sliding window", labels=_LABELS
    )
    for model, replica, prewarm in counted:
        paused.add_metric([model, replica["replica"]], prewarm["budget"]["paused"])
        if prewarm["budget"]["waste"] is not None:
            waste.add_metric([model, replica["replica"]], prewarm["budget"]["waste"])
    yield from (paused, waste)


def _counters(replicas: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Metric]:
    families = {
        prefix: CounterMetricFamily(name, text, labels=[*_LABELS, label])
        for prefix, (name, label, text) in _FAMILIES.items()
    }
    events = CounterMetricFamily("ropewalk_events", "Everything else that replicas count", labels=[*_LABELS, "event"])
    for model, replica in replicas:
        for counter, value in replica.get("counters", {}).items():
            prefix = next((prefix for prefix in families if counter.startswith(prefix)), "")
            labels = [model, replica["replica"], counter.removeprefix(prefix)]
            families.get(prefix, events).add_metric(labels, value)
    yield from (*families.values(), events)
