"""What a stage costs, learned online: the shortest run of cached tokens that is worth one.

A prompt's first token takes about `overhead + per_token * n + per_stage * s` seconds, for `n` computed tokens and `s`
stages. A run from the store saves `per_token` for each of its tokens and costs a stage, so it pays from
`per_stage / per_token` tokens on.
"""

from __future__ import annotations

import numpy as np

DECAY = 0.97
"""Weight of an observation after the next one: the last thirty or so count, so that a change of load is followed."""

MIN_SPREAD = 48.0
"""Standard deviation in tokens below which lines cannot be told apart: what was learned before stays."""

LEAST_RUN, LONGEST_RUN = 32, 1024
"""Bounds in tokens of what is learned: below the first no chunk is found by its head; beyond the second the machine is
too busy for the measurement to mean anything."""


class StageCost:
    """Least squares over exponentially weighted observations.

    What a stage costs shows only where there were some. Until then, and as one observation among the others later on,
    it is taken to be what `initial_run` tokens cost; `None`: as much as a request, for stages that run one by one.
    """

    def __init__(self, initial_run: int | None) -> None:
        self._initial_run = initial_run
        self._run = float(initial_run or 2 * LEAST_RUN)
        self._products = np.zeros((4, 4))  # of (1, n, s, seconds) with itself
        self.overhead_s = self.per_token_s = self.per_stage_s = 0.0

    def observe(self, num_tokens: int, num_stages: int, seconds: float) -> None:
        """Take in one prompt: computed tokens, stages, seconds until its first token."""
        row = np.array([1.0, num_tokens, num_stages, seconds])
        self._products = DECAY * self._products + np.outer(row, row)
        weight, sum_n = self._products[0, 0], self._products[0, 1]
        if self._products[1, 1] / weight - (sum_n / weight) ** 2 < MIN_SPREAD**2:
            return
        assumed = np.array([-1.0, 0.0, 1.0] if self._initial_run is None else [0.0, -float(self._initial_run), 1.0])
        normal = self._products[:3, :3] + np.outer(assumed, assumed)
        overhead, per_token, per_stage = np.linalg.lstsq(normal, self._products[:3, 3], rcond=None)[0].tolist()
        if per_token <= 0:  # noise: a longer prefill is not faster
            return
        self.overhead_s, self.per_token_s, self.per_stage_s = overhead, per_token, per_stage
        self._run = min(max(per_stage / per_token, LEAST_RUN), LONGEST_RUN)

    @property
    def min_run(self) -> int:
        """Shortest run, in tokens, that is worth a stage."""
        return round(self._run)
