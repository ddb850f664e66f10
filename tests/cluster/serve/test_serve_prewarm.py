"""The prewarmer of a replica, with an engine and a scheduler that only note what they are asked."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from ropewalk.cluster.engine.request import RequestReport, RequestSettings
from ropewalk.cluster.serve import prewarm as module
from ropewalk.cluster.serve.prewarm import Prewarmer
from ropewalk.kernels.keys import Tokens, as_tokens
from ropewalk.scheduler.anchors import AnchorTable
from ropewalk.scheduler.client import SchedulerUnavailableError
from ropewalk.scheduler.handovers import Predictability
from ropewalk.scheduler.prewarm import MIN_OUTCOMES, PrewarmSettings
from ropewalk.scheduler.snapshot import EMPTY_SNAPSHOT, AgentView, Snapshot, Stand

ANCHOR = list(range(100, 300))
BLOCK = 16


class FakeEngine:
    """A prefix cache of whole prompts; each prewarm waits until it is let go."""

    def __init__(self) -> None:
        self.on_prompt: Callable[[str, Tokens], None] | None = None
        self.max_model_len = 1000
        self.block_size = BLOCK
        self.prewarm_refused: str | None = None
        self.asked: list[list[int]] = []
        self.num_aborted = 0
        self.num_local = 0
        self.num_loaded = 0
        self.error: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def prewarm(self, tokens: Tokens, agent: str) -> RequestReport:
        assert agent == "b"
        self.asked.append(tokens.tolist())
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        if self.error is not None:
            raise self.error
        return report_of(len(tokens), self.num_local, self.num_loaded)


class FakeScheduler:
    """Expects agent `b` in a session that stands here; its table answers at once, unless it is dead."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.table = AnchorTable()
        self.is_dead = False
        self.exchange: Any = None

    @property
    def snapshot(self) -> Snapshot:
        view = AgentView("b", True, 9, True, 0.5, 100, None, (), (), "m")
        return dataclasses.replace(
            EMPTY_SNAPSHOT,
            agents={"b": view},
            groups={"a": Predictability(0.9, 100)},
            stands=(Stand("s", ("a",), "a", self._now_s()),),
            outlooks={("a",): (("b", 1.0),)},
            replicas={"m": (("r0", "n0"),)},
        )

    def share_anchors(self, exchange: Any) -> None:
        self.exchange = exchange

    def sync(self) -> None:
        message = self.exchange.message()
        self.exchange.take(message, self.table.sync(message))

    async def call(self, method: str, *args: Any) -> Any:
        if self.is_dead:
            raise SchedulerUnavailableError("scheduler-died")
        return getattr(self.table, {"put_anchor": "put", "purge_anchors": "purge"}[method])(*args)


