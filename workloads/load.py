"""Puts sessions on an endpoint: a closed loop (so many at a time) or an open one (so many a second)."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from ropewalk.workloads.client import ChatClient, Reply
from ropewalk.workloads.config import ReplayConfig
from ropewalk.workloads.metrics import ReplayResult, TurnRecord
from ropewalk.workloads.programs.base import Program, Session, estimate_tokens

# What names the arm and not the work: not part of a body's hash.
ARM_FIELDS = ("model", "ropewalk")
ABORTED = "aborted"


class Progress(Protocol):
    """Told what is going on, to show it."""

    def begin(self, total: int) -> None:
        """A replay of `total` turns begins."""

    def turn_done(self, arm: str, record: TurnRecord) -> None:
        """A turn of `arm` has ended, well or badly."""

    def end(self) -> None:
        """Nothing more will come."""


async def run_replay(
    config: ReplayConfig, *, progress: Progress | None = None, stop: asyncio.Event | None = None
) -> ReplayResult:
    """Run one replay to its end, its deadline, or until `stop` is set; the result holds what was done by then.

    Errors of single requests are recorded, and the session goes on. Raises `WorkloadError` before the first turn if
    the settings, the questions or the endpoint cannot be used.
    """
    program, sessions = prepare(config)
    async with ChatClient(config) as client:
        arm = Arm(config, program, client, await client.resolve_model(config.model), time.perf_counter(), progress)
        if progress:
            progress.begin(sum(len(session.turns) for session in sessions))
        try:
            arm.aborted = not await run_until(arm.run_block(sessions), config.deadline_s, stop)
        finally:
            if progress:
                progress.end()
        return arm.result()


def prepare(config: ReplayConfig) -> tuple[Program, list[Session]]:
    """Make the program and all sessions, and check that every prompt can be rendered. Raises `WorkloadError`."""
    program = config.build_program()
    sessions = [program.session(index) for index in range(config.sessions)]
    for session in sessions:
        recorded = [turn.reply for turn in session.turns]
        for turn in session.turns:
            program.messages(session, turn.index, recorded)
    return program, sessions


def arrival_times(seed: int, indices: Sequence[int], rate: float) -> list[float]:
    """When the sessions with these numbers arrive, in seconds from the beginning: Poisson, `rate` a second."""
    gaps = (random.Random(f"{seed}/{index}/arrival").expovariate(rate) for index in indices)
    return list(itertools.accumulate(gaps))


async def run_until(work: Awaitable[None], seconds: float | None, stop: asyncio.Event | None) -> bool:
    """Await `work`, but cancel it after `seconds` or when `stop` is set. Returns whether it came to its end."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait({task, stopped}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for pending in (task, stopped):
            pending.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


