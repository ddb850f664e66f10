"""What a stage costs, learned online: the shortest run of cached tokens that is worth one.

A prompt's first token takes about `overhead + per_token * n + per_stage * s + per_cached * m` seconds, for `n` computed
tokens, `s` stages and `m` cached tokens, which are loaded and attended to. A run from the store saves the difference of
`per_token` and `per_cached` for each of its tokens and costs a stage, so it pays from
`per_stage / (per_token - per_cached)` tokens on. (Without the last term, the time that long runs take to load would
pass for the cost of a stage, and the more is reused, the less would seem worth it.)
"""

from __future__ import annotations

import numpy as np

DECAY = 0.97
"""Weight of an observation after the next one: the last thirty or so count, so that a change of load is followed."""

MIN_SPREAD = 48.0
"""Standard deviation in tokens below which lines cannot be told apart: what was learned before stays."""

NO_EVIDENCE = 100.0
"""Weight, in tokens, of taking cached tokens for free: less than any prompt that has some, so that it only decides
where there were none, and not enough to blame a stage for what its cached tokens take."""

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
        self._products = np.zeros((5, 5))  # of (1, n, s, m, seconds) with itself
        self.overhead_s = self.per_token_s = self.per_stage_s = self.per_cached_s = 0.0

    def observe(self, num_tokens: int, num_stages: int, num_cached: int, seconds: float) -> None:
        """Take in one prompt: computed tokens, stages, cached tokens, seconds until its first token."""
        row = np.array([1.0, num_tokens, num_stages, num_cached, seconds])
        self._products = DECAY * self._products + np.outer(row, row)
        weight, sum_n = self._products[0, 0], self._products[0, 1]
        if self._products[1, 1] / weight - (sum_n / weight) ** 2 < MIN_SPREAD**2:
            return
        assumed = [-1.0, 0.0, 1.0, 0.0] if self._initial_run is None else [0.0, -float(self._initial_run), 1.0, 0.0]
        normal = self._products[:4, :4] + np.outer(assumed, assumed)
        normal[3, 3] += NO_EVIDENCE**2
        solved = np.linalg.lstsq(normal, self._products[:4, 4], rcond=None)[0].tolist()
        _, per_token, per_stage, per_cached = solved
        if per_token <= max(per_cached, 0.0):  # noise: a longer prefill is not faster, nor is computing than loading
            return
        self.overhead_s, self.per_token_s, self.per_stage_s, self.per_cached_s = solved
        self._run = min(max(per_stage / (per_token - max(per_cached, 0.0)), LEAST_RUN), LONGEST_RUN)

    @property
    def min_run(self) -> int:
        """Shortest run, in tokens, that is worth a stage."""
        return round(self._run)
