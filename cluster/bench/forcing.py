"""A logits processor that lets an engine say given tokens: all arms of a study then answer in the same context.

vLLM returns log-probabilities from before logits processors (`logprobs_mode`), so that they are the model's own.
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

KEY = "ropewalk_forced"
"""Key of the token ids in a request's `extra_args`."""


class Forcing(AdapterLogitsProcessor):
    """Rules out every token but the given one, for as many tokens as are given."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> _Force | None:
        forced = (params.extra_args or {}).get(KEY)
        return _Force(forced) if forced else None


class _Force:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) < len(self._tokens):
            token = self._tokens[len(output_ids)]
            wanted = logits[token].clone()
            logits.fill_(float("-inf"))
            logits[token] = wanted
        return logits
