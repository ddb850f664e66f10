"""Edits of a request's history: directives, Anthropic's `context_management`, and the operator's policies.

All become one of two things. Spans of tokens become directives for the engine. Whatever names messages or tool calls,
or is a rule, is carried out on the messages; the engine then finds the edit by comparing with what the session holds.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ropewalk.agents.directives import Directive, DirectiveError, DirectiveSet, Mode, Span
from ropewalk.agents.message_edits import MessageEdit, edit_messages, result_of
from ropewalk.agents.policies import CLEAR_TOOL_USES, ClearToolUses, Message, Policy, TruncateOlderThan, turn_of
from ropewalk.cluster.engine.request import RequestSettings
from ropewalk.cluster.serve.settings import FIELD, RequestRefused, refusal

logger = logging.getLogger("ray.serve")

CONTEXT_FIELD = "context_management"

Count = Annotated[int, Field(ge=0)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TokenSpan(_Part):
    """Tokens `[start, end)` of the prompt as rendered."""

    start: Count
    end: Count


class MessageSpan(_Part):
    """One message, counted from 0."""

    message: Count


class MessagesSpan(_Part):
    """Messages `[first, last)`."""

    messages: tuple[Count, Count]


class ToolCallSpan(_Part):
    """The result of a tool call."""

    tool_call_id: str


class DirectiveField(_Part):
    """One of `ropewalk.directives`."""

    span: TokenSpan | MessageSpan | MessagesSpan | ToolCallSpan
    replacement: str | list[TokenId] = ""
    mode: Mode = Mode.AMORTIZE


class _Amount(_Part):
    type: Literal["input_tokens", "tool_uses"]
    value: Count


class ClearToolUsesField(_Part):
    """Anthropic's `clear_tool_uses_20250919`."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: _Amount = _Amount(type="input_tokens", value=100_000)
    keep: _Amount = _Amount(type="tool_uses", value=3)
    clear_at_least: _Amount | None = None
    exclude_tools: list[str] = []
    clear_tool_inputs: bool = False


class TruncateField(_Part):
    """Cut results of tools that are older than so many turns."""

    type: Literal["truncate_older_than"]
    turns: Count
    max_chars: Count


class ContextManagement(_Part):
    """The `context_management` field of a request."""

    edits: list[Annotated[ClearToolUsesField | TruncateField, Field(discriminator="type")]]


@dataclass(slots=True)
class Applied:
    """What was done to a request before it was rendered."""

    edits: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """What edits need to know of the model: a text's token ids, and how many tokens a request's prompt has."""

    encode: Callable[[str], list[int]]
    num_prompt_tokens: Callable[[Any], Awaitable[int]]


