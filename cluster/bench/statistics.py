"""Figures of the studies: divergence of distributions, medians with spread, intervals of shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LogProbs = npt.NDArray[np.float32]


def divergence(truth: LogProbs, other: LogProbs) -> float:
    """Return KL(truth ‖ other) in nats. Both are log-probabilities `[V]`."""
    likely = truth > -60  # the rest weighs nothing, and may be minus infinity in both
    difference = truth[likely].astype(np.float64) - other[likely]
    return max(float((np.exp(truth[likely].astype(np.float64)) * difference).sum()), 0.0)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return count, mean, median and quartiles; None where there are no values."""
    if not values:
        return {"count": 0, "mean": None, "median": None, "q1": None, "q3": None}
    q1, median, q3 = np.percentile(values, [25, 50, 75])
    return {
        "count": len(values),
        "mean": float(np.mean(values)),
        "median": float(median),
        "q1": float(q1),
        "q3": float(q3),
    }


def share(right: int, count: int) -> dict[str, Any]:
    """Return a share with its 95 % interval (Wilson 1927)."""
    if not count:
        return {"count": 0, "share": None, "low": None, "high": None}
    z = 1.96
    p = right / count
    centre = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return {"count": count, "share": p, "low": max(min(centre - half, p), 0.0), "high": min(max(centre + half, p), 1.0)}
