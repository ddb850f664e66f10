"""`ropewalk.kernels.splice.move` as compiled loops for CPUs: each row is read once and written once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

if TYPE_CHECKING:
    from ropewalk.kernels.splice import Rows, Turns

Array = npt.NDArray[Any]

DTYPES = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}
"""What stands for torch's types in compiled code."""

BYTES_A_THREAD = 4 << 20
"""Least amount worth a second thread: below it, handing over takes as long as moving."""


@intrinsic
def _bits_as_float(context: Any, bits: Any) -> Any:
    """Reinterpret a uint32 as a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@intrinsic
def _float_as_bits(context: Any, number: Any) -> Any:
    """Reinterpret a float32 as a uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


@intrinsic
def _half_as_float(context: Any, bits: Any) -> Any:
    """The float16 of 16 bits as a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _float_as_half(context: Any, number: Any) -> Any:
    """A float32, rounded to nearest even, as the 16 bits of a float16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate


@intrinsic
def _pointer(context: Any, address: Any, like: Any) -> Any:
    """The address as a pointer to numbers of the dtype of the array `like`."""
    pointer = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.int64, like), generate


def _load(stored):
    """A stored number as float32. NumPy and Numba know neither bfloat16 nor how to compute with float16: they come as
    uint16 and int16. A bfloat16 is the upper half of a float32.
    """
    raise NotImplementedError("compiled code only")


@overload(_load)
def _load_compiled(stored):
    if stored == types.uint16:
        return lambda stored: _bits_as_float(np.uint32(stored) << np.uint32(16))
    if stored == types.int16:
        return lambda stored: _half_as_float(stored)
    return lambda stored: stored


@numba.njit(nogil=True, error_model="numpy")
def _rounded_bits(number):
    """The bits of a float32; the upper half is the bfloat16 that is nearest, to even."""
    bits = _float_as_bits(np.float32(number))
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return rounded if number == number else np.uint32(0x7FC00000)


def _store(number, like):
    """A float32 in the dtype of the array `like`, rounded to nearest even."""
    raise NotImplementedError("compiled code only")


