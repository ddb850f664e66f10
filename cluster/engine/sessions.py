"""From a request of a session to what is planned: directives applied, edits found, rows of its lineage looked up; and,
once it is answered, what the session holds from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ropewalk.agents.directives import SINK, Directive, DirectiveSet, Mode, Span
from ropewalk.agents.history import Branch, History, tree
from ropewalk.agents.lineage import Held, Lineage, Rows
from ropewalk.cluster.engine.request import RequestSettings
from ropewalk.cluster.engine.saves import pieces_of
from ropewalk.cluster.store.sessions import SessionFiles
from ropewalk.kernels.gear import ChunkSizes
from ropewalk.kernels.keys import Tokens, as_tokens
from ropewalk.scheduler.planner import ChunkIndex, Plan


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
        if settings.session is None:
            if turn.wants_splice:
                turn.fallbacks.append("no_session")
            return turn
        history = self._files(settings.tenant).get(settings.session)
        turn.reuse = turn.reuse and not history.forgotten
        if settings.apply and history.branches and history.branches[0].sent is not None:
            turn.sent = history.branches[0].sent
        elif not settings.apply:
            applied = history.as_applied(turn.tokens)
            if applied is not turn.tokens:
                turn.tokens, edits = applied, None
        held = self._held(settings, turn, history, tokens, edits, can_turn=can_turn)
        turn.held = held if held is None or forgotten_from is None else held.until(forgotten_from)
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
        amortize = settings.edits == "amortize" or (settings.edits is None and history.amortize)
        if settings.edits == "forget" or not (amortize or turn.wants_splice):
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


def directive_set(directives: Sequence[Sequence[Any]], num_tokens: int) -> DirectiveSet | None:
    """Read directives as `RequestSettings` carry them. Raises `DirectiveError`."""
    if not directives:
        return None
    return DirectiveSet(
        (Directive(Span(start, end), tuple(ids), Mode(mode)) for start, end, ids, mode in directives), num_tokens
    )
