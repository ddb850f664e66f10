"""What the studies ask: bodies of text that are reused, headers that change, questions with known answers.

Two tasks: facts and questions of the recall model, and English prose with access codes hidden in it for any model with
a tokenizer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ropewalk.cluster.models import RECALL_MLA, resolve
from ropewalk.cluster.models.tiny import VOCABULARY
from ropewalk.workloads.datasets import Question as Problem
from ropewalk.workloads.datasets import load_questions
from ropewalk.workloads.recall.task import Document, make_document, make_header, make_question
from ropewalk.workloads.recall.vocabulary import vocabulary

CONTINUATION = 16
"""Tokens of held-out text whose probability is measured."""

CODE_ROOM = 48
"""Tokens that the sentence with an access code may take at most. Prose of some 100 to 200 tokens follows each."""

_COLOURS = ("red", "green", "blue", "white", "black", "golden", "silver", "brown", "purple", "yellow")
_THINGS = ("gate", "tower", "harbour", "library", "garden", "station", "bridge", "market", "factory", "museum")


@dataclass(frozen=True, slots=True)
class Question:
    """What stands behind a body, and either the token ids of the right `answer`, or held-out text whose probability is
    measured (`continuation`).
    """

    tokens: tuple[int, ...]
    answer: tuple[int, ...] = ()
    continuation: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a prompt, and questions about it."""

    tokens: tuple[int, ...]
    questions: tuple[Question, ...]


class Task(Protocol):
    """Makes prompts' parts. All lengths are in tokens and exact."""

    answer_length: int

    def header(self, rng: random.Random, num_tokens: int) -> list[int]:
        """Text before everything else, never the same twice."""

    def sections(self, rng: random.Random, lengths: Sequence[int]) -> list[Section]:
        """Sections that go together: what one says, no other one contradicts."""

    def filler(self, rng: random.Random, num_tokens: int) -> list[int]:
        """Text without anything to ask for."""

    def held_out(self, rng: random.Random, count: int) -> list[Question]:
        """Texts whose probability is measured; none for a model that knows no language."""


class RecallTask:
    """Facts `KEY is V1 V2 .` of the embedded recall model."""

    answer_length = 2

    def header(self, rng: random.Random, num_tokens: int) -> list[int]:
        return make_header(rng, num_tokens)

    def sections(self, rng: random.Random, lengths: Sequence[int]) -> list[Section]:
        keys = list(vocabulary().keys)
        rng.shuffle(keys)
        share = len(keys) // len(lengths)
        sections = []
        for number, length in enumerate(lengths):
            own = tuple(keys[number * share : (number + 1) * share])
            sections.append(_recall_section(_with_facts(rng, length, own)))
        return sections

    def updates(self, rng: random.Random, length: int) -> list[Section]:
        """Two sections of `length` tokens: the second one states keys of the first anew, and is asked for them."""
        own = tuple(rng.sample(vocabulary().keys, 24))
        while True:
            before, after = (_with_facts(rng, length, own) for _ in range(2))
            latest = after.latest()
            updated = [key for key in after.unique_keys() if key in before.latest()]
            if updated:
                break
        questions = tuple(Question(tuple(make_question(key)), latest[key].values) for key in updated)
        return [Section(before.tokens, ()), Section(after.tokens, questions)]

    def filler(self, rng: random.Random, num_tokens: int) -> list[int]:
        return [rng.choice(vocabulary().fillers) for _ in range(num_tokens)]

    def held_out(self, rng: random.Random, count: int) -> list[Question]:
        return []


