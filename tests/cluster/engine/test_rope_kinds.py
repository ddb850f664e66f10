"""Turned keys against keys that vLLM's own rotary modules compute at the target position, for every kind of RoPE.

No engine is started: vLLM builds the module as a model's class would (`get_rope`), and the config goes the way of the
engine's own.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.cluster.engine.rotary import rotary_modules
from ropewalk.kernels.rope import RotaryFacts, UnsupportedRope, facts_from_config, turn
from ropewalk.kernels.rope_table import confirm

HEAD = 64
LENGTH = 8192
NUM_KEYS = 16

THETA = {"rope_theta": 10_000.0}
ORIGINAL = {"original_max_position_embeddings": 2048}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, **ORIGINAL, **THETA}
SCALES = {"mscale": 0.707, "mscale_all_dim": 0.3}

# What the config says; MLA classes rename YaRN before they ask for the module, so that the fourth entry differs.
KINDS: dict[str, tuple[dict[str, Any], bool, bool, dict[str, Any]]] = {
    "default": ({"rope_type": "default", "rope_theta": 500_000.0}, False, False, {}),
    "linear": ({"rope_type": "linear", "factor": 4.0, **THETA}, False, False, {}),
    "llama3": ({"rope_type": "llama3", **LLAMA3, **ORIGINAL, "rope_theta": 5e5}, False, False, {}),
    "yarn": ({"rope_type": "yarn", **YARN}, False, False, {}),
    "yarn, sharp ramp": ({"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2}, False, False, {}),
    "partial": ({"rope_type": "default", "partial_rotary_factor": 0.5, **THETA}, False, False, {}),
    "partial llama3": (
        {"rope_type": "llama3", "partial_rotary_factor": 0.75, **LLAMA3, **ORIGINAL, **THETA},
        False,
        False,
        {},
    ),
    "neighbours": ({"rope_type": "default", **THETA}, False, True, {}),
    "neighbours, partial": ({"rope_type": "default", "partial_rotary_factor": 0.5, **THETA}, False, True, {}),
    "MLA default": ({"rope_type": "default", **THETA}, True, True, {}),
    "MLA yarn": ({"rope_type": "yarn", **YARN, **SCALES}, True, True, {"rope_type": "deepseek_yarn"}),
    "MLA yarn, factor 1": (
        {"rope_type": "yarn", **YARN, "factor": 1.0, "original_max_position_embeddings": LENGTH},
        True,
        True,
        {"rope_type": "deepseek_yarn"},
    ),
    "MLA llama scaling": (
        {"rope_type": "yarn", **YARN, "apply_yarn_scaling": False},
        True,
        True,
        {"rope_type": "deepseek_llama_scaling"},
    ),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module", autouse=True)
def vllm_settings():
    """Modules of vLLM ask which of its custom kernels are switched on, and LongRoPE's for the length of prompts."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=LENGTH)
    with set_current_vllm_config(config):
        yield


