"""Moving rows: every backend against a loop in float64, on layouts of all kinds and turns of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from ropewalk.kernels.rope import RotaryFacts
from ropewalk.kernels.splice import Rows, Turns, dense_rows, move, move_reference, paged_rows
from ropewalk.kernels.splice_triton import move_kernel, move_on_gpu

INTERPRETED = InterpretedFunction(move_kernel.fn)


def move_interpreted(sources: list[Rows], target: Rows, turns: Turns | None) -> None:
    """The GPU's code, run by Triton's interpreter on the CPU."""
    if len(target):
        move_on_gpu(sources, target, turns, kernel=INTERPRETED, device=torch.device("cpu"))


BACKENDS: dict[str, Callable[..., None]] = {
    "torch": move_reference,
    "cpu": move,
    "triton": move_interpreted,
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def turned_by_definition(rows: torch.Tensor, turns: Turns | None) -> torch.Tensor:
    """Rows `[L, n, H, C]` in float64, each pair of the band multiplied by `exp(i * delta * frequency)`."""
    rows = rows.double()
    if turns is None:
        return rows
    size = turns.facts.rotary_size
    for token, delta in enumerate(turns.deltas.tolist()):
        for pair, frequency in enumerate(turns.facts.inv_freq):
            first, second = (2 * pair, 2 * pair + 1) if turns.facts.interleaved else (pair, size // 2 + pair)
            x, y = rows[:, token, :, turns.start + first].clone(), rows[:, token, :, turns.start + second].clone()
            angle = torch.tensor(delta * frequency, dtype=torch.float64)
            rows[:, token, :, turns.start + first] = x * angle.cos() - y * angle.sin()
            rows[:, token, :, turns.start + second] = y * angle.cos() + x * angle.sin()
    return rows


@st.composite
def cases(draw: st.DrawFn) -> Any:
    """Sources, caches and slots, turns: odd counts, several sources, caches that are not contiguous."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    layers, heads, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(2, 41))
    block, blocks = draw(st.sampled_from([1, 3, 16])), draw(st.integers(7, 9))
    counts = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    counts = counts if sum(counts) <= block * blocks else counts[:1]
    sources = [torch.randn(layers, count, heads, width, generator=generator).to(dtype) for count in counts]
    shapes = {"plain": (blocks, heads, block, width), "slots first": (blocks, block, heads, width)}
    kind = draw(st.sampled_from([*shapes, "padded"]))
    if kind == "padded":
        memory = torch.zeros(layers, 2 * blocks, heads, block, width + 3, dtype=dtype)
        caches = [layer[::2, :, :, 1 : width + 1] for layer in memory]
    else:
        caches = [torch.zeros(shapes[kind], dtype=dtype) for _ in range(layers)]
        caches = [cache.transpose(1, 2) if kind == "slots first" else cache for cache in caches]
    slots = torch.randperm(blocks * block, generator=generator)[: sum(counts)]
    half = draw(st.integers(0, width // 2))
    turns = None
    if half:
        numbers = st.sampled_from([0, 1, -1, 31, -1024, 10**6, -(10**6)])
        deltas = torch.tensor(draw(st.lists(numbers, min_size=sum(counts), max_size=sum(counts))), dtype=torch.int64)
        frequencies = tuple(10_000.0 ** (-i / half) for i in range(half))
        turns = Turns(deltas, RotaryFacts(frequencies, draw(st.booleans())), draw(st.integers(0, width - 2 * half)))
    return sources, caches, slots, turns


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_rows_arrive_turned_and_nothing_else_changes(backend: str, case: Any) -> None:
    sources, caches, slots, turns = case
    for cache in caches:
        cache.zero_()
    BACKENDS[backend]([dense_rows(rows) for rows in sources], paged_rows(caches, slots), turns)
    expected = turned_by_definition(torch.cat(sources, dim=1), turns)
    block = caches[0].shape[2]
    for cache, layer in zip(caches, expected, strict=True):
        torch.testing.assert_close(
            cache[slots // block, :, slots % block].double(), layer, atol=TOLERANCE[cache.dtype], rtol=8e-3
        )
        rest = cache.clone()
        rest[slots // block, :, slots % block] = 0
        assert not rest.any()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=20)
@given(case=cases())
def test_what_is_scattered_is_gathered_again(backend: str, case: Any) -> None:
    sources, caches, slots, _ = case
    rows = torch.cat(sources, dim=1)
    back = torch.full_like(rows, 7.0)
    BACKENDS[backend]([dense_rows(part) for part in sources], paged_rows(caches, slots), None)
    BACKENDS[backend]([paged_rows(caches, slots)], dense_rows(back), None)
    assert torch.equal(back, rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backends_round_alike(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 33, 2, 24, generator=generator).to(torch.bfloat16)
    deltas = torch.arange(33) * 17 - 200
    turns = Turns(deltas, RotaryFacts(tuple(100.0 ** (-i / 8) for i in range(8)), interleaved=False), 3)
    expected, found = torch.zeros_like(rows), torch.zeros_like(rows)
    move_reference([dense_rows(rows)], dense_rows(expected), turns)
    BACKENDS[backend]([dense_rows(rows)], dense_rows(found), turns)
    torch.testing.assert_close(found.float(), expected.float(), atol=0, rtol=2**-7)  # one unit in the last place
    # A fused multiply-add rounds once where two operations round twice. Triton's interpreter cuts bf16 off, GPUs round.
    assert (found != expected).float().mean() < (0.5 if backend == "triton" else 0.01)


def test_a_turn_by_zero_copies_every_bit() -> None:
    rows = torch.tensor([[[[float("inf"), float("nan"), -0.0, 1e-40]]]])
    target = torch.zeros_like(rows)
    move([dense_rows(rows)], dense_rows(target), Turns(torch.tensor([0]), RotaryFacts((1.0, 0.1), False), 0))
    assert torch.equal(rows.view(torch.int32), target.view(torch.int32))


def test_numbers_that_do_not_fit_are_refused() -> None:
    rows = torch.zeros(2, 3, 1, 8)
    facts = RotaryFacts((1.0, 0.1), True)
    with pytest.raises(ValueError, match="3 rows for 2 slots"):
        move([dense_rows(rows)], dense_rows(rows[:, :2]))
    with pytest.raises(ValueError, match="do not fit a target of 1"):
        move([dense_rows(rows)], dense_rows(rows[:1]))
    with pytest.raises(ValueError, match="float16"):
        move([dense_rows(rows)], dense_rows(rows.half()))
    with pytest.raises(ValueError, match="1 turns for 3 rows"):
        move([dense_rows(rows)], dense_rows(rows.clone()), Turns(torch.tensor([1]), facts, 0))
    with pytest.raises(ValueError, match="lies outside"):
        move([dense_rows(rows)], dense_rows(rows.clone()), Turns(torch.ones(3, dtype=torch.int64), facts, 6))
    with pytest.raises(ValueError, match="contiguous in their last dimension"):
        dense_rows(rows.transpose(1, 3))
    with pytest.raises(ValueError, match="differ in shape"):
        paged_rows([torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 6)], torch.tensor([0]))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 4.7e-3), (torch.float32, 2e-7)])
def test_one_turn_costs_one_rounding(interleaved: bool, dtype: torch.dtype, bound: float) -> None:
    """Relative L2 against float64; Leyline reports 4.7e-3 for one turn in bf16 storage."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(1, 512, 1, 64, generator=generator).to(dtype)
    deltas = torch.randint(-4096, 4096, (512,), generator=generator)
    turns = Turns(deltas, RotaryFacts(tuple(10_000.0 ** (-i / 32) for i in range(32)), interleaved), 0)
    target = torch.zeros_like(rows)
    move([dense_rows(rows)], dense_rows(target), turns)
    expected = turned_by_definition(rows, turns)
    assert ((target.double() - expected).norm() / expected.norm()).item() <= bound
