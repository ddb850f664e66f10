"""A prewarmed anchor is a cache hit, gives way to real requests, and changes no answer."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from typing import Any

import pytest

from ropewalk.cluster.engine.request import RequestSettings
from ropewalk.cluster.serve.prewarm import Prewarmer
from ropewalk.kernels.keys import as_tokens
from ropewalk.scheduler.handovers import Predictability
from ropewalk.scheduler.prewarm import PrewarmSettings
from ropewalk.scheduler.snapshot import EMPTY_SNAPSHOT, Snapshot, Stand

from .prompts import prompt

pytestmark = pytest.mark.engine

MODEL = "smollm2-135m"
BLOCK = 32
SECONDS = 60
START_S = 1e9


class OneForecast:
    """A scheduler that expects the agent `b` next, in a session that stands on replica `r`."""

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(
            **{f: getattr(EMPTY_SNAPSHOT, f) for f in ("time_s", "agents", "sessions", "predictability")},
            version=1,
            num_handovers=100,
            num_observations=100,
            groups={"a": Predictability(0.9, 100)},
            stands=(Stand("s", ("a",), "a", math.inf),),  # its last turn is never too long ago
            outlooks={("a",): (("b", 1.0),)},
            replicas={"m": (("r", "n"),)},
        )

    def share_anchors(self, exchange: Any) -> None:
        """There is nobody to share them with."""

    async def call(self, method: str, *args: Any) -> Any:
        return None


@pytest.fixture(scope="module")
def engines(start_engines, new_store):
    # In float32 no near-tie can flip; small steps, so that a prewarm takes several.
    arguments = {"dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 128}
    return start_engines(MODEL, None, new_store(), **arguments)


@pytest.fixture
def rng(request) -> random.Random:
    return random.Random(request.node.name)


def test_the_next_request_finds_a_prewarmed_anchor_and_answers_as_plain_vllm(engines, rng):
    plain, ours = engines
    anchor = prompt(MODEL, rng, 300)
    tokens = [*anchor, *prompt(MODEL, rng, 40)]
    before = ours.client.status()["counters"]
    report = ours.run(ours.client.prewarm(as_tokens(anchor), "b"))
    assert report.tokens["computed"] == len(anchor)
    after = ours.client.status()["counters"]
    assert {name: after.get(name, 0) - before.get(name, 0) for name in ("requests", "tokens_computed")} == {
        "requests": 0,
        "tokens_computed": 0,
    }
    answer = ours.ask(tokens)
    # Whole blocks from the prefix cache, and what is left of the anchor from the store.
    assert answer.num_cached - answer.report.num_loaded == len(anchor) // BLOCK * BLOCK
    assert answer.token_ids == plain.ask(tokens).token_ids


def test_an_anchor_that_the_store_has_is_loaded(engines, rng):
    plain, ours = engines
    anchor = prompt(MODEL, rng, 300)
    tokens = [*anchor, *prompt(MODEL, rng, 40)]
    ours.run(ours.client.prewarm(as_tokens(anchor), "b"))
    ours.settle()
    ours.forget_prefixes()
    report = ours.run(ours.client.prewarm(as_tokens(anchor), "b"))
    assert report.num_loaded > len(anchor) // 2
    assert report.tokens["computed"] + report.num_loaded == len(anchor)
    answer = ours.ask(tokens)
    assert answer.num_cached >= len(anchor) // BLOCK * BLOCK
    assert answer.token_ids == plain.ask(tokens).token_ids


def test_a_request_cancels_a_prewarm_and_is_answered_as_if_there_had_been_none(engines, rng):
    plain, ours = engines
    anchor = prompt(MODEL, rng, 900)
    other = prompt(MODEL, rng, 200)
    settings = PrewarmSettings(idle_s=0.001, min_interval_s=0.001)
    clock = itertools.count(START_S, 0.01)  # goes on, so that a cancelled prewarm may be tried again
    prewarmer = Prewarmer("m", "r", "n", settings, OneForecast(), clock=lambda: next(clock))

    async def scenario() -> tuple[Any, dict[str, Any]]:
        await prewarmer.register("b", as_tokens(anchor))
        prewarmer.start(ours.client)
        try:
            await _until(lambda: prewarmer.status()["in_flight"])
            with prewarmer.busy():
                interrupted = prewarmer.status()
                answer = await ours.ask_async(other)
            await _until(lambda: prewarmer.status()["counters"].get("finished"))
            return answer, interrupted
        finally:
            prewarmer.stop()

    answer, interrupted = ours.run(scenario())
    assert interrupted["counters"] == {"started": 1, "cancelled_request": 1}
    assert answer.token_ids == plain.ask(other).token_ids
    # Idle again, it was warmed after all, and is used.
    tokens = [*anchor, *prompt(MODEL, rng, 20)]
    warm = ours.ask(tokens)
    assert warm.num_cached - warm.report.num_loaded == len(anchor) // BLOCK * BLOCK
    assert warm.token_ids == plain.ask(tokens).token_ids


def test_what_was_learned_from_two_sessions_is_warmed_and_counted_as_used(engines, rng):
    _, ours = engines
    anchor = prompt(MODEL, rng, 200)
    later_s = 0.0
    settings = PrewarmSettings(idle_s=0.001, window_s=1.0)
    prewarmer = Prewarmer("m", "r", "n", settings, OneForecast(), clock=lambda: START_S + later_s)

    async def ask(session: str, question: list[int]) -> None:
        settings = RequestSettings(session=session, agent="b")
        with prewarmer.busy():
            answer = await ours.ask_async([*anchor, *question], session=session, agent="b", key=settings.key)
            prewarmer.answered(settings, [answer.report])

    async def scenario() -> dict[str, Any]:
        nonlocal later_s
        prewarmer.start(ours.client)
        try:
            for session in ("s1", "s2"):
                await ask(session, prompt(MODEL, rng, 40))
            async with asyncio.timeout(SECONDS):
                while not await ours.llm.reset_prefix_cache():  # noqa: ASYNC110  # blocks are held until they are saved
                    await asyncio.sleep(0.01)
            later_s = 2.0  # no longer taken to be warm
            await _until(lambda: prewarmer.status()["counters"].get("finished"))
            await ask("s3", prompt(MODEL, rng, 40))
            return prewarmer.status()
        finally:
            prewarmer.stop()
            ours.client.on_prompt = None

    status = ours.run(scenario())
    assert status["anchors"] == 1
    assert status["tokens"]["used"] == len(anchor) // BLOCK * BLOCK
    assert status["tokens"]["wasted"] == 0


async def _until(condition: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  # another process does the work
            await asyncio.sleep(0.001)
