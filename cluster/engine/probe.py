"""The turn probe: does turning this engine's cached keys by our rotary facts give the keys it would compute itself?

In a prompt of one repeated token, keys differ by position only: in layer 0 because nothing else enters them, and in
every later layer because attention over equal values returns that value, whatever its weights. So `R(delta) k[p]` must
equal `k[p + delta]` to storage precision. That checks theta, pairing, scaling, layout and the engine's own arithmetic
at once, on the loaded model, and that no layer turns its keys otherwise or not at all.
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


LATER_LAYERS = 0.25
"""The same for layers behind the first, where rounding in all layers before adds up."""


def turn_errors(rows: torch.Tensor, rotary: RotaryFacts, is_mla: bool) -> list[float]:
    """Return each layer's largest relative L2 error over `PROBE_TURNS`. `rows`: `[L, n, H, C]` of the probe prompt."""
    width = rows.shape[-1]
    start = width - rotary.rotary_size if is_mla else 0
    keys = slice(start, start + rotary.rotary_size)
    worst = torch.zeros(len(rows))
    for delta in PROBE_TURNS:
        found = turned(rows[:, :-delta], delta, rotary, start)[..., keys].float()
        truth = rows[:, delta:][..., keys].float()
        worst = worst.maximum((found - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1))
    return worst.tolist()


def objection(errors: list[float], dtype: torch.dtype) -> str | None:
    """Return why keys with these errors must not be turned, or None."""
    limits = [TOLERANCE.get(dtype, 0.0), *[LATER_LAYERS] * (len(errors) - 1)]
    for layer, (error, limit) in enumerate(zip(errors, limits, strict=True)):
        if not error <= limit:
            return (
                f"the turn probe failed: turned keys of layer {layer} differ from computed ones by {error:.3g} "
                f"(relative L2; at most {limit:g} in {dtype})"
            )
    return None
