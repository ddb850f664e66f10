"""Edit detection finds directives that lead from the old tokens to the new ones, and keeps what it can."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.agents.directives import Directive, DirectiveSet, Mode, Span
from ropewalk.agents.edits import WINDOW, detect_edits, matches
from ropewalk.kernels.keys import as_tokens


def text(rng: random.Random, length: int, vocabulary: int = 5000) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(length)]


@given(st.integers(0, 10**6), st.integers(2, 50), st.integers(0, 6))
def test_what_is_found_leads_from_old_to_new_whatever_was_changed(seed, vocabulary, num_edits):
    rng = random.Random(seed)
    old = text(rng, rng.randrange(300), vocabulary)
    new = list(old)
    for _ in range(num_edits):
        start = rng.randrange(len(new) + 1)
        new[start : start + rng.randrange(40)] = text(rng, rng.randrange(40), vocabulary)
    directives = detect_edits(as_tokens(old), as_tokens(new), Mode.FORGET)
    assert DirectiveSet(directives, len(old)).apply(old) == new
    assert (directives == []) == (old == new)


def test_several_edits_far_apart_are_found_to_the_token():
    rng = random.Random(1)
    old = text(rng, 4000)
    wanted = [
        Directive(Span(300, 700), tuple(text(rng, 12))),
        Directive(Span(1500, 1500), tuple(text(rng, 30))),
        Directive(Span(2600, 3100)),
        Directive(Span(3500, 3510), tuple(text(rng, 10))),
    ]
    new = DirectiveSet(wanted, len(old)).apply(old)
    found = detect_edits(as_tokens(old), as_tokens(new))
    assert DirectiveSet(found, len(old)).apply(old) == new
    assert [(d.span.start, d.span.end) for d in found] == [(d.span.start, d.span.end) for d in wanted]


def test_an_edit_and_an_appended_turn_leave_two_matches():
    rng = random.Random(2)
    old, turn = text(rng, 1000), text(rng, 90)
    new = [*old[:200], *old[600:], *turn]
    assert matches(as_tokens(old), as_tokens(new)) == [(0, 0, 200), (600, 200, 400)]


def test_moved_text_is_matched_once_and_never_backwards():
    rng = random.Random(3)
    a, b, c = text(rng, 200), text(rng, 300), text(rng, 200)
    found = matches(as_tokens([*a, *b, *c]), as_tokens([*b, *a, *c]))
    assert sum(length for _, _, length in found) == 500, "the longer part and the end"
    assert found == sorted(found)
    assert [new for _, new, _ in found] == sorted(new for _, new, _ in found)


@pytest.mark.parametrize("length", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1])
def test_short_texts_and_repetitive_ones(length):
    old = np.full(length, 7, np.int32)
    assert detect_edits(old, old) == []
    longer = np.full(length + 5, 7, np.int32)
    assert DirectiveSet(detect_edits(old, longer, Mode.FORGET), length).apply(old.tolist()) == longer.tolist()
