"""Frequencies read back from rotary tables: whatever the dtype, the length and the magnitude."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.kernels.rope import RotaryFacts, UnsupportedRope
from ropewalk.kernels.rope_table import RotaryModule, confirm, largest_difference, read_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def table(inv_freq, num_positions, dtype=torch.float32, magnitude=1.0):
    angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * torch.tensor(inv_freq, dtype=torch.float64)
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * magnitude).to(dtype)


def module(inv_freq, layers, interleaved=False, num_positions=512, kind="RotaryEmbedding"):
    return RotaryModule(kind, tuple(layers), interleaved, read_table(table(inv_freq, num_positions)))


frequencies = st.lists(st.floats(1e-8, math.pi * 0.99), min_size=1, max_size=8)


@settings(deadline=None, max_examples=40)
@given(frequencies, st.integers(2, 5000), st.sampled_from(DTYPES), st.floats(0.5, 2.0))
def test_frequencies_are_found_within_the_uncertainty_reported(inv_freq, num_positions, dtype, magnitude):
    found = read_table(table(inv_freq, num_positions, dtype, magnitude))
    for read, truth, uncertainty in zip(found.inv_freq, inv_freq, found.uncertainty, strict=True):
        assert abs(read - truth) <= uncertainty


@settings(deadline=None, max_examples=40)
@given(st.floats(1e-6, 1.0), st.sampled_from(DTYPES))
def test_a_longer_table_tells_more(inv_freq, dtype):
    short, long = (read_table(table([inv_freq], length, dtype)).uncertainty[0] for length in (16, 4096))
    assert long < short / 100 + 4e-6 * inv_freq


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.integers(2, 4000), st.floats(0.01, 3.0))
def test_a_table_that_changes_its_frequencies_on_the_way_is_refused(pairs, change, shift):
    inv_freq = [1.0 / (1 + pair) for pair in range(pairs)]
    rows = table(inv_freq, 4096)
    rows[change:] = table([f + shift for f in inv_freq], 4096)[change:]
    with pytest.raises(UnsupportedRope, match="fixed frequencies"):
        read_table(rows)


def test_a_table_that_changes_its_magnitude_is_refused():
    rows = table([1.0, 0.1], 256)
    rows[128:] *= 1.5
    with pytest.raises(UnsupportedRope, match="magnitude"):
        read_table(rows)


@pytest.mark.parametrize("shape", [(8,), (1, 4), (8, 3), (8, 2, 4)])
def test_other_shapes_are_refused_by_name(shape):
    with pytest.raises(UnsupportedRope, match=str(shape[-1])):
        read_table(torch.ones(shape))


def test_the_models_pairing_and_the_configs_frequencies_are_taken():
    facts = RotaryFacts((1.0, 0.1), interleaved=False)
    found = module([1.0, 0.1], ["0", "1"], interleaved=True)
    assert confirm(facts, [found], 2) == replace(facts, interleaved=True)
    assert largest_difference(facts, found) < 1e-6


FACTS = RotaryFacts((1.0, 0.1), interleaved=False)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([], "no rotary module"),
        ([module([1.0, 0.1], ["0"])], "2 layers keep keys, but 1 of them"),
        ([module([1.0, 0.11], ["0", "1"])], r"pair 1 by 0\.1\d+ radians a position, its configuration says 0\.1 "),
        ([module([1.0, 0.1, 0.01], ["0", "1"])], "turns 6 numbers of a key, its configuration says 4"),
        ([module([1.0, 0.1], ["0"]), module([1.0, 0.1], ["1"], True)], "'0' and '1' turn differently: one pairs"),
        ([module([1.0, 0.1], ["0"]), module([1.0, 0.2], ["1"])], "pair 1 by 0.1[0-9]* and by 0.2"),
        ([module([1.0, 0.1], ["0"]), module([1.0], ["1"])], "4 and 2 numbers"),
        ([RotaryModule("MRotaryEmbedding", ("0", "1"), False, None, "not known")], "MRotaryEmbedding"),
    ],
)
def test_what_does_not_agree_is_refused_with_both_values(modules, message):
    with pytest.raises(UnsupportedRope, match=message):
        confirm(FACTS, modules, 2)


@settings(deadline=None, max_examples=12)
@given(st.sampled_from(DTYPES), st.integers(256, 8192))
def test_a_wrong_theta_is_told_from_the_right_one(dtype, num_positions):
    """YaRN and plain frequencies of one theta, or two thetas, differ by far more than any dtype hides."""
    right, wrong = ([theta ** (-pair / 32) for pair in range(32)] for theta in (10_000.0, 11_000.0))
    found = RotaryModule("RotaryEmbedding", ("0",), False, read_table(table(right, num_positions, dtype)))
    confirm(RotaryFacts(tuple(right), False), [found], 1)
    with pytest.raises(UnsupportedRope, match="its configuration says"):
        confirm(RotaryFacts(tuple(wrong), False), [found], 1)
