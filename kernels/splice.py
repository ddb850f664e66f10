"""Moves rows of tokens between chunks and paged KV and turns their keys on the way, in one pass over the memory.

`move` takes rows from any number of sources (chunk files, another part of the paged cache) to any slots, each token by
its own number of positions. It dispatches to Triton on GPUs (`splice_triton`) and to compiled loops on CPUs
(`splice_cpu`); `move_reference` is the same in plain torch, for dtypes that the others do not know and for tests.

Legend: `L` layers, `n` tokens, `H` heads, `C` numbers a head and token, `R` rotary size.

    C:  |   latent, copied   | band, turned |          MLA: band_start = C - R
    C:  | band, turned | rest of K and V, copied |     others: band_start = 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ropewalk.kernels.rope import RotaryFacts


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where `n` tokens' rows lie: row `[l, i, h]` is `C` numbers at element `offsets[i] + h * head_stride` of
    `layers[l]`, counted from its first element.

    `offsets` is `[n]` int64, on the CPU or where the layers are. All layers have one dtype and one device.
    """

    layers: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    head_stride: int
    num_heads: int
    width: int

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].dtype


def dense_rows(rows: torch.Tensor) -> Rows:
    """View a tensor `[L, n, H, C]`, contiguous in its last dimension, as rows."""
    if rows.stride(3) != 1:
        raise ValueError(f"rows must be contiguous in their last dimension, but its stride is {rows.stride(3)}")
    offsets = torch.arange(rows.shape[1], dtype=torch.int64) * rows.stride(1)
    return Rows(rows.unbind(0), offsets, rows.stride(2), rows.shape[2], rows.shape[3])


