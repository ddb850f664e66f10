"""Directives that name messages or tool calls instead of tokens. They are carried out on the messages, so that every
cut falls on a boundary of the chat template; comparing tokens (`edits.py`) then finds what they changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ropewalk.agents.directives import DirectiveError, Mode
from ropewalk.agents.policies import Message


@dataclass(frozen=True, slots=True)
class MessageEdit:
    """Replace messages `[first, last)` by one of the first one's role that says `replacement`, or by none if it is
    empty. `number` is the directive's place in the request.
    """

    first: int
    last: int
    replacement: str = ""
    mode: Mode = Mode.AMORTIZE
    number: int = 0

    @property
    def field(self) -> str:
        """The part of the request that is wrong when this is."""
        return f"directives[{self.number}].span"


def result_of(messages: Sequence[Message], tool_call_id: str, field: str) -> int:
    """Return which message is the result of a tool call. Raises `DirectiveError` unless there is exactly one."""
    found = [
        number
        for number, message in enumerate(messages)
        if message.get("role") == "tool" and message.get("tool_call_id") == tool_call_id
    ]
    if len(found) != 1:
        raise DirectiveError(f"there are {len(found)} results of a tool call {tool_call_id!r} in the messages", field)
    return found[0]


def edit_messages(messages: Sequence[Message], edits: Sequence[MessageEdit]) -> list[Message]:
    """Return the messages with all edits carried out.

    Raises `DirectiveError` for messages that are not there, edits that overlap, a first message that is edited in
    AMORTIZE mode (it holds the attention sink), and a tool call left without its result, or the other way round.
    """
    for edit in edits:
        if not 0 <= edit.first < edit.last <= len(messages):
            raise DirectiveError(
                f"directives[{edit.number}]: messages [{edit.first}, {edit.last}) are not among the {len(messages)} "
                "of the request",
                edit.field,
            )
        if edit.first == 0 and edit.mode is Mode.AMORTIZE:
            raise DirectiveError(
                f"directives[{edit.number}]: the first message holds the attention sink; only 'forget' may edit it",
                edit.field,
            )
    ordered = sorted(edits, key=lambda edit: (edit.first, edit.last))
    for a, b in pairwise(ordered):
        if a.last > b.first:
            one, two = (f"directives[{e.number}] [{e.first}, {e.last})" for e in (a, b))
            raise DirectiveError(f"{one} and {two} overlap", f"directives[{max(a.number, b.number)}].span")
    out: list[Message] = []
    position = 0
    for edit in ordered:
        out += messages[position : edit.first]
        if edit.replacement:
            first = {name: value for name, value in messages[edit.first].items() if name != "tool_calls"}
            is_call = edit.last == edit.first + 1 and "tool_calls" in messages[edit.first]
            kept = {"tool_calls": messages[edit.first]["tool_calls"]} if is_call else {}
            out.append({**first, "content": edit.replacement, **kept})
        position = edit.last
    out += messages[position:]
    torn = sorted(_torn_calls(out) - _torn_calls(messages))
    if torn:
        raise DirectiveError(
            f"tool call {torn[0]!r} would be left without its result, or its result without the call", edits[0].field
        )
    return out


def _torn_calls(messages: Sequence[Message]) -> set[str]:
    """Ids of tool calls without a result, and of results without a call."""
    called = {str(call.get("id")) for message in messages for call in message.get("tool_calls") or ()}
    answered = {str(message.get("tool_call_id")) for message in messages if message.get("role") == "tool"}
    return called ^ answered
