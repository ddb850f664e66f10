"""`ropewalk.kernels.gear` in Triton: hashes and boundary candidates of token ids on a GPU, equal bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ropewalk.kernels.gear import WINDOW, ChunkSizes, boundary_threshold, choose_limits

TILE = 1024
"""Tokens that a program looks at; the first 63 are another program's, repeated: 6 % of the work is done twice."""


@triton.jit
def gear_kernel(
    tokens, hashes, is_candidate, num_tokens, threshold, TILE: tl.constexpr, HALO: tl.constexpr, STEPS: tl.constexpr
):
    """Program `i` hashes `TILE - HALO` tokens, behind the `HALO` ones that their windows reach back to.

    All arithmetic is unsigned and wraps. `hashes` is int64 and gets the bits of the unsigned numbers.
    """
    lane = tl.arange(0, TILE)
    position = tl.program_id(0).to(tl.int64) * (TILE - HALO) - HALO + lane
    inside = (position >= 0) & (position < num_tokens)
    # `token_weights`: splitmix64. Before the text begins there is nothing to add.
    x = tl.load(tokens + position, mask=inside, other=0).to(tl.uint64) + 1
    x *= 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x ^= x >> 31
    sums = tl.where(inside, x, 0)
    for step in tl.static_range(STEPS):
        # S_2w[i] = S_w[i] + (S_w[i - w] << w)
        before = tl.gather(sums, tl.maximum(lane - (1 << step), 0), 0)
        sums += tl.where(lane >= (1 << step), before << (1 << step), 0)
    is_own = inside & (lane >= HALO)
    tl.store(hashes + position, sums.to(tl.int64, bitcast=True), mask=is_own)
    tl.store(is_candidate + position, sums < threshold.to(tl.uint64), mask=is_own)


def hash_on_gpu(
    tokens: torch.Tensor, sizes: ChunkSizes, kernel: Any = gear_kernel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hash `tokens`, `[T]` int32 or int64, where they lie.

    Returns the rolling hash after each token, `[T]` int64 that holds the bits of `gear_hash`, and whether a chunk of
    these sizes may end there, `[T]` bool. `kernel` is for tests, which run it in Triton's interpreter. Raises
    `ValueError` for other dtypes and shapes.
    """
    if tokens.dim() != 1 or tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token ids must be one dimension of int32 or int64, not {tokens.dtype} {tuple(tokens.shape)}")
    hashes = torch.empty(len(tokens), dtype=torch.int64, device=tokens.device)
    is_candidate = torch.empty(len(tokens), dtype=torch.bool, device=tokens.device)
    if len(tokens):
        halo = WINDOW - 1
        kernel[(triton.cdiv(len(tokens), TILE - halo),)](
            tokens.contiguous(),
            hashes,
            is_candidate,
            len(tokens),
            int(boundary_threshold(sizes)),
            TILE=TILE,
            HALO=halo,
            STEPS=WINDOW.bit_length() - 1,
        )
    return hashes, is_candidate


def chunk_limits_on_gpu(tokens: torch.Tensor, sizes: ChunkSizes, kernel: Any = gear_kernel) -> list[int]:
    """Return what `chunk_limits` returns, for `tokens` on a GPU.

    Arguments and errors as `hash_on_gpu`. Limits are chosen on the host, since each depends on the one before: the
    places of the candidates come back there, about one in a hundred tokens.
    """
    _, is_candidate = hash_on_gpu(tokens, sizes, kernel)
    ends = set((torch.nonzero(is_candidate).flatten() + 1).tolist())
    if sizes.markers:
        markers = torch.tensor(sizes.markers, device=tokens.device)
        ends.update(torch.nonzero(torch.isin(tokens, markers)).flatten().tolist())
    return choose_limits(sorted(ends), len(tokens), sizes)
