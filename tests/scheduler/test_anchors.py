"""Anchors are found in prompts, follow new versions, stay bounded, and reach all replicas through the table."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ropewalk.kernels.keys import Tokens, as_tokens
from ropewalk.scheduler.anchors import (
    MAX_ANCHOR_TOKENS,
    MAX_RECENT,
    MIN_ANCHOR_TOKENS,
    Anchor,
    AnchorBook,
    AnchorTable,
    common_prefix,
)

OLD, NEW = list(range(1000, 1100)), [*range(1000, 1050), *range(5000, 5060)]


def prompt(anchor: Sequence[int], question: int) -> Tokens:
    """The anchor and ten tokens that no other question has."""
    return as_tokens([*anchor, *range(10_000 + 100 * question, 10_010 + 100 * question)])


def learned(book: AnchorBook, agent: str = "a") -> list[int] | None:
    anchor = book.get(agent)
    return None if anchor is None else anchor.tokens.tolist()


def sync(book: AnchorBook, table: AnchorTable, model: str = "m") -> None:
    message = book.message(model, "r", "n")
    book.take(message, table.sync(message))


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_the_common_prefix_is_the_longest_one(a: list[int], b: list[int]) -> None:
    n = common_prefix(as_tokens(a), as_tokens(b))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_an_anchor_is_what_prompts_of_two_sessions_share() -> None:
    book = AnchorBook()
    assert not book.learn("a", "s1", prompt(OLD, 1))
    assert learned(book) is None
    assert book.learn("a", "s2", prompt(OLD, 2))
    assert learned(book) == OLD
    book.check_integrity()


def test_one_session_alone_makes_no_anchor() -> None:
    book = AnchorBook()
    for question in range(5):
        book.learn("a", "s1", prompt(OLD, question))
        book.learn("a", None, prompt(OLD, question))
    assert learned(book) is None


def test_a_new_version_replaces_the_anchor_once_two_sessions_have_sent_it() -> None:
    book = AnchorBook()
    for number in range(2):
        book.learn("a", f"old {number}", prompt(OLD, number))
    book.learn("a", "new 1", prompt(NEW, 3))
    assert learned(book) == OLD
    book.learn("a", "new 1", prompt(NEW, 4))
    assert learned(book) == OLD, "the same session again is one session"
    book.learn("a", "new 2", prompt(NEW, 5))
    assert learned(book) == NEW


def test_an_anchor_taken_too_long_shrinks_to_what_other_sessions_share() -> None:
    book = AnchorBook()
    for session in ("1", "2"):
        book.learn("a", session, prompt(OLD, 7))  # the same question
    assert learned(book) == prompt(OLD, 7).tolist()
    book.learn("a", "3", prompt(OLD, 8))
    book.learn("a", "4", prompt(OLD, 9))
    assert learned(book) == OLD


def test_an_anchor_taken_too_short_grows_when_several_sessions_share_more() -> None:
    book = AnchorBook()
    book.learn("a", "1", prompt(OLD[:60], 1))
    book.learn("a", "2", prompt(OLD, 2))
    assert learned(book) == OLD[:60]
    for number in range(MAX_RECENT):
        book.learn("a", f"later {number}", prompt(OLD, 10 + number))
    assert learned(book) == OLD


def test_what_two_sessions_share_by_chance_is_no_anchor() -> None:
    book = AnchorBook()
    for session in ("1", "2"):
        book.learn("a", session, prompt(OLD[: MIN_ANCHOR_TOKENS - 1], int(session)))
    assert learned(book) is None


def test_no_more_of_a_prompt_is_kept_than_the_longest_anchor() -> None:
    book = AnchorBook()
    for session in ("1", "2"):
        book.learn("a", session, as_tokens(range(MAX_ANCHOR_TOKENS + 50)))
    assert len(learned(book) or ()) == MAX_ANCHOR_TOKENS
    book.check_integrity()


def test_the_agents_met_longest_ago_are_forgotten_first() -> None:
    book = AnchorBook(max_agents=2)
    for agent in "abc":
        for session in ("1", "2"):
            book.learn(agent, session, prompt(OLD, int(session)))
    assert book.lengths().keys() == {"b", "c"}


def test_a_registered_anchor_is_not_learned_over() -> None:
    book = AnchorBook()
    book.register(Anchor("a", as_tokens(OLD), "registered"))
    for session in ("1", "2", "3", "4"):
        book.learn("a", session, prompt(NEW, int(session)))
    assert learned(book) == OLD


def test_a_forgotten_session_does_not_make_an_anchor() -> None:
    book = AnchorBook()
    book.learn("a", "1", prompt(OLD, 1))
    book.forget_session("1")
    book.learn("a", "2", prompt(OLD, 2))
    assert learned(book) is None
    book.check_integrity()


def test_a_replica_that_never_saw_an_agent_gets_its_anchor_from_the_table() -> None:
    first, second, table = AnchorBook(), AnchorBook(), AnchorTable()
    for session in ("1", "2"):
        first.learn("a", session, prompt(OLD, int(session)))
    sync(first, table)
    sync(second, table)
    assert learned(second) == OLD
    assert not first.message("m", "r", "n").anchors, "what was confirmed is not sent again"


def test_anchors_of_another_model_are_not_handed_out() -> None:
    book, table = AnchorBook(), AnchorTable()
    table.put("other", Anchor("a", as_tokens(OLD)))
    sync(book, table)
    assert learned(book) is None


def test_a_deleted_anchor_is_forgotten_everywhere() -> None:
    book, table = AnchorBook(), AnchorTable()
    table.put("m", Anchor("a", as_tokens(OLD), "registered"))
    sync(book, table)
    assert table.delete("a") == ["m"]
    assert table.delete("a") == []
    sync(book, table)
    assert learned(book) is None


def test_an_unanswered_message_is_sent_again() -> None:
    book, table = AnchorBook(), AnchorTable()
    for session in ("1", "2"):
        book.learn("a", session, prompt(OLD, int(session)))
    book.message("m", "r", "n")  # never answered
    sync(book, table)
    assert [anchor.agent for _, anchor in table.anchors()] == ["a"]


def test_a_table_that_started_again_empty_learns_from_its_replicas_what_it_knew() -> None:
    book, table = AnchorBook(), AnchorTable(life=1)
    for session in ("1", "2"):
        book.learn("a", session, prompt(OLD, int(session)))
    table.put("m", Anchor("b", as_tokens(NEW), "registered"))
    sync(book, table)
    again = AnchorTable(life=2)
    again.put("m", Anchor("c", as_tokens(OLD)))
    for _ in range(2):
        sync(book, again)
    assert [(anchor.agent, anchor.origin) for _, anchor in again.anchors()] == [
        ("a", "learned"),
        ("b", "registered"),
        ("c", "learned"),
    ]
    assert book.lengths().keys() == {"a", "b", "c"}


def test_a_purge_forgets_what_was_learned_on_every_replica_and_refuses_what_comes_late() -> None:
    first, second, table = AnchorBook(), AnchorBook(), AnchorTable()
    for book in (first, second):
        for session in ("1", "2"):
            book.learn("a", session, prompt(OLD, int(session)))
        sync(book, table)
    table.put("m", Anchor("b", as_tokens(NEW), "registered"))
    late = second.message("m", "r", "n")
    for session in ("3", "4"):
        second.learn("c", session, prompt(OLD, int(session)))
    late = second.message("m", "r2", "n")
    first.forget_learned()
    table.purge("m")
    second.take(late, table.sync(late))
    sync(first, table)
    assert [anchor.agent for _, anchor in table.anchors()] == ["b"]
    assert first.lengths().keys() == second.lengths().keys() == {"b"}


def test_a_purge_that_the_table_did_not_hear_of_reaches_it_with_the_next_message() -> None:
    book, table = AnchorBook(), AnchorTable()
    for session in ("1", "2"):
        book.learn("a", session, prompt(OLD, int(session)))
    sync(book, table)
    book.forget_learned()
    sync(book, table)
    assert table.anchors() == []
    assert learned(book) is None


def test_a_table_comes_back_from_json() -> None:
    table = AnchorTable()
    table.put("m", Anchor("a", as_tokens(OLD)))
    table.put("n", Anchor("b", as_tokens(NEW), "registered"))
    table.purge("other")
    again = AnchorTable.from_dict(json.loads(json.dumps(table.to_dict())), life=2)
    assert [(m, a.agent, a.origin, a.tokens.tolist()) for m, a in again.anchors()] == [
        ("m", "a", "learned", OLD),
        ("n", "b", "registered", NEW),
    ]
    assert again.to_dict()["epochs"] == {"other": 1}


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"format": 99},
        {"format": 1, "epochs": {}, "anchors": [["m", "a", "learned", "nonsense"]]},
        {"format": 1, "epochs": {}, "anchors": [["m", "a"]]},
        {"format": 1, "epochs": 3, "anchors": []},
    ],
)
def test_a_damaged_table_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"format|damaged|packed|unpack|base64"):
        AnchorTable.from_dict(data)


def test_an_anchor_of_a_wrong_length_is_refused_with_its_length() -> None:
    with pytest.raises(ValueError, match=f"got {MIN_ANCHOR_TOKENS - 1}"):
        AnchorTable().put("m", Anchor("a", as_tokens(range(MIN_ANCHOR_TOKENS - 1))))


class Replicas(RuleBasedStateMachine):
    """Two replicas learn, forget and sync in any order; bounds hold, and at rest both know what the table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = AnchorTable(1, max_agents=3)
        self.books = [AnchorBook(max_agents=4), AnchorBook(max_agents=4)]

    @rule(
        book=st.integers(0, 1),
        agent=st.sampled_from("abcde"),
        session=st.sampled_from(["1", "2", "3", None]),
        anchor=st.sampled_from([OLD, NEW, OLD[:40], OLD[:10]]),
        question=st.integers(0, 3),
    )
    def learn(self, book: int, agent: str, session: str | None, anchor: list[int], question: int) -> None:
        self.books[book].learn(agent, session, prompt(anchor, question))

    @rule(book=st.integers(0, 1))
    def sync(self, book: int) -> None:
        sync(self.books[book], self.table)

    @rule(agent=st.sampled_from("abcde"))
    def register(self, agent: str) -> None:
        self.table.put("m", Anchor(agent, as_tokens(OLD), "registered"))

    @rule(agent=st.sampled_from("abcde"))
    def delete(self, agent: str) -> None:
        self.table.delete(agent)

    @rule(book=st.integers(0, 1), session=st.sampled_from(["1", "2", "3"]))
    def forget_session(self, book: int, session: str) -> None:
        self.books[book].forget_session(session)

    @rule(book=st.integers(0, 1))
    def purge(self, book: int) -> None:
        self.books[book].forget_learned()
        self.table.purge("m")

    @rule()
    def restart(self) -> None:
        self.table = AnchorTable.from_dict(self.table.to_dict(), self.table.life + 1)

    @invariant()
    def tables_hold_together(self) -> None:
        self.table.check_integrity()
        for book in self.books:
            book.check_integrity()
            for agent in book.lengths():
                anchor = book.get(agent)
                assert anchor is not None
                assert any(np.array_equal(anchor.tokens, as_tokens(p)[: len(anchor.tokens)]) for p in ALL_PROMPTS)


ALL_PROMPTS = [prompt(anchor, question) for anchor in (OLD, NEW, OLD[:40]) for question in range(4)]
TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(deadline=None)
