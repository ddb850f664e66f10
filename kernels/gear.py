"""Content-defined chunk limits: a Gear rolling hash over token ids (Irminsul, section "CDC").

The hash is `h = (h << 1) + G[token] mod 2**64`. One bit is shifted out per token, so `h` after token `i` depends on the
last 64 tokens only. That makes it a sum of 64 shifted terms, which doubling builds in six vector steps:
`S_2w[i] = S_w[i] + (S_w[i - w] << w)`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WINDOW = 64
"""Tokens that one hash value depends on: the width of the 64-bit hash, since it shifts by one bit a token."""


ANCHOR_WINDOW, ANCHOR_SPACING = 16, 32
"""Tokens that an anchor depends on, and mean distance of anchors in tokens."""

BLOCK = 16_384
"""Tokens hashed at a time: the two 128-KiB arrays of a block stay in a core's L2 cache through all steps."""


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """Lengths of chunks in tokens. Irminsul's defaults: mean 128, minimum 32, maximum 512.

    A chunk also ends before each of the token ids `markers` (Irminsul, S2): where an assembler puts them around shared
    regions, or a chat template around messages, those begin with a chunk wherever they stand.
    """

    mean: int = 128
    minimum: int = 32
    maximum: int = 512
    markers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.minimum < self.mean < self.maximum:
            raise ValueError(
                f"chunk sizes must satisfy 1 <= minimum < mean < maximum, "
                f"not minimum={self.minimum!r}, mean={self.mean!r}, maximum={self.maximum!r}"
            )


def token_weights(tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Return `G[token]`: a fixed pseudo-random 64-bit number for each token id, `[T]` (splitmix64, so no table)."""
    x = tokens.astype(np.uint64)
    shifted = np.empty_like(x)
    x += np.uint64(1)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x ^= np.right_shift(x, np.uint64(30), out=shifted)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= np.right_shift(x, np.uint64(27), out=shifted)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    return x


def gear_hash(tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Return the rolling hash after each token, `[T]` uint64. `tokens` is `[T]` of any integer type."""
    return np.concatenate([np.empty(0, np.uint64), *(sums.copy() for _, sums in _hash_blocks(tokens))])


def _hash_blocks(tokens: npt.NDArray[np.integer]) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """Yield `(start, hashes from there on)` block by block; an array is valid until the next one is asked for."""
    scratch = np.empty(min(BLOCK + WINDOW, len(tokens)), dtype=np.uint64)
    for start in range(0, len(tokens), BLOCK):
        # The window of a block's first token reaches back into the block before.
        halo = min(start, WINDOW - 1)
        sums = token_weights(tokens[start - halo : start + BLOCK])
        width = 1
        while width < WINDOW:
            shifted = np.left_shift(sums[:-width], np.uint64(width), out=scratch[: max(len(sums) - width, 0)])
            sums[width:] += shifted
            width *= 2
        yield start, sums[halo:]


def chunk_limits(tokens: npt.NDArray[np.integer], sizes: ChunkSizes) -> list[int]:
    """Return the ends of the content-defined chunks of `tokens`, ascending, the last one being `len(tokens)`.

    A chunk ends after a token whose hash falls below a threshold, tested on the high bits (the low bits depend on few
    tokens), and before a marker, but never before `sizes.minimum` and never after `sizes.maximum` tokens. Only the last
    chunk may be shorter than the minimum.
    """
    threshold = boundary_threshold(sizes)
    candidates: list[int] = []
    for start, sums in _hash_blocks(tokens):
        candidates += (np.flatnonzero(sums < threshold) + (start + 1)).tolist()
    if sizes.markers:
        candidates = sorted({*candidates, *np.flatnonzero(np.isin(tokens, sizes.markers)).tolist()})
    return choose_limits(candidates, len(tokens), sizes)


def anchors(tokens: npt.NDArray[np.integer]) -> list[int]:
    """Return where, inside a chunk or a prompt, a second look-up may begin: ascending, about every 32 tokens.

    The low bits of the hash depend on few tokens, so that an anchor survives any edit that is not within 16 tokens.
    """
    found: list[int] = []
    for start, sums in _hash_blocks(tokens):
        is_anchor = (sums & np.uint64((1 << ANCHOR_WINDOW) - 1)) < np.uint64((1 << ANCHOR_WINDOW) // ANCHOR_SPACING)
        found += (np.flatnonzero(is_anchor) + (start + 1)).tolist()
    return found[bisect_left(found, ANCHOR_WINDOW) :]


def boundary_threshold(sizes: ChunkSizes) -> np.uint64:
    """Return the value below which a hash ends a chunk.

    Behind the minimum, candidates arrive with probability `1 / (mean - minimum)`: the mean length is then `mean`.
    """
    return np.uint64(min((1 << 64) // (sizes.mean - sizes.minimum), (1 << 64) - 1))


def choose_limits(candidates: list[int], num_tokens: int, sizes: ChunkSizes) -> list[int]:
    """Choose the ends of chunks among the places where a hash would end one, ascending (see `chunk_limits`)."""
    limits: list[int] = []
    start = index = 0
    while num_tokens - start > sizes.minimum:
        index = bisect_left(candidates, start + sizes.minimum, index)
        end = start + sizes.maximum
        if index < len(candidates) and candidates[index] < end:
            end = candidates[index]
        if end >= num_tokens:
            break
        limits.append(end)
        start = end
    if num_tokens:
        limits.append(num_tokens)
    return limits
