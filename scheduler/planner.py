"""From token ids and what the store holds to a plan: which tokens are computed, which are taken from where.

    0        e       f = first_inexact                                   T-1  T
    |  exact | gap 0 |  run 1  | gap 1 |      run 2      |    last gap    |
      chunks  computed  chunks  computed   chunks, turned   computed by the request itself
              by stage 0        by stage 1

`[0, e)` is the longest chain of chunks that equals this prompt from position 0: exact KV. Behind it, runs of chunks
with the same token ids at any position may serve a request in *reuse* mode. vLLM's scheduler takes one external hit per
request, directly behind the local one, so each gap before a run is computed by an internal request of its own (a
*stage*: the prompt up to the gap's end). Everything from `f` on depends on reused KV and belongs to the reuse domain.

Where vLLM has a prefix cache, all stages and the request itself run in one step of the engine (`batched`): each finds
the blocks of the one before, which that step computes, in the prefix cache. So gaps end at a block's end: the first
tokens of a run are computed as well. Otherwise they run one after the other, and take over through the store.
Positions below the carve-out are never reused: the attention sink belongs to the start of the sequence (Irminsul).

A *splice* takes runs from the lineage of one session instead (`ropewalk.agents.lineage`): rows that the session holds,
wherever an edit has moved them. From each of the plan's `marks` on, KV belongs to another domain as well: that of
reuse, or a lineage's.

A run may consist of chunks that were computed behind different texts. With *boundary recompute*, the first tokens of
each stretch from one source are computed anew, so that they see what now stands before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from ropewalk.agents.lineage import NOWHERE, REUSE, Held, Mark, Rows, label_of
from ropewalk.kernels.gear import ChunkSizes, anchors, chunk_limits
from ropewalk.kernels.keys import (
    HEAD_LENGTH,
    Domain,
    Tokens,
    chain_key,
    common_prefix,
    content_key,
    head_key,
    root_key,
)
from ropewalk.scheduler.plan import Plan, Scratch, Segment, pieces

MAX_RUNS = 32
"""Runs taken for a prompt, the longest ones: each costs a request of its own, with the prompt up to it."""


class Chunk(Protocol):
    """What the planner needs to know of a stored chunk. `start` is the position that it was computed at."""

    @property
    def chain(self) -> str: ...
    @property
    def parent(self) -> str: ...
    @property
    def domain(self) -> Domain: ...
    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> Tokens: ...


class ChunkIndex(Protocol):
    """Look-ups into a store of one tenant's chunks. Every answer is a candidate: the planner compares token ids."""

    def by_chain(self, chain: str) -> Chunk | None: ...
    def by_content(self, content: str) -> Sequence[Chunk]: ...
    def by_head(self, head: str) -> Sequence[Chunk]: ...
    def by_anchor(self, head: str) -> Sequence[Chunk]: ...


@dataclass(frozen=True)
class PlannerSettings:
    """`carve_out`: positions below it are never reused. `min_run`: shortest run, in tokens, that is worth a stage at a
    prompt's beginning; `per_position`: what attention to one position costs a token, as a share of its other costs.
    `block_size`: of vLLM's prefix cache, in tokens; None when it has none. `boundary`: tokens at the beginning of each
    stretch from one source that are computed although they are stored. `second_pass`: look misses up once more,
    at anchors inside chunks.
    """

    chunks: ChunkSizes = field(default_factory=ChunkSizes)
    carve_out: int = 32
    min_run: int = 64
    per_position: float = 0.0
    block_size: int | None = None
    boundary: int = 0
    second_pass: bool = True

    def is_worth_a_stage(self, start: int, end: int) -> bool:
        """Tell whether taking positions `[start, end)` from the store saves more than the stage before them costs."""
        return (end - start) * (1 + self.per_position * (start + end) / 2) >= self.min_run

    def __post_init__(self) -> None:
        if self.carve_out < 0:
            raise ValueError(f"carve_out must not be negative, not {self.carve_out!r}")
        if self.min_run < 1:
            raise ValueError(f"min_run must be at least 1, not {self.min_run!r}")
        if self.boundary < 0:
            raise ValueError(f"boundary must not be negative, not {self.boundary!r}")


