"""The settings of a cluster: what is accepted, and how a mistake is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.cluster.config import ConfigError, load_config, parse_config, parse_size, resolve_sources
from ropewalk.cluster.serve.shares import cpus_per_replica


def config_of(**model: Any) -> dict[str, Any]:
    return {"models": [{"source": "smollm2-135m", **model}]}


def problem_of(values: object) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config(values, "serve.yaml")
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_defaults_listen_on_loopback_only() -> None:
    config = parse_config(config_of(), "serve.yaml")
    assert (config.http.host, config.http.port) == ("127.0.0.1", 8000)
    assert config.models[0].replicas == 1
    assert config.models[0].reuse == "exact"


def test_a_model_is_called_like_the_end_of_its_source() -> None:
    config = parse_config({"models": [{"source": "org/Some-Model"}]}, "serve.yaml")
    assert config.models[0].name == "Some-Model"


@pytest.mark.parametrize(
    ("values", "field", "shown"),
    [
        (config_of(replicas=0), "models[0].replicas", "got 0"),
        (config_of(reuse="yes"), "models[0].reuse", "'exact' or 'reuse'"),
        (config_of(kv_cache_gib=-1), "models[0].kv_cache_gib", "got -1"),
        (config_of(dtype="int4"), "models[0].dtype", "int4"),
        (config_of(speed=3), "models[0].speed", "no such setting"),
        ({**config_of(), "hosts": 1}, "hosts", "no such setting"),
        ({**config_of(), "http": {"port": 70000}}, "http.port", "got 70000"),
        ({**config_of(), "store": {"budget": "much"}}, "store.budget", "2GiB"),
        ({"models": []}, "models", "at least 1"),
        ({"models": [{"name": "a"}]}, "models[0].source", "required"),
        (config_of(chunking={"mean": 100}), "models[0].chunking", "power of two"),
        (config_of(chunking={"minimum": 256}), "models[0].chunking", "minimum <= mean <= maximum"),
        (config_of(engine_args={"kv_transfer_config": {}}), "models[0].engine_args", "plain: true"),
        (config_of(engine_args={"max_model_len": 5}), "models[0].engine_args", "max_model_len"),
        ({**config_of(), "prewarm": {"r_min": 1.5}}, "prewarm.r_min", "got 1.5"),
        ({**config_of(), "prewarm": {"idle_s": 0}}, "prewarm.idle_s", "got 0"),
        ({**config_of(), "prewarm": {"min_interval_s": -2}}, "prewarm.min_interval_s", "got -2"),
        ({**config_of(), "prewarm": {"max_waste": 0}}, "prewarm.max_waste", "got 0"),
        ({**config_of(), "prewarm": {"min_handovers": 0}}, "prewarm.min_handovers", "got 0"),
        ({**config_of(), "prewarm": {"window_s": 0.5}}, "prewarm.window_s", "got 0.5"),
        ({**config_of(), "prewarm": {"r": 1}}, "prewarm.r", "no such setting"),
    ],
)
def test_a_mistake_names_the_field_and_what_would_be_right(values: object, field: str, shown: str) -> None:
    message = problem_of(values)
    assert message.startswith(f"serve.yaml: {field}:")
    assert shown in message


def test_two_models_may_not_have_one_name() -> None:
    twice = {"models": [{"source": "smollm2-135m"}, {"source": "smollm2-135m"}]}
    assert "two models are called 'smollm2-135m'" in problem_of(twice)
    alike = [{"source": "smollm2-135m", "name": name} for name in ("a.b", "a_b")]
    assert "two models are called 'a.b' (or alike)" in problem_of({"models": alike})


def test_a_name_with_a_colon_is_refused() -> None:
    """Ray Serve LLM would take what follows it for a LoRA adapter of the model before it."""
    assert "models[0].name" in problem_of({"models": [{"source": "smollm2-135m", "name": "llama:8b"}]})


def test_the_installed_build_decides_between_cpus_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_config(config_of(), "x").models[0].gpus_per_replica == 0
    monkeypatch.setattr("ropewalk.cluster.config.is_cpu_build", lambda: False)
    assert parse_config(config_of(), "x").models[0].gpus_per_replica == 1
    assert "0 needs the CPU build" in problem_of({"models": [{"source": "smollm2-135m", "gpus_per_replica": 0}]})


@pytest.mark.parametrize(
    ("nodes", "model", "expected"),
    [
        ([8], {}, 4),
        ([16, 64], {}, 16),  # one on each node; both get what the smaller one has
        ([2], {"cpus_per_replica": 3}, 3),
        ([64], {"gpus_per_replica": 1}, 1),
        ([1], {}, 1),
    ],
)
def test_replicas_share_the_cpus_of_their_nodes(nodes: list[int], model: dict[str, Any], expected: int) -> None:
    config = parse_config({"models": [{"source": "smollm2-135m", "replicas": 2, **model}]}, "x")
    assert cpus_per_replica(config, config.models[0], nodes) == expected


def test_settings_that_are_no_mapping_are_refused() -> None:
    assert "expected settings" in problem_of(["models"])


def test_several_mistakes_are_reported_together() -> None:
    message = problem_of({**config_of(replicas=0), "http": {"port": 0}})
    assert "models[0].replicas" in message
    assert "http.port" in message


def test_a_file_that_is_not_there_or_not_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot read it"):
        load_config(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("models: [")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(broken)


def test_a_source_path_that_does_not_exist_is_reported_with_its_field(tmp_path: Path) -> None:
    config = parse_config({"models": [{"source": str(tmp_path / "absent")}]}, "serve.yaml")
    with pytest.raises(ConfigError, match=r"models\[0\]\.source: .*absent"):
        resolve_sources(config)


def test_a_store_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "this is a file" in problem_of({**config_of(), "store": {"root": str(file)}})


def test_a_disk_tier_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    def problem(**store: str) -> str:
        return problem_of({**config_of(), "store": store})

    (tmp_path / "file").touch()
    assert "disk_budget needs a disk_root" in problem(disk_budget="1GiB")
    assert "this is a file" in problem(disk_root=str(tmp_path / "file"))
    for inner in ("", "disk"):
        assert "must lie apart" in problem(root=str(tmp_path), disk_root=str(tmp_path / inner))
    apart = {"root": str(tmp_path / "a"), "disk_root": str(tmp_path / "b"), "disk_budget": "2GiB"}
    assert parse_config({**config_of(), "store": apart}, "x").store.disk_budget == 2 << 30


def test_the_example_settings_in_the_repository_are_valid() -> None:
    config = load_config(Path(__file__).parents[2] / "serve.yaml")
    assert config.models


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("7", 7), ("2g", 2_000_000_000)]
)
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ValueError:
        return
    assert isinstance(size, int)
    assert size >= 0


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
NAMES = st.sampled_from(["models", "http", "source", "store", "port", "x"])
VALUES = SCALARS | st.lists(SCALARS | st.dictionaries(NAMES, SCALARS, max_size=3), max_size=2)


@given(SCALARS | st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, SCALARS, max_size=3)))
def test_any_settings_are_accepted_or_refused_with_one_line(values: Any) -> None:
    problem = ""
    try:
        parse_config(values, "serve.yaml")
    except ConfigError as error:
        problem = str(error)
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"router": "prefix-affinity", "router_args": {"threshold": 4}}, "threshold"),
        ({"router": "prefix-affinity", "router_args": {"match_rate_threshold": 2}}, "match_rate_threshold"),
        ({"router_args": {"imbalanced_threshold": 4}}, "router_args"),
        ({"router": "nobody"}, "router"),
    ],
)
def test_arguments_that_a_router_would_choke_on_are_refused_before_anything_starts(fields, said):
    with pytest.raises(ConfigError, match=said):
        parse_config({"models": [{"source": "recall-mla", **fields}]}, "test")


def test_arguments_of_rays_router_are_those_that_it_takes():
    from inspect import signature

    from ray.serve.llm.request_router import PrefixCacheAffinityRouter

    from ropewalk.cluster.config import PrefixAffinityConfig

    taken = set(signature(PrefixCacheAffinityRouter.initialize_state).parameters) - {"self", "tree_actor"}
    assert set(PrefixAffinityConfig.model_fields) == taken