@overload(_store)
def _store_compiled(number, like):
    if like.dtype == types.int16:
        return lambda number, like: _float_as_half(np.float32(number))
    if like.dtype != types.uint16:
        return lambda number, like: number

    return lambda number, like: np.uint16(_rounded_bits(number) >> np.uint32(16))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _turn_words(words, out, cosines, sines):
    """Turn pairs of neighbours in bfloat16, each pair in one word: whole words become vector code, halves do not."""
    upper = np.uint32(0xFFFF0000)
    for pair in range(len(cosines)):
        x = _bits_as_float(np.uint32(words[pair] << np.uint32(16)))
        y = _bits_as_float(np.uint32(words[pair] & upper))
        first = _rounded_bits(x * cosines[pair] - y * sines[pair])
        second = _rounded_bits(y * cosines[pair] + x * sines[pair])
        out[pair] = (second & upper) | (first >> np.uint32(16))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _move_layers(
    first_layer,
    last_layer,
    source_table,
    source_part,
    source_offsets,
    source_head_strides,
    target_table,
    target_offsets,
    target_head_stride,
    cosines,
    sines,
    lines,
    turned_lines,
    num_heads,
    width,
    band_start,
    half,
    interleaved,
    in_words,
    like,
    like_words,
):
    """`in_words`: pairs to turn are words, because they are neighbours of 16 bits."""
    size = like.itemsize
    band_end = band_start + 2 * half
    for layer in range(first_layer, last_layer):
        for token in range(len(source_part)):
            part = source_part[token]
            line = lines[token]
            for head in range(num_heads):
                source_offset = source_offsets[token] + head * source_head_strides[part]
                source_address = source_table[part, layer] + source_offset * size
                source = numba.carray(_pointer(source_address, like), (width,))
                target_offset = target_offsets[token] + head * target_head_stride
                target_address = target_table[layer] + target_offset * size
                target = numba.carray(_pointer(target_address, like), (width,))
                if not turned_lines[line]:
                    target[:] = source
                    continue
                target[:band_start] = source[:band_start]
                target[band_end:] = source[band_end:]
                if in_words:
                    words = numba.carray(_pointer(source_address + band_start * size, like_words), (half,))
                    out = numba.carray(_pointer(target_address + band_start * size, like_words), (half,))
                    _turn_words(words, out, cosines[line], sines[line])
                elif interleaved:
                    for pair in range(half):
                        x = _load(source[band_start + 2 * pair])
                        y = _load(source[band_start + 2 * pair + 1])
                        cos, sin = cosines[line, pair], sines[line, pair]
                        target[band_start + 2 * pair] = _store(x * cos - y * sin, like)
                        target[band_start + 2 * pair + 1] = _store(y * cos + x * sin, like)
                else:
                    for pair in range(half):
                        x = _load(source[band_start + pair])
                        y = _load(source[band_start + half + pair])
                        cos, sin = cosines[line, pair], sines[line, pair]
                        target[band_start + pair] = _store(x * cos - y * sin, like)
                        target[band_start + half + pair] = _store(y * cos + x * sin, like)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _turn_row(row, out, half, cosines, sines, interleaved):
    """Turn the first `2 * half` numbers of a row, copy the rest; side by side, so that it becomes vector code."""
    for column in range(2 * half, len(row)):
        out[column] = row[column]
    if interleaved:
        for pair in range(half):
            x, y = _load(row[2 * pair]), _load(row[2 * pair + 1])
            out[2 * pair] = _store(x * cosines[pair] - y * sines[pair], out)
            out[2 * pair + 1] = _store(y * cosines[pair] + x * sines[pair], out)
    else:
        for pair in range(half):
            x, y = _load(row[pair]), _load(row[pair + half])
            out[pair] = _store(x * cosines[pair] - y * sines[pair], out)
            out[pair + half] = _store(y * cosines[pair] + x * sines[pair], out)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _pack_block(rows, row_pairs, packed, packed_pairs):
    """Write a whole block in AMX order from `rows` `[B, C]`, also seen as pairs of numbers: keys are transposed pair by
    pair, values interleaved by two tokens. Indices are unsigned: compiled code would ask whether others are negative.
    """
    block_size, head_dim = np.uint64(rows.shape[0]), np.uint64(rows.shape[1] // 2)
    two = np.uint64(2)
    for slot in range(block_size):
        for pair in range(head_dim // two):
            packed_pairs[pair * block_size + slot] = row_pairs[slot, pair]
    for slots in range(block_size // two):
        values = block_size * head_dim + slots * two * head_dim
        for column in range(head_dim):
            packed[values + two * column] = rows[two * slots, head_dim + column]
            packed[values + two * column + np.uint64(1)] = rows[two * slots + np.uint64(1), head_dim + column]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _unpack_block(rows, row_pairs, packed, packed_pairs):
    """The inverse of `_pack_block`."""
    block_size, head_dim = np.uint64(rows.shape[0]), np.uint64(rows.shape[1] // 2)
    two = np.uint64(2)
    for slot in range(block_size):
        for pair in range(head_dim // two):
            row_pairs[slot, pair] = packed_pairs[pair * block_size + slot]
    for slots in range(block_size // two):
        values = block_size * head_dim + slots * two * head_dim
        for column in range(head_dim):
            rows[two * slots, head_dim + column] = packed[values + two * column]
            rows[two * slots + np.uint64(1), head_dim + column] = packed[values + two * column + np.uint64(1)]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _move_packed_layers(
    first_layer,
    last_layer,
    to_packed,
    packed_table,
    block_offsets,
    slots_in_block,
    places,
    is_whole,
    packed_head_stride,
    plain_table,
    plain_part,
    plain_offsets,
    plain_head_strides,
    cosines,
    sines,
    lines,
    turned_lines,
    num_heads,
    half,
    interleaved,
    like,
    like_pairs,
):
    """`is_whole` says at which tokens the next ones fill a block in AMX order. All heads of a token are read together:
    they lie together in a chunk, and memory is fastest read in order.
    """
    size = like.itemsize
    block_size, width = places.shape
    rows = np.empty((num_heads, block_size, width), like.dtype)
    row_pairs = numba.carray(_pointer(np.int64(rows.ctypes.data), like_pairs), (num_heads, block_size, width // 2))
    for layer in range(first_layer, last_layer):
        token = 0
        while token < len(block_offsets):
            num_tokens = block_size if is_whole[token] else 1
            if not to_packed:
                for head in range(num_heads):
                    address = packed_table[layer] + (block_offsets[token] + head * packed_head_stride) * size
                    packed = numba.carray(_pointer(address, like), (block_size * width,))
                    if is_whole[token]:
                        packed_pairs = numba.carray(_pointer(address, like_pairs), (block_size * width // 2,))
                        _unpack_block(rows[head], row_pairs[head], packed, packed_pairs)
                    else:
                        place = places[slots_in_block[token]]
                        for column in range(width):
                            rows[head, 0, column] = packed[place[column]]
            for index in range(token, token + num_tokens):
                part, line = plain_part[index], lines[index]
                for head in range(num_heads):
                    offset = (plain_offsets[index] + head * plain_head_strides[part]) * size
                    plain = numba.carray(_pointer(plain_table[part, layer] + offset, like), (width,))
                    row = rows[head, index - token]
                    if not to_packed:
                        for column in range(width):
                            plain[column] = row[column]
                    elif turned_lines[line]:
                        _turn_row(plain, row, half, cosines[line], sines[line], interleaved)
                    else:
                        for column in range(width):
                            row[column] = plain[column]
            if to_packed:
                for head in range(num_heads):
                    address = packed_table[layer] + (block_offsets[token] + head * packed_head_stride) * size
                    packed = numba.carray(_pointer(address, like), (block_size * width,))
                    if is_whole[token]:
                        packed_pairs = numba.carray(_pointer(address, like_pairs), (block_size * width // 2,))
                        _pack_block(rows[head], row_pairs[head], packed, packed_pairs)
                    else:
                        place = places[slots_in_block[token]]
                        for column in range(width):
                            packed[place[column]] = rows[head, 0, column]
            token += num_tokens


def _whole_blocks(slots: Array, places: Array, itemsize: int) -> Array:
    """Tell of each token whether it and the next ones fill a block, and blocks are in the AMX order of 16-bit numbers.

    `places` is `[B, C]`. In this order, found in vLLM's CPU attention, the first pairs of all keys stand before the
    second ones, and each number of a value beside that of the next token's.
    """
    block_size, width = places.shape
    slot, column = np.meshgrid(np.arange(block_size), np.arange(width // 2), indexing="ij")
    keys = column // 2 * 2 * block_size + 2 * slot + column % 2
    values = block_size * width // 2 + slot // 2 * width + 2 * column + slot % 2
    is_whole = np.zeros(len(slots), dtype=np.bool_)
    if itemsize == 2 and block_size % 2 == 0 and np.array_equal(places, np.concatenate([keys, values], axis=1)):
        starts = np.flatnonzero(slots[: max(len(slots) - block_size + 1, 0)] % block_size == 0)
        wanted = slots[starts, None] + np.arange(block_size)
        is_whole[starts] = (slots[starts[:, None] + np.arange(block_size)] == wanted).all(axis=1)
    return is_whole


def move_packed(
    caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    places: torch.Tensor,
    plain: Sequence[Rows],
    turns: Turns | None,
    *,
    to_packed: bool,
    max_threads: int | None = None,
) -> None:
    """Move rows to or from paged caches whose blocks are permuted. Mutates the caches, or the rows.

    `caches` holds one `[N, H, B, C]` a layer, contiguous. Number `c` of slot `b` lies at element `places[b, c]` of a
    block's `B * C` (of one head). `plain` are the rows for `slots`, one after the other. Keys, the first numbers of a
    row, are turned on the way in. At most `max_threads` share the work; None: as many as torch has. Raises `ValueError`
    when rows, slots and caches do not fit together.
    """
    first = caches[0]
    wanted = len(caches), first.shape[1], first.shape[3], first.dtype
    for rows in plain:
        if (found := (len(rows.layers), rows.num_heads, rows.width, rows.dtype)) != wanted:
            raise ValueError(f"rows {found} do not fit caches {wanted} (layers, heads, numbers, dtype)")
    if sum(map(len, plain)) != len(slots):
        raise ValueError(f"{sum(map(len, plain))} rows for {len(slots)} slots")
    num_layers, block_size = len(caches), first.shape[2]
    blocks = slots.numpy() // block_size
    arguments = (
        to_packed,
        np.array([cache.data_ptr() for cache in caches], dtype=np.int64),
        blocks * first.stride(0),
        slots.numpy() - blocks * block_size,
        places.numpy().view(np.uint32),  # unsigned: see `_pack_block`
        _whole_blocks(slots.numpy(), places.numpy(), first.dtype.itemsize),
        first.stride(1),
        *_row_tables(plain),
        *_turn_table(turns, len(slots)),
        first.shape[1],
        turns.facts.rotary_size // 2 if turns is not None else 0,
        turns is not None and turns.facts.interleaved,
        np.empty(0, dtype=DTYPES[first.dtype]),
        np.empty(0, dtype=np.uint32),
    )
    num_bytes = num_layers * len(slots) * first.shape[1] * first.shape[3] * first.dtype.itemsize
    _share_out(lambda start, end: _move_packed_layers(start, end, *arguments), num_layers, num_bytes, max_threads)


def _row_tables(rows: Sequence[Rows]) -> tuple[Array, Array, Array, Array]:
    """Addresses of layers by part, and each token's part, element offset and, by part, the stride of heads."""
    return (
        np.array([[layer.data_ptr() for layer in part.layers] for part in rows], dtype=np.int64),
        np.repeat(np.arange(len(rows)), [len(part) for part in rows]),
        torch.cat([part.offsets for part in rows]).numpy(),
        np.array([part.head_stride for part in rows], dtype=np.int64),
    )


def _turn_table(turns: Turns | None, num_tokens: int) -> tuple[Array, Array, Array, Array]:
    """Cosines and sines `[D, R / 2]`, each token's line in them, and which lines turn at all."""
    if turns is None:
        ones = np.ones((1, 1), dtype=np.float32)
        return ones, ones, np.zeros(num_tokens, dtype=np.int32), np.zeros(1, dtype=np.bool_)
    cosines, sines, lines = (table.numpy() for table in turns.table())
    return cosines, sines, lines, (sines != 0).any(axis=1) | (cosines != 1).any(axis=1)


def _share_out(work: Callable[[int, int], None], num_layers: int, num_bytes: int, max_threads: int | None) -> None:
    """Run `work(first, last)` over all layers, on as many of torch's threads as the amount is worth."""
    num_threads = max(1, min(max_threads or torch.get_num_threads(), num_layers, num_bytes // BYTES_A_THREAD))
    limits = [num_layers * i // num_threads for i in range(num_threads + 1)]
    if num_threads == 1:
        work(0, num_layers)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, limits[:-1], limits[1:]))


def move_on_cpu(sources: Sequence[Rows], target: Rows, turns: Turns | None, max_threads: int | None = None) -> None:
    """See `ropewalk.kernels.splice.move`; dtypes are those of `DTYPES`. Layers are shared out among torch's threads."""
    start = turns.start if turns is not None else 0
    arguments = (
        *_row_tables(sources),
        np.array([layer.data_ptr() for layer in target.layers], dtype=np.int64),
        target.offsets.numpy(),
        target.head_stride,
        *_turn_table(turns, len(target)),
        target.num_heads,
        target.width,
        start,
        turns.facts.rotary_size // 2 if turns is not None else 0,
        turns is not None and turns.facts.interleaved,
        turns is not None and turns.facts.interleaved and target.dtype == torch.bfloat16,
        np.empty(0, dtype=DTYPES[target.dtype]),
        np.empty(0, dtype=np.uint32),
    )
    num_layers = len(target.layers)
    num_bytes = num_layers * len(target) * target.num_heads * target.width * target.dtype.itemsize
    _share_out(lambda first, last: _move_layers(first, last, *arguments), num_layers, num_bytes, max_threads)
