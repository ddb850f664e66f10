"""Registering, listing and deleting anchors: what the ingress and a replica answer. The scheduler is played."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from ropewalk.cluster.serve.ingress import AgentIngress, AnchorBody, UnknownModelError
from ropewalk.cluster.serve.server import AgentServer, AnchorCall
from ropewalk.scheduler.anchors import MIN_ANCHOR_TOKENS, Anchor
from ropewalk.scheduler.client import SchedulerUnavailableError

TOKENS = list(range(1000, 1064))
REQUEST: Any = SimpleNamespace()


class Prewarmer:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.registered: list[Anchor] = []

    async def register(self, agent: str, tokens: Any) -> Anchor:
        if self.error is not None:
            raise self.error
        self.registered.append(Anchor(agent, tokens, "registered"))
        return self.registered[-1]


class PlayedServer(AgentServer):
    """Without what Ray Serve begins and ends it with."""

    def __init__(self) -> None: ...
    def __del__(self) -> None: ...


class Replica:
    """A server whose engine makes `TOKENS` of everything, and notes what it was to render."""

    def __init__(self, prewarmer: Any, error: Exception | None = None) -> None:
        self.rendered: list[Any] = []
        self._error = error
        self.server = PlayedServer()
        self.server._prewarmer = prewarmer
        self.server.engine = SimpleNamespace(tokenize=self._tokenize, planned=SimpleNamespace(max_model_len=128))

    async def _tokenize(self, request: Any) -> AsyncIterator[Any]:
        self.rendered.append(request)
        if self._error is not None:
            raise self._error
        yield SimpleNamespace(tokens=TOKENS)

    async def register(self, **fields: Any) -> dict[str, Any]:
        (answer,) = [answer async for answer in self.server.anchor(AnchorCall(model="m", agent="a", **fields))]
        return answer


MESSAGES = [{"role": "system", "content": "You keep the ledger."}]
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]


async def test_messages_are_rendered_with_tools_and_without_generation_prompt() -> None:
    prewarmer = Prewarmer()
    replica = Replica(prewarmer)
    answer = await replica.register(messages=MESSAGES, tools=TOOLS, add_generation_prompt=False)
    assert answer == {"agent": "a", "model": "m", "tokens": len(TOKENS), "origin": "registered"}
    (rendered,) = replica.rendered
    assert rendered.add_generation_prompt is False
    assert rendered.tools[0].function.name == "count"
    assert prewarmer.registered[0].tokens.tolist() == TOKENS


async def test_of_a_text_the_last_token_is_left_out_and_token_ids_are_taken_as_they_are() -> None:
    prewarmer = Prewarmer()
    replica = Replica(prewarmer)
    await replica.register(prompt="You keep the ledger.")
    await replica.register(prompt=TOKENS[:40])
    assert [anchor.tokens.tolist() for anchor in prewarmer.registered] == [TOKENS[:-1], TOKENS[:40]]


@pytest.mark.parametrize(
    ("replica", "fields", "code", "param"),
    [
        (Replica(Prewarmer()), {"prompt": TOKENS[: MIN_ANCHOR_TOKENS - 1]}, 400, "prompt"),
        (Replica(Prewarmer()), {"prompt": [1] * 127}, 400, "prompt"),
        (Replica(Prewarmer()), {"messages": [{"content": "nobody says it"}]}, 400, "messages.0"),
        (Replica(Prewarmer(), VLLMValidationError("no template")), {"messages": MESSAGES}, 400, "messages"),
        (Replica(Prewarmer(SchedulerUnavailableError("scheduler-died"))), {"messages": MESSAGES}, 503, None),
        (Replica(None), {"messages": MESSAGES}, 400, None),
    ],
)
async def test_what_cannot_be_registered_is_refused_by_field(
    replica: Replica, fields: dict[str, Any], code: int, param: str | None
) -> None:
    error = (await replica.register(**fields))["error"]
    assert error["code"] == code
    assert (error["param"] or "").startswith(param or "")
    assert error["message"]


class Scheduler:
    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    async def call(self, method: str, *args: Any) -> Any:
        self.asked.append((method, *args))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def ingress_of(scheduler: Any, *, prewarms: bool = True, answers: Any = None) -> AgentIngress:
    made = AgentIngress.__new__(AgentIngress)
    made._models = {"m": {"plain": False}, "stock": {"plain": True}}
    made._scheduler, made._prewarms = scheduler, prewarms
    made.sent = []  # type: ignore[attr-defined]

    async def respond(*, body: Any, call_method: str, raw_request: Any) -> AsyncIterator[Any]:
        made.sent.append((call_method, body))  # type: ignore[attr-defined]
        yield answers

    made._get_response = respond  # type: ignore[method-assign]
    return made


def content(answer: Any) -> tuple[int, Any]:
    return answer.status_code, json.loads(answer.body)


async def test_the_ingress_hands_a_registration_to_a_replica_of_the_model() -> None:
    ingress = ingress_of(None, answers={"agent": "a", "tokens": 40})
    body = AnchorBody(model="m", agent=" a ", messages=MESSAGES, tools=TOOLS)
    assert content(await ingress.register_anchor(body, REQUEST)) == (200, {"agent": "a", "tokens": 40})
    ((method, call),) = ingress.sent  # type: ignore[attr-defined]
    assert method == "anchor"
    assert (call.agent, call.add_generation_prompt) == ("a", False)
    assert call.model_fields_set == {"model", "agent", "messages", "tools", "add_generation_prompt"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": MESSAGES, "prompt": "x"}, "messages"),
        ({"prompt": "x", "tools": TOOLS}, "tools"),
        ({"prompt": "x", "agent": "   "}, "agent"),
    ],
)
async def test_a_registration_that_makes_no_sense_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    body = AnchorBody.model_validate({"model": "m", "agent": "a", **fields})
    code, answer = content(await ingress_of(None).register_anchor(body, REQUEST))
    assert (code, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("model", ["nobody", "stock", None])
async def test_an_anchor_needs_a_model_that_prewarms(model: str | None) -> None:
    with pytest.raises(UnknownModelError):
        await ingress_of(None).register_anchor(AnchorBody(model=model, agent="a", prompt="x"), REQUEST)


async def test_anchors_are_listed_and_deleted() -> None:
    listed = [{"agent": "a", "model": "m", "tokens": 40, "origin": "learned", "warm": []}]
    assert content(await ingress_of(Scheduler(listed)).anchors()) == (200, {"anchors": listed})
    scheduler = Scheduler(["m"])
    deleted = content(await ingress_of(scheduler).delete_anchor("a", "m"))
    assert deleted == (200, {"agent": "a", "models": ["m"], "deleted": True})
    assert scheduler.asked == [("delete_anchor", "a", "m")]


async def test_an_anchor_that_is_not_there_is_not_found() -> None:
    code, answer = content(await ingress_of(Scheduler([])).delete_anchor("nobody"))
    assert (code, answer["error"]["param"]) == (404, "agent")
    assert "`nobody`" in answer["error"]["message"]


async def test_without_prewarming_there_are_no_anchors_and_without_scheduler_it_is_asked_again() -> None:
    off = ingress_of(Scheduler([]), prewarms=False)
    assert content(await off.anchors()) == (200, {"anchors": [], "reason": "prewarm-disabled"})
    assert content(await off.delete_anchor("a"))[0] == 400
    dead = ingress_of(Scheduler(SchedulerUnavailableError("scheduler-died")))
    for answer in (await dead.anchors(), await dead.delete_anchor("a")):
        code, error = content(answer)
        assert code == 503
        assert "scheduler-died" in error["error"]["message"]
