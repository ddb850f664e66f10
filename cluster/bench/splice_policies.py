"""What becomes of tasks whose context holds stale tool output that newer output contradicts, by policy:

    keep all     header · stale · newer · question      as it grew
    forget       header · note  · newer · question      the stale output cut to a note, the rest computed anew
    amortize     header · note  · newer · question      the same prompt, what follows the note spliced

Where keep all and forget do not solve the same tasks, it is counted which of them `amortize` does as.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from ropewalk.cluster.bench.engine import Answer, Engine
from ropewalk.cluster.bench.statistics import share
from ropewalk.cluster.bench.tasks import RecallTask, TextTask
from ropewalk.cluster.engine.request import Edits

AT_ONCE = 8
"""Tasks that are asked together: nothing is timed here."""

HEADER, NOTE, UPDATE = 96, 8, 200
"""Tokens before the stale output, of a note in its place, and of stale and of newer output of the recall model."""

SAID = 6
"""Tokens of an answer in which a number is looked for."""

_names = count()


@dataclass(frozen=True, slots=True)
class StaleTask:
    """A task's parts as token ids, and the answer that holds: token ids, or a number as it is written."""

    header: tuple[int, ...]
    stale: tuple[int, ...]
    note: tuple[int, ...]
    newer: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...] | str

    @property
    def whole(self) -> list[int]:
        return [*self.header, *self.stale, *self.newer, *self.question]

    @property
    def before(self) -> list[int]:
        """What the session has held before the cut: the question comes behind it."""
        return [*self.header, *self.stale, *self.newer, self.question[0]]

    @property
    def cut(self) -> list[int]:
        return [*self.header, *self.note, *self.newer, *self.question]


class StaleTasks(Protocol):
    """Makes tasks for one model, and reads its answers."""

    def make(self, rng: random.Random) -> StaleTask: ...
    def is_right(self, task: StaleTask, said: Sequence[int]) -> bool: ...


class RecallUpdates:
    """Facts of the recall model that are stated anew."""

    def __init__(self, task: RecallTask) -> None:
        self._task = task

    def make(self, rng: random.Random) -> StaleTask:
        stale, newer = self._task.updates(rng, UPDATE)
        question = rng.choice(newer.questions)
        return StaleTask(
            tuple(self._task.header(rng, HEADER)),
            stale.tokens,
            tuple(self._task.filler(rng, NOTE)),
            newer.tokens,
            question.tokens,
            question.answer,
        )

    def is_right(self, task: StaleTask, said: Sequence[int]) -> bool:
        return tuple(said[: len(task.answer)]) == task.answer


class Gsm8kDistractors:
    """Problems of GSM8K: a first run of a tool worked on another problem, a second one on this."""

    def __init__(self, task: TextTask) -> None:
        self._task = task

    def make(self, rng: random.Random) -> StaleTask:
        (text, steps, final), (_, wrong_steps, wrong_final) = self._task.solved(rng, 2)
        header, stale, note, newer, question = (
            tuple(self._task.encode(part))
            for part in (
                f"Request {rng.randrange(10**8)}.\n\nQuestion: {text}\n",
                f"\nTool output: {wrong_steps} The answer is {wrong_final}.\n",
                "\nTool output: [evicted: superseded run]\n",
                f"\nTool output (corrected run): {steps} The answer is {final}.\n",
                "\nQuestion: What is the answer?\nAnswer: The answer is",
            )
        )
        return StaleTask(header, stale, note, newer, question, final)

    def is_right(self, task: StaleTask, said: Sequence[int]) -> bool:
        return self._task.first_number(said) == task.answer


def policy_table(ours: Engine, tasks: StaleTasks, rng: random.Random, num_tasks: int) -> dict[str, Any]:
    """Measure how many tasks each policy solves, and in how many `amortize` says what `forget` or `keep all` does."""
    right = dict.fromkeys(("keep all", "forget", "amortize"), 0)
    says = {"forget": 0, "keep all": 0}
    spliced = differ = 0
    for begin in range(0, num_tasks, AT_ONCE):
        batch = [tasks.make(rng) for _ in range(min(AT_ONCE, num_tasks - begin))]
        names = [f"policy-{next(_names)}" for _ in batch]
        whole, cut = [task.whole for task in batch], [task.cut for task in batch]
        _ask(ours, [task.before for task in batch], names, "spliced", "amortize")
        answers = {
            "keep all": _ask(ours, whole, names, "whole", None),
            "forget": _ask(ours, cut, names, "computed", "forget"),
            "amortize": _ask(ours, cut, names, "spliced", "amortize"),
        }
        for number, task in enumerate(batch):
            said = {policy: answers[policy][number] for policy in answers}
            report = said["amortize"].report
            spliced += report is not None and report.tokens["spliced"] > 0
            solved = {policy: tasks.is_right(task, answer.token_ids) for policy, answer in said.items()}
            for policy, is_right in solved.items():
                right[policy] += is_right
            if solved["keep all"] != solved["forget"]:
                differ += 1
                for policy in says:
                    says[policy] += solved["amortize"] == solved[policy]
    return {
        "tasks": num_tasks,
        "spliced": spliced,
        "solved": {policy: share(times, num_tasks) for policy, times in right.items()},
        "differ": differ,
        "amortize_as": says,
    }


def _ask(
    ours: Engine, prompts: Sequence[list[int]], sessions: Sequence[str], tenant: str, edits: Edits | None
) -> list[Answer]:
    return ours.gather(
        [
            ours.ask_async(prompt, tenant=tenant, session=session, edits=edits, max_tokens=SAID, ignore_eos=True)
            for prompt, session in zip(prompts, sessions, strict=True)
        ]
    )


def stale_tasks(task: Any) -> StaleTasks | None:
    """Return the tasks that a model can be asked, by its task in the other studies; None where there are none."""
    if isinstance(task, RecallTask):
        return RecallUpdates(task)
    return Gsm8kDistractors(task) if isinstance(task, TextTask) else None
