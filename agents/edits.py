"""Edit detection: which directives turn the tokens that a session holds into those that its client now sends.

Common beginning and end are set aside. In what is left, windows that stand in the old and in the new text once are
matched by hash, matches that would cross each other are dropped (the longest ascending sequence stays), and the rest
grow to both sides, token by token. What no match covers is edited. Linear in the tokens, but for a sort.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ropewalk.agents.directives import Directive, Mode, Span
from ropewalk.kernels.keys import Tokens, common_prefix

WINDOW = 16
"""Tokens that must agree before a stretch counts as the same: shorter ones occur by chance and save little."""


def detect_edits(old: Tokens, new: Tokens, mode: Mode = Mode.AMORTIZE) -> list[Directive]:
    """Return directives that make `new` of `old`, ascending; none when they are equal.

    `old`, `new`: token ids, `[T]` int32. Not the fewest edits possible: stretches shorter than `WINDOW` tokens are
    replaced even where they agree, unless they adjoin a longer match.
    """
    directives = []
    position = new_position = 0
    for start, new_start, length in [*matches(old, new), (len(old), len(new), 0)]:
        replacement = tuple(new[new_position:new_start].tolist())
        if position < start or replacement:
            directives.append(Directive(Span(position, start), replacement, mode))
        position, new_position = start + length, new_start + length
    return directives


def matches(old: Tokens, new: Tokens) -> list[tuple[int, int, int]]:
    """Return stretches `(start in old, start in new, length)` that agree, ascending in both, none empty."""
    head = common_prefix(old, new)
    tail = common_prefix(old[head:][::-1], new[head:][::-1])
    middle_old, middle_new = old[head : len(old) - tail], new[head : len(new) - tail]
    found = [(head + a, head + b, n) for a, b, n in _middle(middle_old, middle_new)]
    whole = [(0, 0, head), *found, (len(old) - tail, len(new) - tail, tail)]
    return [match for match in whole if match[2]]


def _middle(old: Tokens, new: Tokens) -> list[tuple[int, int, int]]:
    if min(len(old), len(new)) < WINDOW:
        return []
    pairs = _unique_windows(old, new)
    out: list[tuple[int, int, int]] = []
    old_end = new_end = 0
    for a, b in _longest_ascending(pairs):
        if a < old_end or b < new_end:
            continue  # inside the last match, or begun before its end: a shift would tear the text
        left = common_prefix(old[old_end:a][::-1], new[new_end:b][::-1])
        length = common_prefix(old[a:], new[b:])
        if length < WINDOW:
            continue  # two windows with one hash
        out.append((a - left, b - left, left + length))
        old_end, new_end = a + length, b + length
    return out


def _unique_windows(old: Tokens, new: Tokens) -> list[tuple[int, int]]:
    """Return positions `(old, new)` of windows that stand in each text once, ascending in the new one."""
    old_hashes, old_places = _once(_window_hashes(old))
    new_hashes, new_places = _once(_window_hashes(new))
    _, in_old, in_new = np.intersect1d(old_hashes, new_hashes, assume_unique=True, return_indices=True)
    pairs = np.stack([new_places[in_new], old_places[in_old]], axis=1)
    return [(int(a), int(b)) for b, a in pairs[np.argsort(pairs[:, 0])]]


def _window_hashes(tokens: Tokens) -> npt.NDArray[np.uint64]:
    """Hash every window of `WINDOW` tokens by doubling: of 2, 4, 8, 16 tokens. `[T - WINDOW + 1]` uint64."""
    hashes = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    hashes ^= hashes >> np.uint64(29)
    width = 1
    while width < WINDOW:
        hashes = hashes[:-width] * np.uint64(0xBF58476D1CE4E5B9) + hashes[width:]
        hashes ^= hashes >> np.uint64(31)
        width *= 2
    return hashes


def _once(hashes: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    values, places, counts = np.unique(hashes, return_index=True, return_counts=True)
    return values[counts == 1], places[counts == 1].astype(np.int64)


def _longest_ascending(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest subsequence of `pairs` whose first values ascend (the second ones do), by patience sorting."""
    tops: list[int] = []  # smallest first value that ends an ascending sequence of each length
    at: list[int] = []
    before: list[int] = []
    for index, (first, _) in enumerate(pairs):
        pile = bisect_left(tops, first)
        before.append(at[pile - 1] if pile else -1)
        if pile == len(tops):
            tops.append(first)
            at.append(index)
        else:
            tops[pile], at[pile] = first, index
    out = []
    index = at[-1] if at else -1
    while index >= 0:
        out.append(pairs[index])
        index = before[index]
    return out[::-1]
