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
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, dropwhile
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.cluster.bench.engine import Answer, Engine
from ropewalk.cluster.bench.reference import load_reference, references
from ropewalk.cluster.bench.reuse_study import Tally, engines, note
from ropewalk.cluster.bench.splice_load import append_only, mechanism
from ropewalk.cluster.bench.splice_policies import policy_table, stale_tasks
from ropewalk.cluster.bench.statistics import LogProbs, divergence, share, spread
from ropewalk.cluster.bench.tasks import Question, RandomTask, Task, task_of
from ropewalk.cluster.models import RECALL_MLA
from ropewalk.cluster.models.tiny import DEEP_MLA, write

ARMS: dict[str, dict[str, Any]] = {
    "splice": {},
    "naive": {"rotate": False},
    "boundary-16": {"boundary": 16},
    "boundary-64": {"boundary": 64},
}
HEADER = 48
"""Tokens of A, or up to 32 more."""
BEHIND = range(96, 192)
"""Tokens of C where faithfulness is examined: the float32 reference is what takes time."""
AT_ONCE = 8
"""Prompts asked together where nothing is timed."""
REMOVED, STUB = 400, 12
"""Tokens of S and R where time is measured."""

DELTAS = (-1, -1024, 7, -200, -33, -256, 0, -150, 64, -300, -17, -130, 1, -512, -48, -180, -64, -100)
"""By how much the text behind an edit moves where faithfulness is examined; `R` is empty in every third prompt.
Of the two prompts an edit, one asks about what is behind it, one about what was removed if that is long enough."""

LONG = 4096
"""With more tokens behind an edit, fewer questions and rounds have to do."""

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
    chained edits; sessions that edit nothing; tasks with stale output; how many times longer the prompts are that are
    edited at every turn. Behind more than `asked_to` tokens nothing is asked: only the first token is timed.
    """

    faithfulness: int
    exactness: int
    documents: int
    questions: int
    rounds: int
    seconds: float
    chained: int
    append_only: int
    policies: int
    scale: int
    asked_to: float = math.inf


QUICK = {
    True: Counts(102, 100, 4, 10, 5, 15, chained=10, append_only=6, policies=100, scale=2),
    False: Counts(102, 0, 2, 8, 3, 25, chained=5, append_only=3, policies=40, scale=1, asked_to=512),
}
FULL = {
    True: Counts(540, 200, 20, 20, 15, math.inf, chained=50, append_only=30, policies=400, scale=4),
    False: Counts(270, 0, 10, 12, 9, math.inf, chained=30, append_only=20, policies=400, scale=2),
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

    def directive(self, mode: str) -> list[Any]:
        """The edit as a directive on the source, as `RequestSettings` carry it."""
        start = len(self.header)
        return [start, start + len(self.removed), list(self.stub), mode]

    @property
    def target(self) -> list[int]:
        return [*self.header, *self.stub, *self.behind]


@dataclass(frozen=True, slots=True)
class Case:
    """An edit that moves what is behind it by `delta`, and what is asked before and after it: about C, and about S."""

    delta: int
    edit: Edit
    questions: tuple[Question, Question]
    before: tuple[int, ...]
    asks_for_removed: bool

    @property
    def source(self) -> list[int]:
        return [*self.edit.source, *self.before]


@dataclass(slots=True)
class Faithfulness:
    """Splices against the reference, counted."""

    kl: list[float] = field(default_factory=list)
    spliced: list[float] = field(default_factory=list)
    same: int = 0
    ties: int = 0
    follows: dict[str, int] = field(default_factory=lambda: {"full context": 0, "edited prompt": 0, "neither": 0})

    def add(self, truth: LogProbs, answer: Answer) -> None:
        """Take in one answer's first token."""
        assert answer.logprobs is not None
        self.kl.append(divergence(truth, answer.logprobs[0]))
        second, first = np.sort(truth)[-2:]
        if first - second < NEAR_TIE:
            self.ties += 1
        else:
            self.same += int(truth.argmax()) == answer.token_ids[0]

    def follow(self, answer: Answer, full: Answer, edited: Answer) -> None:
        """Take in which answer a splice gives, where the full context's and the edited prompt's differ."""
        if full.token_ids == edited.token_ids:
            return
        said = answer.token_ids
        whose = "full context" if said == full.token_ids else "edited prompt" if said == edited.token_ids else "neither"
        self.follows[whose] += 1

    def summary(self) -> dict[str, Any]:
        """JSON-able figures."""
        return {
            "prompts": len(self.kl),
            "near_ties": self.ties,
            "same_first_token": share(self.same, len(self.kl) - self.ties),
            "kl": spread(self.kl),
            "spliced_share": spread(self.spliced),
            "follows": self.follows,
        }


