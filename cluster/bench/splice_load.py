"""Sessions that edit their history at every turn, several at a time: the mechanism table of Leyline (section 1 of the
paper's evaluation), on engines in this process, with lengths scaled to a small model.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

from ropewalk.cluster.bench.engine import Engine
from ropewalk.cluster.bench.statistics import spread
from ropewalk.cluster.bench.tasks import Task

SESSIONS, TURNS = 16, 6
SYSTEM, RESULT, QUESTION, STUB, ANSWER = 128, 120, 8, 8, 8
"""Tokens of the system prompt, of a turn's tool result and question, of what an old result gives way to, of answers."""

FRESH = 2
"""Results that stay whole: at each turn the one before those is edited away."""

_names = itertools.count()


def mechanism(
    plain: Engine, ours: Engine, task: Task, rng: random.Random, at_once: Sequence[int]
) -> list[dict[str, Any]]:
    """Measure both engines on the same sessions, for each number of sessions at once, edits at every turn."""
    rows = []
    for concurrency in at_once:
        texts = [_texts(task, rng) for _ in range(SESSIONS)]
        row: dict[str, Any] = {"concurrency": concurrency}
        for name, engine, settings in (("plain", plain, {}), ("ropewalk", ours, {"edits": "amortize"})):
            row[name] = engine.run(_run(engine, texts, concurrency, settings))
            ours.settle()
        rows.append(row)
    return rows


def append_only(plain: Engine, ours: Engine, task: Task, rng: random.Random, sessions: int) -> dict[str, Any]:
    """Measure sessions that edit nothing, one at a time, the engines in turn: here splices can only cost."""
    found: dict[str, list[float]] = {"plain_s": [], "ropewalk_s": []}
    hits = prompts = 0
    for _ in range(sessions):
        system, results, questions = _texts(task, rng)
        histories: dict[str, list[int]] = {"plain_s": list(system), "ropewalk_s": list(system)}
        name = f"append-{next(_names)}"
        for turn, (result, question) in enumerate(zip(results, questions, strict=True)):
            for arm, engine, settings in (
                ("plain_s", plain, {}),
                ("ropewalk_s", ours, {"edits": "amortize", "session": name}),
            ):
                tokens = [*histories[arm], *result, *question]
                start = time.perf_counter()
                answer = engine.ask(tokens, max_tokens=ANSWER, ignore_eos=True, **settings)
                if turn:
                    found[arm].append(time.perf_counter() - start)
                    if engine is ours:
                        hits += answer.num_cached
                        prompts += len(tokens)
                histories[arm] = [*tokens, *answer.token_ids]
    pairs = [b / a for a, b in zip(found["plain_s"], found["ropewalk_s"], strict=True)]
    return {
        "hit_rate": hits / prompts,
        "ratio_of_pairs": spread(pairs),
        **{arm: spread(values) for arm, values in found.items()},
    }


Texts = tuple[list[int], list[list[int]], list[list[int]]]


def _texts(task: Task, rng: random.Random) -> Texts:
    """A session's system prompt, its tool results and its questions."""
    return (
        task.header(rng, SYSTEM),
        [task.filler(rng, RESULT) for _ in range(TURNS)],
        [task.filler(rng, QUESTION) for _ in range(TURNS)],
    )


async def _run(engine: Engine, texts: Sequence[Texts], concurrency: int, settings: dict[str, Any]) -> dict[str, Any]:
    slots = asyncio.Semaphore(concurrency)
    latencies: list[float] = []
    after_edit: list[float] = []
    cached = prompts = 0

    async def session(system: list[int], results: list[list[int]], questions: list[list[int]]) -> None:
        nonlocal cached, prompts
        own = {"session": f"load-{next(_names)}", **settings} if settings else {}
        answers: list[tuple[int, ...]] = []
        async with slots:
            for turn in range(TURNS):
                tokens = list(system)
                for past in range(turn + 1):
                    is_old = past < turn + 1 - FRESH
                    tokens += results[past][:STUB] if is_old else results[past]
                    tokens += questions[past]
                    tokens += answers[past] if past < turn else ()
                start = time.perf_counter()
                answer = await engine.ask_async(tokens, max_tokens=ANSWER, ignore_eos=True, **own)
                latencies.append(time.perf_counter() - start)
                if turn >= FRESH:
                    after_edit.append(answer.ttft_s)
                answers.append(answer.token_ids)
                cached += answer.num_cached
                prompts += len(tokens)

    await asyncio.gather(*(session(*text) for text in texts))
    ordered = sorted(latencies)
    return {
        "hit_rate": cached / prompts,
        "latency_p50_s": ordered[len(ordered) // 2],
        "latency_p95_s": ordered[int(0.95 * len(ordered))],
        "ttft_after_edit_s": spread(after_edit),
        "turns": len(latencies),
    }
