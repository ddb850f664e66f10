"""Rows leave and enter paged caches in one canonical order, whatever the packing inside a block."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.cluster.engine.layouts import StandardLayout, StoredRows, UnsupportedLayout, find_layout
from ropewalk.kernels.rope import RotaryFacts
from ropewalk.kernels.splice import turned

FACTS = RotaryFacts((1.0, 0.1, 0.01, 0.001), interleaved=False)
MLA_FACTS = RotaryFacts((1.0, 0.1), interleaved=True)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 23), min_size=1, max_size=24, unique=True), st.integers(-50, 50))
def test_what_is_scattered_is_gathered_turned_and_nothing_else_changes(slots, delta):
    caches = [random(6, 2, 4, 16, seed=layer) for layer in range(3)]
    before = torch.stack([cache.clone() for cache in caches])
    layout = StandardLayout(caches, 4, FACTS, is_mla=False)
    rows = random(3, len(slots), 2, 16, seed=9)
    layout.scatter([StoredRows(torch.tensor(slots), rows, delta)])
    assert torch.equal(layout.gather(torch.tensor(slots)), turned(rows, delta, FACTS, 0))
    untouched = torch.ones(24, dtype=torch.bool)
    untouched[slots] = False
    after = torch.stack(caches).permute(0, 1, 3, 2, 4).flatten(1, 2)
    assert torch.equal(after[:, untouched], before.permute(0, 1, 3, 2, 4).flatten(1, 2)[:, untouched])


def test_latent_caches_of_three_dimensions_are_known():
    layout = find_layout({"a": random(6, 4, 12), "b": random(6, 4, 12)}, {}, 4, MLA_FACTS, is_mla=True)
    rows = random(2, 3, 1, 12, seed=1)
    layout.scatter([StoredRows(torch.tensor([0, 5, 22]), rows, 7)])
    found = layout.gather(torch.tensor([0, 5, 22]))
    assert torch.equal(found, turned(rows, 7, MLA_FACTS, 8))
    assert torch.equal(found[..., :8], rows[..., :8])


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ({}, "no KV caches"),
        ({"a": torch.zeros(2, 6, 2, 4, 16)}, "not one tensor"),
        ({"a": torch.zeros(6, 1, 4, 12), "b": torch.zeros(6, 1, 4, 16)}, "differ in shape"),
        ({"a": torch.zeros(6, 1, 8, 12)}, "does not have 4 slots"),
    ],
)
def test_unknown_caches_are_refused_with_the_reason(caches, message):
    with pytest.raises(UnsupportedLayout, match=message):
        find_layout(caches, {}, 4, MLA_FACTS, is_mla=True)


def test_cpu_attention_of_another_backend_is_refused():
    with pytest.raises(UnsupportedLayout, match="CPU attention"):
        find_layout({"a": torch.zeros(6, 2, 4, 16)}, {"a": object()}, 4, FACTS, is_mla=False)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("isa", "block_size", "dtype"),
    [("vec", 32, torch.float32), ("vec16", 16, torch.float32), ("amx", 32, torch.bfloat16)],
)
def test_the_packing_of_vllms_cpu_attention_is_found_out(isa, block_size, dtype):
    """Needs vLLM's compiled kernels."""
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this machine has no AMX, whose packing is compared")
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    from ropewalk.cluster.engine.layouts import CpuAttentionLayout

    current_platform.import_kernels()
    facts = RotaryFacts(tuple(10_000 ** (-i / 32) for i in range(32)), interleaved=False)
    caches = [torch.zeros(5, 3, block_size, 128, dtype=dtype) for _ in range(2)]
    layout = CpuAttentionLayout(caches, isa, facts)
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(2))[:50]
    rows = random(2, 50, 3, 128).to(dtype)
    layout.scatter([StoredRows(slots, rows, 0)])
    assert torch.equal(layout.gather(slots), rows)
    for other in (rows[:, :, :2], rows[..., :64], rows[:1], rows[:, :49], rows.to(torch.float16)):
        with pytest.raises(ValueError, match=r"fit|49 rows for 50"):
            layout.scatter([StoredRows(slots, other, 0)])
    # As the engine's own writing of the same keys and values packs them:
    expected = torch.zeros(5, 3, 2 * block_size, 64, dtype=dtype)
    keys, values = rows[1, ..., :64].contiguous(), rows[1, ..., 64:].contiguous()
    ops.cpu_attn_reshape_and_cache(keys, values, *expected.chunk(2, dim=2), slots, isa)
    assert torch.equal(caches[1].view_as(expected), expected)
