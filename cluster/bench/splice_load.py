"""Sessions that edit their history at every turn, several at a time: the mechanism table of Leyline, on engines in this
process, with lengths scaled to a small model (the paper: 4,096 tokens of system prompt, 2,048 a turn).

    turn 0     system · result · result · result · result              the session is resumed with KEEP results
    turn t     system · note · … · note · result · … · result          each turn brings one, and cuts one to a note
                                     ^ the edit    ^ moves   ^ new
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.cluster.bench.engine import Engine
from ropewalk.cluster.bench.splice import KEEP
from ropewalk.cluster.bench.statistics import spread
from ropewalk.cluster.bench.tasks import Task

SESSIONS, TURNS = 16, 6
SYSTEM, RESULT, QUESTION, STUB, ANSWER = 112, 44, 8, 8, 4
"""Tokens of the system prompt, of a turn's tool result and question, of what an old result gives way to, of answers.
The first two are multiplied where prompts cost little.
"""

AT_ONCE = (1, 4, 8, 16)
"""Sessions at a time."""

LONG_SYSTEM, SHORT_TURN = 1280, 24
"""Tokens where nothing is edited: so much is added a turn that more than 90 % of a prompt have been seen before."""

_names = itertools.count()


def mechanism(
    plain: Engine,
    ours: Engine,
    task: Task,
    rng: random.Random,
    scale: int,
    at_once: Sequence[int] = AT_ONCE,
    keep: int = KEEP,
) -> list[dict[str, Any]]:
    """Measure both engines on the same sessions, for each number of sessions at once, edits at every turn.

    `keep`: results that stay whole.
    """
    rows = []
    warm_up = [_texts(task, rng, scale, keep)]
    for number, concurrency in enumerate(at_once):
        texts = [_texts(task, rng, scale, keep) for _ in range(SESSIONS)]
        row: dict[str, Any] = {"concurrency": concurrency, "keep": keep}
        arms: list[tuple[str, Engine, dict[str, Any]]] = [
            ("plain", plain, {}),
            ("ropewalk", ours, {"edits": "amortize"}),
        ]
        for name, engine, settings in arms[:: -1 if number % 2 else 1]:
            if number == 0:
                engine.run(_run(engine, warm_up, 1, settings))
            row[name] = engine.run(_run(engine, texts, concurrency, settings))
            ours.settle()
        rows.append(row)
    return rows


def append_only(plain: Engine, ours: Engine, task: Task, rng: random.Random, sessions: int) -> dict[str, Any]:
    """Measure long sessions that edit nothing, one at a time: nearly all is in vLLM's own cache, if it has one for the
    model, so that splices can only cost. The engines are asked in turn, and take turns in being first. Nothing is being
    saved meanwhile: that would slow down the other engine.
    """
    times: dict[Engine, list[float]] = {plain: [], ours: []}
    hits: dict[Engine, int] = {plain: 0, ours: 0}
    prompts = 0
    for number in range(sessions):
        settings = {plain: {}, ours: {"edits": "amortize", "session": f"append-{next(_names)}"}}
        system = task.header(rng, LONG_SYSTEM)
        histories = {plain: list(system), ours: list(system)}
        for turn in range(TURNS):
            added = task.filler(rng, SHORT_TURN)
            for engine in (plain, ours) if (number + turn) % 2 else (ours, plain):
                tokens = [*histories[engine], *added]
                ours.settle()
                start = time.perf_counter()
                answer = engine.ask(tokens, max_tokens=ANSWER, ignore_eos=True, **settings[engine])
                if turn:
                    times[engine].append(time.perf_counter() - start)
                    hits[engine] += answer.num_cached
                    prompts += len(tokens)  # both engines' are equally long
                histories[engine] = [*tokens, *answer.token_ids]
    pairs = [b / a for a, b in zip(times[plain], times[ours], strict=True)]
    return {
        "hit_rate": 2 * hits[ours] / prompts,
        "hit_rate_plain": 2 * hits[plain] / prompts,
        "ratio_of_pairs": spread(pairs),
        "plain_s": spread(times[plain]),
        "ropewalk_s": spread(times[ours]),
    }


@dataclass(frozen=True, slots=True)
class Texts:
    """A session's texts, in tokens: one result and one question a turn, those before it is resumed included."""

    system: list[int]
    results: list[list[int]]
    questions: list[list[int]]
    earlier_answers: list[list[int]]
    keep: int

    def prompt(self, turn: int, answers: Sequence[Sequence[int]]) -> list[int]:
        """The prompt of a turn, counted from 0, after so many answers."""
        tokens = list(self.system)
        said = [*self.earlier_answers, *answers]
        num_results = self.keep + turn
        for number in range(num_results):
            is_old = number < num_results - self.keep
            tokens += self.results[number][:STUB] if is_old else self.results[number]
            tokens += self.questions[number]
            tokens += said[number] if number < num_results - 1 else ()
        return tokens


def _texts(task: Task, rng: random.Random, scale: int, keep: int) -> Texts:
    count = keep + TURNS - 1
    return Texts(
        task.header(rng, scale * SYSTEM),
        [task.filler(rng, scale * RESULT) for _ in range(count)],
        [task.filler(rng, QUESTION) for _ in range(count)],
        [task.filler(rng, ANSWER) for _ in range(keep - 1)],
        keep,
    )


async def _run(engine: Engine, texts: Sequence[Texts], concurrency: int, settings: dict[str, Any]) -> dict[str, Any]:
    slots = asyncio.Semaphore(concurrency)
    latencies: list[float] = []
    after_edit: list[float] = []
    cached = spliced = prompts = 0

    async def session(text: Texts) -> None:
        nonlocal cached, spliced, prompts
        own = {"session": f"load-{next(_names)}", **settings} if settings else {}
        answers: list[tuple[int, ...]] = []
        async with slots:
            for turn in range(TURNS):
                tokens = text.prompt(turn, answers)
                start = time.perf_counter()
                answer = await engine.ask_async(tokens, max_tokens=ANSWER, ignore_eos=True, **own)
                latencies.append(time.perf_counter() - start)
                if turn:
                    after_edit.append(answer.ttft_s)
                answers.append(answer.token_ids)
                cached += answer.num_cached
                spliced += answer.report.tokens["spliced"] if answer.report is not None else 0
                prompts += len(tokens)

    start = time.perf_counter()
    await asyncio.gather(*(session(text) for text in texts))
    seconds = time.perf_counter() - start
    ordered = sorted(latencies)
    return {
        "hit_rate": cached / prompts,
        "spliced": spliced / prompts,
        "latency_p50_s": ordered[len(ordered) // 2],
        "latency_p95_s": ordered[int(0.95 * len(ordered))],
        "ttft_after_edit_s": spread(after_edit),
        "turns": len(latencies),
        "turns_per_s": len(latencies) / seconds,
        "mean_prompt": prompts / len(latencies),
    }
