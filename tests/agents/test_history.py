"""Histories and lineages of a session, against one that remembers for each token where its row was computed."""

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ropewalk.agents.directives import Directive, DirectiveSet, Span
from ropewalk.agents.history import MAX_BRANCHES, Branch, History, tree
from ropewalk.agents.lineage import REUSE, Lineage, Mark, Match, Rows, carry, label_of
from ropewalk.kernels.keys import as_tokens


def lineage(tokens, marks=(), chunk=50):
    """Rows of `chunk` tokens each, computed where they stand."""
    limits = [*range(0, len(tokens), chunk), len(tokens)]
    rows = tuple(Rows(a, b, f"chunk-{a}", 0, a) for a, b in pairwise(limits) if a < b)
    return Lineage(as_tokens(tokens), rows, tuple(marks))


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_however_often_a_history_is_edited_each_row_remembers_where_it_was_computed(seed, num_edits):
    rng = random.Random(seed)
    tokens = [rng.randrange(10**6) for _ in range(600)]
    held, naive = lineage(tokens), list(range(600))
    for _ in range(num_edits):
        start = rng.randrange(32, len(tokens))
        end = min(start + rng.randrange(60), len(tokens))
        replacement = tuple(rng.randrange(10**6) for _ in range(rng.randrange(0 if start < end else 1, 40)))
        if start == end and not replacement:
            continue
        edits = DirectiveSet([Directive(Span(start, end), replacement)], len(tokens))
        matches = [Match(k.start, k.new_start, k.end - k.start) for k in edits.kept()]
        tokens = edits.apply(tokens)
        naive = [*naive[:start], *(None for _ in replacement), *naive[end:]]
        found = carry(held, matches, "owner")
        held = Lineage(as_tokens(tokens), found.rows, found.marks)
        held.check_integrity()
    at = [None] * len(tokens)
    for rows in held.rows:
        for offset in range(rows.end - rows.start):
            at[rows.start + offset] = rows.source + offset
    assert at == naive


def test_marks_before_an_edit_stay_and_those_behind_it_go():
    held = lineage(range(300), [Mark(100, "a"), Mark(200, "b")])
    found = carry(held, [Match(0, 0, 150), Match(180, 160, 120)], "owner")
    assert found.marks == (Mark(100, "a"),)
    assert found.edited_from == 150
    assert found.inexact_from == 100


def test_a_history_that_goes_on_has_no_edit():
    found = carry(lineage(range(300)), [Match(0, 0, 300)], "owner")
    assert found.edited_from is None
    assert found.inexact_from > 10**9


def test_what_was_computed_behind_reused_chunks_is_for_those_who_allow_it():
    held = lineage(range(300), [Mark(100, "a"), Mark(220, REUSE)])
    assert len(held.licensed(reuse=True).tokens) == 300
    exact = held.licensed(reuse=False)
    assert len(exact.tokens) == 220
    exact.check_integrity()
    assert exact.rows[-1] == Rows(200, 220, "chunk-200", 0, 200)


def test_the_label_of_a_splice_is_its_own():
    rows = lineage(range(100)).rows
    labels = {
        label_of("s", (), rows),
        label_of("t", (), rows),
        label_of("s", (Mark(10, "a"),), rows),
        label_of("s", (), rows[:1]),
    }
    assert len(labels) == 4
    assert label_of("s", (), rows) == label_of("s", (), list(rows))


def test_a_longer_history_takes_the_place_of_the_one_it_goes_on_from_and_branches_are_bounded():
    history = History()
    history.add(Branch(lineage(range(100))))
    history.add(Branch(lineage(range(150))))
    assert [len(branch.lineage.tokens) for branch in history.branches] == [150]
    for number in range(20):
        history.add(Branch(lineage([*range(120), 1000 + number])))
    assert len(history.branches) == MAX_BRANCHES
    assert history.branches[0].lineage.tokens[-1] == 1019
    assert tree(history.branches)[1] == (0, 120)


def test_a_splice_does_not_take_the_place_of_an_exact_history_of_the_same_tokens():
    history = History()
    history.add(Branch(lineage(range(100))))
    history.add(Branch(lineage(range(100), [Mark(50, "a")])))
    assert len(history.branches) == 2


