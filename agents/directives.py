"""Directives: what an agent wants changed in the middle of a prompt (Leyline, arXiv 2606.01065).

    original   A · S · C     [start, end) of S in the original's coordinates
    edited     A · R · C     R = replacement;  Δ = |R| - |S|

AMORTIZE keeps the KV of C, computed with S in view, and turns its keys by Δ. FORGET is an ordinary prefill from S on:
no influence of S remains. A `DirectiveSet` is applied as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

SINK = 32
"""Tokens at a sequence's start that attention leans on whatever they say: no AMORTIZE begins there."""


class Mode(StrEnum):
    """What an edit does to the KV behind it."""

    AMORTIZE = "amortize"
    FORGET = "forget"


class Span(NamedTuple):
    """Token positions `[start, end)`."""

    start: int
    end: int


class Kept(NamedTuple):
    """Positions `[start, end)` of the original prompt stand at `[new_start, new_start + end - start)` of the edited."""

    start: int
    end: int
    new_start: int


class DirectiveError(ValueError):
    """A directive that cannot be carried out. `field` names the part that is wrong, such as `directives[1].span`."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Directive:
    """Replace the tokens of `span` by `replacement` (token ids; may be empty). An empty span inserts."""

    span: Span
    replacement: tuple[int, ...] = ()
    mode: Mode = Mode.AMORTIZE

    @property
    def delta(self) -> int:
        """By how many positions the tokens behind the span move."""
        return len(self.replacement) - (self.span.end - self.span.start)


class DirectiveSet:
    """Directives for one prompt, all in coordinates of the original, applied left to right."""

    def __init__(self, directives: Iterable[Directive], num_tokens: int) -> None:
        """Check `directives` against a prompt of `num_tokens`. Raises `DirectiveError`, which names the first offender.

        Errors count directives in the order given.
        """
        given = list(directives)
        for number, directive in enumerate(given):
            _check(directive, number, num_tokens)
        order = sorted(range(len(given)), key=lambda number: (given[number].span, number))
        for before, after in pairwise(order):
            a, b = given[before].span, given[after].span
            if a.end > b.start or a == b:
                raise DirectiveError(
                    f"directives[{before}] {_show(a)} and directives[{after}] {_show(b)} overlap",
                    f"directives[{max(before, after)}].span",
                )
        self.num_tokens = num_tokens
        self.directives = tuple(given[number] for number in order)

    def __len__(self) -> int:
        return len(self.directives)

    def __iter__(self) -> Iterator[Directive]:
        return iter(self.directives)

    @property
    def num_edited(self) -> int:
        """Tokens of the edited prompt."""
        return self.num_tokens + sum(directive.delta for directive in self.directives)

    def apply(self, tokens: Sequence[int]) -> list[int]:
        """Return the edited prompt. `tokens` are the `num_tokens` ids of the original."""
        assert len(tokens) == self.num_tokens
        edited: list[int] = []
        position = 0
        for directive in self.directives:
            edited += tokens[position : directive.span.start]
            edited += directive.replacement
            position = directive.span.end
        edited += tokens[position:]
        return edited

    def kept(self) -> list[Kept]:
        """Return the stretches of the original that stay, ascending, none of them empty."""
        out = []
        position = shift = 0
        for directive in self.directives:
            if position < directive.span.start:
                out.append(Kept(position, directive.span.start, position + shift))
            position, shift = directive.span.end, shift + directive.delta
        if position < self.num_tokens:
            out.append(Kept(position, self.num_tokens, position + shift))
        return out

    def moved(self, span: Span) -> Span:
        """Return where a span of the original stands in the edited prompt. What an edit has touched counts in whole."""
        start, end, shift = span.start, span.end, 0
        for directive in self.directives:
            old, begin = directive.span, directive.span.start + shift
            shift += directive.delta
            if old.end <= span.start:
                start, end = span.start + shift, span.end + shift
            elif old.start < span.end:
                start = begin if old.start < span.start else start
                end = span.end + shift if old.end <= span.end else begin + len(directive.replacement)
        return Span(start, end)

    def forgotten_from(self) -> int | None:
        """Return the edited position from which everything must be computed, because of a FORGET; None without one."""
        shift = 0
        for directive in self.directives:
            if directive.mode is Mode.FORGET:
                return directive.span.start + shift
            shift += directive.delta
        return None


def _check(directive: Directive, number: int, num_tokens: int) -> None:
    field = f"directives[{number}].span"
    span = directive.span
    if not 0 <= span.start <= span.end <= num_tokens:
        raise DirectiveError(f"directives[{number}] {_show(span)} is no span of {num_tokens} tokens", field)
    if span.start == span.end and not directive.replacement:
        raise DirectiveError(f"directives[{number}] {_show(span)} changes nothing", field)
    if span.start < SINK and directive.mode is Mode.AMORTIZE:
        raise DirectiveError(
            f"directives[{number}] {_show(span)} begins inside the first {SINK} tokens, the attention sink", field
        )


def _show(span: Span) -> str:
    return f"[{span.start}, {span.end})"
