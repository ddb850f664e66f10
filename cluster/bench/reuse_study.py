"""The study behind `ropewalk bench reuse`.

Two engines side by side on the same prompts: plain vLLM (the arm `full`) and Ropewalk. A body is computed behind one
header, then asked for behind others. Arms of Ropewalk: `reuse`, `naive` (keys not turned), `boundary-k` (the first `k`
tokens of each reused stretch computed). Requests of these arms leave nothing behind, so that all see the same store.
Times are taken with requests that do, the two engines in turn.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.cluster.bench.engine import BLOCK_SIZE, Answer, Engine
from ropewalk.cluster.bench.patterns import PATTERNS, Case, applies
from ropewalk.cluster.bench.reuse import longest_prompt
from ropewalk.cluster.bench.statistics import divergence, share, spread
from ropewalk.cluster.bench.tasks import Question, Section, Task, TextTask, task_of
from ropewalk.cluster.cli import UserError
from ropewalk.cluster.models import RECALL_MLA

ARMS: dict[str, dict[str, Any]] = {
    "reuse": {},
    "naive": {"rotate": False},
    "boundary-16": {"boundary": 16},
    "boundary-64": {"boundary": 64},
}
SOURCE_HEADER = 160
HEADERS = (32, 96, 128, 224)
"""Lengths of headers in tokens: a body is computed behind one of the first length, asked for behind the others."""

LONG = 4096
"""Bodies of more tokens take so long that fewer questions and rounds have to do."""

GSM8K_TOKENS = 80

TOKENS_AT_ONCE = 16_384
"""Of prompts that are asked together where nothing is timed."""


_START = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Counts:
    """How much is measured: documents a length, questions a document, timed rounds, prompts a pattern and of GSM8K.

    `seconds`: for the documents of a length; no further one is begun that would not be done by then.
    """

    documents: int
    questions: int
    rounds: int
    patterns: int
    gsm8k: int
    seconds: float = math.inf

    def for_length(self, length: int) -> Counts:
        """Return what a body of so many tokens gets."""
        if length <= LONG:
            return self
        return replace(self, questions=max(self.questions // 2, 2), rounds=max(self.rounds // 2, 3))


QUICK = {True: Counts(8, 10, 7, 12, 0, seconds=20), False: Counts(2, 4, 5, 2, 4, seconds=20)}
FULL = {True: Counts(20, 20, 15, 200, 0), False: Counts(10, 12, 15, 40, 50)}
"""By whether the model is the recall model, whose prompts cost little."""


@dataclass
class Tally:
    """What one arm's answers were, compared with full prefill's."""

    kl_first: list[float] = field(default_factory=list)
    kl_next: list[float] = field(default_factory=list)
    argmax: list[bool] = field(default_factory=list)
    divergence_position: list[int] = field(default_factory=list)
    num_same: int = 0
    right: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)

    def add(self, question: Question, full: Answer, answer: Answer, recovered: float) -> None:
        """Take in one answer; distributions are compared as far as both were given the same tokens."""
        assert full.logprobs is not None
        assert answer.logprobs is not None
        self.kl_first.append(divergence(full.logprobs[0], answer.logprobs[0]))
        self.argmax.append(int(full.logprobs[0].argmax()) == int(answer.logprobs[0].argmax()))
        same = _common(full.token_ids, answer.token_ids)
        for position in range(1, min(same + 1, len(full.logprobs), len(answer.logprobs))):
            self.kl_next.append(divergence(full.logprobs[position], answer.logprobs[position]))
        if question.continuation:
            forced = np.asarray(question.continuation)
            self.nll += (-answer.logprobs[np.arange(len(forced)), forced]).tolist()
        else:
            self.right.append(answer.token_ids[: len(question.answer)] == question.answer)
            if same < len(full.token_ids):
                self.divergence_position.append(same)
            else:
                self.num_same += 1
        self.recovered.append(recovered)

    def summary(self) -> dict[str, Any]:
        """JSON-able figures."""
        return {
            "kl_first": spread(self.kl_first),
            "kl_next": spread(self.kl_next),
            "argmax_match": share(sum(self.argmax), len(self.argmax)),
            "recall": share(sum(self.right), len(self.right)),
            "greedy": {"same": self.num_same, "divergence_position": spread(self.divergence_position)},
            "perplexity": float(np.exp(np.mean(self.nll))) if self.nll else None,
            "recovered_share": spread(self.recovered),
        }


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, its question, and how many of its tokens could be reused."""

    tokens: tuple[int, ...]
    question: Question
    num_shared: int


