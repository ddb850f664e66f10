"""What becomes of a request's edits before the engine sees it."""

from types import SimpleNamespace
from typing import Any

import pytest

from ropewalk.cluster.engine.request import RequestSettings
from ropewalk.cluster.engine.sessions import without
from ropewalk.cluster.serve.edits import RequestEditor, Tokenizing
from ropewalk.cluster.serve.settings import RequestRefused
from ropewalk.kernels.keys import as_tokens

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "A long question."},
    {"role": "assistant", "content": "An answer."},
    {"role": "user", "content": "Another."},
]


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


async def rendered(request: Any) -> list[int]:
    """A token a letter, and one around each message; 100 of `MESSAGES`."""
    tokens = [token for m in request.messages or () for token in (0, *letters(str(m["content"])), 1)]
    return [*tokens, *[2] * 49]


TOKENIZING = Tokenizing(letters, rendered)


class Asked(SimpleNamespace):
    def model_copy(self, update: Any) -> "Asked":
        return Asked(**{**vars(self), **update})


def request_of(directives: Any = (), messages: Any = MESSAGES, scratch: Any = (), **extra: Any) -> Any:
    field = {"directives": list(directives), "scratch": list(scratch)}
    return Asked(messages=messages, model_extra={"ropewalk": field, **extra})


async def edit(request: Any, edits: Any = None, policies: Any = ()) -> Any:
    return await RequestEditor(TOKENIZING, policies).edit(request, RequestSettings(session="s", edits=edits))


@pytest.mark.parametrize("edits", [None, "amortize", "forget"])
async def test_a_message_that_is_to_be_forgotten_is_never_spliced(edits):
    request = request_of([{"span": {"message": 1}, "replacement": "Redacted.", "mode": "forget"}])
    settings, _ = await edit(request, edits)
    assert settings.edits == "forget"
    assert request.messages[1] == {"role": "user", "content": "Redacted."}
    assert MESSAGES[1]["content"] == "A long question."


async def test_an_edited_message_is_expected_to_splice():
    settings, _ = await edit(request_of([{"span": {"message": 1}, "replacement": "Short."}]))
    assert (settings.edits, settings.expects_splice) == ("amortize", True)


async def test_spans_of_tokens_become_directives_of_the_engine():
    request = request_of([{"span": {"start": 40, "end": 60}, "replacement": "ab"}])
    settings, _ = await edit(request)
    assert settings.directives == [[40, 60, [97, 98], "amortize"]]
    assert request.messages == MESSAGES


@pytest.mark.parametrize(
    ("directives", "param"),
    [
        ([{"span": {"start": 40, "end": 101}}], "ropewalk.directives[0].span"),
        ([{"span": {"start": 40, "end": 60}}, {"span": {"message": 1}}], "ropewalk.directives"),
        ([{"span": {"start": 40, "end": 60}, "replacement": [2**31]}], "ropewalk.directives[0].replacement"),
        ([{"span": {"message": 1}, "replacement": [5]}], "ropewalk.directives[0].replacement"),
        ([{"span": {"message": 0}, "replacement": "x"}], "ropewalk.directives[0].span"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_the_request_left_as_it_was(directives, param):
    request = request_of(directives)
    with pytest.raises(RequestRefused) as refused:
        await edit(request)
    assert refused.value.param.startswith(param)
    assert request.messages == MESSAGES


async def test_messages_are_those_of_a_chat():
    with pytest.raises(RequestRefused, match="give spans of tokens"):
        await edit(request_of([{"span": {"message": 1}}], messages=None))
    with pytest.raises(RequestRefused, match="needs a chat's messages"):
        await edit(request_of(messages=None, context_management={"edits": []}))


class Shorten:
    def transform(self, messages: Any, turn: int) -> Any:
        return [{**message, "content": message["content"][:6]} for message in messages]


class Broken:
    def transform(self, messages: Any, turn: int) -> Any:
        raise RuntimeError("no")


async def test_an_operators_policy_edits_and_a_broken_one_costs_nothing_but_a_word():
    request = request_of()
    _, applied = await edit(request, policies=[Broken(), Shorten()])
    assert applied.fallbacks == ["policy_failed"]
    assert [message["content"] for message in request.messages] == ["Be bri", "A long", "An ans", "Anothe"]


async def test_results_that_are_content_parts_are_cleared_and_counted():
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    parts = [{"type": "text", "text": "x" * 500}]
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": parts})
    rule = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 50},
        "keep": {"type": "tool_uses", "value": 0},
        "clear_at_least": {"type": "input_tokens", "value": 400},
    }
    _, applied = await edit(request_of(messages=messages, context_management={"edits": [rule]}))
    assert applied.edits[0]["cleared_tool_uses"] == 1
    assert applied.edits[0]["cleared_input_tokens"] > 400


CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
WITH_TOOL = [
    *MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "A result." * 10},
    {"role": "user", "content": "What is it?"},
]


