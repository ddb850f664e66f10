"""The turn probe's judgment: it sees one wrong layer among right ones."""

import pytest
import torch

from ropewalk.cluster.engine.probe import PROBE_LENGTH, objection, turn_errors
from ropewalk.kernels.rope import RotaryFacts, turn

FACTS = RotaryFacts(tuple(10_000 ** (-pair / 8) for pair in range(8)), interleaved=False)
LAYERS, HEADS, HEAD = 3, 2, 24


def rows(facts_of_layers, dtype=torch.bfloat16):
    """`[L, n, H, 2 * HEAD]` of a repeated token; None: a layer whose keys carry no position."""
    generator = torch.Generator().manual_seed(4)
    layers = []
    for facts in facts_of_layers:
        key, value = torch.randn(2, 1, HEADS, HEAD, generator=generator)
        keys = [key if facts is None else turn(key, position, facts) for position in range(PROBE_LENGTH)]
        layers.append(torch.cat([torch.cat(keys), value.expand(PROBE_LENGTH, -1, -1)], dim=-1))
    return torch.stack(layers).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_right_keys_pass(dtype):
    errors = turn_errors(rows([FACTS] * LAYERS, dtype), FACTS, is_mla=False)
    assert len(errors) == LAYERS
    assert objection(errors, dtype) is None


@pytest.mark.parametrize(
    "wrong",
    [None, RotaryFacts(FACTS.inv_freq, interleaved=True), RotaryFacts(tuple(f / 2 for f in FACTS.inv_freq), False)],
)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_that_turns_otherwise_is_found_and_named(layer, wrong):
    facts = [FACTS] * LAYERS
    facts[layer] = wrong
    errors = turn_errors(rows(facts), FACTS, is_mla=False)
    assert f"layer {layer} differ" in (objection(errors, torch.bfloat16) or "")


def test_keys_that_are_no_numbers_do_not_pass():
    assert objection([float("nan")], torch.bfloat16) is not None
