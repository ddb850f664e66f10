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

    loaded = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32, attn_implementation="eager")
    return loaded.eval()


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
    reused = {position for start, end in runs for position in range(start, end)}
    own = [position for position in range(len(target)) if position not in reused]
    source_at = [position + shift for position in range(len(source))] if reused else []
    positions = torch.tensor([*source_at, *own])
    tokens = torch.tensor([*(source if reused else ()), *(target[position] for position in own)])
    num_source = len(source_at)
    is_source = torch.arange(len(positions)) < num_source
    is_reused = torch.tensor([index < num_source and int(p) in reused for index, p in enumerate(positions)])
    causal = positions.unsqueeze(1) >= positions.unsqueeze(0)
    visible = torch.where(is_source.unsqueeze(1), is_source, is_reused | ~is_source)
    mask = torch.where(causal & visible, 0.0, torch.finfo(torch.float32).min)
    positions = positions - min(0, int(positions.min()))
    with torch.no_grad():
        out = model(
            tokens[None],
            attention_mask=mask[None, None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=1,
        )
    log_probs: LogProbs = out.logits[0, -1].log_softmax(-1).numpy()
    return log_probs
