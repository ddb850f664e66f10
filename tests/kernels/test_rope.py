"""Turning keys: against rotation in float64, and frequencies against the reference implementations in transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.kernels.rope import RotaryFacts, UnsupportedRope, facts_from_config, turn

turns = st.integers(-100_000, 100_000)


def rotate_by_definition(keys: torch.Tensor, position: int, facts: RotaryFacts) -> torch.Tensor:
    """Multiply each pair, as a complex number, by `exp(i * position * frequency)`, in float64."""
    size = facts.rotary_size
    rotary = keys[..., :size].double()
    pairs = rotary.unflatten(-1, (size // 2, 2)) if facts.interleaved else rotary.unflatten(-1, (2, size // 2)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones(size // 2, dtype=torch.float64), position * torch.tensor(facts.inv_freq, dtype=torch.float64)
    )
    pairs = torch.view_as_real(turned)
    rotary = pairs.flatten(-2) if facts.interleaved else pairs.mT.flatten(-2)
    return torch.cat([rotary, keys[..., size:].double()], dim=-1)


@st.composite
def keys_and_facts(draw):
    pairs = draw(st.integers(1, 33))
    width = 2 * pairs + draw(st.integers(0, 5))
    shape = (*draw(st.lists(st.integers(1, 4), max_size=3)), width)
    keys = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return keys, RotaryFacts(tuple(10_000 ** (-i / pairs) for i in range(pairs)), draw(st.booleans()))


@settings(deadline=None)
@given(keys_and_facts(), turns)
def test_turning_equals_rotation_in_float64(case, delta):
    keys, facts = case
    torch.testing.assert_close(
        turn(keys, delta, facts).double(), rotate_by_definition(keys, delta, facts), atol=1e-5, rtol=1e-5
    )


@settings(deadline=None)
@given(keys_and_facts(), turns, turns)
def test_turns_add_up(case, first, second):
    keys, facts = case
    torch.testing.assert_close(
        turn(turn(keys, first, facts), second, facts), turn(keys, first + second, facts), atol=1e-4, rtol=1e-4
    )


def test_a_turn_by_zero_changes_nothing():
    keys = torch.randn(3, 8).to(torch.bfloat16)
    assert torch.equal(turn(keys, 0, RotaryFacts((1.0, 0.1, 0.01, 0.001), True)), keys)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_hundred_edits_turned_once_cost_one_rounding(interleaved):
    """Leyline reports 4.7e-3 relative L2 for one rotation in bf16, 2.6e-2 for a hundred chained ones.

    Rotations add up, so a key is turned once, by the sum. Chained turns lose the small angles to rounding each time.
    """
    facts = RotaryFacts(tuple(10_000 ** (-i / 32) for i in range(32)), interleaved)
    keys = torch.randn(512, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)

    def error(turned: torch.Tensor, delta: int) -> float:
        truth = rotate_by_definition(keys, delta, facts)
        return float((turned.double() - truth).norm() / truth.norm())

    assert error(turn(keys, -777, facts), -777) <= 4.7e-3
    chained = keys
    for _ in range(100):
        chained = turn(chained, 13, facts)
    assert error(turn(keys, 1300, facts), 1300) <= 4.7e-3 < error(chained, 1300)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096},
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_those_of_transformers(name):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=131_072, rope_parameters=dict(ROPES[name])
    )
    facts = facts_from_config(config.to_dict())
    kind = ROPES[name]["rope_type"]
    if kind == "default":
        size = int(64 * ROPES[name].get("partial_rotary_factor", 1.0))
        expected = ROPES[name]["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(facts.inv_freq), expected.float(), rtol=1e-5, atol=1e-9)
    assert not facts.interleaved


def test_mla_models_turn_the_band_and_interleave():
    facts = facts_from_config({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_theta": 10_000.0})
    assert (facts.rotary_size, facts.interleaved) == (64, True)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}, "longrope"),
        ({"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}, "M-RoPE"),
        ({"rope_type": "spiral", "rope_theta": 1e4}, "'spiral' is not known"),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, "layer type"),
        ({}, "no rotary"),
    ],
)
def test_encodings_that_cannot_be_turned_are_refused_by_name(rope, message):
    config = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 4096, "rope_parameters": rope}
    with pytest.raises(UnsupportedRope, match=message):
        facts_from_config(config)
