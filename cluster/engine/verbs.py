"""What may be done with the KV of a span of a session's history: keep it, let it age, share it, or purge it.

A pin is a use in the future: it is soft, ends by itself, and decays as its time comes nearer. A chunk that was told to
age is judged by the time of last use that it was given, whatever is expected of it, until it is read again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ropewalk.agents.directives import DirectiveError, Span
from ropewalk.agents.lineage import NOWHERE, SCRATCH, Rows
from ropewalk.cluster.engine.purge import doomed
from ropewalk.cluster.engine.sessions import Sessions
from ropewalk.cluster.store.chunk import ChunkCorrupt, ChunkHeader
from ropewalk.cluster.store.node_store import NodeStore, Traces
from ropewalk.cluster.store.worth import told
from ropewalk.kernels.keys import HEAD_LENGTH, Domain, chain_key, lineage_key

PIN_SHARE = 0.25
"""Of the memory's budget, at most so much is pinned by a tenant."""

SHARED = "shared"
"""Stands for the left neighbour of a shared chunk: what it was computed behind is nobody else's business."""


class Verbs:
    """Verbs on one tenant's sessions.

    Each raises `KeyError` for a session that is not known, `DirectiveError` for a span that is not in its history.
    """

    def __init__(self, sessions: Sessions, store: NodeStore) -> None:
        self._sessions = sessions
        self._store = store

    def pin(self, session: str, span: Span | None, ttl_s: float) -> dict[str, Any]:
        """Keep the chunks of a span for `ttl_s` seconds more than others, as far as the tenant's quota reaches."""
        room = int(PIN_SHARE * self._store.budget_bytes) - self._store.pinned_bytes()
        until = time.time() + ttl_s
        pinned = 0
        for header in self._headers(session, span):
            if pinned >= room:
                return {"pinned_bytes": pinned, "quota_reached": True}
            pinned += self._store.keep_until(header.chain, until)
        return {"pinned_bytes": pinned, "quota_reached": False}

    def decay(self, session: str, span: Span | None, age_s: float) -> dict[str, Any]:
        """Let the chunks of a span count as not used for `age_s` seconds, pinned ones too."""
        at = told(max(time.time() - age_s, 1.0))
        return {"decayed_bytes": sum(self._store.keep_until(h.chain, at) for h in self._headers(session, span))}

    def share(self, session: str, span: Span | None) -> dict[str, Any]:
        """Offer a span to other sessions of the tenant that reuse chunks. What is exact or reused they find already.

        What was computed with a scratch in view is not offered.
        """
        count = 0
        marks = self._sessions.history(self._store.tenant, session).branches[0].lineage.marks
        scratch = next((mark.start for mark in marks if mark.label.startswith(SCRATCH)), NOWHERE)
        for header in self._headers(session, span, before=scratch):
            if header.domain is not Domain.LINEAGE or len(header) < HEAD_LENGTH:
                continue
            try:
                _, rows = self._store.read(header.chain)
            except (OSError, ChunkCorrupt):
                continue
            offered = ChunkHeader(
                _shared_name(header),
                lineage_key(header.parent, SHARED),
                header.content,
                header.tenant,
                Domain.REUSE,
                header.start,
                header.tokens,
            )
            count += self._store.put(offered, rows)
        return {"shared_chunks": count}

    def traces(self, session: str, span: Span) -> Traces:
        """Return by what chunks are known that hold a span or were computed behind it, of all branches.

        The span may reach further than this node's history does: another's may be longer.
        """
        history = self._sessions.history(self._store.tenant, session)
        rows = [rows for branch in history.branches for rows in branch.lineage.rows if rows.end > span.start]
        names = {row.chunk for row in rows}
        for header in map(self._store.by_chain, list(names)):
            if header is not None:
                names.add(_shared_name(header))
        holding = [self._store.by_chain(row.chunk) for row in rows if row.start < span.end]
        found = [header for header in holding if header is not None]
        return Traces(
            frozenset(names),
            frozenset(header.content for header in found),
            frozenset((header.parent, int(header.tokens[0])) for header in found),
        ) | self._sessions.traces(self._store.tenant, session, span)  # what is gone from here may be on another node

    def purge(self, traces: Traces) -> set[str]:
        """Remove from this node what bears traces of a purge, and all that was computed behind it; return the names."""
        names = doomed(self._store.headers(), self._sessions.histories(self._store.tenant), traces)
        removed = {name for name in names if self._store.remove([name])}
        self._store.forget_worths()
        return removed

    def check(self, session: str, span: Span) -> None:
        """Raise `DirectiveError` unless a span is one of the history that the session used last."""
        _check(span, len(self._sessions.tokens(self._store.tenant, session)))

    def _headers(self, session: str, span: Span | None, before: int = NOWHERE) -> Iterator[ChunkHeader]:
        lineage = self._sessions.history(self._store.tenant, session).branches[0].lineage
        span = span if span is not None else Span(0, len(lineage.tokens))
        _check(span, len(lineage.tokens))
        end = min(span.end, before)
        inside: list[Rows] = [rows for rows in lineage.rows if rows.start < end and span.start < rows.end]
        for chunk in dict.fromkeys(rows.chunk for rows in inside):
            header = self._store.by_chain(chunk)
            if header is not None:
                yield header


def _shared_name(header: ChunkHeader) -> str:
    return chain_key(lineage_key(header.parent, SHARED), header.tokens, Domain.REUSE)


def _check(span: Span, num_tokens: int) -> None:
    if not 0 <= span.start < span.end <= num_tokens:
        raise DirectiveError(f"[{span.start}, {span.end}) is no span of the {num_tokens} tokens held", "span")