class Study:
    """One model: its task, plain vLLM and Ropewalk."""

    def __init__(self, model: str, plain: Engine, ours: Engine, seed: int, task: Task | None = None) -> None:
        self.model, self.plain, self.ours = model, plain, ours
        self.task: Task = task if task is not None else task_of(model)
        self.rng = random.Random(f"{model}/{seed}")
        self._sessions = count()
        self.is_warm = False

    def faithfulness(self, num_prompts: int) -> dict[str, Any]:
        """Compare first tokens of splices with the reference's, two prompts an edit."""
        model = load_reference(self.model)
        found = Faithfulness()
        for begin in range(0, num_prompts // 2, AT_ONCE):
            cases = [self._case(number) for number in range(begin, min(begin + AT_ONCE, num_prompts // 2))]
            answers_of = dict(zip(cases, self._spliced_together(cases), strict=True))
            for case, answers in answers_of.items():
                taken, again = (
                    [part for part in answer.report.plan if part.source == "splice"] if answer.report else []
                    for answer in answers
                )
                assert taken == again, "what is asked behind it makes no difference"
                assert all(answer.report and answer.report.tokens["spliced"] for answer in answers), "nothing spliced"
                assert all(part.turn == case.delta for part in taken), "not all of it comes from the source"
                runs = [(part.start, part.end) for part in taken]
                assert runs[-1][1] <= len(case.edit.target), "what is asked was taken, too"
                found.spliced.append(sum(end - start for start, end in runs) / len(case.edit.behind))
                tails = [question.tokens for question in case.questions]
                truths = references(model, case.source, case.edit.target, tails, runs, case.delta)
                for truth, answer in zip(truths, answers, strict=True):
                    found.add(truth, answer)
            # What is asked about C is answered alike with S and without it.
            about_removed = [case for case in cases if case.asks_for_removed]
            for case, full, edited in zip(about_removed, *self._exact_together(about_removed), strict=True):
                found.follow(answers_of[case][1], full, edited)
        return found.summary()

    def _case(self, number: int) -> Case:
        delta = DELTAS[number % len(DELTAS)]
        edit, (kept, lost) = self._edit_by(delta, is_empty=number % 3 == 0 and delta < 0)
        other = self.rng.choice(lost or kept)
        if not lost:  # another prompt than the first one, even if it asks for the same
            other = replace(other, tokens=(*self.task.filler(self.rng, 8), *other.tokens))
        questions = (self.rng.choice(kept), other)
        # What is asked begins otherwise than what was asked before, or that would count as text behind the edit, too.
        first = {question.tokens[0] for question in questions}
        before = tuple(dropwhile(first.__contains__, self.task.filler(self.rng, 16)))
        return Case(delta, edit, questions, before, bool(lost))

    def _spliced_together(self, cases: Sequence[Case]) -> list[tuple[Answer, Answer]]:
        """Ask each case's source, then both its questions behind the target."""
        sessions = [self._session(tenant="faithful") for _ in cases]
        work = zip(cases, sessions, strict=True)
        self.ours.gather([self.ours.ask_async(case.source, max_tokens=1, **session) for case, session in work])
        options: dict[str, Any] = {"ignore_eos": True, "logprobs": True}
        answers = self.ours.gather(
            [
                self.ours.ask_async(
                    [*case.edit.target, *question.tokens], max_tokens=len(question.answer), **options, **session
                )
                for case, session in zip(cases, sessions, strict=True)
                for question in case.questions
            ]
        )
        return list(zip(answers[::2], answers[1::2], strict=True))

    def _exact_together(self, cases: Sequence[Case]) -> tuple[list[Answer], list[Answer]]:
        """Ask the second question of each case behind its source, and behind its target, exactly."""
        answers = self.ours.gather(
            [
                self.ours.ask_async(
                    [*before, *case.questions[1].tokens],
                    tenant="faithful",
                    max_tokens=len(case.questions[1].answer),
                    ignore_eos=True,
                )
                for case in cases
                for before in (case.edit.source, case.edit.target)
            ]
        )
        return answers[::2], answers[1::2]

    def exactness(self, num_prompts: int) -> dict[str, Any]:
        """Compare answers that must be plain vLLM's with plain vLLM's: of a FORGET, and of exact requests with the
        token ids of a prompt that was spliced before. Where plain vLLM disagrees with itself, a prompt is set aside.
        For engines in float32: a prefix from the store leaves other shapes to the kernels than a whole prefill.
        """
        different = {"forget": 0, "exact": 0}
        set_aside = 0
        options: dict[str, Any] = {"max_tokens": EXACT_TOKENS, "ignore_eos": True}
        for begin in range(0, num_prompts, AT_ONCE):
            cases = [self._case(number) for number in range(begin, min(begin + AT_ONCE, num_prompts))]
            self._spliced_together(cases)
            targets = [[*case.edit.target, *case.questions[0].tokens] for case in cases]
            exact = self.ours.ask_together(targets, tenant="faithful", **options)
            forget = self._forgotten_together(cases, options)
            for case, answer in zip(cases, forget, strict=True):
                assert answer.report is not None
                assert answer.report.tokens["computed"] >= len(case.edit.behind), "found, not computed"
            self.plain.forget_prefixes()
            cold, warm = (self.plain.ask_together(targets, **options) for _ in range(2))
            for right, again, one, other in zip(cold, warm, exact, forget, strict=True):
                if right.token_ids != again.token_ids:
                    set_aside += 1
                    continue
                different["forget"] += other.token_ids != right.token_ids
                different["exact"] += one.token_ids != right.token_ids
        return {"prompts": num_prompts, "set_aside": set_aside, "different": different}

    def _forgotten_together(self, cases: Sequence[Case], options: dict[str, Any]) -> list[Answer]:
        """Ask each case's source, then have S forgotten by a directive."""
        sessions = [self._session(tenant="forgetful", edits=None) for _ in cases]
        prompts = [[*case.edit.source, *case.questions[0].tokens] for case in cases]
        work = list(zip(cases, prompts, sessions, strict=True))
        self.ours.gather([self.ours.ask_async(prompt, max_tokens=1, **session) for _, prompt, session in work])
        return self.ours.gather(
            [
                self.ours.ask_async(prompt, **options, **session, directives=[case.edit.directive("forget")])
                for case, prompt, session in work
            ]
        )

    def chained(self, num_prompts: int) -> dict[str, Any]:
        """Compare ten edits of one place with a single one that leads to the same prompt: both turn each row once."""
        drift, same = [], 0
        for _ in range(num_prompts):
            edit, (asked, _) = self._edit_by(-100, is_empty=False)
            question = self.rng.choice(asked)
            stubs = [self.task.filler(self.rng, self.rng.randrange(1, 80)) for _ in range(CHAINED - 1)]
            source = [*edit.source, *self.task.filler(self.rng, 8)]
            answers = []
            for steps in ([*stubs, edit.stub], [edit.stub]):
                session = self._session(tenant="faithful")
                self.ours.ask(source, max_tokens=1, **session)
                for stub in steps:
                    tokens = [*edit.header, *stub, *edit.behind, *question.tokens]
                    answer = self.ours.ask(tokens, max_tokens=1, ignore_eos=True, logprobs=True, **session)
                assert answer.report is not None
                assert answer.report.tokens["spliced"], "nothing spliced"
                answers.append(answer)
            many, once = answers
            assert many.logprobs is not None
            assert once.logprobs is not None
            drift.append(divergence(once.logprobs[0], many.logprobs[0]))
            same += many.token_ids == once.token_ids
        return {"edits": CHAINED, "kl": spread(drift), "same_first_token": share(same, num_prompts)}

    def edits(self, length: int, counts: Counts) -> dict[str, Any]:
        """Measure edits with `length` tokens behind them."""
        # What computing the first tokens anew is worth is told by the shorter lengths.
        compared = ARMS if length <= LONG else {name: ARMS[name] for name in ("splice", "naive")}
        arms = {name: Tally() for name in ("prefill", *compared)}
        start = time.perf_counter()
        num_questions = counts.questions if length <= LONG else max(counts.questions // 3, 2)
        num_documents = 0
        for done in range(counts.documents if length <= counts.asked_to else 0):
            spent = time.perf_counter() - start
            if done and spent * (done + 1) / done > counts.seconds:
                break
            (body,) = self.task.sections(self.rng, [length])
            edit, _ = self._edit(body.tokens, REMOVED, STUB)
            held_out = self.task.held_out(self.rng, num_questions // 2)
            asked = [question for question in body.questions if question.answer]
            chosen = [self.rng.choice(asked) for _ in range(num_questions - len(held_out))]
            self._ask_all(arms, edit, [*chosen, *held_out])
            num_documents += 1
        timed = self._time(length, counts.rounds if length <= LONG else max(counts.rounds // 2, 2))
        summaries = {name: tally.summary() for name, tally in arms.items()}
        return {
            "length": length,
            "documents": num_documents,
            "ttft_ratio": float(np.median(timed["prefill_s"]) / np.median(timed["splice_s"])),
            "recall_prefill": summaries["prefill"]["recall"]["share"],
            "recall_splice": summaries["splice"]["recall"]["share"],
            "kl_splice": summaries["splice"]["kl_first"]["mean"],
            "kl_naive": summaries["naive"]["kl_first"]["mean"],
            "ttft": {name: spread(values) for name, values in timed.items()},
            "arms": summaries,
        }

    def _ask_all(self, arms: dict[str, Tally], edit: Edit, questions: Sequence[Question]) -> None:
        """Ask about a spliced text, in all arms; nothing is timed."""
        prompts = [[*edit.target, *question.tokens] for question in questions]
        options: list[dict[str, Any]] = [
            {
                "max_tokens": len(question.continuation) or self.task.answer_length,
                "ignore_eos": True,
                "logprobs": True,
                "forced": question.continuation,
            }
            for question in questions
        ]
        work = list(zip(prompts, options, strict=True))
        truths = self.plain.gather([self.plain.ask_async(prompt, **how) for prompt, how in work])
        for question, truth in zip(questions, truths, strict=True):
            arms["prefill"].add(question, truth, truth, 0.0)
        for arm, settings in ARMS.items():
            if arm not in arms:
                continue
            session = self._session(tenant="edits", **settings)  # arms that turn keys share what is exact
            self.ours.ask([*edit.source, *questions[0].tokens], max_tokens=1, **session)
            answers = self.ours.gather([self.ours.ask_async(prompt, **how, **session) for prompt, how in work])
            for question, truth, answer in zip(questions, truths, answers, strict=True):
                assert answer.report is not None
                arms[arm].add(question, truth, answer, answer.report.tokens["spliced"] / len(edit.behind))

    def _time(self, length: int, rounds: int) -> dict[str, list[float]]:
        """Time first tokens after an edit; nothing is being saved meanwhile."""
        timed: dict[str, list[float]] = {"prefill_s": [], "splice_s": [], "spliced_share": []}
        for number in range(int(self.is_warm), rounds + 1):  # the first one warms up
            (body,) = self.task.sections(self.rng, [length])
            edit, _ = self._edit(body.tokens, REMOVED, STUB)
            question = self.task.filler(self.rng, 8)
            session = self._session(tenant="splice")
            options: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}
            self.plain.ask([*edit.header, *question], **options)  # of the source, this is what its cache can serve
            self.ours.ask([*edit.source, *question], **options, **session)
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
        self.is_warm = True
        return timed

    def _session(self, **settings: Any) -> dict[str, Any]:
        return {"session": f"session-{next(self._sessions)}", "edits": "amortize", **settings}

    def _edit_by(self, delta: int, *, is_empty: bool) -> tuple[Edit, tuple[list[Question], list[Question]]]:
        """An edit that moves what is behind it by `delta`, and questions about that, and about what is removed."""
        num_stub = 0 if is_empty else self.rng.randrange(max(delta, 1), max(delta, 1) + 24)
        (body,) = self.task.sections(self.rng, [self.rng.choice(BEHIND)])
        edit, lost = self._edit(body.tokens, num_stub - delta, num_stub)
        return edit, ([q for q in body.questions if q.answer], [q for q in lost if q.answer])

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
        tasks = stale_tasks(study.task)
        if "policies" not in args.skip and tasks is not None:
            note(f"{model}: stale tool output, by policy")
            found["policies"] = policy_table(ours, tasks, study.rng, counts.policies)
        if "load" not in args.skip:
            note(f"{model}: sessions that edit at every turn")
            found["load"] = mechanism(plain, ours, study.task, study.rng, counts.scale, keep=args.keep)
            note(f"{model}: sessions that edit nothing")
            study.is_warm = True
            found["append_only"] = append_only(plain, ours, study.task, study.rng, counts.append_only)
        for length in lengths if "edits" not in args.skip else ():
            note(f"{model}: edits before {length} tokens")
            found["edits"].append(study.edits(length, counts))
        status = ours.client.status()
        found["min_run"], found["counters"] = status["min_run"], status["counters"]
    if counts.exactness and "exactness" not in args.skip:
        note(f"{model}: exactness, in float32")
        with engines(model, MIN_RUN, **EXACT_ENGINE) as (plain, ours):
            study = Study(model, plain, ours, args.seed)
            found["exactness"] = study.exactness(counts.exactness)
            found["faithfulness_float32"] = study.faithfulness(counts.faithfulness // 2)
    return found


def run_deep(args: argparse.Namespace) -> dict[str, Any]:
    """Examine what a splice follows in a deep MLA model with random weights: for that none has to be trained."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(write(DEEP_MLA, Path(folder)))
        with engines(model, MIN_RUN, skip_tokenizer_init=True, dtype="bfloat16") as (plain, ours):
            note(f"{DEEP_MLA.name}: faithfulness")
            study = Study(model, plain, ours, args.seed, RandomTask())
            return {"edits": [], "faithfulness": study.faithfulness(270 if args.full else 24)}