class RequestEditor:
    """Carries out edits on requests of one model. `policies` are the operator's."""

    def __init__(self, tokenizing: Tokenizing, policies: Sequence[Policy] = ()) -> None:
        self._tokenizing = tokenizing
        self._policies = tuple(policies)

    async def edit(self, request: Any, settings: RequestSettings) -> tuple[RequestSettings, Applied]:
        """Edit `request` in place; return settings that carry what is left for the engine, and what was done.

        Raises `RequestRefused`; the request is then as it was.
        """
        extra: Mapping[str, Any] = request.model_extra or {}
        directives = read_directives(extra)
        context = read_context(extra)
        messages = getattr(request, "messages", None)
        applied = Applied()
        spans = [one for one in directives if isinstance(one.span, TokenSpan)]
        if messages is not None and spans and len(spans) < len(directives):
            raise RequestRefused("spans of tokens and of messages cannot be mixed in a request", f"{FIELD}.directives")
        if messages is None and context is not None:
            raise RequestRefused("'context_management' needs a chat's messages", CONTEXT_FIELD)
        if messages is not None:
            edited, modes = self._by_message([dict(message) for message in messages], directives)
            edited = await self._by_rule(edited, context, request, applied)
            if edited != messages:
                request.messages = edited
            if Mode.FORGET in modes:  # more is forgotten than was asked for, rather than less
                settings = replace(settings, edits="forget")
            elif modes:
                settings = replace(settings, edits=settings.edits or "amortize", expects_splice=True)
        elif len(spans) < len(directives):
            raise RequestRefused(
                "messages and tool calls are those of a chat; give spans of tokens", f"{FIELD}.directives"
            )
        if spans:
            found = [self.directive(one) for one in spans]
            try:
                _checked(found, await self._tokenizing.num_prompt_tokens(request))
            except RequestRefused:
                if messages is not None:
                    request.messages = messages
                raise
            settings = replace(settings, directives=[as_params(one) for one in found])
        return settings, applied

    def directive(self, one: DirectiveField) -> Directive:
        """Return a directive on tokens. Raises `RequestRefused` for one on messages."""
        if not isinstance(one.span, TokenSpan):
            raise RequestRefused("the span must be one of tokens: start and end", "directives")
        ids = self._tokenizing.encode(one.replacement) if isinstance(one.replacement, str) else one.replacement
        return Directive(Span(one.span.start, one.span.end), tuple(ids), one.mode)

    def _by_message(
        self, messages: list[Message], directives: Sequence[DirectiveField]
    ) -> tuple[list[Message], set[Mode]]:
        edits = []
        for number, one in enumerate(directives):
            where = f"directives[{number}].span"
            if isinstance(one.span, TokenSpan):
                continue
            if not isinstance(one.replacement, str):
                raise RequestRefused("a message is replaced by text", f"{FIELD}.directives[{number}].replacement")
            try:
                if isinstance(one.span, ToolCallSpan):
                    first = result_of(messages, one.span.tool_call_id, where)
                    last = first + 1
                elif isinstance(one.span, MessageSpan):
                    first, last = one.span.message, one.span.message + 1
                else:
                    first, last = one.span.messages
            except DirectiveError as error:
                raise _refused(error) from None
            edits.append(MessageEdit(first, last, one.replacement, one.mode, number))
        try:
            return (edit_messages(messages, edits) if edits else messages), {edit.mode for edit in edits}
        except DirectiveError as error:
            raise _refused(error) from None

    async def _by_rule(
        self, messages: list[Message], context: ContextManagement | None, request: Any, applied: Applied
    ) -> list[Message]:
        turn = turn_of(messages)
        for policy in self._policies:
            try:
                messages = policy.transform(messages, turn)
            except Exception:  # somebody else's code; the conversation is served as it was
                applied.fallbacks.append("policy_failed")
                logger.exception("Policy %r failed", policy)
        for rule in context.edits if context is not None else ():
            if isinstance(rule, TruncateField):
                before = messages
                messages = TruncateOlderThan(rule.turns, rule.max_chars).transform(messages, turn)
                count = sum(a != b for a, b in zip(before, messages, strict=True))
                applied.edits.append({"type": rule.type, "truncated_tool_uses": count})
                continue
            clear = await self._clear(rule, request)
            messages = clear.transform(messages, turn)
            applied.edits.append(
                {
                    "type": CLEAR_TOOL_USES,
                    "cleared_tool_uses": clear.cleared_uses,
                    "cleared_input_tokens": clear.cleared_tokens,
                }
            )
        return messages

    async def _clear(self, rule: ClearToolUsesField, request: Any) -> ClearToolUses:
        by_tokens = rule.trigger.type == "input_tokens"
        return ClearToolUses(
            count=lambda text: len(self._tokenizing.encode(text)),
            num_prompt_tokens=await self._tokenizing.num_prompt_tokens(request) if by_tokens else 0,
            trigger_tokens=rule.trigger.value if by_tokens else None,
            trigger_uses=None if by_tokens else rule.trigger.value,
            keep=rule.keep.value,
            clear_at_least=rule.clear_at_least.value if rule.clear_at_least is not None else None,
            exclude_tools=tuple(rule.exclude_tools),
            clear_tool_inputs=rule.clear_tool_inputs,
        )


def read_directives(extra: Mapping[str, Any]) -> list[DirectiveField]:
    """Read `ropewalk.directives`. Raises `RequestRefused` naming what is wrong."""
    field = extra.get(FIELD)
    values = field.get("directives") if isinstance(field, Mapping) else None
    out = []
    for number, value in enumerate(values or ()):
        try:
            out.append(DirectiveField.model_validate(value))
        except ValidationError as error:
            raise refusal(error, f"{FIELD}.directives[{number}]") from None
    return out


def read_context(extra: Mapping[str, Any]) -> ContextManagement | None:
    """Read `context_management`. Raises `RequestRefused` naming what is wrong."""
    value = extra.get(CONTEXT_FIELD)
    if value is None:
        return None
    try:
        return ContextManagement.model_validate(value)
    except ValidationError as error:
        raise refusal(error, CONTEXT_FIELD) from None


def as_params(directive: Directive) -> list[Any]:
    """The form in which `RequestSettings` carry a directive."""
    return [directive.span.start, directive.span.end, list(directive.replacement), directive.mode.value]


def _checked(directives: Sequence[Directive], num_tokens: int) -> None:
    try:
        DirectiveSet(directives, num_tokens)
    except DirectiveError as error:
        raise _refused(error) from None


def _refused(error: DirectiveError) -> RequestRefused:
    return RequestRefused(str(error), f"{FIELD}.{error.field}")
