"""Plans as values: which tokens of a prompt are computed, which are taken from where, and what of it is stored.

They are made in `planner.py`, whose docstring has the picture, and carried out in `ropewalk.cluster.engine`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.agents.lineage import NOWHERE, REUSE, Mark
from ropewalk.kernels.gear import ChunkSizes, chunk_limits
from ropewalk.kernels.keys import Domain, Tokens, chain_key, lineage_key, root_key


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions `[start, end)` taken from rows `[offset, offset + end - start)` of a chunk, turned by `turn`.

    `reused` tells KV taken from another place or context from KV that this prompt's own prefill made; `spliced`, that
    it comes from the session's lineage.
    """

    start: int
    end: int
    chunk: str
    offset: int
    turn: int
    reused: bool
    spliced: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk to be saved: positions `[start, end)` of a prompt, under its own name and behind its neighbour's."""

    start: int
    end: int
    chain: str
    parent: str
    domain: Domain


@dataclass(frozen=True, slots=True)
class Plan:
    """How a prompt of `num_tokens` is served.

    `segments` are ascending and disjoint; they cover the exact prefix and the runs, and unless `batched` the gaps
    between them too, which stages compute and store. `stages` are the prompt lengths of the internal requests,
    ascending. `runs` are the reused position ranges, `exact_end` the end of the exact prefix. `marks` say from where on
    KV is whose; KV before the first one is exact. `unsaved` position ranges are never stored.
    """

    num_tokens: int
    exact_end: int
    runs: tuple[tuple[int, int], ...]
    stages: tuple[int, ...]
    segments: tuple[Segment, ...]
    batched: bool = False
    marks: tuple[Mark, ...] = ()
    unsaved: tuple[tuple[int, int], ...] = ()

    @property
    def first_inexact(self) -> int | None:
        """The first position whose KV may not be exact; what follows it is not, either. None: all exact."""
        return self.marks[0].start if self.marks else None

    @property
    def num_reused(self) -> int:
        return sum(end - start for start, end in self.runs)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the computed ranges, ascending; the last one ends at `num_tokens`."""
        starts = [self.exact_end, *(end for _, end in self.runs)]
        ends = [*(start for start, _ in self.runs), self.num_tokens]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

    def to_params(self) -> dict[str, Any]:
        """JSON-able form, for `kv_transfer_params`."""
        return {
            "num_tokens": self.num_tokens,
            "exact_end": self.exact_end,
            "runs": [list(run) for run in self.runs],
            "stages": list(self.stages),
            "segments": [[s.start, s.end, s.chunk, s.offset, s.turn, s.reused, s.spliced] for s in self.segments],
            "batched": self.batched,
            "marks": [list(mark) for mark in self.marks],
            "unsaved": [list(span) for span in self.unsaved],
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Plan:
        """The inverse of `to_params`."""
        return cls(
            params["num_tokens"],
            params["exact_end"],
            tuple((start, end) for start, end in params["runs"]),
            tuple(params["stages"]),
            tuple(Segment(*segment) for segment in params["segments"]),
            params["batched"],
            tuple(Mark(*mark) for mark in params["marks"]),
            tuple((start, end) for start, end in params["unsaved"]),
        )

    def check_integrity(self) -> None:
        """Assert the picture in the docstring of `planner.py`."""
        position = 0
        for start, end in [(0, self.exact_end), *self.runs]:
            assert position <= start <= end < max(self.num_tokens, 1), self
            position = end
        position = 0
        gaps = dict(self.gaps()) if self.batched else {}
        for segment in self.segments:
            assert segment.start == gaps.get(position, position) < segment.end, self
            position = segment.end
        assert position == (self.runs[-1][1] if self.runs else self.exact_end), self
        assert list(self.stages) == [end for _, end in self.gaps()[:-1]], self
        starts = [self.exact_end, *(mark.start for mark in self.marks)]
        assert starts == sorted(starts), self
        assert not self.runs or self.marks, self
        assert not self.runs or self.marks[0].start <= self.runs[0][0], self


@dataclass(frozen=True, slots=True)
class Scratch:
    """Parts of a prompt that leave nothing behind: `spans`, ascending, disjoint, not empty.

    From the first one on, KV belongs to a domain that nobody else is in: `label`, never used again. `keeps_rest`: what
    stands between and behind them may be stored in that domain.
    """

    spans: tuple[tuple[int, int], ...]
    label: str
    keeps_rest: bool

    @property
    def start(self) -> int:
        return self.spans[0][0]

    @property
    def mark(self) -> Mark:
        return Mark(self.start, self.label)

    @property
    def unsaved(self) -> tuple[tuple[int, int], ...]:
        """What is not stored."""
        return self.spans if self.keeps_rest else ((self.start, NOWHERE),)


def empty_plan(num_tokens: int, scratch: Scratch | None = None) -> Plan:
    """Return the plan to compute everything."""
    if scratch is None:
        return Plan(num_tokens, 0, (), (), ())
    return Plan(num_tokens, 0, (), (), (), marks=(scratch.mark,), unsaved=scratch.unsaved)


def pieces(
    tokens: Tokens,
    tenant: str,
    sizes: ChunkSizes,
    runs: Sequence[tuple[int, int]],
    marks: Sequence[Mark],
    unsaved: Sequence[tuple[int, int]] = (),
) -> list[Piece]:
    """Cut what was computed of `tokens` into chunks to be saved: content-defined limits, every edge of a run, and where
    another domain begins.

    Ranges inside `runs` came from the store, those inside `unsaved` may not go there: they are left out, and of the
    latter nothing enters the names of what follows. Pieces before the first mark are exact.
    """
    edges = [*(edge for span in (*runs, *unsaved) for edge in span), *(mark.start for mark in marks)]
    cuts = sorted({*chunk_limits(tokens, sizes), *(edge for edge in edges if edge <= len(tokens))})
    out = []
    parent = root_key(tenant)
    domain = Domain.EXACT
    waiting = list(marks)
    start = 0
    for end in cuts:
        if start == end:  # a run that starts at 0 (no carve-out)
            continue
        while waiting and waiting[0].start <= start:
            label = waiting.pop(0).label
            if label != REUSE or domain is Domain.LINEAGE:
                parent = lineage_key(parent, label)
            domain = Domain.LINEAGE if label != REUSE or domain is Domain.LINEAGE else Domain.REUSE
        if any(first <= start < last for first, last in unsaved):
            parent, start = lineage_key(parent, f"{end - start} tokens of scratch"), end
            continue
        chain = chain_key(parent, tokens[start:end], domain)
        if not any(run_start <= start < run_end for run_start, run_end in runs):
            out.append(Piece(start, end, chain, parent, domain))
        parent, start = chain, end
    return out
