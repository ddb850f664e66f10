"""The float32 reference of reuse and splices: one forward pass that knows nothing of caches and turns nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ropewalk.cluster.bench.statistics import LogProbs
from ropewalk.cluster.models import resolve


def load_reference(model: str) -> Any:
    """Load a model as transformers has it, in float32, for `reference`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32, attn_implementation="sdpa").eval()


def reference(
    model: Any, source: Sequence[int], target: Sequence[int], runs: Sequence[tuple[int, int]], shift: int
) -> LogProbs:
    """Log-probabilities `[V]` of the token after `target`, of which `runs` were computed inside `source`, `shift`
    positions earlier.

    `source` stands at the positions that its rows have in `target`, and a mask lets the tokens of `target` see those
    of its rows that are reused, and nothing else of it. Positions may be negative: only distances enter.

           source: A · S · C                  causal
           target: A · R · (C, reused) · q    causal, and the reused rows of source
    """
    return references(model, source, target, [()], runs, shift)[0]


def references(
    model: Any,
    source: Sequence[int],
    target: Sequence[int],
    tails: Sequence[Sequence[int]],
    runs: Sequence[tuple[int, int]],
    shift: int,
) -> list[LogProbs]:
    """As `reference`, of `target` followed by each of `tails`, in one pass: no tail sees another one. `runs` lie inside
    `target`.
    """
    reused = {position for start, end in runs for position in range(start, end)}
    assert all(tails) or len(target) - 1 not in reused, "the last token must be one that is computed"
    own = [position for position in range(len(target)) if position not in reused]
    num_source = len(source) if reused else 0
    positions = torch.tensor(
        [
            *(position + shift for position in range(num_source)),
            *own,
            *(len(target) + index for tail in tails for index in range(len(tail))),
        ]
    )
    tokens = torch.tensor(
        [*source[:num_source], *(target[position] for position in own), *(token for tail in tails for token in tail)]
    )
    # Whose a token is: of the source, of the target, of the first tail, ...
    owner = torch.tensor(
        [-1] * num_source + [0] * len(own) + [number for number, tail in enumerate(tails, 1) for _ in tail]
    )
    is_source = owner == -1
    is_reused = is_source & torch.tensor([int(position) in reused for position in positions])
    mine = (owner.unsqueeze(0) == owner.unsqueeze(1)) | (owner == 0)
    visible = torch.where(is_source.unsqueeze(1), is_source, is_reused | (mine & ~is_source))
    causal = positions.unsqueeze(1) >= positions.unsqueeze(0)
    mask = torch.where(causal & visible, 0.0, torch.finfo(torch.float32).min)
    ends, end = [], num_source + len(own)
    for tail in tails:
        ends.append((end + len(tail) if tail else num_source + len(own)) - 1)
        end += len(tail)
    with torch.no_grad():
        out = model(
            tokens[None],
            attention_mask=mask[None, None],
            position_ids=(positions - min(0, int(positions.min())))[None],
            use_cache=False,
            logits_to_keep=torch.tensor(ends),
        )
    return [row.log_softmax(-1).numpy() for row in out.logits[0]]
