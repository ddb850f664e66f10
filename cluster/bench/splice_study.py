"""The study behind `ropewalk bench splice`.

    source   A · S · C · q0     asked first, as a session
    target   A · R · C · q      the same session, S edited to R

Faithfulness: the engine's spliced first token against a float32 reference in which C saw S, and everything behind it
sees R instead. Which answer a splice follows where the full context and the edited prompt give different ones is
counted. Edits: time to first token, plain vLLM and Ropewalk in turn, each time in a session of its own; and what is
asked about C.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from ropewalk.cluster.bench.engine import Answer, Engine
from ropewalk.cluster.bench.reference import load_reference, reference
from ropewalk.cluster.bench.reuse_study import Tally, engines, note
from ropewalk.cluster.bench.splice_load import append_only, mechanism
from ropewalk.cluster.bench.statistics import divergence, share, spread
from ropewalk.cluster.bench.tasks import Question, Task, task_of
from ropewalk.cluster.models import RECALL_MLA

ARMS: dict[str, dict[str, Any]] = {
    "splice": {},
    "naive": {"rotate": False},
    "boundary-16": {"boundary": 16},
    "boundary-64": {"boundary": 64},
}
HEADER = 96
"""Tokens of A."""
REMOVED, STUB = 400, 12
"""Tokens of S and R where time is measured."""

DELTAS = (-1, -1024, 7, -200, -33, -256, 0, -150, 64, -300, -17, -130, 1, -512, -48, -180, -64, -100)
"""By how much the text behind an edit moves where faithfulness is examined; `R` is empty in every third prompt.
Every other prompt, those with much removed, asks for what was removed."""

EXACT_TOKENS = 8
"""Tokens of an answer that must be plain vLLM's."""

CHAINED = 10
"""Edits of one place, one after another, compared with a single one."""

LEAST_SECTION = 128
"""Tokens of a removed text from which on it says something that can be asked for."""

MIN_RUN = 32
"""Shortest run that is spliced: here even those are examined that save nothing."""

NEAR_TIE = 0.05
"""Nats between the reference's two likeliest tokens below which bf16 may take either: set aside, and counted."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Prompts of faithfulness and of exactness; documents a length, questions a document, timed rounds.

    `seconds`: for the documents of a length; no further one is begun that would not be done by then. Prompts with
    chained edits; sessions at once where each edits at every turn; sessions that edit nothing.
    """

    faithfulness: int
    exactness: int
    documents: int
    questions: int
    rounds: int
    seconds: float = math.inf
    chained: int = 10
    at_once: tuple[int, ...] = (1, 4, 8, 16)
    append_only: int = 6


QUICK = {True: Counts(108, 100, 4, 10, 5, 25), False: Counts(108, 0, 2, 4, 3, 25)}
FULL = {
    True: Counts(540, 200, 20, 20, 15, chained=50, append_only=30),
    False: Counts(270, 0, 10, 12, 9, chained=30, append_only=20),
}
"""By whether the model is the recall model, whose prompts cost little. It alone shows exactness; tests do of others."""

EXACT_ENGINE: dict[str, Any] = {"dtype": "float32", "attention_backend": "CPU_MLA", "max_model_len": 2048}
"""In float32 no near-ties are left that kernels' shapes could tip; the recall model's AMX backend has none."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A conversation before and after an edit, up to what is asked."""

    header: tuple[int, ...]
    removed: tuple[int, ...]
    stub: tuple[int, ...]
    behind: tuple[int, ...]

    @property
    def source(self) -> list[int]:
        return [*self.header, *self.removed, *self.behind]

    @property
    def target(self) -> list[int]:
        return [*self.header, *self.stub, *self.behind]


