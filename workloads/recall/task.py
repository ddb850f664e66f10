"""The recall task: notes full of facts, and questions that only the notes can answer.

A *document* is a run of notes; a *note* mixes filler words with *facts*, each `KEY is V1 V2 .`; a *question* is
`what is KEY ?`. When a document states a key twice, the latest fact holds, so that only the order of the text tells.
Everything is drawn from a `random.Random`, so the same seed gives the same tokens everywhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .vocabulary import vocabulary

NOTE_LENGTHS = (16, 96)
FACT_DENSITIES = (0.08, 0.4)
# Share of text fillers that are bytes or word prefixes, so that foreign text does not throw the model off.
NOISE_SHARE = 0.05
# `KEY is V1 V2 .`
FACT_LENGTH = 5
# `<user> what is KEY ? <assistant>` and `V1 V2 <end>`.
QUESTION_LENGTH = 6
ANSWER_LENGTH = 3


@dataclass(frozen=True, slots=True)
class Fact:
    """`KEY is V1 V2 .`: `start` is the index of KEY within the document's tokens."""

    key: int
    values: tuple[int, int]
    start: int


@dataclass(frozen=True, slots=True)
class Document:
    """Notes and the facts in them.

    Attributes:
        tokens: token ids.
        note_starts: index of each note's first token, ascending, starting with 0.
        facts: all facts, in the order of the text.
    """

    tokens: tuple[int, ...]
    note_starts: tuple[int, ...]
    facts: tuple[Fact, ...]

    def latest(self) -> dict[int, Fact]:
        """The fact that holds for each key, in the order in which the keys first appear."""
        return {fact.key: fact for fact in self.facts}

    def reassigned_keys(self) -> tuple[int, ...]:
        """Keys stated more than once, in the order in which they first appear."""
        counts: dict[int, int] = {}
        for fact in self.facts:
            counts[fact.key] = counts.get(fact.key, 0) + 1
        return tuple(key for key, count in counts.items() if count > 1)

    def unique_keys(self) -> tuple[int, ...]:
        """Keys stated exactly once, in the order of the text."""
        reassigned = set(self.reassigned_keys())
        return tuple(key for key in self.latest() if key not in reassigned)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A header, a document and one question; greedy decoding should give `answer`.

    `tokens[document_start : document_start + len(document.tokens)]` is the document.
    """

    tokens: tuple[int, ...]
    answer: tuple[int, int]
    document: Document
    document_start: int
    key: int


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """Tokens with answers filled in.

    Attributes:
        tokens: `T` token ids.
        positions: `T` ascending positions, with gaps where the sequence pretends to be longer.
        answer_indices: indices of V1 and V2 of each answer, V1 first; each token is to be predicted from its left.
        end_indices: indices of each answer's end token.
    """

    tokens: list[int]
    positions: list[int]
    answer_indices: list[int]
    end_indices: list[int]


def make_fillers(rng: random.Random, count: int) -> list[int]:
    """`count` tokens that mean nothing to the task."""
    words = vocabulary()
    tokens = rng.choices(words.fillers, k=count)
    for index in range(count):
        if rng.random() < NOISE_SHARE:
            tokens[index] = rng.choice(words.other)
    return tokens


def make_header(rng: random.Random, num_tokens: int) -> list[int]:
    """`<bos> <system> filler* <user>`: the part of a prompt before the document, `num_tokens` (at least 3) long."""
    if num_tokens < 3:
        raise ValueError(f"a header needs at least 3 tokens, not {num_tokens}")
    words = vocabulary()
    return [words.bos, words.system, *make_fillers(rng, num_tokens - 3), words.user]


def make_question(key: int, *, as_new_turn: bool = False) -> list[int]:
    """`what is KEY ? <assistant>`, behind `<user>` when it opens a turn of its own."""
    words = vocabulary()
    return [*([words.user] if as_new_turn else []), words.what, words.is_, key, words.question_mark, words.assistant]


def make_document(
    rng: random.Random,
    num_tokens: int,
    *,
    density: float | None = None,
    reassigned_share: float = 0.0,
    keys: tuple[int, ...] | None = None,
) -> Document:
    """A document of exactly `num_tokens` tokens.

    Args:
        density: share of tokens that belong to facts; drawn from `FACT_DENSITIES` when not given.
        reassigned_share: chance that a fact states a key of the document anew instead of a fresh one.
        keys: key ids to draw from, each used for one fresh fact at most; by default all keys. Documents with disjoint
            `keys` can be concatenated without contradicting each other.
    """
    words = vocabulary()
    density = rng.uniform(*FACT_DENSITIES) if density is None else density
    fresh = list(words.keys if keys is None else keys)
    rng.shuffle(fresh)
    tokens: list[int] = []
    note_starts: list[int] = []
    facts: list[Fact] = []
    used: list[int] = []
    while len(tokens) < num_tokens:
        length = min(rng.randint(*NOTE_LENGTHS), num_tokens - len(tokens))
        note_start = len(tokens)
        note_starts.append(note_start)
        end = note_start + length
        # Chance per place for a fact to start, so that facts take the wanted share of tokens.
        start_chance = density / (FACT_LENGTH * (1 - density) + density)
        while len(tokens) < end:
            may_reassign = bool(used) and reassigned_share > 0
            fits = end - len(tokens) >= FACT_LENGTH
            if fits and (fresh or may_reassign) and rng.random() < start_chance:
                if may_reassign and (not fresh or rng.random() < reassigned_share):
                    key = rng.choice(used)
                else:
                    key = fresh.pop()
                    used.append(key)
                values = (rng.choice(words.values), rng.choice(words.values))
                facts.append(Fact(key, values, len(tokens)))
                tokens += [key, words.is_, *values, words.full_stop]
            else:
                tokens += make_fillers(rng, 1)
        if length > 1 and tokens[-1] != words.full_stop and rng.random() < 0.5:
            tokens[-1] = words.newline
    return Document(tuple(tokens), tuple(note_starts), tuple(facts))


def make_prompt(
    rng: random.Random,
    num_tokens: int,
    *,
    reassigned: bool = False,
    header_tokens: int | None = None,
    density: float | None = None,
) -> Prompt:
    """A prompt of exactly `num_tokens` tokens with one question.

    Args:
        reassigned: ask for a key that the document states more than once (a quarter of its facts re-assign one);
            otherwise every key is stated once.
        header_tokens: length of the header, 3 to 27 when not given.
        density: see `make_document`.
    """
    header = make_header(rng, rng.randint(3, 27) if header_tokens is None else header_tokens)
    num_document = num_tokens - len(header) - (QUESTION_LENGTH - 1)
    if num_document < NOTE_LENGTHS[0]:
        raise ValueError(f"num_tokens = {num_tokens} leaves {num_document} tokens for the document; at least 16 needed")
    while True:
        document = make_document(rng, num_document, density=density, reassigned_share=0.25 if reassigned else 0.0)
        candidates = document.reassigned_keys() if reassigned else document.unique_keys()
        if candidates:
            break
    key = rng.choice(candidates)
    tokens = (*header, *document.tokens, *make_question(key))
    return Prompt(tokens, document.latest()[key].values, document, len(header), key)


def _questions(rng: random.Random, count: int, groups: list[tuple[int, ...]]) -> list[int]:
    """`count` keys, each group (none empty) as likely as the other, no key twice before its group is used up."""
    left: list[list[int]] = [[] for _ in groups]
    chosen: list[int] = []
    for _ in range(count):
        index = rng.randrange(len(groups))
        if not left[index]:
            left[index] = rng.sample(groups[index], k=len(groups[index]))
        chosen.append(left[index].pop())
    return chosen


def make_training_sequence(
    rng: random.Random, num_tokens: int, num_questions: int, *, reassigned_share: float, max_position: int
) -> TrainingSequence:
    """One sequence of exactly `num_tokens` tokens, its questions answered.

    Half of the sequences get position gaps at note limits, up to `max_position`, so that distances far longer than the
    sequence are seen. Half of the questions ask for re-assigned keys where there are any.
    """
    words = vocabulary()
    num_dialogue = num_questions * (QUESTION_LENGTH + ANSWER_LENGTH)
    longest_header = max(3, min(27, (num_tokens - num_dialogue) // 4))
    header = make_header(rng, rng.randint(3, longest_header))
    while True:
        document = make_document(rng, num_tokens - num_dialogue - len(header), reassigned_share=reassigned_share)
        if document.facts:
            break
    tokens = [*header, *document.tokens]
    starts = [len(header) + start for start in document.note_starts]
    latest = document.latest()
    reassigned, unique = document.reassigned_keys(), document.unique_keys()
    order = _questions(rng, num_questions, [keys for keys in (reassigned, unique) if keys])
    answer_indices: list[int] = []
    end_indices: list[int] = []
    as_turns = rng.random() < 0.5
    for index, key in enumerate(order):
        starts.append(len(tokens))
        tokens += make_question(key, as_new_turn=as_turns and index > 0)
        answer_indices += [len(tokens), len(tokens) + 1]
        end_indices.append(len(tokens) + 2)
        tokens += [*latest[key].values, words.end]
    tokens += make_fillers(rng, num_tokens - len(tokens))

    positions = list(range(num_tokens))
    if rng.random() < 0.5:
        room = rng.randint(0, max_position - num_tokens)
        cuts = sorted(rng.sample(starts, k=rng.randint(1, min(8, len(starts)))))
        steps = sorted(rng.randint(0, room) for _ in cuts)
        for cut, following, gap in zip(cuts, [*cuts[1:], num_tokens], steps, strict=True):
            positions[cut:following] = [position + gap for position in positions[cut:following]]
    return TrainingSequence(tokens, positions, answer_indices, end_indices)
