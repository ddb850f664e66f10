"""What a stage costs, learned online: the shortest run of cached tokens that is worth one.

A prompt's first token takes about

    overhead + per_token * n + per_stage * s + per_cached * m + per_pair * n * (m + n / 2)    seconds

for `n` computed tokens, `s` stages and `m` cached tokens, which are loaded; computed tokens attend to all before them.
A run from the store saves the difference of `per_token` and `per_cached` for each of its tokens, and the pairs of its
tokens with all before them. At a prompt's beginning it pays from `per_stage / (per_token - per_cached)` tokens on.
(Without the last two terms, the time that long runs take to load, or that attention to them takes, would pass for the
cost of a stage: the more is reused, the less would seem worth it.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

DECAY = 0.97
"""Weight of an observation after the next one: the last thirty or so count, so that a change of load is followed."""

MIN_SPREAD = 48.0
"""Standard deviation in tokens below which lines cannot be told apart: what was learned before stays."""

ASSUMED_WEIGHT = 0.2
"""Of the assumption about a stage, where an observation has 1: little once prompts with and without stages were seen,
but enough to decide when all reuse alike, so that only the sum of some costs shows.
"""

FREE_CACHED, FREE_PAIRS = 200.0, 200_000.0
"""Weight, in tokens and pairs, of taking loads and attention for free: less than long prompts have."""

OUTLIER = 2.0
"""An observation counts as at most so many times what was expected, and at least one such part."""

LEAST_RUN, LONGEST_RUN = 32, 1024
"""Bounds in tokens of what is learned: below the first no chunk is found by its head; beyond the second the machine is
too busy for the measurement to mean anything."""


class StageCost:
    """Least squares of relative errors over exponentially weighted observations.

    What a stage costs shows only where there were some. Until then, and with a small weight later on,
    it is taken to be what `initial_run` tokens cost; `None`: as much as a request, for stages that run one by one.
    """

    def __init__(self, initial_run: int | None) -> None:
        self._run = float(initial_run or 2 * LEAST_RUN)
        assumed = [-1.0, 0.0, 1.0, 0.0, 0.0] if initial_run is None else [0.0, -float(initial_run), 1.0, 0.0, 0.0]
        self._assumed = ASSUMED_WEIGHT * np.outer(assumed, assumed) + np.diag([0, 0, 0, FREE_CACHED**2, FREE_PAIRS**2])
        self._products = np.zeros((6, 6))  # of (1, n, s, m, pairs, seconds) with itself, over seconds squared
        self._lengths = np.zeros(3)  # of (1, n, n squared): relative weights would hide long prompts behind short ones
        self._costs: npt.NDArray[np.float64] = np.zeros(5)

    @property
    def overhead_s(self) -> float:
        """Seconds that every prompt takes."""
        return float(self._costs[0])

    @property
    def per_token_s(self) -> float:
        """Seconds that a computed token takes, without attention."""
        return float(self._costs[1])

    @property
    def per_stage_s(self) -> float:
        """Seconds that a stage takes."""
        return float(self._costs[2])

    @property
    def per_cached_s(self) -> float:
        """Seconds that a cached token takes to load."""
        return float(self._costs[3])

    def observe(self, num_tokens: int, num_stages: int, num_cached: int, seconds: float) -> None:
        """Take in one prompt: computed tokens, stages, cached tokens, seconds until its first token."""
        pairs = num_tokens * (num_cached + num_tokens / 2)
        row = np.array([1.0, num_tokens, num_stages, num_cached, pairs, max(seconds, 1e-6)])
        expected = float(row[:5] @ self._costs)
        if expected > 0:
            row[5] = min(max(row[5], expected / OUTLIER), expected * OUTLIER)
        row /= row[5]
        self._products = DECAY * self._products + np.outer(row, row)
        self._lengths = DECAY * self._lengths + np.array([1.0, num_tokens, num_tokens**2])
        weight, sum_n, sum_squares = self._lengths
        if sum_squares / weight - (sum_n / weight) ** 2 < MIN_SPREAD**2:
            return
        costs = self._solve(self._short_s or seconds)
        per_token, per_stage, per_cached = costs[1:4].tolist()
        if per_token <= max(per_cached, 0.0):  # noise: a longer prefill is not faster, nor is computing than loading
            return
        self._costs = costs
        self._run = min(max(per_stage / (per_token - max(per_cached, 0.0)), LEAST_RUN), LONGEST_RUN)

    @property
    def min_run(self) -> int:
        """Shortest run, in tokens, that is worth a stage at the beginning of a prompt."""
        return round(self._run)

    @property
    def spared_s(self) -> float:
        """Seconds that a token from the store spares, without attention; 0 as long as nothing is known."""
        return max(self.per_token_s - max(self.per_cached_s, 0.0), 0.0)

    @property
    def per_position(self) -> float:
        """What attention to one position costs a token, as a share of what computing it costs otherwise."""
        return max(float(self._costs[4]), 0.0) / self.spared_s if self.spared_s > 0 else 0.0

    @property
    def _short_s(self) -> float:
        """Seconds of the shortest prompt that something is reused of."""
        return max(self.overhead_s + LEAST_RUN * self.per_token_s, 0.0)

    def _solve(self, short_s: float) -> npt.NDArray[np.float64]:
        """The costs that fit best; what is assumed is as uncertain as the time of a prompt of `short_s` seconds."""
        normal = self._products[:5, :5] + self._assumed / max(short_s, 1e-6) ** 2
        scale = 1 / np.sqrt(np.diag(normal))  # pairs are some ten million times as many as stages
        solved = np.linalg.lstsq(normal * np.outer(scale, scale), self._products[:5, 5] * scale, rcond=None)[0]
        costs: npt.NDArray[np.float64] = solved * scale
        return costs