class Study:
    """One model: its task, plain vLLM and Ropewalk."""

    def __init__(self, model: str, plain: Engine, ours: Engine, seed: int) -> None:
        self.model, self.plain, self.ours = model, plain, ours
        self.task: Task = task_of(model)
        self.rng = random.Random(f"{model}/{seed}")
        self._sessions = count()

    def faithfulness(self, num_prompts: int) -> dict[str, Any]:
        """Compare first tokens of splices with the reference's."""
        model = load_reference(self.model)
        same = ties = 0
        kl, spliced, follows = [], [], {"full context": 0, "edited prompt": 0, "neither": 0}
        for number in range(num_prompts):
            delta = DELTAS[number % len(DELTAS)]
            edit, question = self._edit_by(delta, is_empty=number % 3 == 0 and delta < 0, about_removed=number % 2 == 1)
            source, target = [*edit.source, *self.task.filler(self.rng, 8)], [*edit.target, *question.tokens]
            length = len(question.answer)
            answer = self._spliced(source, target, max_tokens=length, logprobs=True)
            assert answer.report is not None
            assert answer.logprobs is not None
            taken = [part for part in answer.report.plan if part.source == "splice"]
            assert all(part.turn == delta for part in taken), "not all of it comes from the source"
            runs = [(part.start, part.end) for part in taken]
            truth = reference(model, source, target, runs, delta)
            first, second = np.sort(truth)[-2:][::-1]
            kl.append(divergence(truth, answer.logprobs[0]))
            spliced.append(sum(end - start for start, end in runs) / len(edit.behind))
            if first - second < NEAR_TIE:
                ties += 1
            else:
                same += int(truth.argmax()) == answer.token_ids[0]
            if number % 2 == 0:
                continue  # what is asked about C is answered alike with S and without it
            full, edited = (
                self.plain.ask(prompt, max_tokens=length, ignore_eos=True).token_ids
                for prompt in ([*edit.source, *question.tokens], target)
            )
            if full != edited:
                said = answer.token_ids
                follows["full context" if said == full else "edited prompt" if said == edited else "neither"] += 1
        return {
            "prompts": num_prompts,
            "near_ties": ties,
            "same_first_token": share(same, num_prompts - ties),
            "kl": spread(kl),
            "spliced_share": spread(spliced),
            "follows": follows,
        }

    def exactness(self, num_prompts: int) -> dict[str, Any]:
        """Compare answers that must be plain vLLM's with plain vLLM's: of a FORGET, and of exact requests with the
        token ids of a prompt that was spliced before. Where plain vLLM disagrees with itself, a prompt is set aside.
        For engines in float32: a prefix from the store leaves other shapes to the kernels than a whole prefill.
        """
        different = {"forget": 0, "exact": 0}
        set_aside = 0
        options: dict[str, Any] = {"max_tokens": EXACT_TOKENS, "ignore_eos": True}
        for number in range(num_prompts):
            delta = DELTAS[1 + number % (len(DELTAS) - 1)]
            edit, question = self._edit_by(delta, is_empty=number % 3 == 0 and delta < 0, about_removed=False)
            source, target = [*edit.source, *question.tokens], [*edit.target, *question.tokens]
            self._spliced(source, target, max_tokens=EXACT_TOKENS)
            exact = self.ours.ask(target, tenant="faithful", **options).token_ids
            session = self._session(tenant="faithful", edits=None)
            self.ours.ask(source, max_tokens=1, **session)
            start, end = len(edit.header), len(edit.header) + len(edit.removed)
            directive = [start, end, list(edit.stub), "forget"]
            forget = self.ours.ask(source, **options, **session, directives=[directive]).token_ids
            self.plain.forget_prefixes()
            cold, warm = (self.plain.ask(target, **options).token_ids for _ in range(2))
            if cold != warm:
                set_aside += 1
                continue
            different["forget"] += forget != cold
            different["exact"] += exact != cold
        return {"prompts": num_prompts, "set_aside": set_aside, "different": different}

    def chained(self, num_prompts: int) -> dict[str, Any]:
        """Compare ten edits of one place with a single one that leads to the same prompt: both turn each row once."""
        drift, same = [], 0
        for _ in range(num_prompts):
            edit, question = self._edit_by(-100, is_empty=False, about_removed=False)
            stubs = [self.task.filler(self.rng, self.rng.randrange(1, 80)) for _ in range(CHAINED - 1)]
            source = [*edit.source, *self.task.filler(self.rng, 8)]
            answers = []
            for steps in ([*stubs, edit.stub], [edit.stub]):
                session = self._session(tenant="faithful")
                self.ours.ask(source, max_tokens=1, **session)
                for stub in steps:
                    tokens = [*edit.header, *stub, *edit.behind, *question.tokens]
                    answer = self.ours.ask(tokens, max_tokens=1, ignore_eos=True, logprobs=True, **session)
                answers.append(answer)
            many, once = answers
            assert many.logprobs is not None
            assert once.logprobs is not None
            drift.append(divergence(once.logprobs[0], many.logprobs[0]))
            same += many.token_ids == once.token_ids
        return {"edits": CHAINED, "kl": spread(drift), "same_first_token": share(same, num_prompts)}

    def edits(self, length: int, counts: Counts) -> dict[str, Any]:
        """Measure edits with `length` tokens behind them."""
        arms = {name: Tally() for name in ("prefill", *ARMS)}
        start = time.perf_counter()
        for done in range(counts.documents):
            spent = time.perf_counter() - start
            if done and spent * (done + 1) / done > counts.seconds:
                break
            (body,) = self.task.sections(self.rng, [length])
            edit, _ = self._edit(body.tokens, REMOVED, STUB)
            asked = [question for question in body.questions if question.answer]
            held_out = [question for question in body.questions if question.continuation]
            chosen = [self.rng.choice(asked) for _ in range(counts.questions // (2 if held_out else 1))]
            self._ask_all(arms, edit, chosen + held_out * (counts.questions - len(chosen)))
        timed = self._time(length, counts.rounds)
        summaries = {name: tally.summary() for name, tally in arms.items()}
        return {
            "length": length,
            "ttft_ratio": float(np.median(timed["prefill_s"]) / np.median(timed["splice_s"])),
            "recall_prefill": summaries["prefill"]["recall"]["share"],
            "recall_splice": summaries["splice"]["recall"]["share"],
            "kl_splice": summaries["splice"]["kl_first"]["mean"],
            "kl_naive": summaries["naive"]["kl_first"]["mean"],
            "ttft": {name: spread(values) for name, values in timed.items()},
            "arms": summaries,
        }

    def _ask_all(self, arms: dict[str, Tally], edit: Edit, questions: Sequence[Question]) -> None:
        sessions = {}
        for arm, settings in ARMS.items():
            sessions[arm] = self._session(tenant=arm, **settings)
            self.ours.ask([*edit.source, *questions[0].tokens], max_tokens=1, **sessions[arm])
        for question in questions:
            tokens = [*edit.target, *question.tokens]
            forced = question.continuation
            options = {
                "max_tokens": len(forced) or self.task.answer_length,
                "ignore_eos": True,
                "logprobs": True,
                "forced": forced,
            }
            truth = self.plain.ask(tokens, **options)
            arms["prefill"].add(question, truth, truth, 0.0)
            for arm, session in sessions.items():
                answer = self.ours.ask(tokens, **session, **options)
                assert answer.report is not None
                arms[arm].add(question, truth, answer, answer.report.tokens["spliced"] / len(edit.behind))

    def _time(self, length: int, rounds: int) -> dict[str, list[float]]:
        """Time first tokens after an edit; nothing is being saved meanwhile."""
        timed: dict[str, list[float]] = {"prefill_s": [], "splice_s": [], "spliced_share": []}
        for number in range(rounds + 1):  # the first one warms up
            (body,) = self.task.sections(self.rng, [length])
            edit, _ = self._edit(body.tokens, REMOVED, STUB)
            question = self.task.filler(self.rng, 8)
            session = self._session(tenant="splice")
            options: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}
            for engine, own in ((self.plain, {}), (self.ours, session)):
                engine.ask([*edit.source, *question], **options, **own)
            self.ours.settle()
            tokens = [*edit.target, *self.task.filler(self.rng, 8)]
            plain = self.plain.ask(tokens, **options)
            ours = self.ours.ask(tokens, **options, **session)
            self.ours.settle()
            if number:
                assert ours.report is not None
                timed["prefill_s"].append(plain.ttft_s)
                timed["splice_s"].append(ours.ttft_s)
                timed["spliced_share"].append(ours.report.tokens["spliced"] / length)
        return timed

    def _spliced(self, source: Sequence[int], target: Sequence[int], **options: Any) -> Answer:
        session = self._session(tenant="faithful")
        self.ours.ask(source, max_tokens=1, **session)
        return self.ours.ask(target, ignore_eos=True, **options, **session)

    def _session(self, **settings: Any) -> dict[str, Any]:
        return {"session": f"session-{next(self._sessions)}", "edits": "amortize", **settings}

    def _edit_by(self, delta: int, *, is_empty: bool, about_removed: bool) -> tuple[Edit, Question]:
        """An edit that moves what is behind it by `delta`, and a question about that, or about what is removed."""
        num_stub = 0 if is_empty else self.rng.randrange(max(delta, 1), max(delta, 1) + 24)
        (body,) = self.task.sections(self.rng, [self.rng.randrange(200, 360)])
        edit, lost = self._edit(body.tokens, num_stub - delta, num_stub)
        asked = [q for q in (lost if about_removed and lost else body.questions) if q.answer]
        return edit, self.rng.choice(asked)

    def _edit(self, behind: tuple[int, ...], num_removed: int, num_stub: int) -> tuple[Edit, Sequence[Question]]:
        """Around a text: a fresh header, something that goes, and what comes in its place. With what the first says."""
        header = self.task.header(self.rng, HEADER + self.rng.randrange(32))
        lost = self.task.sections(self.rng, [num_removed])[0] if num_removed >= LEAST_SECTION else None
        removed = lost.tokens if lost is not None else tuple(self.task.filler(self.rng, num_removed))
        stub = tuple(self.task.filler(self.rng, num_stub))
        return Edit(tuple(header), removed, stub, behind), lost.questions if lost is not None else ()


def run_model(model: str, args: argparse.Namespace, lengths: Sequence[int]) -> dict[str, Any]:
    """Run the study for one model."""
    counts = (FULL if args.full else QUICK)[model == RECALL_MLA]
    longest = max([*lengths, 2048]) + 1024
    with engines(model, MIN_RUN, max_model_len=longest, dtype="bfloat16") as (plain, ours):
        study = Study(model, plain, ours, args.seed)
        found: dict[str, Any] = {"edits": []}
        if "faithfulness" not in args.skip:
            note(f"{model}: faithfulness")
            found["faithfulness"] = study.faithfulness(counts.faithfulness)
        if "chained" not in args.skip:
            note(f"{model}: chained edits")
            found["chained"] = study.chained(counts.chained)
        if "load" not in args.skip:
            note(f"{model}: sessions that edit at every turn")
            found["load"] = mechanism(plain, ours, study.task, study.rng, counts.at_once)
            found["append_only"] = append_only(plain, ours, study.task, study.rng, counts.append_only)
        for length in lengths if "edits" not in args.skip else ():
            note(f"{model}: edits before {length} tokens")
            found["edits"].append(study.edits(length, counts))
        status = ours.client.status()
        found["min_run"], found["counters"] = status["min_run"], status["counters"]
    if counts.exactness and "exactness" not in args.skip:
        note(f"{model}: exactness, in float32")
        with engines(model, MIN_RUN, **EXACT_ENGINE) as (plain, ours):
            found["exactness"] = Study(model, plain, ours, args.seed).exactness(counts.exactness)
    return found
