"""What becomes of a request's edits before the engine sees it."""

from types import SimpleNamespace
from typing import Any

import pytest

from ropewalk.cluster.engine.request import RequestSettings
from ropewalk.cluster.serve.edits import RequestEditor, Tokenizing
from ropewalk.cluster.serve.settings import RequestRefused

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "A long question."},
    {"role": "assistant", "content": "An answer."},
    {"role": "user", "content": "Another."},
]


async def one_hundred(request: Any) -> int:
    return 100


TOKENIZING = Tokenizing(lambda text: [ord(letter) for letter in text], one_hundred)


def request_of(directives: Any = (), messages: Any = MESSAGES, **extra: Any) -> Any:
    return SimpleNamespace(messages=messages, model_extra={"ropewalk": {"directives": list(directives)}, **extra})


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
