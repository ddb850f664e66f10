"""What is refused, by name, and what decides whether two engines share KV."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ropewalk.cluster.engine.facts import engine_facts

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def vllm_config(weights: Path, hf: dict[str, Any] = LLAMA, **changes: Any) -> Any:
    """What is read of a `VllmConfig`, with `changes` such as `cache_config__cache_dtype`."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(to_dict=lambda: dict(hf)),
            use_mla=False,
            runner_type="generate",
            is_encoder_decoder=False,
            is_hybrid=False,
            is_attention_free=False,
            get_sliding_window=lambda: None,
            dtype="bfloat16",
            quantization=None,
            model=str(weights),
            revision=None,
            max_model_len=2048,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        speculative_config=None,
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    return config


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 20_000)
    return tmp_path


def test_an_ordinary_model_is_not_refused(weights):
    facts = engine_facts(vllm_config(weights))
    assert (facts.refused, facts.reuse_refused) == (None, None)
    assert facts.rotary is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_config__is_hybrid": True}, "Mamba"),
        ({"model_config__is_encoder_decoder": True}, "cross-attention"),
        ({"model_config__get_sliding_window": lambda: 4096}, "sliding-window"),
        ({"model_config__runner_type": "pooling"}, "pooling"),
        ({"cache_config__cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        ({"speculative_config": object()}, "draft model"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"scheduler_config__async_scheduling": True}, "async_scheduling"),
    ],
)
def test_engines_whose_kv_cannot_be_stored_are_refused_by_name(weights, changes, reason):
    assert reason in engine_facts(vllm_config(weights, **changes)).refused


def test_layers_with_a_sliding_window_are_refused(weights):
    hf = LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}
    assert "sliding-window" in engine_facts(vllm_config(weights, hf)).refused


def test_keys_that_cannot_be_turned_leave_the_exact_domain(weights):
    hf = LLAMA | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    facts = engine_facts(vllm_config(weights, hf))
    assert facts.refused is None
    assert "dynamic" in facts.reuse_refused


def test_the_same_weights_in_another_folder_share_kv(weights, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy")
    (copy / "model.safetensors").write_bytes((weights / "model.safetensors").read_bytes())
    assert engine_facts(vllm_config(weights)).fingerprint == engine_facts(vllm_config(copy)).fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__dtype": "float32"},
        {"cache_config__cache_dtype": "float16"},
        {"model_config__quantization": "awq"},
        {"parallel_config__tensor_parallel_size": 2},
    ],
)
def test_engines_that_differ_in_what_decides_kv_do_not_share_it(weights, changes):
    other = engine_facts(vllm_config(weights, **changes))
    assert other.fingerprint != engine_facts(vllm_config(weights)).fingerprint


@pytest.mark.parametrize("position", [0, 65_536 * 30, -1])
def test_other_weights_do_not_share_kv(weights, position):
    before = engine_facts(vllm_config(weights)).fingerprint
    data = bytearray((weights / "model.safetensors").read_bytes())
    data[position] ^= 1
    (weights / "model.safetensors").write_bytes(data)
    assert engine_facts(vllm_config(weights)).fingerprint != before


@pytest.mark.parametrize("changes", [{"load_config__load_format": "dummy"}, {"model_config__use_mla": True}])
def test_what_else_decides_the_kv_changes_its_name(weights, changes):
    assert engine_facts(vllm_config(weights, **changes)).fingerprint != engine_facts(vllm_config(weights)).fingerprint


def test_the_longest_prompt_counts_where_frequencies_depend_on_it():
    def names(hf: dict[str, Any]) -> set[str]:
        lengths = (2048, 4096)
        return {engine_facts(vllm_config(Path("x"), hf, model_config__max_model_len=n)).fingerprint for n in lengths}

    assert len(names(LLAMA)) == 1
    assert len(names(LLAMA | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10_000.0}})) == 2
