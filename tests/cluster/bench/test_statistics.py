"""Figures of the studies against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.cluster.bench.statistics import divergence, share, spread


@given(st.integers(0, 2**32 - 1), st.integers(2, 50))
def test_divergence_is_the_sum_over_the_vocabulary(seed, size):
    rng = np.random.default_rng(seed)
    truth, other = (np.log(rng.dirichlet(np.ones(size))).astype(np.float32) for _ in range(2))
    expected = float((np.exp(truth.astype(np.float64)) * (truth.astype(np.float64) - other)).sum())
    assert divergence(truth, other) == pytest.approx(max(expected, 0.0), abs=1e-5)
    assert divergence(truth, truth) == 0


def test_what_cannot_be_said_weighs_nothing():
    certain = np.array([0.0, -np.inf], dtype=np.float32)
    assert divergence(certain, certain) == 0


@given(st.integers(0, 100), st.integers(1, 100))
def test_a_share_lies_in_its_interval_and_that_in_0_to_1(right, more):
    found = share(right, right + more)
    assert 0 <= found["low"] <= found["share"] <= found["high"] <= 1


def test_nothing_counted_is_no_share_and_no_spread():
    assert share(0, 0)["share"] is None
    assert spread([])["median"] is None


def test_a_spread_has_median_and_quartiles():
    assert spread([1, 2, 3, 4, 5]) == {"count": 5, "mean": 3, "median": 3, "q1": 2, "q3": 4}
