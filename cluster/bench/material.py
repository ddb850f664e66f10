"""Texts to study, as token ids: for the recall model notes of its task, for any other real English prose and code."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ropewalk.cluster.models import RECALL_MLA, resolve

HEADER_TOKENS = 16


class TooLittleText(ValueError):
    """The text is too short for what is asked of it."""


@dataclass(frozen=True, slots=True)
class Material:
    """`fillers` go before `blocks`. No two share tokens of the text that they were cut from."""

    fillers: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[int, ...], ...]


def make_material(
    model: str, rng: random.Random, *, num_fillers: int, filler_tokens: int, num_blocks: int, block_tokens: int
) -> Material:
    """Cut fillers and blocks for a model. Raises `TooLittleText` where the text does not suffice."""
    if model == RECALL_MLA:
        from ropewalk.workloads.recall.task import make_document, make_header

        fillers = [
            (*make_header(rng, HEADER_TOKENS), *make_document(rng, filler_tokens).tokens)[:filler_tokens]
            for _ in range(num_fillers)
        ]
        return Material(tuple(fillers), tuple(make_document(rng, block_tokens).tokens for _ in range(num_blocks)))
    text = _english(model)
    needed = num_fillers * filler_tokens + num_blocks * block_tokens
    if needed > len(text):
        raise TooLittleText(f"{needed:,} tokens are needed, but the text has only {len(text):,}")
    split = num_fillers * filler_tokens
    fillers = [text[start : start + filler_tokens] for start in range(0, split, filler_tokens)] if filler_tokens else []
    places = range(split, len(text) - block_tokens + 1, block_tokens)
    # Drawn from all over the text: neighbours would speak of the same things.
    return Material(tuple(fillers), tuple(text[p : p + block_tokens] for p in rng.sample(places, num_blocks)))


def _english(model: str) -> tuple[int, ...]:
    """The help topics that come with Python: half a megabyte of prose, grammar and code, on every machine."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    text = "\n".join(topics[name] for name in sorted(topics))
    tokenizer = AutoTokenizer.from_pretrained(resolve(model))
    # Longer than any model's context, which the tokenizer would complain about.
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
