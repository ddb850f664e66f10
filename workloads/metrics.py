"""From the record of every turn to the figures of a replay."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ropewalk.workloads.config import ReplayConfig

PERCENTILES = (50, 95, 99)

Key = TypeVar("Key", str, int)


@dataclass(slots=True)
class TurnRecord:
    """What happened to one turn. Times in seconds since the start of the replay.

    `intended` is when the turn should have started: in an open loop the arrival of its session (later turns: the end
    of the turn before). Latencies count from there, not from the moment of sending, so that a client that falls
    behind does not hide the delay (coordinated omission).
    """

    session: int
    turn: int
    agent: str
    body_sha256: str
    estimated_prompt_tokens: int
    intended: float
    started: float
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    status: int | None = None
    error: str | None = None
    warmup: bool = False
    ropewalk_tokens: dict[str, int] | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token."""
        return (self.token_times[0] - self.intended) * 1e3 if self.token_times else None

    @property
    def turn_ms(self) -> float:
        """Time to the end of the reply."""
        return (self.ended - self.intended) * 1e3

    @property
    def itl_ms(self) -> list[float]:
        """Inter-token latencies: gaps between chunks with content (an endpoint may put several tokens in one)."""
        return [float(gap) * 1e3 for gap in np.diff(self.token_times)]

    def to_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        return {
            "session": self.session,
            "turn": self.turn,
            "agent": self.agent,
            "intended_s": round(self.intended, 6),
            "started_s": round(self.started, 6),
            "ttft_ms": None if self.ttft_ms is None else round(self.ttft_ms, 3),
            "turn_ms": round(self.turn_ms, 3),
            "itl_ms": [round(gap, 3) for gap in self.itl_ms],
            "prompt_tokens": self.prompt_tokens,
            "estimated_prompt_tokens": self.estimated_prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason,
            "status": self.status,
            "error": self.error,
            "warmup": self.warmup,
            "ropewalk_tokens": self.ropewalk_tokens,
            "body_sha256": self.body_sha256,
        }


@dataclass(slots=True)
class ReplayResult:
    """All turns of one replay, and what can be said about them."""

    config: ReplayConfig
    model: str
    source: str
    records: list[TurnRecord]
    wall_s: float  # time in which this replay's sessions were running
    measured_s: float  # the part of it after warm-up
    aborted: bool = False

    @property
    def measured(self) -> list[TurnRecord]:
        """Turns after warm-up."""
        return [record for record in self.records if not record.warmup]

    @property
    def answered(self) -> list[TurnRecord]:
        """Measured turns with a complete reply."""
        return [record for record in self.measured if record.error is None]

    def summary(self) -> dict[str, Any]:
        """The figures: see `summarize`; with the hash of all bodies, throughput, and what was excluded.

        `body_sha256` covers everything that was sent in all turns (warm-up included) but the fields `model` and
        `ropewalk`, which name the arm, not the work. It doesn't depend on timing.
        """
        warmup = [record for record in self.records if record.warmup]
        seconds = self.measured_s
        figures = summarize(self.measured)
        return {
            **figures,
            "turns_per_s": len(self.answered) / seconds if seconds else 0.0,
            "output_tokens_per_s": figures["completion_tokens"] / seconds if seconds else 0.0,
            "wall_s": self.wall_s,
            "aborted": self.aborted,
            "warmup": {"requests": len(warmup), "errors": sum(record.error is not None for record in warmup)},
            "body_sha256": combined_hash(self.records),
            "source": self.source,
            "model": self.model,
        }

    def by_agent(self) -> dict[str, dict[str, Any]]:
        """`summarize` for each agent that spoke, busiest first."""
        return _grouped(self.measured, lambda record: record.agent, key=lambda item: -len(item[1]))

    def by_turn(self) -> dict[int, dict[str, Any]]:
        """`summarize` for each position in the session."""
        return _grouped(self.measured, lambda record: record.turn, key=lambda item: item[0])


def summarize(records: Sequence[TurnRecord]) -> dict[str, Any]:
    """Counts, token sums, cached share and latency distributions; only complete replies enter the last four.

    `cached_token_share` is cached over prompt tokens as the endpoint reports them. Endpoints may leave the field out
    when nothing was cached, so a missing one counts as 0; `cached_tokens_reported` is false if no reply had it.
    """
    answered = [record for record in records if record.error is None]
    prompt_tokens = sum(record.prompt_tokens or 0 for record in answered)
    cached_tokens = sum(record.cached_tokens or 0 for record in answered)
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    explained = [record.ropewalk_tokens for record in answered if record.ropewalk_tokens]
    return {
        "requests": len(records),
        "errors": len(records) - len(answered),
        "error_kinds": dict(sorted(errors.items(), key=lambda item: -item[1])),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "completion_tokens": sum(record.completion_tokens or 0 for record in answered),
        "cached_token_share": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "cached_tokens_reported": any(record.cached_tokens is not None for record in answered),
        "ropewalk_tokens": {
            kind: sum(tokens.get(kind, 0) for tokens in explained) for kind in sorted({k for t in explained for k in t})
        },
        "ttft_ms": distribution(record.ttft_ms for record in answered if record.ttft_ms is not None),
        "turn_ms": distribution(record.turn_ms for record in answered),
        "itl_ms": distribution(gap for record in answered for gap in record.itl_ms),
    }


def distribution(values: Iterable[float]) -> dict[str, float | int | None]:
    """Mean and percentiles (linear interpolation between ranks); all `None` if there are no values."""
    array = np.fromiter(values, dtype=np.float64)
    if not array.size:
        return {"count": 0, "mean": None, **{f"p{p}": None for p in PERCENTILES}, "max": None}
    percentiles = np.percentile(array, PERCENTILES)
    return {
        "count": int(array.size),
        "mean": float(array.mean()),
        **{f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)},
        "max": float(array.max()),
    }


def combined_hash(records: Iterable[TurnRecord]) -> str:
    """SHA-256 over the body hashes in the order of session and turn, whenever they were sent."""
    digest = hashlib.sha256()
    for record in sorted(records, key=lambda record: (record.session, record.turn)):
        digest.update(bytes.fromhex(record.body_sha256))
    return digest.hexdigest()


def _grouped(
    records: Sequence[TurnRecord], by: Callable[[TurnRecord], Key], key: Callable[[tuple[Key, list[TurnRecord]]], Any]
) -> dict[Key, dict[str, Any]]:
    groups: dict[Key, list[TurnRecord]] = {}
    for record in records:
        groups.setdefault(by(record), []).append(record)
    return {name: summarize(group) for name, group in sorted(groups.items(), key=key)}
