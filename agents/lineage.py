"""Lineages: for each token of a session's history, the stored row that holds its KV.

    tokens   A · R · C · G        after an edit A · S · C -> A · R · C, and an answer G
    rows     a   r   c   g        names of chunks, offsets in them, and the positions that they were computed at
    marks          ^ L            from here on, KV belongs to lineage L: no prefill of these tokens would make it

Rows stay where they were first stored: an edit moves positions, not KV. So however many edits a row has seen, its key
is turned once, from the position where it was computed (`turn = start - source`; rotations compose, Leyline section 3).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import xxhash

from ropewalk.kernels.keys import Tokens

REUSE = "reuse"
"""Label of KV that position-independent chunks are part of; any other label is a lineage's."""


SCRATCH = "scratch/"
"""How labels of KV begin that was computed with a scratch in view."""

NOWHERE = sys.maxsize
"""A position behind every prompt."""


class Mark(NamedTuple):
    """From `start` on, KV belongs to the domain `label`, and to those of the marks before it."""

    start: int
    label: str


class Match(NamedTuple):
    """Positions `[start, start + length)` of a held history stand at `new_start` of a prompt."""

    start: int
    new_start: int
    length: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Positions `[start, end)` are rows `[offset, ...)` of `chunk`, computed from position `source` on."""

    start: int
    end: int
    chunk: str
    offset: int
    source: int

    @property
    def turn(self) -> int:
        """Positions by which keys must be turned."""
        return self.start - self.source

    def part(self, start: int, end: int) -> Rows:
        """Return what lies inside `[start, end)`, which must overlap."""
        first, last = max(start, self.start), min(end, self.end)
        assert first < last, (self, start, end)
        skipped = first - self.start
        return replace(self, start=first, end=last, offset=self.offset + skipped, source=self.source + skipped)


@dataclass(frozen=True, slots=True)
class Lineage:
    """A history of `T` tokens, int32. `rows` are ascending and disjoint; what none covers is not stored."""

    tokens: Tokens
    rows: tuple[Rows, ...] = ()
    marks: tuple[Mark, ...] = ()

    def licensed(self, *, reuse: bool) -> Lineage:
        """Return the beginning that a request may be served: without `reuse`, nothing behind reused chunks."""
        bad = next((mark.start for mark in self.marks if mark.label == REUSE), None)
        return self if reuse or bad is None else self.until(bad)

    def until(self, end: int) -> Lineage:
        """Return the first `end` tokens."""
        return Lineage(
            self.tokens[:end],
            tuple(rows.part(0, end) for rows in self.rows if rows.start < end),
            tuple(mark for mark in self.marks if mark.start < end),
        )

    def check_integrity(self) -> None:
        """Assert that rows and marks are ascending and inside the history."""
        for rows in self.rows:
            assert 0 <= rows.start < rows.end <= len(self.tokens), rows
            assert rows.offset >= 0, rows
            assert rows.source >= 0, rows
        for a, b in pairwise(self.rows):
            assert a.end <= b.start, (a, b)
        for before, behind in pairwise(self.marks):
            assert before.start <= behind.start, self.marks


@dataclass(frozen=True, slots=True)
class Held:
    """What a lineage has for a prompt: rows at the prompt's positions, and marks that hold there.

    `edited_from`: the prompt is the history as it was before this position; None: nowhere else, no edit. `owner` makes
    the label of a new mark: of whom and from what the KV behind the edit comes. `moved_marks`: what the lineage's marks
    behind the edit say that stays true wherever their rows stand: computed behind reused chunks, or behind a scratch.
    """

    rows: tuple[Rows, ...]
    marks: tuple[Mark, ...]
    edited_from: int | None
    owner: str
    moved_marks: tuple[Mark, ...] = ()

    @property
    def inexact_from(self) -> int:
        """The first position that a lineage has rows for which no prefill of the prompt would have made."""
        moved = [rows.start for rows in self.rows if self.edited_from is not None and rows.start >= self.edited_from]
        starts = [*(mark.start for mark in self.marks[:1]), *moved[:1]]
        return min(starts, default=NOWHERE)

    def until(self, end: int) -> Held:
        """Return what stands before position `end`."""
        return Held(
            tuple(rows.part(0, end) for rows in self.rows if rows.start < end),
            tuple(mark for mark in self.marks if mark.start < end),
            self.edited_from,
            self.owner,
            self.moved_marks,
        )


def carry(lineage: Lineage, matches: Sequence[Match], owner: str) -> Held:
    """Move a lineage's rows to where a prompt has their tokens. `matches` are ascending in both; `owner`: the session.

    The first match counts as the unedited beginning if it is one (from 0 to 0).
    """
    head = matches[0].length if matches and matches[0][:2] == (0, 0) else 0
    behind = [mark for mark in lineage.marks if mark.start >= head]
    first_of = (
        next((mark for mark in behind if mark.label == REUSE), None),
        next((mark for mark in behind if mark.label.startswith(SCRATCH)), None),
    )
    moved_marks: dict[str, Mark] = {}
    moved: list[Rows] = []
    index = 0
    for match in matches:
        end, shift = match.start + match.length, match.new_start - match.start
        while index < len(lineage.rows) and lineage.rows[index].end <= match.start:
            index += 1
        for rows in lineage.rows[index:]:
            if rows.start >= end:
                break
            part = rows.part(match.start, end)
            moved.append(replace(part, start=part.start + shift, end=part.end + shift))
        for mark in first_of:
            if mark is not None and end > mark.start:
                moved_marks.setdefault(mark.label, Mark(max(mark.start, match.start) + shift, mark.label))
    marks = tuple(mark for mark in lineage.marks if mark.start < head)
    is_edited = len(matches) > (1 if head else 0)
    return Held(tuple(moved), marks, head if is_edited else None, owner, tuple(sorted(moved_marks.values())))


def label_of(owner: str, before: Iterable[Mark], rows: Iterable[Rows]) -> str:
    """Return the label of KV that begins with these rows behind those marks: the same for the same splice."""
    hasher = xxhash.xxh3_128()
    hasher.update(f"{len(owner)}/{owner}\n".encode())
    for mark in before:
        hasher.update(f"{mark.start} {mark.label}\n".encode())
    for row in rows:
        hasher.update(f"{row.start} {row.end} {row.chunk} {row.offset} {row.source}\n".encode())
    return hasher.hexdigest()
