"""What a model's own rotary table says: its frequencies, read back from cosines and sines, and whether a config agrees.

The angle of a pair at position `p` is `atan2(sin, cos)`, in which a model's attention scaling (YaRN's `mscale`)
cancels. Position 1 gives a first estimate of the frequency; positions 2, 4, 8, … refine it, because the estimate before
tells how many whole turns the angle has made, and an error of the angle counts for `1 / p` of it.

Legend: `P` positions of the table, `r` pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ropewalk.kernels.rope import RotaryFacts, UnsupportedRope

ARITHMETIC = 2.0**-19
"""Relative error of frequencies and angles made in float32: `theta ** exponent` alone costs up to a dozen roundings."""

MAX_ROWS = 4096
"""Rows compared with the frequencies found: enough to see a table that changes them on its way."""


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Frequencies of a table, `[r]` radians a position, and how far each may be off because of the table's dtype."""

    inv_freq: tuple[float, ...]
    uncertainty: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RotaryModule:
    """A rotary module of a loaded model: its class, the layers that use it, its pairing and its table.

    `table` is None where `unreadable` says why.
    """

    kind: str
    layers: tuple[str, ...]
    interleaved: bool
    table: RotaryTable | None
    unreadable: str | None = None


def read_table(table: torch.Tensor) -> RotaryTable:
    """Read the frequencies of a table `[P, 2 r]`, cosines then sines, in any dtype; mutates nothing.

    Raises `UnsupportedRope` for a table that is no rotation by fixed frequencies at constant magnitude.
    """
    if table.dim() != 2 or table.shape[0] < 2 or table.shape[1] % 2:
        raise UnsupportedRope(f"a rotary table of shape {tuple(table.shape)} is not known")
    num_positions, size = table.shape
    rounding = torch.finfo(
        table.dtype
    ).eps  # sine and cosine are rounded to half of it: together, no angle is off by more
    inv_freq = _angles(table[1])
    position = 1
    while 2 * position < num_positions:
        position *= 2
        inv_freq = inv_freq + _ahead(table[position], position, inv_freq) / position
    uncertainty = rounding / position + inv_freq.abs() * ARITHMETIC
    # Positions between the powers of two must agree as well.
    rows = torch.linspace(0, num_positions - 1, min(num_positions, MAX_ROWS), dtype=torch.float64).long()
    positions = rows.double().unsqueeze(1)
    off = _ahead(table[rows], positions, inv_freq).abs()
    if not bool((off <= rounding + positions * uncertainty).all()):
        worst = int(off.amax(dim=1).argmax())
        raise UnsupportedRope(
            f"its table does not turn at fixed frequencies: at position {int(rows[worst])} it is "
            f"{float(off[worst].max()):.3g} radians off"
        )
    magnitude = table[rows, : size // 2].double().hypot(table[rows, size // 2 :].double())
    if not float(magnitude.max()) <= float(magnitude.min()) * (1 + 2 * rounding):
        raise UnsupportedRope("its table changes its magnitude")
    return RotaryTable(tuple(inv_freq.tolist()), tuple(uncertainty.tolist()))


def _angles(rows: torch.Tensor) -> torch.Tensor:
    cos, sin = rows.double().chunk(2, dim=-1)
    return torch.atan2(sin, cos)


def _ahead(rows: torch.Tensor, position: torch.Tensor | float, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return how far the rows' angles are ahead of `position * inv_freq`, in `[-pi, pi]`."""
    ahead = _angles(rows) - position * inv_freq
    return ahead - 2 * math.pi * (ahead / (2 * math.pi)).round()


def confirm(facts: RotaryFacts, modules: Sequence[RotaryModule], num_layers: int) -> RotaryFacts:
    """Return `facts` of a config with the pairing of the loaded model's modules, if its modules agree with them.

    The config's frequencies, exact to float64, are the ones to turn with: the modules' table, rounded to its dtype,
    confirms them. `num_layers` is the number of layers that keep keys. Raises `UnsupportedRope`, naming what differs.
    """
    if not modules:
        raise UnsupportedRope("the loaded model has no rotary module that is known")
    for module in modules:
        if module.unreadable is not None:
            raise UnsupportedRope(f"rotary module {module.kind} of layer {module.layers[0]!r}: {module.unreadable}")
    first = modules[0]
    for module in modules[1:]:
        if difference := _difference(first, module):
            raise UnsupportedRope(f"layers {first.layers[0]!r} and {module.layers[0]!r} turn differently: {difference}")
    if (found := sum(len(module.layers) for module in modules)) != num_layers:
        raise UnsupportedRope(f"{num_layers} layers keep keys, but {found} of them have a rotary module")
    assert first.table is not None
    if len(first.table.inv_freq) != len(facts.inv_freq):
        raise UnsupportedRope(
            f"the loaded model turns {2 * len(first.table.inv_freq)} numbers of a key, "
            f"its configuration says {facts.rotary_size}"
        )
    for pair, (read, said) in enumerate(zip(first.table.inv_freq, facts.inv_freq, strict=True)):
        if not abs(read - said) <= first.table.uncertainty[pair]:
            raise UnsupportedRope(
                f"the loaded model turns pair {pair} by {read:.9g} radians a position, its configuration says "
                f"{said:.9g} (more apart than {first.table.uncertainty[pair]:.1g}, which its table's dtype allows)"
            )
    return RotaryFacts(facts.inv_freq, first.interleaved)


def largest_difference(facts: RotaryFacts, module: RotaryModule) -> float:
    """Return by how much the module's frequencies differ from `facts`, in radians a position."""
    assert module.table is not None
    return max(abs(read - said) for read, said in zip(module.table.inv_freq, facts.inv_freq, strict=True))


def _difference(one: RotaryModule, other: RotaryModule) -> str | None:
    if one.interleaved != other.interleaved:
        return "one pairs neighbours, the other halves"
    assert one.table is not None
    assert other.table is not None
    if len(one.table.inv_freq) != len(other.table.inv_freq):
        return f"{2 * len(one.table.inv_freq)} and {2 * len(other.table.inv_freq)} numbers of a key"
    for pair, (a, b) in enumerate(zip(one.table.inv_freq, other.table.inv_freq, strict=True)):
        if not abs(a - b) <= one.table.uncertainty[pair] + other.table.uncertainty[pair]:
            return f"pair {pair} by {a:.9g} and by {b:.9g} radians a position"
    return None