class World:
    """One replica."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.engine = FakeEngine()
        self.scheduler = FakeScheduler(lambda: self.now_s)
        settings = PrewarmSettings(idle_s=1e-6, min_interval_s=2.0, window_s=60.0)
        self.prewarmer = Prewarmer("m", "r0", "n0", settings, self.scheduler, clock=lambda: self.now_s)

    @property
    def counters(self) -> dict[str, int]:
        return self.prewarmer.status()["counters"]

    @property
    def tokens(self) -> dict[str, int]:
        return self.prewarmer.status()["tokens"]

    async def until(self, **counters: int) -> None:
        await until(lambda: counters.items() <= self.counters.items())

    def answer(
        self, session: str, tokens: list[int], *, local: int = 0, agent: str | None = "b", recognised: str | None = None
    ) -> None:
        settings = RequestSettings(session=session, agent=agent, recognised=recognised)
        with self.prewarmer.busy():
            assert self.engine.on_prompt is not None
            self.engine.on_prompt(settings.key, as_tokens(tokens))
            self.prewarmer.answered(settings, [report_of(len(tokens), local, 0)])


def report_of(length: int, local: int, loaded: int) -> RequestReport:
    tokens = {"computed": length - local - loaded, "exact": local + loaded, "reused": 0, "spliced": 0}
    return RequestReport("exact", num_prompt_tokens=length, num_loaded=loaded, tokens=tokens)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # a task of its own does the work
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(module, "POLL_S", 0.001)
    world = World()
    world.prewarmer.start(world.engine)
    try:
        yield world
    finally:
        world.prewarmer.stop()


async def test_an_expected_anchor_is_warmed_once_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        await world.prewarmer.register("b", as_tokens(ANCHOR))
        await world.until(finished=1)
        await until(lambda: world.prewarmer.status()["last_decision"] == "all-warm")
        assert world.engine.asked == [ANCHOR]
        assert world.tokens == {"present": 0, "loaded": 0, "computed": 200, "used": 0, "wasted": 0}


async def test_a_request_gives_up_what_is_being_warmed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        world.engine.go.clear()
        await world.prewarmer.register("b", as_tokens(ANCHOR))
        await world.until(started=1)
        with world.prewarmer.busy():
            assert world.counters == {"started": 1, "cancelled_request": 1}
            await until(lambda: world.engine.num_aborted == 1)
            world.now_s += 10
            world.engine.go.set()
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert len(world.engine.asked) == 1, "nothing is warmed beside a request"
        await world.until(finished=1)
        assert len(world.engine.asked) == 2


async def test_a_cancelled_prewarm_is_not_tried_again_within_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        world.engine.go.clear()
        await world.prewarmer.register("b", as_tokens(ANCHOR))
        await world.until(started=1)
        with world.prewarmer.busy():
            pass
        await until(lambda: world.prewarmer.status()["last_decision"] == "too-soon")
        assert len(world.engine.asked) == 1


async def test_never_more_than_one_prewarm_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        world.engine.go.clear()
        await world.prewarmer.register("b", as_tokens(ANCHOR))
        await world.until(started=1)
        world.now_s += 100
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert len(world.engine.asked) == 1
        assert world.prewarmer.status()["in_flight"]


async def test_what_is_learned_from_two_sessions_counts_as_warm_and_is_warmed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch) as world:
        world.answer("1", [*ANCHOR, 1, 1])
        world.answer("2", [*ANCHOR, 2, 2])
        await until(lambda: world.prewarmer.status()["last_decision"] == "all-warm")
        assert world.engine.asked == []
        world.now_s += 61
        await world.until(finished=1)
        assert world.engine.asked == [ANCHOR]


async def test_what_a_request_finds_in_the_cache_was_used_and_the_rest_wasted(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = len(ANCHOR) // BLOCK * BLOCK
    async with running(monkeypatch) as world:
        await world.prewarmer.register("b", as_tokens(ANCHOR))
        await world.until(finished=1)
        world.answer("1", [*ANCHOR, 1], local=whole - BLOCK)
        assert (world.tokens["used"], world.tokens["wasted"]) == (whole - BLOCK, BLOCK)
        world.now_s += 61
        await world.until(finished=2)
        world.now_s += 61
        await until(lambda: world.tokens["wasted"] == BLOCK + whole)


async def test_an_anchor_learned_some_words_too_long_is_still_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        for session in ("1", "2"):
            world.answer(session, [*ANCHOR, 7, 7, int(session)])
        world.now_s += 61
        await world.until(finished=1)
        world.answer("3", [*ANCHOR, 9], local=192)
        assert (world.tokens["used"], world.tokens["wasted"]) == (192, 0)


async def test_a_prompt_of_another_version_uses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        await world.prewarmer.register("b", as_tokens(ANCHOR))
        await world.until(finished=1)
        world.answer("1", [*ANCHOR[:64], *range(1000, 1200)], local=64)
        assert world.tokens["used"] == 0
        assert world.prewarmer.status()["awaiting_use"] == 1


async def test_what_was_there_already_is_neither_used_nor_wasted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        world.engine.num_local = 192
        await world.prewarmer.register("b", as_tokens(ANCHOR))
        await world.until(finished=1)
        world.answer("1", [*ANCHOR, 1], local=192)
        assert world.tokens == {"present": 192, "loaded": 0, "computed": 8, "used": 0, "wasted": 0}


async def test_waste_pauses_prewarming_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        await world.prewarmer.register("b", as_tokens(ANCHOR))
        for number in range(MIN_OUTCOMES):
            await world.until(finished=number + 1)
            world.now_s += 61
        await until(lambda: world.prewarmer.status()["last_decision"] == "paused")
        status = world.prewarmer.status()
        assert status["budget"]["paused"]
        assert status["decisions"]["paused"] == 1
        world.now_s += status["budget"]["paused_for_s"]
        await world.until(finished=MIN_OUTCOMES + 1)


async def test_a_failing_engine_is_counted_and_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        world.engine.error = RuntimeError("no blocks")
        await world.prewarmer.register("b", as_tokens(ANCHOR))
        await world.until(failed=1)
        world.engine.error = None
        world.now_s += 3
        await world.until(finished=1)


async def test_an_anchor_longer_than_the_context_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        world.engine.max_model_len = len(ANCHOR) + 1
        await world.prewarmer.register("b", as_tokens(ANCHOR))
        await until(lambda: world.prewarmer.status()["last_decision"] == "no-anchor")
        assert world.engine.asked == []


async def test_an_engine_that_cannot_be_prewarmed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.engine.prewarm_refused = "vLLM has no prefix cache for this model here"
    world.prewarmer.start(world.engine)
    assert world.prewarmer.status()["refused"] == "vLLM has no prefix cache for this model here"
    assert world.engine.on_prompt is None
    assert world.scheduler.exchange is None


async def test_the_scheduler_hears_what_was_learned_and_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        await world.prewarmer.register("b", as_tokens(ANCHOR))
        await world.until(finished=1)
        message = world.scheduler.exchange.message()
        assert (message.model, message.replica, message.node) == ("m", "r0", "n0")
        assert message.warmed == (("b", 1000.0),)
        world.scheduler.sync()
        assert world.scheduler.exchange.message().warmed == ()


async def test_a_purge_forgets_what_prompts_taught_here_and_in_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        for session in ("1", "2"):
            world.answer(session, [*ANCHOR, int(session)])
        world.scheduler.sync()
        assert len(world.scheduler.table.anchors()) == 1
        await world.prewarmer.forget_learned()
        assert world.scheduler.table.anchors() == []
        assert world.prewarmer.status()["anchors"] == 0
        world.scheduler.is_dead = True
        with pytest.raises(SchedulerUnavailableError):
            await world.prewarmer.forget_learned()


async def test_prompts_without_a_known_agent_or_an_answer_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        for session in ("1", "2"):
            world.answer(session, [*ANCHOR, int(session)], agent=None)
        assert world.engine.on_prompt is not None
        world.engine.on_prompt("key", as_tokens(ANCHOR))
        world.prewarmer.given_up("key")
        assert world.prewarmer.status()["anchors"] == 0
        assert not world.prewarmer._prompts


async def test_an_agent_that_gave_no_name_is_the_one_that_it_was_recognised_as(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        for session in ("1", "2"):
            world.answer(session, [*ANCHOR, int(session)], agent=None, recognised="b")
        assert world.prewarmer.status()["anchors"] == 1


async def test_times_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as world:
        for number in range(2 * module.MAX_PROMPTS):
            assert world.engine.on_prompt is not None
            world.engine.on_prompt(str(number), as_tokens(ANCHOR))
            module._note(world.prewarmer._used, str(number), math.inf)
        assert len(world.prewarmer._prompts) == module.MAX_PROMPTS
        assert len(world.prewarmer._used) == module.MAX_TIMES
