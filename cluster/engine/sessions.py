"""From a request of a session to what is planned: directives applied, edits found, rows of its lineage looked up; and,
once it is answered, what the session holds from then on.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ropewalk.agents.directives import SINK, Directive, DirectiveError, DirectiveSet, Mode, Span
from ropewalk.agents.history import Branch, History, tree
from ropewalk.agents.lineage import SCRATCH, Held, Lineage, Mark, Match, Rows, carry
from ropewalk.cluster.engine.request import RequestSettings
from ropewalk.cluster.engine.saves import pieces_of
from ropewalk.cluster.store.node_store import Traces
from ropewalk.cluster.store.sessions import SessionFiles
from ropewalk.kernels.gear import ChunkSizes, chunk_limits
from ropewalk.kernels.keys import Tokens, as_tokens, content_key, root_key
from ropewalk.scheduler.plan import Plan, Scratch
from ropewalk.scheduler.planner import ChunkIndex


@dataclass(slots=True)
class Turn:
    """One request of a session, or of none: the `tokens` to be answered, and what its lineage `held` of them.

    `sent` are the tokens as the client sent them. `reuse`: position-independent chunks may be taken. `epoch` is that of
    the session's history.
    """

    sent: Tokens
    tokens: Tokens
    reuse: bool
    held: Held | None = None
    scratch: Scratch | None = None
    wants_splice: bool = False
    epoch: str = ""
    fallbacks: list[str] = field(default_factory=list)


class Sessions:
    """Sessions of one model. `files` opens a tenant's."""

    def __init__(self, files: Callable[[str], SessionFiles], chunks: ChunkSizes) -> None:
        self._files = files
        self._chunks = chunks

    def names(self, tenant: str) -> list[str]:
        """Return the tenant's sessions, most recently used first."""
        return self._files(tenant).names()

    def delete(self, tenant: str, session: str) -> bool:
        """Forget a session; False when it is not known."""
        return self._files(tenant).delete(session)

    def history(self, tenant: str, session: str) -> History:
        """Return what a session holds, not to be mutated. Raises `KeyError` when it is not known."""
        history = self._files(tenant).get(session)
        if not history.branches:
            raise KeyError(session)
        return history

    def tokens(self, tenant: str, session: str) -> Tokens:
        """Return the history that a session used last. Raises `KeyError` when it is not known."""
        return self.history(tenant, session).branches[0].lineage.tokens

    def histories(self, tenant: str) -> Iterator[History]:
        """Yield what all sessions of a tenant hold, not to be mutated. Reads all their files."""
        files = self._files(tenant)
        return (files.get(name) for name in files.names())

    def traces(self, tenant: str, session: str, span: Span) -> Traces:
        """Return by what chunks of a span are known in all branches, as far as that can be told without them: by how
        the text is cut, and by what their left neighbours are called.
        """
        contents, places = set(), set()
        for branch in self.history(tenant, session).branches:
            tokens, rows = branch.lineage.tokens, branch.lineage.rows
            limits = chunk_limits(tokens, self._chunks)
            edges = sorted({0, *limits, *(edge for row in rows for edge in (row.start, row.end))})
            for a, b in (*pairwise(edges), *pairwise([0, *limits])):
                if a < b and span.start < b and a < span.end:
                    contents.add(content_key(tenant, tokens[a:b]))
            parent = root_key(tenant)
            for row in rows:
                if span.start < row.end and row.start < span.end and row.offset == 0:
                    places.add((parent, int(tokens[row.start])))
                parent = row.chunk
        return Traces(frozenset(), frozenset(contents), frozenset(places))

    def describe(self, tenant: str, session: str) -> dict[str, Any] | None:
        """Return what a session holds, JSON-able; None when it is not known."""
        history = self._files(tenant).get(session)
        if not history.branches and not history.forgotten:
            return None
        branches = []
        for branch, (parent, shared) in zip(history.branches, tree(history.branches), strict=True):
            lineage = branch.lineage
            inexact = lineage.marks[0].start if lineage.marks else len(lineage.tokens)
            branches.append(
                {
                    "num_tokens": len(lineage.tokens),
                    "num_tokens_with_kv": sum(rows.end - rows.start for rows in lineage.rows),
                    "exact_until": inexact,
                    "lineage": lineage.marks[-1].label if lineage.marks else None,
                    "branches_from": parent,
                    "branches_at": shared,
                    "used_s": branch.used_s,
                }
            )
        return {
            "session": session,
            "edits": "amortize" if history.amortize else None,
            "forgotten": history.forgotten,
            "branches": branches,
        }

    def begin(self, settings: RequestSettings, tokens: Tokens, *, can_turn: bool) -> Turn:
        """Resolve one request. `can_turn`: the model's keys can be turned. Raises `DirectiveError`."""
        turn = Turn(tokens, tokens, reuse=settings.mode == "reuse", wants_splice=settings.expects_splice)
        edits = directive_set(settings.directives, len(tokens))
        forgotten_from = edits.forgotten_from() if edits is not None else None
        turn.reuse = turn.reuse and forgotten_from is None and settings.edits != "forget"
        if edits is not None:
            turn.tokens = as_tokens(edits.apply(tokens.tolist()))
            turn.wants_splice |= any(edit.mode is Mode.AMORTIZE for edit in edits)
        scratch = scratch_set(settings.scratch, len(tokens), has_directives=edits is not None)
        if settings.session is None:
            if turn.wants_splice:
                turn.fallbacks.append("no_session")
            turn.scratch = _scratch(scratch, keeps_rest=False)
            return turn
        history = self._files(settings.tenant).get(settings.session)
        turn.reuse = turn.reuse and not history.forgotten
        if settings.apply and history.branches and history.branches[0].sent is not None:
            turn.sent = history.branches[0].sent
        elif not settings.apply:
            lacking = history.to_apply(turn.tokens)
            if lacking is not None:
                turn.tokens, edits = as_tokens(lacking.apply(turn.tokens.tolist())), None
                scratch = _merged(lacking.moved(span) for span in scratch)
        held = self._held(settings, turn, history, tokens, edits, can_turn=can_turn)
        turn.held = held if held is None or forgotten_from is None else held.until(forgotten_from)
        turn.scratch = _scratch(scratch, keeps_rest=can_turn and self._amortizes(settings, history))
        if turn.scratch is not None and turn.held is not None:
            turn.held = turn.held.until(turn.scratch.start)
        if settings.edits == "forget" or forgotten_from is not None:
            # Now, not at the end: whatever becomes of this request, and of others that run, the text is gone.
            is_edited = forgotten_from is not None or history.is_edited(turn.tokens)
            history = self._forget(settings.tenant, settings.session, drop=is_edited)
        turn.epoch = history.epoch
        return turn

    def _held(
        self,
        settings: RequestSettings,
        turn: Turn,
        history: History,
        original: Tokens,
        edits: DirectiveSet | None,
        *,
        can_turn: bool,
    ) -> Held | None:
        if settings.edits == "forget" or not (self._amortizes(settings, history) or turn.wants_splice):
            return None
        if not can_turn:
            turn.fallbacks.append("splice_refused")
            return None
        held = history.held(turn.tokens, settings.session or "", reuse=turn.reuse, original=original, edits=edits)
        if held is not None and held.edited_from is not None and held.edited_from < SINK:
            turn.fallbacks.append("edit_in_sink")
            return None
        if held is None and turn.wants_splice:
            turn.fallbacks.append("lineage_lost")
        return held

    @staticmethod
    def _amortizes(settings: RequestSettings, history: History) -> bool:
        return settings.edits == "amortize" or (settings.edits is None and history.amortize)

    def _forget(self, tenant: str, session: str, *, drop: bool) -> History:
        files = self._files(tenant)

        def change(history: History) -> None:
            if drop:
                history.forget()
            history.forgotten = True

        if files.get(session).forgotten and not drop:
            return files.get(session)
        if not files.update(session, change):  # rather no history than one that remembers
            files.delete(session)
        return files.get(session)

    def lost(self, turn: Turn, plan: Plan, index: ChunkIndex) -> bool:
        """Tell whether a plan lacks rows of the lineage because the store has them no more."""
        if turn.held is None or any(segment.spliced for segment in plan.segments):
            return False
        begin = turn.held.inexact_from
        return any(rows.end > begin and index.by_chain(rows.chunk) is None for rows in turn.held.rows)

    def end(self, settings: RequestSettings, turn: Turn, plan: Plan, answer: Sequence[int]) -> None:
        """Note what the session holds after a turn. `answer`: token ids whose KV was computed, without the last one."""
        if settings.session is None or not settings.keep:
            return
        if not settings.rotate and any(segment.spliced for segment in plan.segments):
            return  # a study's: these rows stand where they were computed, not where they should
        added = np.asarray(answer, np.int32)
        tokens = np.concatenate([turn.tokens, added])
        is_edited_here = turn.sent is not turn.tokens and (settings.apply or not settings.directives)
        sent = np.concatenate([turn.sent, added]) if is_edited_here else None
        lineage = Lineage(tokens, self._rows(tokens, settings.tenant, plan), plan.marks)
        if turn.scratch is not None:
            lineage = without_scratch(lineage, turn.scratch)
        if settings.scratch and sent is not None:
            sent = without(sent, settings.scratch)
        branch = Branch(lineage, sent, time.time())

        def change(history: History) -> None:
            if history.accepts(turn.epoch):
                history.amortize |= settings.apply and turn.wants_splice
                history.add(branch)

        self._files(settings.tenant).update(settings.session, change)

    def _rows(self, tokens: Tokens, tenant: str, plan: Plan) -> tuple[Rows, ...]:
        """Return where the KV of a history lies, or will lie once it is saved."""
        taken = [
            Rows(s.start, s.end, s.chunk, s.offset, s.start - s.turn)
            for s in plan.segments
            if s.reused or s.end <= plan.exact_end
        ]
        rows: list[Rows] = []
        position = 0
        own = [Rows(p.start, p.end, p.chain, 0, p.start) for p in pieces_of(tokens, tenant, self._chunks, plan)]
        for start, end in [*((row.start, row.end) for row in taken), (len(tokens), len(tokens))]:
            rows += [row.part(position, start) for row in own if max(row.start, position) < min(row.end, start)]
            position = end
        return tuple(sorted([*rows, *taken], key=lambda row: row.start))


