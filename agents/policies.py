"""Policies: rules by which a server edits a conversation, message by message, before it is rendered.

Messages are OpenAI's: dicts with `role`, `content`, `tool_calls`, `tool_call_id`. A policy returns new messages and
leaves those that it was given alone. What it did not mean to change must come back equal, or more is edited than meant.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Message = dict[str, Any]

CLEARED_RESULT = "[cleared: old tool result]"
CLEARED_INPUT = "{}"

CLEAR_TOOL_USES = "clear_tool_uses_20250919"
"""The name of this edit in Anthropic's context management."""


@runtime_checkable
class Policy(Protocol):
    """Edits a conversation."""

    def transform(self, messages: Sequence[Message], turn: int) -> list[Message]:
        """Return the messages as the model shall see them. `turn` counts the assistant's messages so far."""


@dataclass(frozen=True, slots=True)
class TruncateOlderThan:
    """Cut the results of tools to `max_chars` characters once the assistant has spoken `turns` times since."""

    turns: int
    max_chars: int

    def __post_init__(self) -> None:
        if self.turns < 0 or self.max_chars < 0:
            raise ValueError(f"turns and max_chars must not be negative, not {self.turns!r} and {self.max_chars!r}")

    def transform(self, messages: Sequence[Message], turn: int) -> list[Message]:
        """See `Policy`."""
        out, spoken = [], 0
        for message in messages:
            text = message.get("content")
            is_old = turn - spoken >= self.turns
            if message.get("role") == "tool" and is_old and isinstance(text, str) and len(text) > self.max_chars:
                message = {**message, "content": text[: self.max_chars]}
            spoken += message.get("role") == "assistant"
            out.append(message)
        return out


@dataclass(slots=True)
class ClearToolUses:
    """Replace old results of tools by a short note, as Anthropic's `clear_tool_uses_20250919` does.

    Once the prompt has more than `trigger_tokens` tokens (or the conversation more than `trigger_uses` tool calls), all
    but the last `keep` results are cleared, unless that clears fewer than `clear_at_least` tokens. Results of
    `exclude_tools` stay. `clear_tool_inputs` clears the calls' arguments, too. `count` counts a text's tokens.
    """

    count: Callable[[str], int]
    num_prompt_tokens: int
    trigger_tokens: int | None = 100_000
    trigger_uses: int | None = None
    keep: int = 3
    clear_at_least: int | None = None
    exclude_tools: tuple[str, ...] = ()
    clear_tool_inputs: bool = False
    cleared_uses: int = field(default=0, init=False)
    cleared_tokens: int = field(default=0, init=False)

    def transform(self, messages: Sequence[Message], turn: int) -> list[Message]:
        """See `Policy`. `cleared_uses` and `cleared_tokens` say what the last call did."""
        self.cleared_uses = self.cleared_tokens = 0
        calls = {call["id"]: call for message in messages for call in message.get("tool_calls") or () if "id" in call}
        results = [number for number, message in enumerate(messages) if message.get("role") == "tool"]
        is_due = (self.trigger_tokens is not None and self.num_prompt_tokens > self.trigger_tokens) or (
            self.trigger_uses is not None and len(results) > self.trigger_uses
        )
        if not is_due:
            return list(messages)
        old = results[: max(len(results) - self.keep, 0)]
        clearing = [number for number in old if self._is_clearable(messages[number], calls)]
        ids = {messages[number].get("tool_call_id") for number in clearing}
        out = [
            {**message, "content": CLEARED_RESULT} if number in clearing else self._without_inputs(message, ids)
            for number, message in enumerate(messages)
        ]
        saved = sum(self._tokens(before) - self._tokens(after) for before, after in zip(messages, out, strict=True))
        if not clearing or (self.clear_at_least is not None and saved < self.clear_at_least):
            return list(messages)
        self.cleared_uses, self.cleared_tokens = len(clearing), saved
        return out

    def _is_clearable(self, message: Message, calls: Mapping[str, Any]) -> bool:
        call = calls.get(message.get("tool_call_id", ""))
        name = message.get("name") or ((call or {}).get("function") or {}).get("name")
        return name not in self.exclude_tools and message.get("content") != CLEARED_RESULT

    def _without_inputs(self, message: Message, ids: set[Any]) -> Message:
        calls = message.get("tool_calls")
        if not self.clear_tool_inputs or not calls or not any(call.get("id") in ids for call in calls):
            return message
        cleared = [
            {**call, "function": {**(call.get("function") or {}), "arguments": CLEARED_INPUT}}
            if call.get("id") in ids
            else call
            for call in calls
        ]
        return {**message, "tool_calls": cleared}

    def _tokens(self, message: Message) -> int:
        content = message.get("content")
        parts = [part.get("text") for part in content] if isinstance(content, list) else [content]
        texts = [*parts, *((call.get("function") or {}).get("arguments") for call in _calls(message))]
        return sum(self.count(text) for text in texts if isinstance(text, str))


def load_policy(path: str) -> Policy:
    """Import `module:name` and return the policy there, made by calling it if it is a class.

    Raises `ValueError` naming what is wrong.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"a policy is named as module:name, not {path!r}")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy {path!r} cannot be imported: {error}") from error
    policy = found() if isinstance(found, type) else found
    if not isinstance(policy, Policy):
        raise ValueError(f"policy {path!r} has no transform(messages, turn)")
    return policy


def turn_of(messages: Sequence[Message]) -> int:
    """Return how often the assistant has spoken."""
    return sum(message.get("role") == "assistant" for message in messages)


def _calls(message: Message) -> Sequence[Any]:
    return message.get("tool_calls") or ()