@dataclass(frozen=True, slots=True)
class _Match:
    """Rows `[offset, offset + length)` of `chunk` hold the tokens from some position on."""

    chunk: Chunk
    offset: int
    length: int


def make_plan(
    tokens: Tokens,
    tenant: str,
    index: ChunkIndex,
    settings: PlannerSettings,
    *,
    reuse: bool,
    held: Held | None = None,
    scratch: Scratch | None = None,
) -> Plan:
    """Plan one prompt. `tokens` are its ids, `[T]` int32; `reuse` allows position-independent chunks, and `held` what
    the session's lineage has for the prompt.

    The last token is always computed: its logits are what the request is for. So is everything from `scratch` on.
    """
    whole = tokens
    if scratch is not None:
        tokens = tokens[: scratch.start + 1]  # one more: the last one is always computed
        held = held.until(scratch.start) if held is not None else None
    limits = chunk_limits(tokens, settings.chunks)
    exact = _exact_prefix(tokens, tenant, index, limits)
    spliced: list[list[Segment]] = []
    marks: list[Mark] = []
    if held is not None:
        kept = _until(exact, held.inexact_from)
        spliced = _held_runs(tokens, index, held, kept[-1].end if kept else 0, settings)
        if spliced:  # else the lineage is lost, and this prompt like any other
            exact, marks = kept, _marks(held, spliced)
    exact_end = exact[-1].end if exact else 0
    spliced_end = spliced[-1][-1].end if spliced else exact_end
    found = _find_runs(tokens, tenant, index, limits, spliced_end, settings) if reuse else []
    if found and all(mark.label != REUSE for mark in marks):
        marks.append(Mark(found[0][0].start, REUSE))
    found = spliced + found
    runs = [(run[0].start, run[-1].end) for run in found]
    gap_starts = [exact_end, *(end for _, end in runs)]
    stages = [start for gap_start, (start, _) in zip(gap_starts, runs, strict=False) if gap_start < start]

    batched = settings.block_size is not None
    segments = list(exact)
    # Unless they run together, what the stages compute is taken from the chunks that they save.
    computed = [] if batched else pieces(tokens, tenant, settings.chunks, runs, marks)
    for gap_start, run in zip(gap_starts, found, strict=False):
        for piece in computed:
            start, end = max(piece.start, gap_start), min(piece.end, run[0].start)
            if start < end:
                segments.append(Segment(start, end, piece.chain, start - piece.start, 0, reused=False))
        segments.extend(run)
    unsaved: tuple[tuple[int, int], ...] = ()
    if scratch is not None:
        marks.append(scratch.mark)
        unsaved = scratch.unsaved
    plan = Plan(len(whole), exact_end, tuple(runs), tuple(stages), tuple(segments), batched, tuple(marks), unsaved)
    plan.check_integrity()
    return plan


def _until(segments: Sequence[Segment], end: int) -> list[Segment]:
    """The part of ascending segments before position `end`."""
    return [replace(segment, end=min(segment.end, end)) for segment in segments if segment.start < end]


def _held_runs(
    tokens: Tokens, index: ChunkIndex, held: Held, exact_end: int, settings: PlannerSettings
) -> list[list[Segment]]:
    """Return what the store still has of a lineage's rows behind the exact prefix, as runs of adjoining segments."""
    first, last = max(held.inexact_from, exact_end, settings.carve_out), len(tokens) - 1
    stretches: list[list[Segment]] = []
    for rows in held.rows if first < last else ():
        if rows.end <= first or rows.start >= last:
            continue
        rows = rows.part(first, last)
        chunk, length = index.by_chain(rows.chunk), rows.end - rows.start
        if chunk is None or chunk.start + rows.offset != rows.source:
            continue
        if not np.array_equal(chunk.tokens[rows.offset : rows.offset + length], tokens[rows.start : rows.end]):
            continue
        segment = Segment(rows.start, rows.end, rows.chunk, rows.offset, rows.turn, reused=True, spliced=True)
        if stretches and stretches[-1][-1].end == segment.start:
            stretches[-1].append(segment)
        else:
            stretches.append([segment])
    return _worthwhile(stretches, index, exact_end, settings, NOWHERE if held.edited_from is None else held.edited_from)