class Arm:
    """One endpoint under one configuration: runs sessions and keeps the record of every turn."""

    def __init__(
        self,
        config: ReplayConfig,
        program: Program,
        client: ChatClient,
        model: str,
        origin: float,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self.aborted = False
        self._program = program
        self._client = client
        self._model = model
        self._origin = origin  # `time.perf_counter()` that counts as second 0
        self._progress = progress
        self._records: list[TurnRecord] = []
        self._wall_s = 0.0
        self._measured_s = 0.0

    async def run_block(self, sessions: Sequence[Session]) -> None:
        """Run these sessions and return when all have ended. When cancelled, record turns under way as aborted."""
        started = self._now()
        first = len(self._records)
        try:
            if self.config.rate is None:
                await self._closed_loop(sessions)
            else:
                await self._open_loop(sessions, self.config.rate)
        finally:
            ended = self._now()
            measured = [record.started for record in self._records[first:] if not record.warmup]
            self._wall_s += ended - started
            self._measured_s += ended - min(measured, default=ended)

    def result(self) -> ReplayResult:
        """What has happened so far."""
        return ReplayResult(
            config=self.config,
            model=self._model,
            source=self._program.source,
            records=sorted(self._records, key=lambda record: (record.session, record.turn)),
            wall_s=self._wall_s,
            measured_s=self._measured_s,
            aborted=self.aborted,
        )

    async def _closed_loop(self, sessions: Sequence[Session]) -> None:
        waiting = iter(sessions)

        async def work() -> None:
            for session in waiting:  # shared: each session is taken once
                await self._run_session(session, self._now())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.config.concurrency, len(sessions))):
                group.create_task(work())

    async def _open_loop(self, sessions: Sequence[Session], rate: float) -> None:
        async with asyncio.TaskGroup() as group:
            begin = self._now()
            arrivals = arrival_times(self.config.seed, [session.index for session in sessions], rate)
            for session, arrival in zip(sessions, arrivals, strict=True):
                group.create_task(self._arrive(session, begin + arrival))

    async def _arrive(self, session: Session, arrival: float) -> None:
        await asyncio.sleep(max(0.0, arrival - self._now()))
        await self._run_session(session, arrival)

    async def _run_session(self, session: Session, intended: float) -> None:
        replies: list[str] = []
        for turn in session.turns:
            record, text = await self._run_turn(session, turn.index, replies, intended)
            # An agent that said nothing, or could not be reached, is taken to have said what was recorded.
            replies.append(text if self.config.live and text else turn.reply)
            intended = record.ended

    async def _run_turn(
        self, session: Session, index: int, replies: Sequence[str], intended: float
    ) -> tuple[TurnRecord, str]:
        agent = session.turns[index].agent
        body = self._body(session, index, replies)
        record = TurnRecord(
            session=session.index,
            turn=index,
            agent=agent,
            body_sha256=body_hash(body),
            estimated_prompt_tokens=estimate_tokens(body["messages"]),
            intended=intended,
            started=self._now(),
            # By place rather than by time: which turns start first depends on the server's speed.
            warmup=session.index * self.config.turns + index < self.config.warmup_turns,
        )
        headers = {"x-session-id": session.id, "x-agent": agent} if self.config.id_headers else {}
        text = ""
        try:
            reply = await self._client.chat(body, headers)
            self._fill(record, reply)
            text = reply.text.strip() if reply.error is None else ""
        except asyncio.CancelledError:
            record.error, record.ended = ABORTED, self._now()
            raise
        finally:
            self._records.append(record)
            if self._progress:
                self._progress.turn_done(self.config.name, record)
        return record, text

    def _body(self, session: Session, index: int, replies: Sequence[str]) -> dict[str, Any]:
        config = self.config
        body: dict[str, Any] = {
            "model": self._model,
            "messages": self._program.messages(session, index, replies),
            "max_tokens": config.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if config.ignore_eos:
            body["ignore_eos"] = True
        if config.sends_ropewalk_field:
            field: dict[str, Any] = {"session": session.id, "agent": session.turns[index].agent}
            if config.reuse in ("exact", "reuse"):
                field["reuse"] = config.reuse
            if config.explain:
                field["explain"] = True
            body["ropewalk"] = field
        return body

    def _fill(self, record: TurnRecord, reply: Reply) -> None:
        record.started = reply.started - self._origin
        record.ended = reply.ended - self._origin
        record.token_times = [moment - self._origin for moment in reply.token_times]
        record.prompt_tokens = reply.prompt_tokens
        record.cached_tokens = reply.cached_tokens
        record.completion_tokens = reply.completion_tokens
        record.finish_reason = reply.finish_reason
        record.status = reply.status
        record.error = reply.error
        tokens = (reply.ropewalk or {}).get("tokens")
        if isinstance(tokens, dict):
            record.ropewalk_tokens = {str(kind): count for kind, count in tokens.items() if isinstance(count, int)}

    def _now(self) -> float:
        return time.perf_counter() - self._origin


def body_hash(body: dict[str, Any]) -> str:
    """SHA-256 of a request body without the fields that name the arm."""
    work = {key: value for key, value in body.items() if key not in ARM_FIELDS}
    return hashlib.sha256(json.dumps(work, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
