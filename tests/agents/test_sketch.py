"""A sketch says what an anchor is made of, and any request body has one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.agents.sketch import (
    MAX_ANCHOR_CHARS,
    MAX_NAME_CHARS,
    SKETCH_SIZE,
    AnchorSketch,
    anchor_sketch,
    clean_agent_name,
)

from .anchors import chat, sentences, tool


def test_the_same_anchor_gives_the_same_sketch_whatever_the_user_says() -> None:
    one = {"messages": [{"role": "system", "content": "You plan.\nYou never guess."}, {"role": "user", "content": "a"}]}
    two = {"messages": [*one["messages"], {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}
    assert anchor_sketch(one) == anchor_sketch(two)
    assert anchor_sketch(one)


def test_times_and_ids_do_not_change_a_sketch() -> None:
    one = chat(["Today is 2026-11-29 10:15. Request 7f3a-11. You plan the work."])
    two = chat(["Today is 2027-01-02 23:59. Request 0bc1-98. You plan the work."])
    assert anchor_sketch(one).hashes == anchor_sketch(two).hashes


def test_content_parts_and_developer_messages_count_like_plain_text() -> None:
    parts = {"messages": [{"role": "developer", "content": [{"type": "text", "text": "You plan the work."}]}]}
    assert anchor_sketch(parts).hashes == anchor_sketch(chat(["You plan the work."])).hashes


def test_a_changed_tool_parameter_costs_one_piece() -> None:
    before = anchor_sketch(chat(["You call tools."], [tool("add", x="first number", y="second number")]))
    after = anchor_sketch(chat(["You call tools."], [tool("add", x="first number", y="divisor")]))
    assert len(set(before.hashes) - set(after.hashes)) == 1


def test_a_completions_prompt_is_sketched_by_its_head_as_text_or_as_ids() -> None:
    rng = random.Random(0)
    head = " ".join(sentences(rng, 200))
    assert anchor_sketch({"prompt": head + " one end"}) == anchor_sketch({"prompt": head + " another end"})
    ids = [rng.randrange(50_000) for _ in range(2048)]
    assert anchor_sketch({"prompt": [*ids, 1]}) == anchor_sketch({"prompt": [*ids, 2]})
    assert anchor_sketch({"prompt": ids})


def test_text_in_one_endless_line_is_still_cut_where_its_content_says() -> None:
    rng = random.Random(1)
    body = " ".join(sentences(rng, 60)).replace(".", "")
    plain, shifted = anchor_sketch(chat([body])), anchor_sketch(chat(["some words before " + body]))
    shared = len(set(plain.hashes) & set(shifted.hashes))
    assert shared >= 0.9 * len(plain.hashes)


def test_a_pasted_book_is_bounded() -> None:
    sketch = anchor_sketch(chat(["word " * MAX_ANCHOR_CHARS]))
    assert sketch.num_chars <= MAX_ANCHOR_CHARS
    assert len(sketch.hashes) <= SKETCH_SIZE


def test_long_runs_without_digits_are_masked_in_linear_time() -> None:
    # The digit mask backtracks over a word; unbounded, half a million steps would become ten thousand million.
    assert anchor_sketch(chat(["a" * 60_000])).num_pieces >= 1


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
roles = st.sampled_from(["system", "developer", "user"]) | junk
odd_messages = st.lists(st.fixed_dictionaries({"role": roles, "content": junk}) | junk, max_size=4)
odd_functions = st.fixed_dictionaries({"name": junk, "parameters": junk})
odd_tools = st.lists(st.fixed_dictionaries({"function": odd_functions}) | junk, max_size=4)


@settings(max_examples=50, deadline=None)
@given(st.fixed_dictionaries({}, optional={"messages": odd_messages | junk, "tools": odd_tools | junk, "prompt": junk}))
def test_no_body_is_too_odd_to_sketch(body: dict[str, Any]) -> None:
    sketch = anchor_sketch(body)
    assert AnchorSketch.from_dict(json.loads(json.dumps(sketch.to_dict()))) == sketch
    assert list(sketch.hashes) == sorted(set(sketch.hashes))
    assert len(sketch.hashes) <= min(SKETCH_SIZE, sketch.num_pieces)


def test_a_sketch_with_unordered_hashes_is_refused() -> None:
    data = AnchorSketch((5, 3), 2, 10).to_dict()
    with pytest.raises(ValueError, match="ascending"):
        AnchorSketch.from_dict(data)


@given(st.text())
def test_agent_names_are_printable_and_bounded(name: str) -> None:
    cleaned = clean_agent_name(name)
    assert cleaned is None or (cleaned.isprintable() and 0 < len(cleaned) <= MAX_NAME_CHARS)
    assert clean_agent_name(cleaned) == cleaned