def test_the_branch_that_has_most_of_a_prompt_is_asked():
    history = History()
    history.add(Branch(lineage(range(400))))
    history.add(Branch(lineage([*range(60), *range(900, 1000)])))
    found = history.held(as_tokens([*range(100), *range(150, 400), 7]), "s", reuse=False)
    assert found is not None
    assert sum(rows.end - rows.start for rows in found.rows) == 350
    assert history.held(as_tokens(range(399)), "s", reuse=False) is None, "that is exact"
    assert history.held(as_tokens([5, 5, 5]), "s", reuse=False) is None


def test_directives_say_what_is_kept_where_comparing_would_find_more():
    """The replacement repeats a part of what it replaces: that is to be computed anew."""
    tokens = list(range(400))
    edits = DirectiveSet([Directive(Span(100, 200), tuple(range(120, 160)))], 400)
    history = History([Branch(lineage(tokens))])
    edited = as_tokens(edits.apply(tokens))
    by_directives = history.held(edited, "s", reuse=False, original=as_tokens(tokens), edits=edits)
    assert by_directives is not None
    assert not any(100 <= rows.start < 140 for rows in by_directives.rows)


def applied(history, prompt):
    """The prompt with those edits carried out that it lacks."""
    edits = history.to_apply(as_tokens(prompt))
    assert edits is not None
    return edits.apply(list(prompt))


def test_directives_that_were_applied_on_the_server_are_applied_to_later_prompts():
    branch = Branch(lineage([*range(50), *range(80, 100)]), as_tokens(range(100)))
    history = History([branch])
    assert applied(history, range(120)) == [*range(50), *range(80, 120)]
    assert history.to_apply(as_tokens([*range(50), *range(80, 120)])) is None
    assert history.to_apply(as_tokens([1, 2])) is None


def test_what_was_forgotten_is_gone():
    history = History([Branch(lineage(range(100)))])
    history.forget()
    assert history.branches == []
    assert history.forgotten
    assert not history.is_edited(as_tokens([1]))


def test_only_a_changed_history_counts_as_edited():
    history = History([Branch(lineage(range(100)))])
    assert not history.is_edited(as_tokens(range(120)))
    assert not history.is_edited(as_tokens(range(60)))
    assert history.is_edited(as_tokens([*range(50), *range(60, 120)]))


def test_an_edit_before_reused_chunks_does_not_make_them_the_sessions_own():
    """Behind a splice the old mark is gone; where its rows stand now is said, so they stay for who allows it."""
    held = lineage(range(400), [Mark(300, REUSE)])
    found = carry(held, [Match(0, 0, 100), Match(200, 110, 200)], "s")
    assert (found.marks, found.edited_from, found.moved_marks) == ((), 100, (Mark(210, REUSE),))
    assert carry(held, [Match(0, 0, 100), Match(350, 110, 50)], "s").moved_marks == (Mark(110, REUSE),)
    assert carry(held, [Match(0, 0, 100), Match(110, 105, 60)], "s").moved_marks == ()
    assert carry(held, [Match(0, 0, 350)], "s").moved_marks == (), "the mark itself is there"


def test_a_turn_that_began_before_something_was_forgotten_adds_nothing():
    history = History(epoch="one")
    assert history.accepts("one")
    history.forget()
    assert not history.accepts("one")
    assert not history.accepts("")
    assert History().accepts("")


def test_applied_edits_are_found_again_where_the_prompt_has_changed_elsewhere():
    sent, held = list(range(200)), [*range(50), *range(80, 200)]
    history = History([Branch(lineage(held), as_tokens(sent))])
    prompt = [*range(20), 7000, *range(20, 200), 8000]
    assert applied(history, prompt) == [*range(20), 7000, *range(20, 50), *range(80, 200), 8000]
    inserted = History([Branch(lineage([*range(60), 9000, *range(60, 200)]), as_tokens(sent))])
    there_already = as_tokens([*range(10), 7000, *range(10, 60), 9000, *range(60, 200)])
    assert inserted.to_apply(there_already) is None


def test_what_saw_a_scratch_says_so_wherever_it_is_moved():
    tokens = as_tokens(range(400))
    marks = (Mark(300, "scratch/1/dropped"), Mark(320, REUSE))
    held = Lineage(tokens, (Rows(0, 400, "c", 0, 0),), marks)
    found = carry(held, [Match(0, 0, 100), Match(150, 110, 250)], "s")
    assert found.moved_marks == (Mark(260, "scratch/1/dropped"), Mark(280, REUSE))
    assert found.until(270).moved_marks == found.moved_marks
