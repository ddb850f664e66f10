"""The turn probe: does turning this engine's cached keys by our rotary facts give the keys it would compute itself?

A prompt of one repeated token has, in layer 0, keys that differ by position only. So `R(delta) k[p]` must equal
`k[p + delta]` to storage precision. That checks theta, pairing, scaling, layout and the engine's own arithmetic at
once, on the loaded model.
"""

from __future__ import annotations

import torch

from ropewalk.kernels.rope import RotaryFacts
from ropewalk.kernels.splice import turned

PROBE_LENGTH = 160
"""Tokens: long enough to hold the largest turn below, short enough to cost milliseconds."""

PROBE_TURNS = (1, 7, 64, 128)

TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3, torch.float32: 1e-3}
"""Largest relative L2 error taken as right: a few times the rounding of the stored key. Wrong facts give about 1."""


def turn_error(rows: torch.Tensor, rotary: RotaryFacts, is_mla: bool) -> float:
    """Return the largest relative L2 error over `PROBE_TURNS`. `rows`: `[1, n, H, C]`, layer 0 of the probe prompt."""
    width = rows.shape[-1]
    start = width - rotary.rotary_size if is_mla else 0
    keys = slice(start, width if is_mla else width // 2)
    worst = 0.0
    for delta in PROBE_TURNS:
        found = turned(rows[:, :-delta], delta, rotary, start)[..., keys].float()
        truth = rows[:, delta:][..., keys].float()
        worst = max(worst, float((found - truth).norm() / truth.norm()))
    return worst