def _marks(held: Held, runs: Sequence[Sequence[Segment]]) -> list[Mark]:
    """Return the marks of a prompt that is served these runs of a lineage; what is behind them is computed on them."""
    marks = [mark for mark in held.marks if mark.start < runs[-1][-1].end]
    moved = [s for run in runs for s in run if held.edited_from is not None and s.start >= held.edited_from]
    if moved:
        rows = [Rows(s.start, s.end, s.chunk, s.offset, s.start - s.turn) for s in moved]
        marks.append(Mark(moved[0].start, label_of(held.owner, marks, rows)))
        first = moved[0].start
        marks += [Mark(max(start, first), label) for start, label in held.moved_marks if start < moved[-1].end]
    return marks


def _exact_prefix(tokens: Tokens, tenant: str, index: ChunkIndex, limits: Sequence[int]) -> list[Segment]:
    """Follow the chain of exact chunks from position 0; the last one may match in part."""
    segments: list[Segment] = []
    parent = root_key(tenant)
    start = 0
    last = len(tokens) - 1
    for end in limits:
        chain = chain_key(parent, tokens[start:end], Domain.EXACT)
        chunk = index.by_chain(chain)
        if chunk is None or chunk.start != start or not np.array_equal(chunk.tokens, tokens[start:end]):
            break
        if start < last:
            segments.append(Segment(start, min(end, last), chain, 0, 0, reused=False))
        parent, start = chain, end
    if last - start >= HEAD_LENGTH:
        best: Chunk | None = None
        length = 0
        for chunk in index.by_head(head_key(tenant, tokens[start:])):
            if chunk.parent == parent and chunk.domain == Domain.EXACT and chunk.start == start:
                common = common_prefix(chunk.tokens, tokens[start:last])
                if common > length:
                    best, length = chunk, common
        if best is not None:
            segments.append(Segment(start, start + length, best.chain, 0, 0, reused=False))
    return segments


def _find_runs(
    tokens: Tokens,
    tenant: str,
    index: ChunkIndex,
    limits: Sequence[int],
    exact_end: int,
    settings: PlannerSettings,
) -> list[list[Segment]]:
    """Find the ranges behind the exact prefix that stored chunks can serve, each a list of adjoining segments."""
    last = len(tokens) - 1
    floor = max(exact_end, settings.carve_out)
    places = {floor, *limits}
    if settings.second_pass:
        places.update(anchors(tokens))
    stretches: list[list[Segment]] = []
    for place in sorted(places):
        # Places in the carve-out count, too: what is found there is taken from the carve-out's end on.
        if (place < floor and (place < exact_end or floor > settings.carve_out)) or place >= last:
            continue
        match = _best_match(tokens, tenant, index, limits, place, None, settings)
        skipped = max(floor - place, 0)
        if match is None or match.length < skipped + HEAD_LENGTH:
            continue
        match, place = _Match(match.chunk, match.offset + skipped, match.length - skipped), place + skipped
        run, position = _extend_left(tokens, index, match, place, floor), place
        if run and run[-1].chunk == match.chunk.chain:  # a match in the middle of a chunk
            position = run.pop().start
            more = place - position
            match = _Match(match.chunk, match.offset - more, match.length + more)
        while match is not None:
            run.append(_segment(match, position))
            position += match.length
            match = _best_match(tokens, tenant, index, limits, position, match.chunk.chain, settings)
        floor = position
        if stretches and stretches[-1][-1].end == run[0].start:
            stretches[-1].extend(run)
        else:
            stretches.append(run)
    return _worthwhile(stretches, index, exact_end, settings)


