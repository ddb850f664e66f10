"""Who an unnamed agent is taken for, before its request reaches the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ropewalk.agents.sketch import anchor_sketch
from ropewalk.cluster.engine.request import RequestSettings
from ropewalk.cluster.serve.observer import Observer
from ropewalk.scheduler.state import Observation, SchedulerSettings, SchedulerState

SYSTEM = " ".join(f"Rule {word}: answer {word} questions with {word}ly care." for word in "abcdefghijklmnopqrstuvw")


def request_of(system: str) -> Any:
    body = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "Go on."}]}
    return SimpleNamespace(**body, model_dump=lambda **_: body)


@pytest.fixture
def observer(monkeypatch) -> Observer:
    state = SchedulerState()
    sketch = anchor_sketch({"messages": [{"role": "system", "content": SYSTEM}]})
    for number in range(3):
        state.observe(Observation(f"s{number}", "careful", sketch, "m", "r", "n", float(number), 100))
    made = Observer("m", "r", "n", SchedulerSettings())
    monkeypatch.setattr(made, "_client", SimpleNamespace(snapshot=state.snapshot(), status=dict))
    return made


def test_an_agent_is_recognised_by_its_anchor(observer):
    asked = RequestSettings(session="s")
    assert observer.recognise(request_of(SYSTEM), asked).recognised == "careful"
    assert observer.recognise(request_of("You sing."), asked).recognised is None


@pytest.mark.parametrize(
    "asked",
    [RequestSettings(session="s", agent="mine"), RequestSettings(), RequestSettings(session="s", scratch=[[0, 4]])],
)
def test_who_is_named_has_no_session_or_must_not_be_remembered_is_not_looked_at(observer, asked):
    assert observer.recognise(request_of(SYSTEM), asked) is asked


def test_a_failure_is_counted_and_the_request_served(observer, monkeypatch):
    monkeypatch.setattr(observer, "_client", SimpleNamespace(status=dict))  # without a snapshot
    asked = RequestSettings(session="s")
    assert observer.recognise(request_of(SYSTEM), asked) is asked
    assert observer.status()["observer_failures"] == 1
