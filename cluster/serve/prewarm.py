"""Warms anchors in a replica's idle time: what `ropewalk.scheduler.prewarm` decides, done by the planned engine.

One task for each replica. It waits until no request has run or waited here for `idle_s`, asks what to warm, and warms
it: one at a time, given up at once when a request comes. Whatever fails here costs no request anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ropewalk.agents.sketch import clean_agent_name
from ropewalk.cluster.engine.request import RequestReport, RequestSettings
from ropewalk.kernels.keys import Tokens
from ropewalk.scheduler.anchors import (
    MAX_ANCHOR_TOKENS,
    Anchor,
    AnchorBook,
    AnchorMessage,
    AnchorUpdate,
    common_prefix,
)
from ropewalk.scheduler.prewarm import Ledger, PrewarmSettings, Situation, Verdict, WasteBudget, decide
from ropewalk.scheduler.snapshot import Snapshot

logger = logging.getLogger("ray.serve")

POLL_S = 0.25
"""Seconds between two decisions while there is nothing to warm: half of what a snapshot may be old."""

USED_SHARE = 0.5
"""Of an anchor, so much must stand at the beginning of a prompt that counts as a use of it: the first two sessions
often share some words beyond it. A prompt that shares less is another version."""

MAX_PROMPTS = 1024
"""Prompts held until their answers are done: more than a replica runs at once."""

MAX_TIMES = 512
"""Agents whose last use is remembered here, least recent forgotten."""


class Engine(Protocol):
    """What a prewarmer needs of `PlannedEngine`."""

    on_prompt: Callable[[str, Tokens], None] | None

    @property
    def max_model_len(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def prewarm_refused(self) -> str | None: ...

    async def prewarm(self, tokens: Tokens, agent: str) -> RequestReport: ...


class Scheduler(Protocol):
    """What a prewarmer needs of `SchedulerClient`."""

    @property
    def snapshot(self) -> Snapshot: ...

    def share_anchors(self, exchange: Any) -> None: ...

    async def call(self, method: str, *args: Any) -> Any: ...


class Prewarmer:
    """The anchors of one replica and the task that warms them. All of it runs in the replica's event loop, except
    `message` and `take`, which the scheduler's client calls from its thread. `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        model: str,
        replica: str,
        node: str,
        settings: PrewarmSettings,
        scheduler: Scheduler,
        *,
        reuse: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._model, self._replica, self._node = model, replica, node
        self._settings = settings
        self._scheduler = scheduler
        self._reuse = reuse
        self._clock = clock
        self._lock = threading.Lock()
        """Holds for `_book` and `_unsent`, which the client's thread reads and writes, too."""
        self._book = AnchorBook()
        self._unsent: dict[str, float] = {}
        self._budget = WasteBudget(settings.max_waste)
        self._ledger = Ledger(settings.window_s)
        self._used: OrderedDict[str, float] = OrderedDict()
        self._tried: OrderedDict[str, float] = OrderedDict()
        self._prompts: OrderedDict[str, Tokens] = OrderedDict()
        self._counters: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._verdicts: Counter[str] = Counter()
        self._last: Verdict | None = None
        self._refused: str | None = "the engine has not started"
        self._engine: Engine | None = None
        self._num_busy = 0
        self._idle_since = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._flight: asyncio.Task[RequestReport] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, engine: Engine) -> None:
        """Begin to learn from the engine's prompts, and to warm. Call it in the replica's event loop."""
        self._engine = engine
        self._refused = engine.prewarm_refused
        if self._refused is not None:
            logger.warning("Prewarming is off: %s", self._refused)
            return
        self._idle_since = time.monotonic()
        engine.on_prompt = self.prompt
        self._scheduler.share_anchors(self)
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """End the task and what it warms."""
        self._cancel("shutdown")
        if self._task is not None:
            self._task.cancel()
            self._task = None

    # What the replica tells

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Around everything that somebody waits for: gives up what is being warmed, and keeps from warming."""
        self._num_busy += 1
        self._idle.clear()
        self._cancel("request")
        try:
            yield
        finally:
            self._num_busy -= 1
            if self._num_busy == 0:
                self._idle_since = time.monotonic()
                self._idle.set()

    def prompt(self, key: str, tokens: Tokens) -> None:
        """The engine answers a prompt of the request with this key. Of several, the first counts."""
        if key not in self._prompts:
            self._prompts[key] = tokens[:MAX_ANCHOR_TOKENS]
            if len(self._prompts) > MAX_PROMPTS:
                self._prompts.popitem(last=False)

    def answered(self, settings: RequestSettings, reports: Sequence[RequestReport]) -> None:
        """A request was answered. Never raises."""
        prompt = self._prompts.pop(settings.key, None)
        if prompt is None:
            return
        try:
            agent = clean_agent_name(settings.agent) or settings.recognised
            if agent is not None:
                # Of several prompts it is not known which report is the first one's.
                self._learn(agent, settings.session, prompt, reports[0] if len(reports) == 1 else None)
        except Exception:  # the answer has been sent: learning from it must not turn it into an error
            self._counters["learning_failed"] += 1
            logger.exception("What anchor a prompt has could not be noted")

    def given_up(self, key: str) -> None:
        """A request ended without an answer."""
        self._prompts.pop(key, None)

    def _learn(self, agent: str, session: str | None, prompt: Tokens, report: RequestReport | None) -> None:
        now_s = self._clock()
        with self._lock:
            self._book.learn(agent, session, prompt)
            anchor = self._book.get(agent)
        shared = common_prefix(anchor.tokens, prompt) if anchor is not None else 0
        if anchor is None or shared < USED_SHARE * len(anchor.tokens):
            return
        _note(self._used, agent, now_s)
        if report is not None:
            self._settle(now_s, self._ledger.used(agent, now_s, min(_num_local(report), shared)))

    # Anchors

    async def register(self, agent: str, tokens: Tokens) -> Anchor:
        """Keep an anchor that somebody vouches for, here and for all replicas of the model.

        Raises ValueError for one that is too short, and `SchedulerUnavailableError` when the scheduler does not answer.
        """
        anchor = Anchor(agent, tokens[:MAX_ANCHOR_TOKENS].copy(), "registered")
        await self._scheduler.call("put_anchor", self._model, anchor)
        with self._lock:
            self._book.register(anchor)
        return anchor

    async def forget_learned(self) -> None:
        """Forget all anchors that came from prompts, here and in the scheduler, and what they were learned from.

        Raises `SchedulerUnavailableError`; then it is done here only, and must be asked for again.
        """
        self._prompts.clear()
        with self._lock:
            self._book.forget_learned()
        await self._scheduler.call("purge_anchors", self._model)

    def forget_session(self, session: str) -> None:
        """Forget the prompts of a session."""
        with self._lock:
            self._book.forget_session(session)

    def message(self) -> AnchorMessage:
        """See `AnchorBook.message`."""
        with self._lock:
            return self._book.message(self._model, self._replica, self._node, self._unsent.items())

    def take(self, message: AnchorMessage, update: AnchorUpdate) -> None:
        """See `AnchorBook.take`."""
        with self._lock:
            for agent, then_s in message.warmed:
                if self._unsent.get(agent) == then_s:
                    del self._unsent[agent]
            self._book.take(message, update)

    # Warming

    async def _run(self) -> None:
        while True:
            await self._idleness()
            try:
                has_warmed = await self._step()
            except Exception:  # the next try may do better; requests do not depend on it
                self._counters["failed"] += 1
                if self._counters["failed"] == 1:
                    logger.exception("Prewarming failed; further failures are counted only")
                has_warmed = False
            if not has_warmed:
                await asyncio.sleep(POLL_S)

    async def _idleness(self) -> None:
        """Wait until nothing has run here for `idle_s`."""
        while True:
            await self._idle.wait()
            left = self._idle_since + self._settings.idle_s - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(left)

    async def _step(self) -> bool:
        """Decide, and warm what was decided on; says whether anything was."""
        assert self._engine is not None
        now_s = self._clock()
        self._settle(now_s, self._ledger.expire(now_s))
        with self._lock:
            lengths = {a: n for a, n in self._book.lengths().items() if n < self._engine.max_model_len - 1}
        situation = Situation(
            self._scheduler.snapshot, self._model, self._replica, lengths, self._used, self._tried, now_s, self._reuse
        )
        decision = decide(situation, self._settings, paused=self._budget.is_paused(now_s))
        if decision.verdict != self._last:
            self._verdicts[str(decision.verdict)] += 1  # changes, not every look
            self._last = decision.verdict
        if decision.agent is None:
            return False
        with self._lock:
            anchor = self._book.get(decision.agent)
        if anchor is not None:
            await self._warm(self._engine, anchor)
        return True

    async def _warm(self, engine: Engine, anchor: Anchor) -> None:
        agent = anchor.agent
        _note(self._tried, agent, self._clock())
        self._counters["started"] += 1
        flight = self._flight = asyncio.create_task(engine.prewarm(anchor.tokens, agent))
        try:
            await asyncio.wait({flight})
        finally:
            self._flight = None
            flight.cancel()
        if flight.cancelled():
            return
        report = flight.result()
        self._counters["finished"] += 1
        # Whole blocks are cached, so the rest behind the last one is of no use to anybody.
        num_whole = len(anchor.tokens) // engine.block_size * engine.block_size
        num_present = min(_num_local(report), num_whole)
        self._tokens["present"] += num_present
        self._tokens["loaded"] += report.num_loaded
        self._tokens["computed"] += report.tokens["computed"]
        now_s = self._clock()
        _note(self._used, agent, now_s)
        with self._lock:
            self._unsent[agent] = now_s
            while len(self._unsent) > MAX_TIMES:
                del self._unsent[next(iter(self._unsent))]
        self._settle(now_s, self._ledger.warmed(agent, now_s, num_whole, num_whole - num_present))

    def _cancel(self, reason: str) -> None:
        if self._flight is not None and not self._flight.done():
            self._flight.cancel()
            self._flight = None
            self._counters[f"cancelled_{reason}"] += 1

    def _settle(self, now_s: float, outcomes: Sequence[tuple[int, int]]) -> None:
        for num_tokens, num_used in outcomes:
            self._tokens["used"] += num_used
            self._tokens["wasted"] += num_tokens - num_used
            self._budget.settle(now_s, num_tokens, num_used)

    def status(self) -> dict[str, Any]:
        """What `GET /v1/replicas` shows: counts, budget, and why nothing is warmed now."""
        with self._lock:
            num_anchors = len(self._book)
        return {
            "refused": self._refused,
            "anchors": num_anchors,
            "counters": dict(self._counters),
            "tokens": {name: self._tokens[name] for name in ("present", "loaded", "computed", "used", "wasted")},
            "decisions": dict(self._verdicts),
            "last_decision": None if self._last is None else str(self._last),
            "in_flight": self._flight is not None,
            "awaiting_use": len(self._ledger),
            "budget": self._budget.status(self._clock()),
        }


def _num_local(report: RequestReport) -> int:
    """Prompt tokens that were in vLLM's prefix cache. What the store gave counts first as reused or spliced."""
    exact_loaded = max(report.num_loaded - report.tokens["reused"] - report.tokens["spliced"], 0)
    return max(report.tokens["exact"] - exact_loaded, 0)


def _note(times: OrderedDict[str, float], agent: str, now_s: float) -> None:
    times[agent] = now_s
    times.move_to_end(agent)
    if len(times) > MAX_TIMES:
        times.popitem(last=False)
