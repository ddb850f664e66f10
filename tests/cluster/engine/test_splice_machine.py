"""Any interleaving of turns, edits, branches, evictions and restarts, of sessions of two tenants: every row that a
plan takes is one that this request may be served.

No engine runs: what a plan computes is stored as it would be, with a note of who computed it behind what.
"""

import itertools
import shutil
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from ropewalk.agents.directives import SINK, DirectiveError
from ropewalk.agents.lineage import REUSE
from ropewalk.cluster.engine.request import RequestSettings
from ropewalk.cluster.engine.saves import pieces_of
from ropewalk.cluster.engine.sessions import Sessions
from ropewalk.cluster.store.chunk import ChunkHeader
from ropewalk.cluster.store.sessions import SessionFiles
from ropewalk.kernels.gear import ChunkSizes, anchors
from ropewalk.kernels.keys import HEAD_LENGTH, Domain, as_tokens, content_key, head_key
from ropewalk.scheduler.plan import Plan
from ropewalk.scheduler.planner import PlannerSettings, make_plan

SIZES = ChunkSizes(mean=48, minimum=32, maximum=96)
TENANTS = ("one", "two")
SESSIONS = ("a", "b")
ANSWER = 5

words = st.lists(st.integers(0, 3), min_size=1, max_size=4)  # numbers of texts that everybody shares
EDITS = st.sampled_from(["amortize"] * 7 + [None] * 2 + ["forget"])


def text(number: int, length: int = 60) -> list[int]:
    return np.random.default_rng(number).integers(0, 50_000, length).tolist()


@dataclass(frozen=True)
class Stored:
    """A chunk, and what is true of it: the session it belongs to, and what its rows came after."""

    header: ChunkHeader
    session: str | None
    behind_reuse: bool
    before: tuple[int, ...] | None
    """All tokens before it, if they are exactly what its rows saw."""


class Index:
    """Chunks of one tenant, in dictionaries."""

    def __init__(self) -> None:
        self.chunks: dict[str, Stored] = {}

    def by_chain(self, chain):
        stored = self.chunks.get(chain)
        return stored and stored.header

    def _where(self, holds):
        return [s.header for s in self.chunks.values() if s.header.domain is not Domain.LINEAGE and holds(s.header)]

    def by_content(self, content):
        return self._where(lambda h: h.content == content)

    def by_head(self, head):
        return self._where(lambda h: len(h) >= HEAD_LENGTH and head_key(h.tenant, h.tokens) == head)

    def by_anchor(self, head):
        def holds(h):
            starts = (start for start in anchors(h.tokens) if start + HEAD_LENGTH <= len(h))
            return any(head_key(h.tenant, h.tokens[start:]) == head for start in starts)

        return self._where(holds)


