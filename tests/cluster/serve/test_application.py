"""What engines are started with."""

from typing import Any

import pytest

from ropewalk.cluster.config import parse_config
from ropewalk.cluster.serve.application import CPU_KV_CACHE_GIB, engine_kwargs, prewarm_settings
from ropewalk.scheduler.prewarm import PrewarmSettings


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, int(CPU_KV_CACHE_GIB * 2**30)),
        ({"kv_cache_gib": 0.5}, 2**29),
        ({"engine_args": {"gpu_memory_utilization": 0.5}}, None),
        ({"gpus_per_replica": 1}, None),
    ],
)
def test_a_replica_on_cpus_does_not_ask_for_the_whole_machine(fields: dict[str, Any], expected: int | None):
    model = {"source": "recall-mla", "gpus_per_replica": 0} | fields
    (parsed,) = parse_config({"models": [model]}, "test").models
    assert engine_kwargs(parsed, None).get("kv_cache_memory_bytes") == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"prewarm": {"enabled": True}}, PrewarmSettings()),
        ({"prewarm": {"enabled": True, "r_min": 0.5, "window_s": 20}}, PrewarmSettings(r_min=0.5, window_s=20)),
    ],
)
def test_nothing_is_prewarmed_without_the_setting(fields: dict[str, Any], expected: PrewarmSettings | None):
    config = parse_config({"models": [{"source": "recall-mla"}], **fields}, "test")
    assert prewarm_settings(config) == expected