def hugging_face(rope: dict[str, Any], is_mla: bool) -> dict[str, Any]:
    config = {"hidden_size": 4 * HEAD, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    mla = {"kv_lora_rank": 512, "qk_rope_head_dim": HEAD} if is_mla else {}
    return config | mla | {"rope_parameters": dict(rope)}


def rotary_module(rope: dict[str, Any], interleaved: bool, dtype: torch.dtype) -> Any:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    return get_rope(HEAD, LENGTH, is_neox_style=not interleaved, rope_parameters=dict(rope), dtype=dtype)


def attention(module: Any) -> torch.nn.Module:
    """A model of one attention layer, named as vLLM's are."""
    model = torch.nn.Module()
    model.self_attn = torch.nn.Module()
    model.self_attn.rotary_emb = module
    return model


@cache
def facts_of(name: str, dtype: torch.dtype) -> tuple[Any, RotaryFacts]:
    """vLLM's module of this kind, and what an engine would turn its keys with."""
    rope, is_mla, interleaved, renamed = KINDS[name]
    module = rotary_module(rope | renamed, interleaved, dtype)
    found = rotary_modules(attention(module), ["self_attn.attn"])
    return module, confirm(facts_from_config(hugging_face(rope, is_mla)), found, 1)


def keys_at(module: Any, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`keys` `[n, HEAD]` as the module computes them at `positions` `[n]`: by its definition in PyTorch."""
    _, turned = module.forward_native(positions, keys.clone().unsqueeze(1), keys.clone().unsqueeze(1))
    return turned.squeeze(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_turned_keys_are_those_computed_at_the_target(name, dtype, data):
    module, facts = facts_of(name, DTYPES[dtype])
    source = data.draw(st.integers(0, LENGTH - 1))
    target = data.draw(st.integers(0, LENGTH - 1) | st.sampled_from([0, LENGTH - 1, source]))
    raw = torch.randn(NUM_KEYS, HEAD, generator=torch.Generator().manual_seed(source)).to(DTYPES[dtype])
    computed, truth = (keys_at(module, raw, torch.full((NUM_KEYS,), position)) for position in (source, target))
    found = turn(computed, target - source, facts)
    error = float((found.float() - truth.float()).norm() / truth.float().norm())
    # vLLM forms angles in float32: at position 8,191 the fastest pair is off by up to 5e-4 radians.
    assert error <= {"float32": 1e-3, "bfloat16": 1e-2}[dtype]
    assert torch.equal(found[:, facts.rotary_size :], raw[:, facts.rotary_size :])


@pytest.mark.parametrize("name", [name for name in KINDS if "partial" not in name])
def test_not_turning_is_wrong_by_far(name):
    """Without this, the tolerance above might forgive anything."""
    module, _ = facts_of(name, torch.float32)
    raw = torch.randn(NUM_KEYS, HEAD, generator=torch.Generator().manual_seed(0))
    near, far = (keys_at(module, raw, torch.full((NUM_KEYS,), position)) for position in (10, 4000))
    assert float((near - far).norm() / far.norm()) > 0.5


@pytest.mark.parametrize("name", ["yarn", "MLA yarn"])
def test_the_attention_scaling_stays_in_the_key(name):
    module, facts = facts_of(name, torch.float32)
    raw = torch.randn(NUM_KEYS, HEAD, generator=torch.Generator().manual_seed(1))
    scaled = keys_at(module, raw, torch.full((NUM_KEYS,), 7))
    assert abs(float(scaled.norm() / raw.norm()) - 1) > 0.01, "this kind scales nothing, so that nothing is tested"
    assert float(turn(scaled, 1000, facts).norm()) == pytest.approx(float(scaled.norm()), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 20_000.0},
        {"factor": 8.0},
        {"original_max_position_embeddings": 4096},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_a_config_that_says_something_else_is_refused_with_both_values(dtype, change):
    rope = {"rope_type": "yarn", **YARN}
    found = rotary_modules(attention(rotary_module(rope, False, DTYPES[dtype])), ["self_attn.attn"])
    with pytest.raises(UnsupportedRope, match=r"loaded model turns .* its configuration says"):
        confirm(facts_from_config(hugging_face(rope | change, False)), found, 1)


def test_layers_with_two_thetas_are_refused_by_name():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    for theta in (10_000.0, 1_000_000.0):
        module = rotary_module({"rope_type": "default", "rope_theta": theta}, False, torch.bfloat16)
        model.layers.append(attention(module))
    found = rotary_modules(model, ["layers.0.self_attn.attn", "layers.1.self_attn.attn"])
    with pytest.raises(
        UnsupportedRope, match=r"'layers\.0\.self_attn\.attn' and 'layers\.1\.self_attn\.attn' turn diff"
    ):
        confirm(facts_from_config(hugging_face({"rope_type": "default", **THETA}, False)), found, 2)


def test_layers_without_a_rotary_module_are_refused():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(
        [attention(rotary_module({"rope_type": "default", **THETA}, False, torch.float32))]
    )
    found = rotary_modules(model, ["layers.0.self_attn.attn", "layers.1.self_attn.attn"])
    with pytest.raises(UnsupportedRope, match="2 layers keep keys, but 1 of them"):
        confirm(facts_from_config(hugging_face({"rope_type": "default", **THETA}, False)), found, 2)


@pytest.mark.parametrize(
    ("rope", "kind"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, **THETA}, "DynamicNTKScalingRotaryEmbedding"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * (HEAD // 2),
                "long_factor": [2.0] * (HEAD // 2),
                **ORIGINAL,
                **THETA,
            },
            "Phi3LongRoPEScaledRotaryEmbedding",
        ),
        ({"rope_type": "default", "mrope_section": [8, 12, 12], **THETA}, "MRotaryEmbedding"),
        ({"rope_type": "proportional", **THETA}, "Gemma4RotaryEmbedding"),
    ],
)
def test_modules_whose_keys_cannot_be_turned_are_refused_by_name(rope, kind):
    """Even where the configuration were to say otherwise."""
    found = rotary_modules(attention(rotary_module(rope, False, torch.float32)), ["self_attn.attn"])
    with pytest.raises(UnsupportedRope, match=kind):
        confirm(facts_from_config(hugging_face({"rope_type": "default", **THETA}, False)), found, 1)
