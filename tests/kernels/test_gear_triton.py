"""The GPU's chunker, run by Triton's interpreter, against NumPy's: bit for bit; and compiled for real GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from ropewalk.kernels.gear import WINDOW, ChunkSizes, boundary_threshold, chunk_limits, gear_hash
from ropewalk.kernels.gear_triton import TILE, chunk_limits_on_gpu, gear_kernel, hash_on_gpu

INTERPRETED = InterpretedFunction(gear_kernel.fn)
OWN = TILE - WINDOW + 1  # tokens that one program hashes
EDGES = [0, 1, 62, 63, 64, 65, OWN - 1, OWN, OWN + 1, TILE - 1, TILE, TILE + 1, 2 * OWN, 2 * OWN + 1, 5 * OWN + 17]

SIZES = [
    ChunkSizes(),
    ChunkSizes(40, 8, 64),
    ChunkSizes(33, 32, 40),  # a threshold of 2**64 - 1, and the next of 2**63: negative as signed numbers
    ChunkSizes(34, 32, 40),
    ChunkSizes(4096, 1024, 16384),
    ChunkSizes(40, 8, 64, markers=(1, 2**31 - 1)),
]


@st.composite
def texts(draw: st.DrawFn) -> npt.NDArray[np.integer]:
    """Token ids of odd lengths, from the whole range of int32, sometimes from its ends alone."""
    length = draw(st.sampled_from(EDGES) | st.integers(0, 3 * TILE))
    low, high = draw(st.sampled_from([(0, 2**31), (0, 2), (2**31 - 2, 2**31), (0, 150_000)]))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    return rng.integers(low, high, length).astype(draw(st.sampled_from([np.int32, np.int64])))


@settings(deadline=None)
@given(tokens=texts(), sizes=st.sampled_from(SIZES))
def test_hashes_candidates_and_limits_are_those_of_numpy(tokens: npt.NDArray[np.integer], sizes: ChunkSizes) -> None:
    expected = gear_hash(tokens)
    hashes, is_candidate = hash_on_gpu(torch.from_numpy(tokens), sizes, INTERPRETED)
    assert np.array_equal(hashes.numpy().view(np.uint64), expected)
    assert np.array_equal(is_candidate.numpy(), expected < boundary_threshold(sizes))
    assert chunk_limits_on_gpu(torch.from_numpy(tokens), sizes, INTERPRETED) == chunk_limits(tokens, sizes)


@pytest.mark.parametrize("length", EDGES)
def test_no_edge_of_a_program_shows(length: int) -> None:
    tokens = np.random.default_rng(length).integers(0, 2**31, length).astype(np.int32)
    hashes, _ = hash_on_gpu(torch.from_numpy(tokens), ChunkSizes(), INTERPRETED)
    assert np.array_equal(hashes.numpy().view(np.uint64), gear_hash(tokens))


def test_token_ids_that_do_not_lie_side_by_side_are_read_in_order() -> None:
    tokens = torch.arange(400, dtype=torch.int32)[::2]
    hashes, _ = hash_on_gpu(tokens, ChunkSizes(), INTERPRETED)
    assert np.array_equal(hashes.numpy().view(np.uint64), gear_hash(tokens.numpy()))


@pytest.mark.parametrize("tokens", [torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3), torch.zeros(3).short()])
def test_other_shapes_and_dtypes_are_refused(tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="one dimension of int32 or int64"):
        hash_on_gpu(tokens, ChunkSizes(), INTERPRETED)


@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)])
@pytest.mark.parametrize("token_type", ["*i32", "*i64"])
def test_the_kernel_compiles_for_gpus_with_unsigned_arithmetic(target: tuple[str, Any, int], token_type: str) -> None:
    types = {"tokens": token_type, "hashes": "*i64", "is_candidate": "*i1", "num_tokens": "i32", "threshold": "i64"}
    constants = {"TILE": TILE, "HALO": WINDOW - 1, "STEPS": 6}
    source = ASTSource(gear_kernel, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget(*target))
    assert compiled.asm["hsaco" if target[0] == "hip" else "cubin"]
    assert "cmpi ult" in compiled.asm["ttir"]
    assert "shrui" in compiled.asm["ttir"]
    assert "shrsi" not in compiled.asm["ttir"]
