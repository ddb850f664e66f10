"""Agents are recognised by their anchors, whatever stands before them."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ropewalk.agents.identity import AgentRegistry
from ropewalk.agents.profiles import AnchorIndex, Profile
from ropewalk.agents.sketch import (
    AnchorSketch,
    anchor_sketch,
)
from ropewalk.workloads.datasets import load_questions
from ropewalk.workloads.programs.gsm8k import Gsm8kProgram

from .anchors import chat, sentences


class Program:
    """Six agents behind a shared preamble; every request gets a header of its own."""

    def __init__(self, seed: int, preamble: int, own: int, header: int) -> None:
        self.rng = random.Random(seed)
        self.preamble = sentences(self.rng, preamble)
        self.own = [sentences(self.rng, own) for _ in range(6)]
        self.header = header

    def body(self, agent: int) -> dict[str, Any]:
        stamp = f"Now: 2026-11-29T10:{self.rng.randrange(60):02}:00Z, request {self.rng.getrandbits(64):016x}"
        return chat([stamp, *sentences(self.rng, self.header), *self.preamble, *self.own[agent]])

    def turns(self, num_sessions: int, num_turns: int) -> Iterator[tuple[str, int]]:
        for session in range(num_sessions):
            for _ in range(num_turns):
                yield f"s{session}", self.rng.randrange(6)


@pytest.mark.parametrize(("preamble", "own", "header"), [(80, 20, 10), (60, 40, 10), (90, 10, 8), (50, 50, 30)])
def test_six_agents_behind_one_preamble_are_told_apart_across_varying_headers(
    preamble: int, own: int, header: int
) -> None:
    program = Program(seed=1, preamble=preamble, own=own, header=header)
    registry = AgentRegistry()
    seen = [
        (agent, registry.resolve(None, anchor_sketch(program.body(agent)), session).agent)
        for session, agent in program.turns(num_sessions=24, num_turns=10)
    ]
    late = seen[-80:]
    usual = {agent: Counter(a for b, a in late if b == agent).most_common(1)[0][0] for agent in range(6)}
    assert len(set(usual.values())) == 6
    assert sum(usual[agent] == found for agent, found in late) >= 0.95 * len(late)
    registry.check_integrity()


def test_recognition_does_not_depend_on_who_comes_first() -> None:
    for seed in range(4):
        program = Program(seed=7, preamble=60, own=30, header=6)
        order = [(f"s{s}", a) for s in range(6) for a in range(6)]
        random.Random(seed).shuffle(order)
        registry = AgentRegistry()
        found = [(a, registry.resolve(None, anchor_sketch(program.body(a)), s).agent) for s, a in order]
        assert len(set(found)) == 6, seed


def test_a_header_that_stays_the_same_within_a_session_is_learned_to_be_a_header() -> None:
    program = Program(seed=2, preamble=60, own=25, header=0)
    registry, found = AgentRegistry(), []
    for session in range(24):
        header = sentences(program.rng, 20)
        for agent in (0, 1, 0, 1):
            body = chat([*header, *program.preamble, *program.own[agent]])
            found.append((agent, registry.resolve(None, anchor_sketch(body), f"s{session}").agent))
    assert len(set(found[-40:])) == 2


def test_an_agent_of_nearly_the_same_prompt_is_split_off_once_both_keep_coming() -> None:
    program = Program(seed=3, preamble=95, own=5, header=4)
    registry, found = AgentRegistry(), []
    for i in range(120):
        agent = 0 if i < 40 or i % 3 else 1
        found.append((agent, registry.resolve(None, anchor_sketch(program.body(agent)), f"s{i}").agent))
    assert len(set(found[:40])) == 1
    assert len(set(found[-30:])) == 2
    registry.check_integrity()


@pytest.mark.parametrize("own", [5, 12])
def test_a_new_version_of_a_prompt_keeps_its_agent(own: int) -> None:
    program = Program(seed=4, preamble=95, own=own, header=4)
    registry = AgentRegistry()
    found = {
        registry.resolve(None, anchor_sketch(program.body(0 if i < 40 else 1)), f"s{i // 2}").agent for i in range(120)
    }
    assert len(found) == 1


def test_header_text_drawn_from_a_pool_of_documents_makes_no_agents() -> None:
    rng = random.Random(5)
    body, pool = sentences(rng, 90), [sentences(rng, 4) for _ in range(20)]
    registry = AgentRegistry()
    for i in range(200):
        retrieved = [line for document in rng.sample(pool, 3) for line in document]
        registry.resolve(None, anchor_sketch(chat([*retrieved, *body])), f"s{i}")
    assert len(registry) == 1


def test_one_line_prompts_do_not_claim_longer_ones_that_quote_them() -> None:
    rng = random.Random(6)
    registry = AgentRegistry()
    short = registry.resolve(None, anchor_sketch(chat(["You are a helpful assistant."])), "a").agent
    long = anchor_sketch(chat(["You are a helpful assistant.", *sentences(rng, 30)]))
    assert registry.resolve(None, long, "b").agent != short


def test_an_explicit_name_wins_and_teaches_the_anchor() -> None:
    program = Program(seed=8, preamble=40, own=20, header=3)
    registry = AgentRegistry()
    assert registry.resolve("coder", anchor_sketch(program.body(0)), "a").agent == "coder"
    assert registry.resolve(None, anchor_sketch(program.body(0)), "b").agent == "coder"
    assert registry.resolve("writer", anchor_sketch(program.body(0)), "c").agent == "writer"


def test_an_unnamed_agent_takes_the_name_it_is_given_later() -> None:
    program = Program(seed=9, preamble=40, own=20, header=3)
    registry = AgentRegistry()
    unnamed = registry.resolve(None, anchor_sketch(program.body(0)), "a").agent
    assert unnamed is not None
    assert unnamed.startswith("agent-")
    assert len(unnamed) == len("agent-") + 8
    named = registry.resolve("coder", anchor_sketch(program.body(0)), "b")
    assert named.renamed == ((unnamed, "coder"),)
    assert [entry.agent for entry in registry.entries()] == ["coder"]
    assert registry.entries()[0].num_requests == 2


def test_without_name_and_anchor_there_is_no_agent() -> None:
    registry = AgentRegistry()
    assert registry.resolve(None, None).agent is None
    assert registry.resolve("  ", AnchorSketch()).agent is None
    assert len(registry) == 0


def test_a_restored_registry_recognises_the_same_agents() -> None:
    program = Program(seed=10, preamble=60, own=30, header=6)
    registry = AgentRegistry()
    for session, agent in program.turns(num_sessions=12, num_turns=8):
        registry.resolve(None, anchor_sketch(program.body(agent)), session)
    restored = AgentRegistry.from_dict(json.loads(json.dumps(registry.to_dict())))
    restored.check_integrity()
    for agent in range(6):
        sketch = anchor_sketch(program.body(agent))
        assert restored.resolve(None, sketch, "new").agent == registry.resolve(None, sketch, "new").agent


def test_a_restart_does_not_fold_the_agents_of_one_session() -> None:
    rng = random.Random(3)
    preamble = sentences(rng, 60)
    bodies = [chat([*preamble, *sentences(rng, 40)]) for _ in range(10)]
    registry = AgentRegistry()
    for body in bodies[:9]:
        registry.resolve(None, anchor_sketch(body), "s")
    restored = AgentRegistry.from_dict(json.loads(json.dumps(registry.to_dict())))
    restored.resolve(None, anchor_sketch(bodies[9]), "s")
    assert len(restored) == 10


def test_agents_beyond_the_bound_are_forgotten_least_recently_seen_first() -> None:
    registry = AgentRegistry(max_agents=2)
    registry.resolve("a", None)
    registry.resolve("b", None)
    registry.resolve("a", None)
    assert registry.resolve("c", None).evicted == ("b",)
    assert [entry.agent for entry in registry.entries()] == ["a", "c"]


def test_an_index_weighs_rare_pieces_more_than_shared_ones() -> None:
    shared, full = set(range(1, 41)), (1 << 64) - 1
    own = {name: set(range(100 * n, 100 * n + 10)) for n, name in enumerate("abcd", start=1)}
    profiles = {name: Profile(dict.fromkeys(shared | own[name], 1.0), full, 0, num_sessions=2) for name in own}
    stranger = AnchorSketch(tuple(sorted(shared | set(range(900, 910)))), 50, 0)
    # Unweighted, each agent is contained by 40 of 50; that would be near enough to pass for a new version.
    assert all(contained < 0.7 for _, contained, _ in AnchorIndex(profiles).candidates(stranger))


@pytest.mark.parametrize("headers", ["turn", "session"])
def test_the_agents_of_the_gsm8k_chat_are_recognised_without_their_names(
    headers: Literal["turn", "session"],
) -> None:
    program = Gsm8kProgram(load_questions("sample"), headers=headers, max_prompt_tokens=6000)
    registry = AgentRegistry()
    sessions = [program.session(index) for index in range(10)]
    ids: dict[str, set[str | None]] = {}
    for number in range(len(sessions[0].turns)):  # the sessions take turns, as in a cluster
        for session in sessions:
            messages = program.messages(session, number, ["Done."] * number)
            found = registry.resolve(None, anchor_sketch({"messages": messages}), session.id).agent
            ids.setdefault(session.turns[number].agent, set()).add(found)
    assert all(len(found) == 1 for found in ids.values())
    assert len(registry) == len(ids)


class RegistryMachine(RuleBasedStateMachine):
    """Whatever comes in whatever order, the registry keeps its bounds and its tables agree."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = AgentRegistry(max_agents=5)
        self.program = Program(seed=0, preamble=12, own=4, header=0)

    @rule(
        name=st.none() | st.sampled_from(["x", "y", "z"]),
        agent=st.integers(0, 5),
        session=st.none() | st.sampled_from("abc"),
        header=st.integers(0, 8),
    )
    def resolve(self, name: str | None, agent: int, session: str | None, header: int) -> None:
        self.program.header = header
        before = {entry.agent for entry in self.registry.entries()}
        result = self.registry.resolve(name, anchor_sketch(self.program.body(agent)), session)
        assert result.agent in self.registry
        assert name is None or result.agent == name
        for old, _ in result.renamed:
            assert old in before
            assert old not in self.registry

    @rule(agent=st.integers(0, 5), count=st.integers(9, 12))
    def alternate(self, agent: int, count: int) -> None:
        for i in range(count):
            self.program.header = 0
            self.registry.resolve(None, anchor_sketch(self.program.body(agent if i % 2 else 0)))

    @rule()
    def reload(self) -> None:
        self.registry = AgentRegistry.from_dict(json.loads(json.dumps(self.registry.to_dict())), 5)

    @invariant()
    def integrity(self) -> None:
        self.registry.check_integrity()


RegistryMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
test_registry_keeps_its_bounds = RegistryMachine.TestCase
