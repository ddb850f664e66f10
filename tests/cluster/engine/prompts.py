"""Prompts for the engine tests: plain English for SmolLM2, facts and questions for the recall model."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from ropewalk.workloads.recall.task import make_document, make_header, make_question

SUBJECTS = ("The old harbour", "A careful engineer", "The night train", "Her younger brother", "The city council")
VERBS = ("carried", "repaired", "counted", "described", "sold", "remembered", "painted", "ignored")
OBJECTS = ("three wooden boats", "the broken clock", "a box of letters", "every second window", "the long bridge")
PLACES = ("near the river", "before the storm", "in the spring of that year", "without a word", "for seven coins")


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from ropewalk.cluster.models import resolve

    return AutoTokenizer.from_pretrained(resolve("smollm2-135m"))


def english(rng: random.Random, num_tokens: int) -> list[int]:
    """Exactly `num_tokens` tokens of simple sentences."""
    sentences: list[str] = []
    while len(sentences) * 8 < num_tokens + 40:
        parts = (rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(OBJECTS), rng.choice(PLACES))
        sentences.append(f"{' '.join(parts)}, and {rng.randrange(1000)} people saw it.")
    return list(tokenizer()(" ".join(sentences))["input_ids"][:num_tokens])


def recall(rng: random.Random, num_tokens: int) -> list[int]:
    """A header, notes and a question about one of their facts, `num_tokens` in all."""
    header = make_header(rng, 4)
    while True:
        document = make_document(rng, num_tokens - len(header) - 5)
        if keys := document.unique_keys():
            return [*header, *document.tokens, *make_question(rng.choice(keys))]


def prompt(model: str, rng: random.Random, num_tokens: int) -> list[int]:
    """A prompt that the model can say something about."""
    return recall(rng, num_tokens) if model == "recall-mla" else english(rng, num_tokens)


def body_and_headers(model: str, rng: random.Random, num_body: int) -> tuple[list[int], Any, list[list[int]]]:
    """A body, a maker of headers of a given length, and questions to put behind the body."""
    if model == "recall-mla":
        document = make_document(rng, num_body)
        keys = rng.sample(document.unique_keys(), 8)
        return list(document.tokens), lambda n: make_header(rng, n), [make_question(key) for key in keys]
    questions = [f" And then, when {subject.lower()} came back" for subject in SUBJECTS]
    ids = [list(tokenizer()(question)["input_ids"]) for question in questions]
    return english(rng, num_body), lambda n: english(rng, n), ids