def _worthwhile(
    stretches: Sequence[Sequence[Segment]],
    index: ChunkIndex,
    begin: int,
    settings: PlannerSettings,
    boundary_from: int = 0,
) -> list[list[Segment]]:
    """Return the runs that are taken of stretches of adjoining segments, the first of which may start at `begin`.

    The boundary is computed of those that start at `boundary_from` or later.
    """
    runs: list[list[Segment]] = []
    for stretch in stretches:
        for part in _by_source(stretch, index) if settings.boundary else [stretch]:
            run = _from(part, part[0].start + (settings.boundary if part[0].start >= boundary_from else 0))
            gap_start = runs[-1][-1].end if runs else begin
            if run and settings.block_size is not None and run[0].start > gap_start:
                run = _from(run, -(-run[0].start // settings.block_size) * settings.block_size)
            # Where nothing is to be computed before it, a run costs no stage.
            if run and (run[0].start == gap_start or settings.is_worth_a_stage(run[0].start, run[-1].end)):
                runs.append(run)
    most = sorted(runs, key=lambda run: run[0].start - run[-1].end)[:MAX_RUNS]
    return sorted(most, key=lambda run: run[0].start)


def _by_source(run: Sequence[Segment], index: ChunkIndex) -> list[list[Segment]]:
    """Part a run where a chunk was not computed behind the one that now stands before it."""
    parts = [[run[0]]]
    for before, segment in pairwise(run):
        chunk = index.by_chain(segment.chunk)
        if chunk is not None and chunk.parent == before.chunk and segment.turn == before.turn:
            parts[-1].append(segment)
        else:
            parts.append([segment])
    return parts


def _from(run: Sequence[Segment], start: int) -> list[Segment]:
    """The part of a run from position `start` on."""
    out = []
    for segment in run:
        skipped = max(start - segment.start, 0)
        if segment.start + skipped < segment.end:
            out.append(replace(segment, start=segment.start + skipped, offset=segment.offset + skipped))
    return out


def _best_match(
    tokens: Tokens,
    tenant: str,
    index: ChunkIndex,
    limits: Sequence[int],
    position: int,
    parent: str | None,
    settings: PlannerSettings,
) -> _Match | None:
    """Return the longest match at `position`: a whole chunk by content, else the beginning of one by its head, else
    what stands in the middle of one by an anchor.

    Among equally long ones: exact before reuse domain, then the one whose left neighbour is `parent`, then the newest.
    """
    last = len(tokens) - 1
    if last - position < HEAD_LENGTH:
        return None
    candidates: list[tuple[Chunk, int]] = []
    end = limits[int(np.searchsorted(limits, position, side="right"))]
    if end <= last:
        candidates.extend((chunk, 0) for chunk in index.by_content(content_key(tenant, tokens[position:end])))
    if not candidates:
        candidates.extend((chunk, 0) for chunk in index.by_head(head_key(tenant, tokens[position:])))
    if not candidates and settings.second_pass:
        head = tokens[position : position + HEAD_LENGTH]
        for chunk in index.by_anchor(head_key(tenant, head)):
            candidates.extend((chunk, offset) for offset in _find(chunk.tokens, head))
    best: _Match | None = None
    best_rank: tuple[int, bool, bool] = (HEAD_LENGTH - 1, True, True)
    for chunk, offset in candidates:
        length = common_prefix(chunk.tokens[offset:], tokens[position:last])
        rank = (length, chunk.domain == Domain.EXACT, chunk.parent == parent)
        if length >= HEAD_LENGTH and rank > best_rank:
            best, best_rank = _Match(chunk, offset, length), rank
    return best


def _extend_left(tokens: Tokens, index: ChunkIndex, match: _Match, position: int, floor: int) -> list[Segment]:
    """Return the segments that reach from `position` back towards `floor`: what the match's chunk holds left of the
    match, then its left neighbours.
    """
    segments: list[Segment] = []
    chunk: Chunk | None = match.chunk
    end = match.offset
    while position > floor and chunk is not None:
        common = common_prefix(chunk.tokens[:end][::-1], tokens[floor:position][::-1])
        if common:
            position -= common
            segments.insert(0, _segment(_Match(chunk, end - common, common), position))
        if common < end:
            break
        source_start = chunk.start
        chunk = index.by_chain(chunk.parent)
        if chunk is not None:
            end = len(chunk.tokens)
            if chunk.start + end != source_start:
                break
    return segments


def _segment(match: _Match, position: int) -> Segment:
    turn = position - (match.chunk.start + match.offset)
    return Segment(position, position + match.length, match.chunk.chain, match.offset, turn, reused=True)


def _find(tokens: Tokens, part: Tokens) -> list[int]:
    """Return where `part` stands in `tokens`."""
    starts = np.flatnonzero(tokens[: len(tokens) - len(part) + 1] == part[0]).tolist()
    return [start for start in starts if np.array_equal(tokens[start : start + len(part)], part)]
