"""Directives against the naive way: cut and paste in a list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.agents.directives import SINK, Directive, DirectiveError, DirectiveSet, Mode, Span


@st.composite
def edits(draw):
    """A prompt's tokens and directives that may stand together, in any order."""
    num_tokens = draw(st.integers(SINK, 400))
    cuts = sorted(draw(st.lists(st.integers(SINK, num_tokens), max_size=12, unique=True)))
    directives = []
    for start, end in zip(cuts[::2], cuts[1::2], strict=False):
        replacement = tuple(draw(st.lists(st.integers(1000, 1009), max_size=40)))
        directives.append(Directive(Span(start, end), replacement, draw(st.sampled_from(Mode))))
    return list(range(num_tokens)), draw(st.permutations(directives))


@given(edits())
def test_applying_equals_cutting_and_pasting_from_the_right(case):
    tokens, directives = case
    naive = list(tokens)
    for directive in sorted(directives, key=lambda directive: directive.span, reverse=True):
        naive[directive.span.start : directive.span.end] = directive.replacement
    found = DirectiveSet(directives, len(tokens))
    assert found.apply(tokens) == naive
    assert found.num_edited == len(naive)


@given(edits())
def test_what_is_kept_stands_where_it_says_in_the_edited_prompt(case):
    tokens, directives = case
    found = DirectiveSet(directives, len(tokens))
    edited = found.apply(tokens)
    for kept in found.kept():
        assert kept.start < kept.end
        assert edited[kept.new_start : kept.new_start + kept.end - kept.start] == tokens[kept.start : kept.end]
    removed = {position for d in directives for position in range(*d.span)}
    assert {p for kept in found.kept() for p in range(kept.start, kept.end)} == set(tokens) - removed


@given(edits())
def test_nothing_behind_a_forget_is_kept(case):
    tokens, directives = case
    found = DirectiveSet(directives, len(tokens))
    forgotten = [d for d in directives if d.mode is Mode.FORGET]
    if not forgotten:
        assert found.forgotten_from() is None
        return
    first = min(forgotten, key=lambda d: d.span)
    before = [d for d in directives if d.span < first.span]
    assert found.forgotten_from() == first.span.start + sum(d.delta for d in before)


def test_overlapping_directives_are_rejected_and_both_named():
    with pytest.raises(
        DirectiveError, match=r"directives\[1\] \[40, 60\) and directives\[0\] \[50, 70\) overlap"
    ) as error:
        DirectiveSet([Directive(Span(50, 70)), Directive(Span(40, 60))], 100)
    assert error.value.field == "directives[1].span"


def test_two_insertions_at_one_place_have_no_order_and_are_rejected():
    with pytest.raises(DirectiveError, match="overlap"):
        DirectiveSet([Directive(Span(50, 50), (1,)), Directive(Span(50, 50), (2,))], 100)


def test_an_insertion_may_adjoin_a_replaced_span():
    found = DirectiveSet(
        [Directive(Span(50, 60), (7,)), Directive(Span(50, 50), (8,)), Directive(Span(60, 60), (9,))], 70
    )
    assert found.apply(range(70))[48:55] == [48, 49, 8, 7, 9, 60, 61]


@pytest.mark.parametrize("span", [(-1, 40), (40, 101), (60, 50), (101, 101)])
def test_a_span_that_is_not_in_the_prompt_is_rejected(span):
    with pytest.raises(DirectiveError, match="is no span of 100 tokens") as error:
        DirectiveSet([Directive(Span(40, 50)), Directive(Span(*span), (1,))], 100)
    assert error.value.field == "directives[1].span"


def test_a_directive_that_changes_nothing_is_rejected():
    with pytest.raises(DirectiveError, match="changes nothing"):
        DirectiveSet([Directive(Span(40, 40))], 100)


@pytest.mark.parametrize("start", [0, SINK - 1])
def test_no_amortize_begins_in_the_attention_sink_but_a_forget_may(start):
    with pytest.raises(DirectiveError, match="attention sink"):
        DirectiveSet([Directive(Span(start, 50))], 100)
    assert DirectiveSet([Directive(Span(start, 50), mode=Mode.FORGET)], 100).forgotten_from() == start
    DirectiveSet([Directive(Span(SINK, 50))], 100)


@given(edits(), st.data())
def test_a_span_moves_with_the_text_in_it(case, data):
    tokens, directives = case
    found = DirectiveSet(directives, len(tokens))
    start = data.draw(st.integers(0, len(tokens) - 1))
    end = data.draw(st.integers(start + 1, len(tokens)))
    moved = found.moved(Span(start, end))
    kept = {position for k in found.kept() for position in range(k.start, k.end)}
    inside = found.apply(tokens)[moved.start : moved.end]
    assert [token for token in inside if token < 1000] == sorted(kept & set(range(start, end)))
    replaced = [d.replacement for d in found if d.span.start < end and d.span.end > start]
    assert [token for token in inside if token >= 1000] == [token for one in replaced for token in one]
