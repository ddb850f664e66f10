"""How prompts of agents change between two calls: what was computed first, and what is asked then.

header            H B q            ->  H' B q'
system variable   S v S2 B q       ->  S v' S2 B q'
compaction        S T1 ... T6 q    ->  S summary T4 T5 T6 q'
re-rank           S D1 ... D6 q    ->  S D4 D2 D6 D1 D5 D3 q'
tool variants     S t1 ... t8 B q  ->  S t1 t2' t4 ... t8 B q'
updates           S A q | S' B q   ->  S'' A B q'     (B states facts of A anew; the two were computed apart)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from ropewalk.cluster.bench.tasks import Question, RecallTask, Section, Task


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts that are computed first, then a prompt `before` and `question` about what it shares with them.

    `num_shared`: tokens of it that the first prompts hold, behind the first difference.
    """

    sources: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]
    question: Question
    num_shared: int


Pattern = Callable[[Task, random.Random, int], Case]


def _join(*parts: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    return tuple(chain(*parts))


def _ask(rng: random.Random, *sections: Section) -> tuple[Question, Question]:
    """Two different questions about the sections, with answers; both may be one where there is only one."""
    questions = [question for section in sections for question in section.questions if question.answer]
    if len(questions) == 1:
        return questions[0], questions[0]
    first, then = rng.sample(questions, 2)
    return first, then


def header(task: Task, rng: random.Random, length: int) -> Case:
    """Another header before the same body of `length` tokens."""
    (body,) = task.sections(rng, [length])
    first, then = _ask(rng, body)
    source = _join(task.header(rng, 160), body.tokens, first.tokens)
    return Case((source,), _join(task.header(rng, 96), body.tokens), then, length)


def system_variable(task: Task, rng: random.Random, length: int) -> Case:
    """A variable in the middle of the system prompt takes another value, of another length."""
    (body,) = task.sections(rng, [length])
    system, rest = task.header(rng, 100), task.filler(rng, 120)
    first, then = _ask(rng, body)
    source = _join(system, task.filler(rng, 9), rest, body.tokens, first.tokens)
    return Case((source,), _join(system, task.filler(rng, 4), rest, body.tokens), then, len(rest) + length)


def compaction(task: Task, rng: random.Random, length: int) -> Case:
    """The older half of six turns gives way to a short summary."""
    system, turns = task.header(rng, 128), task.sections(rng, [length // 6] * 6)
    kept = turns[3:]
    first, then = _ask(rng, *kept)
    source = _join(system, *(turn.tokens for turn in turns), first.tokens)
    before = _join(system, task.filler(rng, 48), *(turn.tokens for turn in kept))
    return Case((source,), before, then, sum(len(turn.tokens) for turn in kept))


def re_rank(task: Task, rng: random.Random, length: int) -> Case:
    """Six retrieved documents come back in another order."""
    system, documents = task.header(rng, 128), task.sections(rng, [length // 6] * 6)
    order = [3, 1, 5, 0, 4, 2]
    first, then = _ask(rng, *documents)
    source = _join(system, *(document.tokens for document in documents), first.tokens)
    before = _join(system, *(documents[number].tokens for number in order))
    return Case((source,), before, then, sum(len(document.tokens) for document in documents))


def tool_variants(task: Task, rng: random.Random, length: int) -> Case:
    """One of eight tool definitions before the conversation changes, one goes."""
    system, tools = task.header(rng, 96), [task.filler(rng, 80) for _ in range(8)]
    (body,) = task.sections(rng, [length])
    first, then = _ask(rng, body)
    source = _join(system, *tools, body.tokens, first.tokens)
    before = _join(system, tools[0], task.filler(rng, 70), *tools[3:], body.tokens)
    return Case((source,), before, then, 5 * 80 + length)


def updates(task: Task, rng: random.Random, length: int) -> Case:
    """Two texts that were computed apart, the second of which states facts of the first anew."""
    assert isinstance(task, RecallTask)
    old, new = task.updates(rng, length // 2)
    sources = tuple(_join(task.header(rng, 160), part.tokens, task.filler(rng, 8)) for part in (old, new))
    before = _join(task.header(rng, 96), old.tokens, new.tokens)
    return Case(sources, before, rng.choice(new.questions), len(old.tokens) + len(new.tokens))


PATTERNS: dict[str, Pattern] = {
    "header": header,
    "system variable": system_variable,
    "compaction": compaction,
    "re-rank": re_rank,
    "tool variants": tool_variants,
    "updates": updates,
}


def applies(name: str, task: Task) -> bool:
    """Whether a task has what a pattern needs."""
    return name != "updates" or isinstance(task, RecallTask)
