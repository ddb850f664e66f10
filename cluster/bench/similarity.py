"""How well similarity of KV tells equal content from other content: cosines of rows, ROC curves, areas under them.

Legend: `G` groups, `B` blocks a group, `P` positions, `L` layers, `n` tokens a block, `D` numbers a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Auc:
    """Area under a ROC curve with its 95 % interval: 0.5 is chance, 1 a perfect order, below 0.5 a reversed one."""

    value: float
    low: float
    high: float


def pair_scores(rows: torch.Tensor) -> tuple[Scores, Scores]:
    """Compare the blocks of one group: `rows` is `[B, P, L, n, D]`, block `b` computed at position `p`.

    Returns the scores of same-content pairs (one block at two positions, `[L, B * P (P - 1) / 2]`) and of
    different-content pairs (two blocks at one position, `[L, P * B (B - 1) / 2]`). A score is the cosine of two rows,
    token by token, averaged over the block's tokens.
    """
    unit = torch.nn.functional.normalize(rows.float(), dim=-1)
    num_blocks, num_positions, _, num_tokens, _ = rows.shape
    between_positions = torch.einsum("bplnd,bqlnd->lbpq", unit, unit) / num_tokens
    between_blocks = torch.einsum("bplnd,cplnd->lpbc", unit, unit) / num_tokens
    p, q = np.triu_indices(num_positions, 1)
    b, c = np.triu_indices(num_blocks, 1)
    return _flat(between_positions[..., p, q]), _flat(between_blocks[..., b, c])


def _flat(scores: torch.Tensor) -> Scores:
    flat: Scores = scores.flatten(1).double().numpy()
    return flat


def auc(same: Scores, different: Scores) -> Auc:
    """Return the chance that a same-content pair scores higher than a different-content pair, ties counting half.

    `same` is `[G, i]`, `different` is `[G, j]`. This is the Mann-Whitney statistic. Pairs of one group share blocks,
    so the interval takes groups as the independent unit: DeLong 1988's variance in Obuchowski 1997's form for clusters.
    It has no width where the order is perfect.
    """
    ranks_of_same = _placements(same, different)
    ranks_of_different = 1 - _placements(different, same)
    value = float(ranks_of_same.mean())
    deviations = ranks_of_same.mean(axis=1) + ranks_of_different.mean(axis=1) - 2 * value
    count = len(deviations)
    error = math.sqrt(float((deviations**2).sum()) / (count * (count - 1))) if count > 1 else math.nan
    return Auc(value, max(value - 1.96 * error, 0.0), min(value + 1.96 * error, 1.0))


def _placements(scores: Scores, others: Scores) -> Scores:
    """For each score, the share of `others` below it, ties counting half."""
    ordered = np.sort(others, axis=None)
    below = np.searchsorted(ordered, scores, "left")
    not_above = np.searchsorted(ordered, scores, "right")
    placements: Scores = (below + not_above) / (2 * len(ordered))
    return placements


def roc_curve(same: Scores, different: Scores) -> Scores:
    """Return the ROC curve, `[k, 2]` from (0, 0) to (1, 1): for each threshold the share of different-content pairs
    that reach it (false positives), and of same-content pairs (true positives). The area below is `auc`.
    """
    thresholds = np.unique(np.concatenate([same.ravel(), different.ravel()]))[::-1]
    shares = [
        1 - np.searchsorted(np.sort(part, axis=None), thresholds, "left") / part.size for part in (different, same)
    ]
    return np.concatenate([np.zeros((1, 2)), np.stack(shares, axis=1)])