class Study:
    """One model: its task, plain vLLM and Ropewalk."""

    def __init__(self, model: str, plain: Engine, ours: Engine, task: Task, seed: int) -> None:
        self.model, self.plain, self.ours, self.task = model, plain, ours, task
        self._rng = random.Random(f"{model}/{seed}")
        # Without vLLM's prefix cache, stages take over through the store, where arms would find each other's chunks.
        self._is_batched = ours.client.status()["batched"]

    def warm_up(self) -> None:
        """Ask what does not count, so that the time of the first length is not spent on compiling and loading."""
        (body,) = self.task.sections(self._rng, [512])
        asked = [Asked((*self.task.header(self._rng, 32), *body.tokens, *q.tokens), q, 512) for q in body.questions[:2]]
        self._compare({name: Tally() for name in ("full", *ARMS)}, asked)

    def lengths(self, length: int, counts: Counts) -> dict[str, Any]:
        """Measure a body of `length` tokens behind changed headers."""
        arms = {name: Tally() for name in ("full", *ARMS)}
        counts = counts.for_length(length)
        start = time.perf_counter()
        for done in range(counts.documents):
            spent = time.perf_counter() - start
            if done and spent * (done + 1) / done > counts.seconds:
                break
            (body,) = self.task.sections(self._rng, [length])
            self._compute([[*self.task.header(self._rng, SOURCE_HEADER), *body.tokens, *body.questions[0].tokens]])
            asked = []
            for number, question in enumerate(self._questions(body, counts.questions)):
                header = self.task.header(self._rng, HEADERS[number % len(HEADERS)])
                asked.append(Asked((*header, *body.tokens, *question.tokens), question, length))
            self._compare(arms, asked)
        timed = self._time(body, counts.rounds)
        summaries = {name: tally.summary() for name, tally in arms.items()}
        return {
            "length": length,
            "recovered_share": spread(timed.recovered)["median"],
            "ttft_ratio": timed.ratio,
            "kl_reuse": summaries["reuse"]["kl_first"]["mean"],
            "kl_naive": summaries["naive"]["kl_first"]["mean"],
            "recall_full": summaries["full"]["recall"]["share"],
            "recall_reuse": summaries["reuse"]["recall"]["share"],
            "ttft": timed.summary(),
            "arms": summaries,
        }

    def pattern(self, name: str, length: int, counts: Counts) -> dict[str, Any]:
        """Measure one pattern at one length."""
        arms = {arm: Tally() for arm in ("full", *ARMS)}
        cases: list[Case] = [PATTERNS[name](self.task, self._rng, length) for _ in range(counts.patterns)]
        for case in cases:
            self._compute(case.sources)
        prompts = [Asked((*case.before, *case.question.tokens), case.question, case.num_shared) for case in cases]
        self._compare(arms, prompts)
        return {"pattern": name, "length": length, "arms": {arm: tally.summary() for arm, tally in arms.items()}}

    def _questions(self, body: Section, count: int) -> list[Question]:
        """Half of them held-out continuations where the task has such, each behind another header."""
        asked = [question for question in body.questions if question.answer]
        held_out = [question for question in body.questions if question.continuation]
        chosen = [self._rng.choice(asked) for _ in range(count // 2 if held_out else count)]
        return chosen + held_out * (count - len(chosen))

    def _compute(self, sources: Sequence[Sequence[int]]) -> None:
        """Let Ropewalk answer the prompts that others will share text with."""
        tenants = {"study": {}} if self._is_batched else ARMS
        for tenant, settings in tenants.items():
            options = {"mode": "reuse", "max_tokens": 1, "tenant": tenant, **settings}
            self.ours.gather([self.ours.ask_async(tokens, **options) for tokens in sources])
        self.ours.settle()

    def _compare(self, arms: dict[str, Tally], prompts: Sequence[Asked]) -> None:
        """Ask plain vLLM, then Ropewalk in all arms; as many prompts at once as a small KV cache has room for."""
        at_once = max(TOKENS_AT_ONCE // len(prompts[0].tokens), 1)
        for start in range(0, len(prompts), at_once):
            wave = prompts[start : start + at_once]
            full = self.plain.gather([self.plain.ask_async(asked.tokens, **self._options(asked)) for asked in wave])
            for arm, settings in ARMS.items():
                own = {"tenant": "study", "keep": False} if self._is_batched else {"tenant": arm}
                answers = self.ours.gather(
                    [
                        self.ours.ask_async(asked.tokens, mode="reuse", **own, **settings, **self._options(asked))
                        for asked in wave
                    ]
                )
                for asked, truth, answer in zip(wave, full, answers, strict=True):
                    assert answer.report is not None
                    recovered = min(answer.report.tokens["reused"] / asked.num_shared, 1.0)
                    arms[arm].add(asked.question, truth, answer, recovered)
            for asked, truth in zip(wave, full, strict=True):
                arms["full"].add(asked.question, truth, truth, 0.0)

    def _options(self, asked: Asked) -> dict[str, Any]:
        forced = asked.question.continuation
        length = len(forced) or self.task.answer_length
        return {"max_tokens": length, "ignore_eos": True, "logprobs": True, "forced": forced}

    def _time(self, body: Section, rounds: int) -> _Timed:
        """Time first tokens behind fresh headers, plain vLLM and Ropewalk in turn; nothing is being saved meanwhile."""
        timed = _Timed([], [], [])
        for number in range(rounds + 1):  # the first one warms up
            header = self.task.header(self._rng, HEADERS[number % len(HEADERS)])
            # Another question than the one that was computed with the body: it would be found, too.
            question = body.questions[1 + number % (len(body.questions) - 1)] if len(body.questions) > 1 else None
            tokens = [*header, *body.tokens, *(question.tokens if question else self.task.filler(self._rng, 8))]
            # Two tokens: what ends with a request would otherwise come before its first.
            plain = self.plain.ask(tokens, max_tokens=2, ignore_eos=True)
            options = {"mode": "reuse", "tenant": "study" if self._is_batched else "reuse"}
            ours = self.ours.ask(tokens, max_tokens=2, ignore_eos=True, **options)
            self.ours.settle()
            assert plain.num_cached == 0, "a header was not fresh"
            if number:
                assert ours.report is not None
                timed.plain.append(plain.ttft_s)
                timed.ours.append(ours.ttft_s)
                timed.recovered.append(min(ours.report.tokens["reused"] / len(body.tokens), 1.0))
        return timed

    def gsm8k(self, count: int) -> dict[str, Any]:
        """Let both solve GSM8K problems behind worked examples that moved; count right and equal final numbers."""
        assert isinstance(self.task, TextTask)
        examples, problems = self.task.worked_examples(self._rng, 6), self.task.problems(self._rng, count)
        self._compute([[*self.task.header(self._rng, SOURCE_HEADER), *examples, *problems[0][0]]])
        prompts = [
            [*self.task.header(self._rng, HEADERS[number % len(HEADERS)]), *examples, *asked]
            for number, (asked, _) in enumerate(problems)
        ]
        finals = [final for _, final in problems]
        said: dict[str, list[str | None]] = {}
        for arm, settings in {"full": None, **ARMS}.items():
            if settings is None:
                work = [self.plain.ask_async(tokens, max_tokens=GSM8K_TOKENS) for tokens in prompts]
                answers = self.plain.gather(work)
            else:
                own = {"tenant": "study", "keep": False} if self._is_batched else {"tenant": arm}
                options = {"mode": "reuse", "max_tokens": GSM8K_TOKENS, **own, **settings}
                answers = self.ours.gather([self.ours.ask_async(tokens, **options) for tokens in prompts])
            said[arm] = [self.task.final_number(answer.token_ids) for answer in answers]
        with_number = [number for number, said_by_full in enumerate(said["full"]) if said_by_full is not None]
        return {
            arm: {
                "right": share(sum(a == b for a, b in zip(numbers, finals, strict=True)), count),
                "same_number_as_full": share(
                    sum(numbers[index] == said["full"][index] for index in with_number), len(with_number)
                ),
            }
            for arm, numbers in said.items()
        }


@dataclass(frozen=True, slots=True)
class _Timed:
    plain: list[float]
    ours: list[float]
    recovered: list[float]

    @property
    def ratio(self) -> float:
        return float(np.median(self.plain) / np.median(self.ours))

    def summary(self) -> dict[str, Any]:
        pairs = [plain / ours for plain, ours in zip(self.plain, self.ours, strict=True)]
        return {
            "plain_s": spread(self.plain),
            "ropewalk_s": spread(self.ours),
            "ratio_of_pairs": spread(pairs),
            "recovered_share": spread(self.recovered),
        }


def run_model(model: str, args: argparse.Namespace, lengths: Sequence[int]) -> dict[str, Any]:
    counts = (FULL if args.full else QUICK)[model == RECALL_MLA]
    longest = longest_prompt(lengths, args.pattern_length)
    with engines(model, args.min_run, max_model_len=longest, dtype=args.dtype) as (plain, ours):
        study = Study(model, plain, ours, task_of(model), args.seed)
        study.warm_up()
        found: dict[str, Any] = {"turn_error": ours.client.status()["turn_error"], "lengths": [], "patterns": []}
        for length in lengths if "lengths" not in args.skip else ():
            note(f"{model}: bodies of {length} tokens")
            found["lengths"].append(study.lengths(length, counts))
        for name in PATTERNS if "patterns" not in args.skip else ():
            if applies(name, study.task):
                note(f"{model}: pattern {name}")
                found["patterns"].append(study.pattern(name, args.pattern_length, counts))
        if counts.gsm8k and "gsm8k" not in args.skip:
            note(f"{model}: GSM8K")
            found["gsm8k"] = study.gsm8k(counts.gsm8k)
        status = ours.client.status()
        found["min_run"], found["counters"] = status["min_run"], status["counters"]
    return found


@contextmanager
def engines(
    model: str, min_run: int | None = None, settings: dict[str, Any] | None = None, **engine_args: Any
) -> Iterator[tuple[Engine, Engine]]:
    """Start plain vLLM and Ropewalk side by side, and remove the store afterwards."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    root = base / f"ropewalk-bench-{uuid.uuid4().hex}"
    budget = min(3 << 30, shutil.disk_usage(base).free // 2)
    settings = {"store_budget_bytes": budget, "min_run": min_run} | (settings or {})

    def start(store: Path | None) -> Engine:
        return Engine(model, store_root=store, settings=settings, forcing=True, **engine_args)

    started: list[Engine] = []
    try:
        with ThreadPoolExecutor() as pool:
            starting = [pool.submit(start, store) for store in (None, root)]
        started.extend(future.result() for future in starting if future.exception() is None)
        for future in starting:
            if isinstance(error := future.exception(), OSError | ValueError):
                raise UserError(f"{model}: no engine starts for it: {str(error).strip().splitlines()[0]}") from error
            future.result()
        yield started[0], started[1]
    finally:
        for engine in started:
            engine.stop()
        shutil.rmtree(root, ignore_errors=True)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import platform
    from importlib.metadata import version

    return {
        "cpus": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "block_size": BLOCK_SIZE,
    }


def note(text: str) -> None:
    """Tell on standard error what is being measured, and how long after the beginning."""
    print(f"bench: {time.perf_counter() - _START:4.0f} s: {text}", file=sys.stderr, flush=True)
