"""The recall task's documents, prompts and training sequences."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.workloads.recall.task import make_document, make_prompt, make_training_sequence
from ropewalk.workloads.recall.vocabulary import vocabulary


def facts_read_from(tokens: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
    """All `KEY is V1 V2 .` in the text, found by reading it."""
    words = vocabulary()
    keys, values = set(words.keys), set(words.values)
    return [
        (tokens[i], (tokens[i + 2], tokens[i + 3]))
        for i in range(len(tokens) - 4)
        if tokens[i] in keys
        and tokens[i + 1] == words.is_
        and {tokens[i + 2], tokens[i + 3]} <= values
        and tokens[i + 4] == words.full_stop
    ]


@given(seed=st.integers(0, 10**6), num_tokens=st.integers(1, 1500), share=st.sampled_from([0.0, 0.25, 0.9]))
def test_a_document_has_the_asked_length_and_lists_the_facts_it_contains(
    seed: int, num_tokens: int, share: float
) -> None:
    document = make_document(random.Random(seed), num_tokens, reassigned_share=share)
    assert len(document.tokens) == num_tokens
    assert [(fact.key, fact.values) for fact in document.facts] == facts_read_from(document.tokens)
    assert document.note_starts[0] == 0
    assert list(document.note_starts) == sorted(set(document.note_starts))


@given(seed=st.integers(0, 10**6), num_tokens=st.integers(200, 1500), reassigned=st.booleans())
def test_the_answer_is_the_latest_fact_about_the_key(seed: int, num_tokens: int, reassigned: bool) -> None:
    prompt = make_prompt(random.Random(seed), num_tokens, reassigned=reassigned)
    assert len(prompt.tokens) == num_tokens
    stated = [values for key, values in facts_read_from(prompt.tokens) if key == prompt.key]
    assert prompt.answer == stated[-1]
    assert (len(stated) > 1) == reassigned
    assert prompt.tokens[-3] == prompt.key


def test_documents_drawn_from_disjoint_keys_never_contradict_each_other() -> None:
    keys = vocabulary().keys
    first, second = (make_document(random.Random(1), 2000, keys=part, density=0.4) for part in (keys[::2], keys[1::2]))
    assert not {fact.key for fact in first.facts} & {fact.key for fact in second.facts}


def test_the_same_seed_gives_the_same_prompt() -> None:
    assert make_prompt(random.Random(7), 300) == make_prompt(random.Random(7), 300)
    assert make_prompt(random.Random(7), 300) != make_prompt(random.Random(8), 300)


@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.0, 0.25]))
def test_training_answers_are_the_latest_facts_and_positions_ascend(seed: int, share: float) -> None:
    words = vocabulary()
    sequence = make_training_sequence(random.Random(seed), 256, 10, reassigned_share=share, max_position=6144)
    tokens = tuple(sequence.tokens)
    assert len(tokens) == len(sequence.positions) == 256
    assert sequence.positions[0] >= 0
    assert sequence.positions[-1] < 6144
    assert all(left < right for left, right in zip(sequence.positions, sequence.positions[1:], strict=False))
    for first, second, end in zip(
        sequence.answer_indices[::2], sequence.answer_indices[1::2], sequence.end_indices, strict=True
    ):
        key = tokens[first - 3]
        assert dict(facts_read_from(tokens))[key] == (tokens[first], tokens[second])
        assert tokens[end] == words.end


def test_a_prompt_too_short_for_a_document_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens = 20"):
        make_prompt(random.Random(0), 20)