def without_scratch(lineage: Lineage, scratch: Scratch) -> Lineage:
    """Return what is left of a history once its scratch is dropped: as after an edit that removes it."""
    drop = removal(scratch.spans, len(lineage.tokens))
    if not scratch.keeps_rest:
        lineage = replace(lineage, rows=lineage.until(scratch.start).rows)
    held = carry(lineage, [Match(kept.start, kept.new_start, kept.end - kept.start) for kept in drop.kept()], "")
    marks = held.marks
    if any(rows.end > scratch.start for rows in held.rows):
        # Another name than in the turn itself: no block of that is found by its own tokens, should they repeat.
        marks = (*marks, Mark(scratch.start, f"{scratch.label}/dropped"))
    return Lineage(without(lineage.tokens, scratch.spans), held.rows, marks)


def without(tokens: Tokens, spans: Sequence[Sequence[int]]) -> Tokens:
    """Return tokens without some spans of them."""
    return as_tokens(removal(spans, len(tokens)).apply(tokens.tolist()))


def removal(spans: Sequence[Sequence[int]], num_tokens: int) -> DirectiveSet:
    """Return the edit that removes spans. Raises `DirectiveError`."""
    return DirectiveSet((Directive(Span(*span), (), Mode.FORGET) for span in spans), num_tokens)