def paged_rows(caches: Sequence[torch.Tensor], slots: torch.Tensor) -> Rows:
    """View slots (`[n]` int64, `block * B + offset`) of paged caches as rows.

    `caches` holds one `[N, H, B, C]` a layer (`N` blocks of `B` slots), alike in shape, strides and dtype. Raises
    `ValueError` when they are not.
    """
    first = caches[0]
    for cache in caches:
        if (cache.shape[1:], cache.stride(), cache.dtype) != (first.shape[1:], first.stride(), first.dtype):
            raise ValueError("layers' KV caches differ in shape, strides or dtype")
    if first.stride(3) != 1:
        raise ValueError(f"KV caches must be contiguous in their last dimension, but its stride is {first.stride(3)}")
    size = first.shape[2]
    blocks = slots.div(size, rounding_mode="floor")
    offsets = blocks * first.stride(0) + (slots - blocks * size) * first.stride(2)
    return Rows(tuple(caches), offsets, first.stride(1), first.shape[1], first.shape[3])


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """How keys turn on the way: token `i` by `deltas[i]` positions, `[n]` int64, in the band that begins at `start`."""

    deltas: torch.Tensor
    facts: RotaryFacts
    start: int

    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return cosines and sines, `[D, R / 2]` float32 for `D` distinct turns, and the tokens' lines, `[n]` int32.

        Angles are formed in float64: in float32 a turn by a million positions would be off by several hundredths.
        """
        distinct, lines = torch.unique(self.deltas.cpu(), return_inverse=True)
        angles = distinct.double()[:, None] * torch.tensor(self.facts.inv_freq, dtype=torch.float64)
        return angles.cos().float(), angles.sin().float(), lines.int()


def move(sources: Sequence[Rows], target: Rows, turns: Turns | None = None, *, max_threads: int | None = None) -> None:
    """Copy the sources' rows, one source after the other, to `target`, keys turned. Mutates the target's layers.

    On CPUs, `max_threads` bounds the threads that share the work; None: as many as torch has.
    Sources and target have the same layers, heads, width and dtype, and do not overlap. Raises `ValueError` when their
    numbers do not fit together.
    """
    _check(sources, target, turns)
    if len(target) == 0:
        return
    if target.device.type == "cuda":
        from ropewalk.kernels.splice_triton import move_on_gpu

        move_on_gpu(sources, target, turns)
        return
    if target.device.type == "cpu" and target.dtype in (torch.bfloat16, torch.float16, torch.float32):
        from ropewalk.kernels.splice_cpu import move_on_cpu

        move_on_cpu(sources, target, turns, max_threads)
        return
    move_reference(sources, target, turns)


def turned(rows: torch.Tensor, delta: int, facts: RotaryFacts, start: int) -> torch.Tensor:
    """Return rows `[L, n, H, C]` with the band that begins at `start` turned by `delta` positions."""
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    turns = Turns(torch.full((rows.shape[1],), delta, dtype=torch.int64), facts, start)
    move([dense_rows(rows)], dense_rows(out), turns)
    return out


def move_reference(sources: Sequence[Rows], target: Rows, turns: Turns | None = None) -> None:
    """`move` in plain torch, any device and dtype, arithmetic in float32."""
    columns = torch.arange(target.width, device=target.device)
    heads = torch.arange(target.num_heads, device=target.device)[:, None] * target.head_stride + columns
    cos = sin = lines = None
    if turns is not None:
        cos, sin, lines = (part.to(target.device) for part in turns.table())
    begin = 0
    for source in sources:
        end = begin + len(source)
        taken = source.offsets.to(source.device)[:, None, None] + (
            torch.arange(source.num_heads, device=source.device)[:, None] * source.head_stride
            + torch.arange(source.width, device=source.device)
        )
        given = target.offsets[begin:end].to(target.device)[:, None, None] + heads
        for from_layer, to_layer in zip(source.layers, target.layers, strict=True):
            rows = _flat(from_layer)[taken].to(target.device)
            if turns is not None:
                assert cos is not None
                assert sin is not None
                assert lines is not None
                line = lines[begin:end].long()
                _turn_band(rows, cos[line][:, None], sin[line][:, None], turns)
            _flat(to_layer)[given] = rows
        begin = end


def _turn_band(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turns: Turns) -> None:
    size = turns.facts.rotary_size
    band = rows[..., turns.start : turns.start + size]
    if turns.facts.interleaved:
        first, second = band[..., 0::2], band[..., 1::2]
    else:
        first, second = band[..., : size // 2], band[..., size // 2 :]
    x, y = first.to(torch.float32, copy=True), second.to(torch.float32, copy=True)
    first.copy_(x * cos - y * sin)
    second.copy_(y * cos + x * sin)


def _flat(layer: torch.Tensor) -> torch.Tensor:
    """All memory from a tensor's first element on, as one dimension."""
    length = layer.untyped_storage().nbytes() // layer.element_size() - layer.storage_offset()
    return layer.as_strided((max(length, 0),), (1,))


def _check(sources: Sequence[Rows], target: Rows, turns: Turns | None) -> None:
    for source in sources:
        if (len(source.layers), source.num_heads, source.width) != (
            len(target.layers),
            target.num_heads,
            target.width,
        ):
            raise ValueError(
                f"rows of {len(source.layers)} layers, {source.num_heads} heads and {source.width} numbers do not fit "
                f"a target of {len(target.layers)}, {target.num_heads} and {target.width}"
            )
        if source.dtype != target.dtype:
            raise ValueError(f"rows are {source.dtype}, the target is {target.dtype}")
    num_rows = sum(map(len, sources))
    if num_rows != len(target):
        raise ValueError(f"{num_rows} rows for {len(target)} slots")
    if turns is not None:
        if len(turns.deltas) != num_rows:
            raise ValueError(f"{len(turns.deltas)} turns for {num_rows} rows")
        if turns.start < 0 or turns.start + turns.facts.rotary_size > target.width:
            raise ValueError(
                f"a band of {turns.facts.rotary_size} numbers at {turns.start} lies outside rows of {target.width}"
            )
