"""What one session holds: a tree of histories, kept as its branches from root to leaf.

A turn that goes on from a branch's end makes that branch longer. One that goes on from earlier (a retry, a rollback),
or from an edited history, is a branch of its own; the old one stays until it is not used any more.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ropewalk.agents.directives import DirectiveSet, Mode, Span
from ropewalk.agents.edits import detect_edits, matches
from ropewalk.agents.lineage import Held, Lineage, Match, carry
from ropewalk.kernels.keys import Tokens, common_prefix

MAX_BRANCHES = 8
"""Branches kept a session; the one that was not used longest goes first."""

COMPARED = 3
"""Branches that a prompt is compared with token by token: those that begin most like it."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A history and its KV. `sent` is what the client calls it, if directives were applied here and not by the client:
    its prompts go on from that.
    """

    lineage: Lineage
    sent: Tokens | None = None
    used_s: float = 0.0


@dataclass(slots=True)
class History:
    """Branches of a session, most recently used first.

    `amortize`: an edited history is a splice, without the client saying so each time. `forgotten`: a text was removed
    for good, so no position-independent chunk, whose rows may have seen it, is served to this session again. `epoch`
    changes with that: turns that began before it may not bring back what they had.
    """

    branches: list[Branch] = field(default_factory=list)
    amortize: bool = False
    forgotten: bool = False
    epoch: str = ""

    def add(self, branch: Branch) -> None:
        """Put a branch first, in place of those that it goes on from."""
        self.branches = [old for old in self.branches if not _continues(branch, old)]
        self.branches = [branch, *self.branches][:MAX_BRANCHES]

    def forget(self) -> None:
        """Drop all branches: what they hold may have seen what was removed."""
        self.branches, self.forgotten, self.epoch = [], True, uuid.uuid4().hex

    def accepts(self, epoch: str) -> bool:
        """Tell whether a turn that began at `epoch` may still add what it holds: nothing was forgotten meanwhile."""
        return epoch == self.epoch or (not epoch and not self.forgotten)

    def is_edited(self, tokens: Tokens) -> bool:
        """Tell whether a prompt changes the history that it has most in common with, instead of going on from it."""
        shared = [(common_prefix(b.lineage.tokens, tokens), len(b.lineage.tokens)) for b in self.branches]
        length, of = max(shared, default=(0, 0))
        return length < min(of, len(tokens))

    def to_apply(self, tokens: Tokens) -> DirectiveSet | None:
        """Return those edits that were applied to this session and that a prompt still lacks."""
        for branch in self.branches:
            if branch.sent is None or common_prefix(branch.lineage.tokens, tokens) == len(branch.lineage.tokens):
                continue
            there = matches(branch.sent, tokens)
            edits = []
            for edit in detect_edits(branch.sent, branch.lineage.tokens):
                start, end = edit.span
                for old, new, length in there:
                    # Where something was only inserted, a match on both sides says that it is missing.
                    if old <= start and end <= old + length and (start < end or old < start < old + length):
                        span = Span(new + start - old, new + end - old)
                        edits.append(replace(edit, span=span, mode=Mode.FORGET))  # the mode does not matter here
            if edits:
                return DirectiveSet(edits, len(tokens))
        return None

    def held(
        self,
        tokens: Tokens,
        owner: str,
        *,
        reuse: bool,
        original: Tokens | None = None,
        edits: DirectiveSet | None = None,
    ) -> Held | None:
        """Return what the branch that has most of a prompt holds of it; None when there is nothing but exact KV.

        `edits` made the prompt of `original`. `reuse`: rows computed behind reused chunks are welcome.
        """
        best: Held | None = None
        most = 0
        shared = [common_prefix(branch.lineage.tokens, tokens) for branch in self.branches]
        for index in sorted(range(len(shared)), key=lambda index: -shared[index])[:COMPARED]:
            lineage = self.branches[index].lineage.licensed(reuse=reuse)
            found = carry(lineage, _matches(lineage.tokens, tokens, original, edits), owner)
            count = sum(rows.end - rows.start for rows in found.rows)
            if count > most:
                best, most = found, count
            if edits is None and shared[index] == len(lineage.tokens):
                break  # the prompt goes on from it
        return best if best is not None and (best.marks or best.edited_from is not None) else None


def _matches(held: Tokens, tokens: Tokens, original: Tokens | None, edits: DirectiveSet | None) -> list[Match]:
    """Return where a held history stands in a prompt: by directives if it was what they edit, else by comparing."""
    if edits is not None and original is not None and len(edits):
        length = common_prefix(held, original)
        first = min(directive.span.end for directive in edits)
        if length > first:
            kept = [(k.start, k.new_start, min(k.end, length) - k.start) for k in edits.kept() if k.start < length]
            return [Match(*match) for match in kept]
    return [Match(*match) for match in matches(held, tokens)]


def _continues(branch: Branch, old: Branch) -> bool:
    """Tell whether `branch` holds all that `old` does."""
    new_tokens, old_tokens = branch.lineage.tokens, old.lineage.tokens
    length = len(old_tokens)
    return (
        length <= len(new_tokens)
        and common_prefix(new_tokens, old_tokens) == length
        and tuple(mark for mark in branch.lineage.marks if mark.start < length) == old.lineage.marks
    )


def tree(branches: Sequence[Branch]) -> list[tuple[int | None, int]]:
    """Return, for each branch, the earlier one that it shares its longest beginning with, and how long that is."""
    out: list[tuple[int | None, int]] = []
    for index, branch in enumerate(branches):
        shared: list[int] = [common_prefix(branch.lineage.tokens, other.lineage.tokens) for other in branches[:index]]
        longest = max(shared, default=0)
        out.append((shared.index(longest) if longest else None, longest))
    return out