class TextTask:
    """Prose from word problems, with access codes in it, for a model of which only the tokenizer is known."""

    answer_length = 8

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(resolve(model))
        self._problems = load_questions().questions

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        text: str = self._tokenizer.decode(token_ids)
        return text

    def header(self, rng: random.Random, num_tokens: int) -> list[int]:
        start = self.encode(f"Request {rng.randrange(10**8)}. Notes from the search:")
        return [*start, *self._prose(rng, num_tokens)][:num_tokens]

    def sections(self, rng: random.Random, lengths: Sequence[int]) -> list[Section]:
        names = [f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS]
        rng.shuffle(names)
        return [self._section(rng, length, names) for length in lengths]

    def filler(self, rng: random.Random, num_tokens: int) -> list[int]:
        return self._prose(rng, num_tokens)

    def held_out(self, rng: random.Random, count: int) -> list[Question]:
        texts = (self._prose(rng, 8 + CONTINUATION) for _ in range(count))
        return [Question(tuple(text[:8]), continuation=tuple(text[8:])) for text in texts]

    def worked_examples(self, rng: random.Random, count: int) -> list[int]:
        """Solved problems, as examples before another one."""
        chosen = rng.sample(self._problems, count)
        return self.encode("".join(f"\n\nQuestion: {p.text}\nAnswer: {_solution(p)}" for p in chosen))

    def problems(self, rng: random.Random, count: int) -> list[tuple[list[int], str]]:
        """Unsolved problems and their final numbers."""
        chosen = rng.sample(self._problems, count)
        return [(self.encode(f"\n\nQuestion: {problem.text}\nAnswer:"), problem.final) for problem in chosen]

    def solved(self, rng: random.Random, count: int) -> list[tuple[str, str, str]]:
        """Problems, what their solutions say, and their final numbers, no two of which are the same."""
        while True:
            chosen = rng.sample(self._problems, count)
            if len({problem.final for problem in chosen}) == count:
                return [(p.text, " ".join(step.sentence for step in p.steps), p.final) for p in chosen]

    def first_number(self, token_ids: Sequence[int]) -> str | None:
        """The first number in a text, or None."""
        match = re.search(r"-?\d[\d,]*(\.\d+)?", self.decode(token_ids))
        return match[0].replace(",", "") if match else None

    def final_number(self, token_ids: Sequence[int]) -> str | None:
        """The number behind `####` in an answer, or None."""
        match = re.search(r"####\s*(-?[\d,.]*\d)", self.decode(token_ids))
        return match[1] if match else None

    def _section(self, rng: random.Random, num_tokens: int, names: list[str]) -> Section:
        tokens: list[int] = []
        questions = []
        while len(tokens) < num_tokens:
            if names and num_tokens - len(tokens) >= CODE_ROOM:
                name, code = names.pop(), str(rng.randrange(1000, 10_000))
                tokens += self.encode(f"\n\nThe access code of the {name} is {code}.")
                asked = self.encode(
                    f"\n\nQ: What is the access code of the {name}?\nA: The access code of the {name} is"
                )
                questions.append(Question(tuple(asked), answer=tuple(self.encode(f" {code}"))))
            tokens += self.encode("\n\n" + self._problem(rng))
        rest = tokens[num_tokens:] + self._prose(rng, 2 * CONTINUATION)
        held_out = Question(tuple(rest[:4]), continuation=tuple(rest[4 : 4 + CONTINUATION]))
        return Section(tuple(tokens[:num_tokens]), (*questions, held_out))

    def _prose(self, rng: random.Random, num_tokens: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            tokens += self.encode(f"\n\n{self._problem(rng)}")
        return tokens[:num_tokens]

    def _problem(self, rng: random.Random) -> str:
        problem = rng.choice(self._problems)
        return " ".join([problem.text, *(step.sentence for step in problem.steps)])


class RandomTask:
    """Tokens without a meaning, for models with random weights. Whatever is said, none is right."""

    answer_length = 1

    def header(self, rng: random.Random, num_tokens: int) -> list[int]:
        return self.filler(rng, num_tokens)

    def sections(self, rng: random.Random, lengths: Sequence[int]) -> list[Section]:
        return [
            Section(tuple(self.filler(rng, n)), (Question(tuple(self.filler(rng, 8)), (VOCABULARY,)),)) for n in lengths
        ]

    def filler(self, rng: random.Random, num_tokens: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(num_tokens)]

    def held_out(self, rng: random.Random, count: int) -> list[Question]:
        return []


def task_of(model: str) -> Task:
    """Return the task that a model can do."""
    return RecallTask() if model == RECALL_MLA else TextTask(model)


def _solution(problem: Problem) -> str:
    return " ".join([*(step.sentence for step in problem.steps), f"#### {problem.final}"])


def _with_facts(rng: random.Random, length: int, keys: tuple[int, ...]) -> Document:
    while True:
        document = make_document(rng, length, keys=keys)
        if document.unique_keys():
            return document


def _recall_section(document: Document) -> Section:
    latest = document.latest()
    questions = (Question(tuple(make_question(key)), latest[key].values) for key in document.unique_keys())
    return Section(document.tokens, tuple(questions))
