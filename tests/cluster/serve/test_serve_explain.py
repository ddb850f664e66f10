"""The `ropewalk` field of answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ropewalk.cluster.engine.request import PlannedRange, RequestReport, RequestSettings
from ropewalk.cluster.serve.edits import Applied
from ropewalk.cluster.serve.explain import explain_stream, explanation

FIELD = {"tokens": {"computed": 3}}
DONE = "data: [DONE]\n\n"


def chunk(text: str, finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}, 'finish_reason': finish}]})}\n\n"


USAGE = f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': 3}})}\n\n"


async def explained(*events: str) -> list[str]:
    async def source() -> AsyncIterator[str]:
        for event in events:
            yield event

    return [event async for event in explain_stream(source(), lambda: dict(FIELD))]


def payload(event: str) -> dict[str, Any]:
    return dict(json.loads(event.removeprefix("data: ")))


@pytest.mark.parametrize(
    "tail", [[chunk("", "stop")], [chunk("", "stop"), USAGE], [chunk("a", "stop"), chunk("b", "stop")]]
)
async def test_the_last_chunk_before_done_carries_the_field(tail: list[str]) -> None:
    events = await explained(chunk("x"), chunk("y"), *tail, DONE)
    assert events[-1] == DONE
    assert payload(events[-2])["ropewalk"] == FIELD
    assert all("ropewalk" not in event for event in events[:-2])


async def test_nothing_else_of_a_stream_changes() -> None:
    sent = [chunk("x"), chunk("", "stop"), USAGE, DONE]
    received = await explained(*sent)
    last = payload(received[2])
    del last["ropewalk"]
    assert received[:2] == sent[:2]
    assert last == payload(USAGE)


async def test_a_refusal_passes_as_it_is() -> None:
    refusal: Any = object()
    assert await explained(refusal) == [refusal]


async def test_tokens_are_not_held_back() -> None:
    handed_over: list[str] = []

    async def source() -> AsyncIterator[str]:
        for number in range(3):
            handed_over.append(str(number))
            yield chunk(str(number))

    async for event in explain_stream(source(), lambda: dict(FIELD)):
        assert handed_over[-1] in event


async def test_an_error_event_passes_unchanged() -> None:
    error = 'data: {"error": {"message": "engine died"}}\n\n'
    assert await explained(error, DONE) == [error, DONE]


def test_an_explanation_sums_tokens_over_prompts() -> None:
    first = RequestReport("reuse", tokens={"computed": 5, "exact": 32, "reused": 0, "spliced": 0}, fallbacks=["a"])
    second = RequestReport(
        "reuse", tokens={"computed": 1, "exact": 0, "reused": 64, "spliced": 0}, fallbacks=["a", "b"]
    )
    told = explanation(RequestSettings(session="s", agent="coder", mode="reuse"), [first, second], Applied())
    assert told["tokens"] == {"computed": 6, "exact": 32, "reused": 64, "spliced": 0}
    assert told["fallbacks"] == ["a", "b"]
    assert told["plan"] == [[], []]
    assert (told["session"], told["agent"]) == ("s", "coder")


def test_the_plan_of_a_single_prompt_is_a_flat_list() -> None:
    report = RequestReport("exact", plan=[PlannedRange(0, 32, "compute")])
    told = explanation(RequestSettings(), [report], Applied())
    assert told["plan"] == [{"start": 0, "end": 32, "source": "compute", "chunk": None, "turn": 0}]
    json.dumps(told)