def scratch_set(spans: Sequence[Sequence[int]], num_tokens: int, *, has_directives: bool) -> list[Span]:
    """Read scratch as `RequestSettings` carry it. Raises `DirectiveError`."""
    if not spans:
        return []
    if has_directives:
        raise DirectiveError("directives on tokens and scratch cannot be mixed in a request", "scratch")
    try:
        edits = removal(spans, num_tokens)
    except DirectiveError as error:
        message, field = (text.replace("directives[", "scratch[") for text in (str(error), error.field))
        raise DirectiveError(message, field.removesuffix(".span")) from None
    return [edit.span for edit in edits]


def _scratch(spans: Sequence[Span], *, keeps_rest: bool) -> Scratch | None:
    if not spans:
        return None
    # Rows behind an attention sink that is gone are no splice, as with directives.
    return Scratch(tuple(spans), f"{SCRATCH}{uuid.uuid4().hex}", keeps_rest and spans[0].start >= SINK)


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return spans without empty ones, and as one where they overlap."""
    out: list[Span] = []
    for span in sorted(span for span in spans if span.start < span.end):
        if out and span.start < out[-1].end:
            out[-1] = Span(out[-1].start, max(out[-1].end, span.end))
        else:
            out.append(span)
    return out


def directive_set(directives: Sequence[Sequence[Any]], num_tokens: int) -> DirectiveSet | None:
    """Read directives as `RequestSettings` carry them. Raises `DirectiveError`."""
    if not directives:
        return None
    return DirectiveSet(
        (Directive(Span(start, end), tuple(ids), Mode(mode)) for start, end, ids, mode in directives), num_tokens
    )