@pytest.mark.parametrize(
    ("scratch", "missing"),
    [
        ([{"message": 1}], [1]),
        ([{"tool_call_id": "c"}], [5]),
        ([{"messages": [4, 6]}], [4, 5]),
        ([{"tool_call_id": "c"}, {"message": 4}], [4, 5]),
        ([{"message": 1}, {"message": 5}], [1, 5]),
    ],
)
async def test_scratch_is_what_would_be_missing_without_it(scratch, missing):
    request = request_of(scratch=scratch, messages=WITH_TOOL)
    settings, _ = await edit(request)
    whole = await rendered(request)
    kept = [message for number, message in enumerate(WITH_TOOL) if number not in missing]
    assert without(as_tokens(whole), settings.scratch).tolist() == await rendered(request_of(messages=kept))
    assert request.messages == WITH_TOOL


async def test_scratch_is_found_in_messages_as_they_are_edited():
    request = request_of([{"span": {"message": 1}, "replacement": "Q"}], scratch=[{"message": 2}])
    settings, _ = await edit(request)
    ((start, end),) = settings.scratch
    whole = await rendered(request)
    assert [*whole[:start], *whole[end:]] == await rendered(
        request_of(messages=[m for m in request.messages if m != MESSAGES[2]])
    )
    assert (settings.edits, settings.expects_splice) == ("amortize", True)


async def test_spans_of_tokens_are_scratch_as_they_are():
    settings, _ = await edit(request_of(scratch=[{"start": 50, "end": 60}, {"start": 40, "end": 41}]))
    assert settings.scratch == [(40, 41), (50, 60)]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (request_of(scratch=[{"message": 4}]), "ropewalk.scratch[0]"),
        (request_of(scratch=[{"message": 1}, {"messages": [2, 2]}]), "ropewalk.scratch[1]"),
        (request_of(scratch=[{"tool_call_id": "x"}]), "ropewalk.scratch[0]"),
        (request_of(scratch=[{"message": -1}]), "ropewalk.scratch[0].message"),
        (request_of(scratch=[{"message": "2"}]), "ropewalk.scratch[0].message"),
        (request_of(scratch=[{"message": 2, "replacement": "x"}]), "ropewalk.scratch[0].replacement"),
        (request_of(scratch=[{"messages": [0, 4]}]), "ropewalk.scratch"),
        (request_of(scratch=[{"message": 1}, {"start": 1, "end": 2}]), "ropewalk.scratch"),
        (request_of([{"span": {"messages": [1, 3]}}], scratch=[{"message": 1}]), "ropewalk.scratch"),
        (request_of(scratch=[{"message": 1}], messages=None), "ropewalk.scratch"),
    ],
)
async def test_scratch_that_is_not_there_is_refused_and_the_request_left_as_it_was(request_, param):
    before = request_.messages
    with pytest.raises(RequestRefused) as refused:
        await edit(request_)
    assert refused.value.param.startswith(param)
    assert request_.messages == before


async def test_beam_search_carries_no_edits():
    for asked in (request_of([{"span": {"message": 1}}]), request_of(scratch=[{"message": 1}])):
        asked.use_beam_search = True
        with pytest.raises(RequestRefused, match="beam search"):
            await edit(asked)


@pytest.mark.parametrize(
    "field", [{"scratch": [{"start": 40, "end": 60}]}, {"directives": [{"span": {"start": 40, "end": 60}}]}]
)
async def test_spans_of_tokens_are_not_taken_for_those_of_edited_messages(field):
    """The client's are of its own messages; a policy has changed them."""
    request = request_of(**field)
    with pytest.raises(RequestRefused, match="where messages are edited"):
        await edit(request, policies=[Shorten()])
    assert request.messages == MESSAGES


async def test_directives_on_tokens_and_scratch_are_not_mixed():
    with pytest.raises(RequestRefused, match="cannot be mixed"):
        await edit(request_of([{"span": {"start": 40, "end": 60}}], scratch=[{"message": 2}]))


@pytest.mark.parametrize("span", [{"mesage": 2}, {"span": {"message": 2}}, 7, {}])
async def test_a_span_of_no_kind_is_told_which_kinds_there_are(span):
    for request in (request_of(scratch=[span]), request_of([{"span": span}])):
        with pytest.raises(RequestRefused, match="'message', or 'messages', or 'tool_call_id'"):
            await edit(request)
