"""Areas under ROC curves against their definition, and cosines of pairs against a loop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.cluster.bench.similarity import Scores, auc, pair_scores, roc_curve


@st.composite
def score_pairs(draw: st.DrawFn) -> tuple[Scores, Scores]:
    """Scores of some groups, many of them equal."""
    numbers = st.integers(-4, 4) | st.floats(-1, 1)
    num_groups = draw(st.integers(2, 5))

    def scores() -> Scores:
        size = draw(st.integers(1, 5))
        lines = st.lists(st.lists(numbers, min_size=size, max_size=size), min_size=num_groups, max_size=num_groups)
        return np.array(draw(lines), dtype=np.float64)

    return scores(), scores()


@given(score_pairs())
def test_the_area_is_the_share_of_pairs_in_the_right_order_ties_half(pair: tuple[Scores, Scores]) -> None:
    same, different = pair
    wins = [float(a > b) + 0.5 * (a == b) for a in same.ravel() for b in different.ravel()]
    area = auc(same, different)
    assert area.value == pytest.approx(np.mean(wins))
    assert area.low <= area.value + 1e-12
    assert area.value <= area.high + 1e-12


@given(score_pairs())
def test_the_area_under_the_curve_is_the_statistic(pair: tuple[Scores, Scores]) -> None:
    curve = roc_curve(*pair)
    assert curve[0].tolist() == [0, 0]
    assert curve[-1].tolist() == [1, 1]
    assert (np.diff(curve, axis=0) >= 0).all()
    assert np.trapezoid(curve[:, 1], curve[:, 0]) == pytest.approx(auc(*pair).value)


def test_the_interval_agrees_with_a_bootstrap_over_groups() -> None:
    rng = np.random.default_rng(0)
    of_group = rng.normal(size=(40, 1))  # what pairs of a group have in common
    same = 1.0 + of_group + 0.5 * rng.normal(size=(40, 10))
    different = of_group * 0.3 + 0.5 * rng.normal(size=(40, 8))
    area = auc(same, different)
    drawn = (rng.integers(0, 40, 40) for _ in range(1000))
    low, high = np.percentile([auc(same[groups], different[groups]).value for groups in drawn], [2.5, 97.5])
    assert area.high - area.low == pytest.approx(high - low, rel=0.15)


def test_scores_are_cosines_of_aligned_tokens_averaged_over_a_block() -> None:
    rows = torch.randn(3, 4, 2, 5, 6, generator=torch.Generator().manual_seed(0))

    def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cosine_similarity(a, b, dim=-1).mean(dim=-1)

    same = [cosine(block[p], block[q]) for block in rows for p, q in itertools.combinations(range(4), 2)]
    different = [cosine(rows[b, p], rows[c, p]) for p in range(4) for b, c in itertools.combinations(range(3), 2)]
    found_same, found_different = pair_scores(rows.to(torch.float32))
    assert found_same.shape == (2, 18)
    assert found_different.shape == (2, 12)
    for layer in range(2):
        assert np.sort(found_same[layer]) == pytest.approx(np.sort([float(s[layer]) for s in same]), abs=1e-6)
        assert np.sort(found_different[layer]) == pytest.approx(np.sort([float(s[layer]) for s in different]), abs=1e-6)
