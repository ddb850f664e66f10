"""Edits that name messages or tool calls."""

import pytest

from ropewalk.agents.directives import DirectiveError, Mode
from ropewalk.agents.message_edits import MessageEdit, edit_messages, result_of


def call(identity):
    return {"id": identity, "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Read it."},
    {"role": "assistant", "content": None, "tool_calls": [call("c1")]},
    {"role": "tool", "tool_call_id": "c1", "content": "a long file"},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks."},
]


def test_a_tool_result_is_replaced_and_the_rest_left_alone():
    number = result_of(MESSAGES, "c1", "span")
    out = edit_messages(MESSAGES, [MessageEdit(number, number + 1, "[evicted]")])
    assert out[3] == {"role": "tool", "tool_call_id": "c1", "content": "[evicted]"}
    assert [*out[:3], *out[4:]] == [*MESSAGES[:3], *MESSAGES[4:]]
    assert MESSAGES[3]["content"] == "a long file"


def test_several_messages_give_way_to_one_or_to_none():
    out = edit_messages(MESSAGES, [MessageEdit(2, 4, "[evicted: 1 tool turn]"), MessageEdit(5, 6, "")])
    assert out == [*MESSAGES[:2], {"role": "assistant", "content": "[evicted: 1 tool turn]"}, MESSAGES[4]]


@pytest.mark.parametrize(("first", "last"), [(2, 3), (3, 4)])
def test_a_call_is_not_torn_from_its_result(first, last):
    with pytest.raises(DirectiveError, match="'c1' would be left without its result"):
        edit_messages(MESSAGES, [MessageEdit(first, last, "")])


def test_a_call_that_had_no_result_before_is_no_reason_to_refuse():
    waiting = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call("c2")]}]
    assert len(edit_messages(waiting, [MessageEdit(4, 5, "")])) == 6


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ([MessageEdit(2, 7)], r"\[2, 7\) are not among the 6"),
        ([MessageEdit(3, 3)], r"\[3, 3\) are not among"),
        ([MessageEdit(0, 1, "x")], "attention sink"),
        (
            [MessageEdit(2, 5, "x", number=0), MessageEdit(4, 6, "y", number=1)],
            r"directives\[0\].*directives\[1\].*overlap",
        ),
    ],
)
def test_what_cannot_be_is_refused(edits, message):
    with pytest.raises(DirectiveError, match=message):
        edit_messages(MESSAGES, edits)


def test_a_forget_may_edit_the_first_message_and_an_unknown_call_is_named():
    assert edit_messages(MESSAGES, [MessageEdit(0, 1, "Redacted.", Mode.FORGET)])[0]["content"] == "Redacted."
    with pytest.raises(DirectiveError, match="0 results of a tool call 'c9'"):
        result_of(MESSAGES, "c9", "directives[0].span")