class Splices(RuleBasedStateMachine):
    """Prompts that were asked are remembered with their tenant and session, to be gone on from."""

    prompts = Bundle("prompts")

    @initialize(block_size=st.sampled_from([None, 16, 32]), boundary=st.sampled_from([0, 16]))
    def begin(self, block_size, boundary):
        self.root = Path(tempfile.mkdtemp(prefix="ropewalk-machine-"))
        self.planner = PlannerSettings(SIZES, min_run=40, block_size=block_size, boundary=boundary)
        self.index = {tenant: Index() for tenant in TENANTS}
        self.clock = itertools.count(1)
        self.scratch: list[list[int]] = []
        """How all scratch began: none of it is ever found in a chunk or a history."""
        self.since_forget: dict[tuple[str, str], set[str]] = {}
        """Of sessions that had something removed for good: chunks that stand for what they sent since then."""
        self.told_to_splice: set[tuple[str, str]] = set()
        self.told_to_forget: set[tuple[str, str]] = set()
        self.own: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        """By session, chunks that it computed or has in common with others as exact prefix."""
        self.restart()

    def teardown(self):
        if hasattr(self, "root"):
            shutil.rmtree(self.root, ignore_errors=True)

    @rule()
    def restart(self):
        """Another process: what it knows is in files."""
        self.files = {tenant: SessionFiles(self.root / tenant) for tenant in TENANTS}
        self.sessions = Sessions(self.files.__getitem__, SIZES)

    @rule(
        target=prompts,
        tenant=st.sampled_from(TENANTS),
        session=st.sampled_from([*SESSIONS * 3, None]),
        mode=st.sampled_from(["exact", "exact", "reuse"]),
        edits=EDITS,
        parts=words,
    )
    def a_first_turn(self, tenant, session, mode, edits, parts):
        tokens = [*text(100), *itertools.chain(*map(text, parts))]
        return self._serve(RequestSettings(tenant=tenant, session=session, mode=mode, edits=edits), tokens)

    @rule(
        target=prompts,
        before=prompts,
        mode=st.sampled_from(["exact", "exact", "reuse"]),
        edits=EDITS,
        parts=words,
        as_stranger=st.sampled_from([False, False, False, True]),
    )
    def a_next_turn(self, before, mode, edits, parts, as_stranger):
        tenant, session, tokens = before
        if as_stranger:
            session = {"a": "b", "b": None, None: "a"}[session]
        tokens = [*tokens, *itertools.chain(*map(text, parts))]
        return self._serve(RequestSettings(tenant=tenant, session=session, mode=mode, edits=edits), tokens)

    @rule(
        target=prompts,
        before=prompts,
        mode=st.sampled_from(["exact", "exact", "reuse"]),
        edits=EDITS,
        start=st.integers(20, 250),
        removed=st.integers(0, 100),
        added=st.integers(0, 50),
        parts=words,
    )
    def an_edited_history(self, before, mode, edits, start, removed, added, parts):
        tenant, session, tokens = before
        stub = text(next(self.clock) + 1000, added) if added else []
        tokens = [*tokens[:start], *stub, *tokens[start + removed :], *itertools.chain(*map(text, parts))]
        return self._serve(RequestSettings(tenant=tenant, session=session, mode=mode, edits=edits), tokens)

    @rule(
        target=prompts,
        before=prompts,
        start=st.integers(20, 250),
        removed=st.integers(0, 100),
        added=st.integers(0, 20),
        mode=st.sampled_from(["amortize"] * 6 + ["forget"]),
        apply=st.booleans(),
    )
    def a_directive(self, before, start, removed, added, mode, apply):
        tenant, session, tokens = before
        stub = text(next(self.clock) + 1000, added) if added else []
        request = RequestSettings(tenant=tenant, session=session, directives=[[start, start + removed, stub, mode]])
        if apply and session is not None:
            try:
                tokens = self.sessions.tokens(tenant, session).tolist()
            except KeyError:
                return before
            request = replace(request, apply=True, edits="amortize")
        valid = start + removed <= len(tokens) and (removed or added) and (start >= SINK or mode == "forget")
        try:
            return self._serve(request, tokens)
        except DirectiveError:
            assert not valid
            return before

    @rule(
        target=prompts,
        before=prompts,
        mode=st.sampled_from(["exact", "exact", "reuse"]),
        edits=EDITS,
        length=st.integers(1, 90),
        parts=words,
        is_dropped=st.sampled_from([True, True, True, False]),
        in_the_middle=st.booleans(),
    )
    def a_turn_with_scratch(self, before, mode, edits, length, parts, is_dropped, in_the_middle):
        tenant, session, tokens = before
        start = len(tokens) // 2 if in_the_middle else len(tokens)
        scratch = text(next(self.clock) + 9000, length)
        if is_dropped and length >= 12:
            self.scratch.append(scratch[:12])
        behind = [*tokens[start:], *itertools.chain(*map(text, parts))]
        request = RequestSettings(tenant=tenant, session=session, mode=mode, edits=edits)
        request = replace(request, scratch=[[start, start + length]])
        *_, said = self._serve(request, [*tokens[:start], *scratch, *behind])
        answer = said[len(tokens[:start]) + length + len(behind) :]
        return tenant, session, [*tokens[:start], *([] if is_dropped else scratch), *behind, *answer]

    @rule(prompt=prompts, seed=st.integers(0, 10**6), share=st.floats(0, 0.4))
    def some_chunks_are_evicted(self, prompt, seed, share):
        rng = np.random.default_rng(seed)
        index = self.index[prompt[0]]
        index.chunks = {chain: stored for chain, stored in index.chunks.items() if rng.random() > share}

    @invariant()
    def histories_are_sound(self):
        for tenant, files in getattr(self, "files", {}).items():
            for session in SESSIONS:
                for branch in files.get(session).branches:
                    branch.lineage.check_integrity()
            assert files.counters["session_damaged"] == files.counters["session_failed"] == 0, tenant

    @invariant()
    def scratch_is_nowhere(self):
        for tenant in TENANTS if hasattr(self, "index") else ():
            held = [stored.header.tokens for stored in self.index[tenant].chunks.values()]
            for session in SESSIONS:
                for branch in self.files[tenant].get(session).branches:
                    held += [branch.lineage.tokens, *([] if branch.sent is None else [branch.sent])]
            everything = b"".join(as_tokens(tokens).tobytes() for tokens in held)
            assert not any(as_tokens(begun).tobytes() in everything for begun in self.scratch[-3:])

    def _serve(self, request: RequestSettings, tokens: list[int]):
        tenant, session = request.tenant, request.session
        index, owner = self.index[tenant], (request.tenant, request.session)
        before = self._epoch(owner)
        turn = self.sessions.begin(request, as_tokens(tokens), can_turn=True)
        forgets = request.edits == "forget" or any(mode == "forget" for *_, mode in request.directives)
        if forgets:
            self.told_to_forget.add(owner)
        if self._epoch(owner) != before and owner in self.told_to_forget:
            self.since_forget[owner] = set()
        if request.apply and turn.wants_splice:
            self.told_to_splice.add(owner)
        plan = make_plan(
            turn.tokens, tenant, index, self.planner, reuse=turn.reuse, held=turn.held, scratch=turn.scratch
        )
        assert plan.num_tokens == len(turn.tokens)
        self._check(request, turn, plan, index, owner, forgets)
        answer = text(next(self.clock) + 5000, ANSWER)
        self._store(turn.tokens, answer, plan, index, request, owner)
        self.sessions.end(request, turn, plan, answer)
        return tenant, session, [*tokens, *answer]

    def _epoch(self, owner) -> str | None:
        tenant, session = owner
        return self.files[tenant].get(session).epoch if session is not None else None

    def _check(self, request, turn, plan: Plan, index: Index, owner, forgets):
        tokens, session = turn.tokens, request.session
        asked = (
            request.edits == "amortize" or turn.wants_splice or (request.edits is None and owner in self.told_to_splice)
        )
        own = {piece.chain for piece in pieces_of(tokens, request.tenant, SIZES, plan)}
        for segment in plan.segments:
            if not segment.reused and segment.end > plan.exact_end:
                assert segment.chunk in own
                continue
            stored = index.chunks[segment.chunk]
            header, length = stored.header, segment.end - segment.start
            assert header.tenant == request.tenant
            assert np.array_equal(header.tokens[segment.offset :][:length], tokens[segment.start : segment.end])
            assert segment.turn == segment.start - header.start - segment.offset
            if not segment.reused:
                assert header.domain is Domain.EXACT
                assert stored.before == tuple(tokens[: header.start].tolist())
                continue
            assert segment.start >= self.planner.carve_out
            if segment.spliced:
                assert asked, "nobody asked for a splice"
                assert header.domain is not Domain.LINEAGE or stored.session == session
                assert request.mode == "reuse" or not stored.behind_reuse
                assert request.mode == "reuse" or segment.chunk in self.own[owner], "taken from elsewhere by reuse"
            else:
                assert request.mode == "reuse"
                assert header.domain is not Domain.LINEAGE
                assert session is None or owner not in self.told_to_forget, "its rows may have seen what was removed"
                assert not forgets
            if segment.spliced and session is not None and owner in self.since_forget and not forgets:
                assert segment.chunk in self.since_forget[owner], "its rows may have seen what was removed"
        exact = {segment.chunk for segment in plan.segments if not segment.reused}
        self.own[owner] |= own | exact
        if owner in self.since_forget:
            self.since_forget[owner] |= own | {segment.chunk for segment in plan.segments}
        assert plan.first_inexact is not None or not plan.runs

    def _store(self, tokens, answer, plan: Plan, index: Index, request, owner):
        everything = as_tokens([*tokens.tolist(), *answer])
        for piece in pieces_of(everything, request.tenant, SIZES, plan):
            self.own[owner].add(piece.chain)
            if owner in self.since_forget:
                self.since_forget[owner].add(piece.chain)
            if piece.chain in index.chunks:
                continue
            part = everything[piece.start : piece.end]
            marks = [mark for mark in plan.marks if mark.start <= piece.start]
            assert (piece.domain is Domain.EXACT) == (not marks)
            content = content_key(request.tenant, part)
            index.chunks[piece.chain] = Stored(
                ChunkHeader(piece.chain, piece.parent, content, request.tenant, piece.domain, piece.start, part),
                request.session if piece.domain is Domain.LINEAGE else None,
                any(mark.label == REUSE for mark in marks),
                tuple(everything[: piece.start].tolist()) if piece.domain is Domain.EXACT else None,
            )


TestSplices = Splices.TestCase
TestSplices.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
