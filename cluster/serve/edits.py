"""Edits of a request's history: directives, Anthropic's `context_management`, and the operator's policies; and scratch.

All become one of two things. Spans of tokens become directives for the engine. Whatever names messages or tool calls,
or is a rule, is carried out on the messages; the engine then finds the edit by comparing with what the session holds.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError

from ropewalk.agents.directives import Directive, DirectiveError, DirectiveSet, Mode, Span
from ropewalk.agents.message_edits import MessageEdit, edit_messages, result_of
from ropewalk.agents.policies import CLEAR_TOOL_USES, ClearToolUses, Message, Policy, TruncateOlderThan, turn_of
from ropewalk.cluster.engine.request import RequestSettings, digest
from ropewalk.cluster.engine.sessions import scratch_set, without
from ropewalk.cluster.serve.settings import FIELD, RequestRefused, refusal
from ropewalk.kernels.keys import Tokens, as_tokens, common_prefix

logger = logging.getLogger("ray.serve")

T = TypeVar("T")

CONTEXT_FIELD = "context_management"

Count = Annotated[int, Field(ge=0, strict=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


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


_FORMS = {"start": "TokenSpan", "end": "TokenSpan", "message": "MessageSpan", "messages": "MessagesSpan"}


def _form(value: Any) -> str | None:
    """Return which kind of span a value is meant to be, by the fields that it has."""
    if not isinstance(value, Mapping):
        return type(value).__name__
    return next((_FORMS[name] for name in value if name in _FORMS), "ToolCallSpan" if "tool_call_id" in value else None)


AnySpan = Annotated[
    Annotated[TokenSpan, Tag("TokenSpan")]
    | Annotated[MessageSpan, Tag("MessageSpan")]
    | Annotated[MessagesSpan, Tag("MessagesSpan")]
    | Annotated[ToolCallSpan, Tag("ToolCallSpan")],
    Discriminator(
        _form,
        custom_error_type="span_form",
        custom_error_message="A span has the fields 'start' and 'end', or 'message', or 'messages', or 'tool_call_id'",
    ),
]
_SPAN: TypeAdapter[AnySpan] = TypeAdapter(AnySpan)


class DirectiveField(_Part):
    """One of `ropewalk.directives`."""

    span: AnySpan
    replacement: str | list[TokenId] = ""
    mode: Mode = Mode.AMORTIZE


_DIRECTIVE = TypeAdapter(DirectiveField)


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
    """What edits need to know of the model: a text's token ids, and those of a request's prompt as it is rendered."""

    encode: Callable[[str], list[int]]
    prompt_tokens: Callable[[Any], Awaitable[Sequence[int]]]


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
        scratch = read_scratch(extra)
        context = read_context(extra)
        messages = getattr(request, "messages", None)
        applied = Applied()
        spans = [one for one in directives if isinstance(one.span, TokenSpan)]
        if messages is not None and spans and len(spans) < len(directives):
            raise RequestRefused("spans of tokens and of messages cannot be mixed in a request", f"{FIELD}.directives")
        if (directives or scratch) and getattr(request, "use_beam_search", False):
            raise RequestRefused("beam search can carry neither directives nor scratch", "use_beam_search")
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
        if spans or scratch:
            by_tokens = f"{FIELD}.directives" if spans else f"{FIELD}.scratch"
            has_token_spans = spans or any(isinstance(span, TokenSpan) for span in scratch)
            try:
                if has_token_spans and messages is not None and request.messages != messages:
                    raise RequestRefused("spans of tokens are not known where messages are edited, too", by_tokens)
                if spans and scratch:
                    raise RequestRefused("directives on tokens and scratch cannot be mixed in a request", by_tokens)
                settings = await self._with_spans(
                    request, settings, [self.directive(one) for one in spans], scratch, messages
                )
            except RequestRefused:
                if messages is not None:
                    request.messages = messages
                raise
        return settings, applied

    async def _with_spans(
        self,
        request: Any,
        settings: RequestSettings,
        directives: Sequence[Directive],
        scratch: Sequence[AnySpan],
        sent: Sequence[Message] | None,
    ) -> RequestSettings:
        """Return settings with what is said of tokens, checked against the prompt as it is rendered."""
        tokens = await self._tokenizing.prompt_tokens(request)
        _checked(directives, len(tokens))
        found: list[tuple[int, int]] = []
        if all(isinstance(span, TokenSpan) for span in scratch):
            found = [(span.start, span.end) for span in scratch if isinstance(span, TokenSpan)]
            try:
                scratch_set(found, len(tokens), has_directives=bool(directives))
            except DirectiveError as error:
                raise _refused(error) from None
        else:
            found = await self._scratch(request, as_tokens(tokens), scratch, sent)
        return replace(
            settings,
            directives=[as_params(one) for one in directives],
            scratch=sorted(found),
            spans_of=digest(tokens),
        )

    async def _scratch(
        self, request: Any, whole: Tokens, scratch: Sequence[AnySpan], sent: Sequence[Message] | None
    ) -> list[tuple[int, int]]:
        """Return the tokens of messages that are scratch, ascending spans: all that would be missing without them."""
        where = f"{FIELD}.scratch"
        if any(isinstance(span, TokenSpan) for span in scratch):
            raise RequestRefused("spans of tokens and of messages cannot be mixed", where)
        if sent is None:
            raise RequestRefused("messages and tool calls are those of a chat; give spans of tokens", where)
        messages = request.messages
        if len(messages) != len(sent):
            raise RequestRefused("scratch cannot be named where edits remove messages", where)
        chosen = _chosen(scratch, messages)
        if len(chosen) == len(messages):
            raise RequestRefused("not all messages can be scratch", where)

        async def rendered(left_out: Set[int]) -> Tokens:
            rest = [message for number, message in enumerate(messages) if number not in left_out]
            return as_tokens(await self._tokenizing.prompt_tokens(request.model_copy(update={"messages": rest})))

        in_a_row = groupby(enumerate(sorted(chosen)), key=lambda pair: pair[1] - pair[0])
        out: list[tuple[int, int]] = []
        for _, pairs in in_a_row:
            without_it = await rendered({number for _, number in pairs})
            start = common_prefix(whole, without_it)
            end = len(whole) - common_prefix(whole[start:][::-1], without_it[start:][::-1])
            if start < end:
                out.append((start, end))
        # Messages that repeat, or a template that looks at all of them, may have misled the comparison.
        is_sound = all(a[1] <= b[0] for a, b in pairwise(out))
        if not is_sound or not np.array_equal(without(whole, out), await rendered(chosen)):
            raise RequestRefused(
                "the chat template renders the other messages otherwise without these; give spans of tokens", where
            )
        return out

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
            first, last = _message_range(one.span, messages, f"{FIELD}.{where}")
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
            num_prompt_tokens=len(await self._tokenizing.prompt_tokens(request)) if by_tokens else 0,
            trigger_tokens=rule.trigger.value if by_tokens else None,
            trigger_uses=None if by_tokens else rule.trigger.value,
            keep=rule.keep.value,
            clear_at_least=rule.clear_at_least.value if rule.clear_at_least is not None else None,
            exclude_tools=tuple(rule.exclude_tools),
            clear_tool_inputs=rule.clear_tool_inputs,
        )


def read_directives(extra: Mapping[str, Any]) -> list[DirectiveField]:
    """Read `ropewalk.directives`. Raises `RequestRefused` naming what is wrong."""
    return _read(extra, "directives", _DIRECTIVE)


def read_scratch(extra: Mapping[str, Any]) -> list[AnySpan]:
    """Read `ropewalk.scratch`. Raises `RequestRefused` naming what is wrong."""
    return _read(extra, "scratch", _SPAN)


def _read(extra: Mapping[str, Any], name: str, kind: TypeAdapter[T]) -> list[T]:
    field = extra.get(FIELD)
    values = field.get(name) if isinstance(field, Mapping) else None
    out = []
    for number, value in enumerate(values or ()):
        try:
            out.append(kind.validate_python(value))
        except ValidationError as error:
            raise refusal(error, f"{FIELD}.{name}[{number}]") from None
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


def _chosen(scratch: Sequence[AnySpan], messages: Sequence[Message]) -> set[int]:
    """Return the messages that are scratch."""
    chosen: set[int] = set()
    for number, span in enumerate(scratch):
        where = f"{FIELD}.scratch[{number}]"
        first, last = _message_range(span, messages, where)
        if not first < last <= len(messages):
            raise RequestRefused(f"messages [{first}, {last}) are not among the {len(messages)} of the request", where)
        chosen.update(range(first, last))
    return chosen


def _message_range(span: AnySpan, messages: Sequence[Message], where: str) -> tuple[int, int]:
    """Return which messages `[first, last)` a span names. Raises `RequestRefused` for a tool call without a result."""
    if isinstance(span, ToolCallSpan):
        try:
            first = result_of(messages, span.tool_call_id, where)
        except DirectiveError as error:
            raise RequestRefused(str(error), where) from None
        return first, first + 1
    if isinstance(span, MessageSpan):
        return span.message, span.message + 1
    assert isinstance(span, MessagesSpan), "spans of tokens name no messages"
    return span.messages


def _checked(directives: Sequence[Directive], num_tokens: int) -> None:
    try:
        DirectiveSet(directives, num_tokens)
    except DirectiveError as error:
        raise _refused(error) from None


def _refused(error: DirectiveError) -> RequestRefused:
    return RequestRefused(str(error), f"{FIELD}.{error.field}")
