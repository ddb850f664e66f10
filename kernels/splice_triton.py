"""`ropewalk.kernels.splice.move` in Triton: one launch for all layers, heads, tokens and sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from ropewalk.kernels.splice import Rows, Turns

TOKENS_A_PROGRAM = 16
"""With rows of 128 to 576 numbers, 4 to 18 KiB a program in bf16: enough loads in flight to fill the memory bus."""

COLUMNS_A_STEP = 128


@triton.jit
def move_kernel(
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
    num_tokens,
    num_layers,
    num_heads,
    width,
    band_start,
    half,
    DTYPE: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Program `(i, l * num_heads + h)` moves `TOKENS` rows of layer `l` and head `h`. Tables hold addresses."""
    layer = tl.program_id(1) // num_heads
    head = tl.program_id(1) % num_heads
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    valid = token < num_tokens
    part = tl.load(source_part + token, mask=valid, other=0)
    base = tl.load(source_table + part * num_layers + layer, mask=valid, other=0)
    source = base.to(tl.pointer_type(DTYPE)) + tl.load(source_offsets + token, mask=valid, other=0)
    source += head * tl.load(source_head_strides + part, mask=valid, other=0)
    target = tl.load(target_table + layer).to(tl.pointer_type(DTYPE)) + head * target_head_stride
    target = target + tl.load(target_offsets + token, mask=valid, other=0)

    if HALF > 0:
        pair = tl.arange(0, HALF)
        turned = valid[:, None] & (pair < half)[None, :]
        if INTERLEAVED:
            first = band_start + 2 * pair
            second = first + 1
        else:
            first = band_start + pair
            second = first + half
        x = tl.load(source[:, None] + first[None, :], mask=turned, other=0.0).to(tl.float32)
        y = tl.load(source[:, None] + second[None, :], mask=turned, other=0.0).to(tl.float32)
        angle = tl.load(lines + token, mask=valid, other=0)[:, None] * half + pair[None, :]
        cos = tl.load(cosines + angle, mask=turned, other=1.0)
        sin = tl.load(sines + angle, mask=turned, other=0.0)
        tl.store(target[:, None] + first[None, :], (x * cos - y * sin).to(DTYPE), mask=turned)
        tl.store(target[:, None] + second[None, :], (y * cos + x * sin).to(DTYPE), mask=turned)

    for step in range((width + COLUMNS - 1) // COLUMNS):
        column = step * COLUMNS + tl.arange(0, COLUMNS)
        copied = (column < width) & ((column < band_start) | (column >= band_start + 2 * half))
        mask = valid[:, None] & copied[None, :]
        numbers = tl.load(source[:, None] + column[None, :], mask=mask, other=0.0)
        tl.store(target[:, None] + column[None, :], numbers, mask=mask)


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def move_on_gpu(
    sources: Sequence[Rows], target: Rows, turns: Turns | None, kernel: Any = move_kernel, device: Any = None
) -> None:
    """See `ropewalk.kernels.splice.move`. Sources lie on the target's device or in pinned memory that it can read.

    `kernel` and `device` are for tests, which run the kernel in Triton's interpreter. Raises `ValueError` for a dtype
    other than bfloat16, float16 and float32, and for sources in memory that the GPU cannot read.
    """
    device = device or target.device
    if target.dtype not in _DTYPES:
        raise ValueError(f"rows must be bfloat16, float16 or float32, not {target.dtype}")
    for source in sources:
        if source.device != target.device and not source.layers[0].is_pinned():
            raise ValueError(f"source rows lie in {source.device} memory that {target.device} cannot read")

    def on_device(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    source_table = on_device([layer.data_ptr() for source in sources for layer in source.layers])
    target_table = on_device([layer.data_ptr() for layer in target.layers])
    part = torch.repeat_interleave(torch.tensor([len(source) for source in sources])).int().to(device)
    offsets = torch.cat([source.offsets.cpu() for source in sources]).to(device)
    half, start, interleaved = 0, 0, False
    cos = sin = torch.zeros(1, dtype=torch.float32, device=device)
    lines = torch.zeros(1, dtype=torch.int32, device=device)
    if turns is not None:
        cos, sin, lines = (table.to(device) for table in turns.table())
        half, start, interleaved = turns.facts.rotary_size // 2, turns.start, turns.facts.interleaved
    grid = (triton.cdiv(len(target), TOKENS_A_PROGRAM), len(target.layers) * target.num_heads)
    kernel[grid](
        source_table,
        part,
        offsets,
        on_device([source.head_stride for source in sources]),
        target_table,
        target.offsets.to(device),
        target.head_stride,
        cos,
        sin,
        lines,
        len(target),
        len(target.layers),
        target.num_heads,
        target.width,
        start,
        half,
        DTYPE=_DTYPES[target.dtype],
        TOKENS=TOKENS_A_PROGRAM,
        HALF=triton.next_power_of_2(half) if half else 0,
        COLUMNS=COLUMNS_A_STEP,
        INTERLEAVED=interleaved,
    )
