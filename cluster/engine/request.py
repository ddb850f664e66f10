"""What travels with one request: the settings that the HTTP layer gives the engine, and the report that comes back."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import xxhash

from ropewalk.kernels.keys import Tokens, as_tokens
from ropewalk.scheduler.plan import Plan

PARAMS_KEY = "ropewalk"
"""The one name that Ropewalk uses inside vLLM's `kv_transfer_params`."""

Mode = Literal["exact", "reuse"]
Edits = Literal["amortize", "forget"]


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """How one request wants its KV to be found.

    `key` names the request between the HTTP layer and the engine and is never shown to a client (empty: nobody asks
    for its report). `mode` is `exact`
    (only KV that equals what a prefill would compute) or `reuse` (position-independent chunks are welcome too). KV is
    never shared between tenants.

    `session` names the conversation, `agent` who has its turn; `recognised` is the agent that an unnamed one is taken
    for. `edits` says what it means that its history has changed: `amortize` splices,
    `forget` computes everything from the change on and drops what was held; None is as the session was told before,
    else a new prompt like any other. `directives` are `[start, end, replacement ids, mode]` each; with `apply`, they
    hold from now on: the client's later prompts are edited likewise. `expects_splice`: the request was edited before it
    was rendered, so that it is worth a word if there is nothing to splice. `scratch`: spans `[start, end]` of tokens
    that are attended to now, and neither stored nor found by anybody. `spans_of`: `digest` of the tokens that the spans
    were said of; a prompt that was rendered otherwise is refused.

    `prewarm`: nobody asked for this request; it is not counted among those that were (`PlannedEngine.prewarm`).

    The rest is for studies of quality, and never set by the HTTP layer. `rotate=False` takes reused keys as they were
    computed, at the wrong positions. `boundary` overrides how many
    tokens at the beginning of each reused stretch are computed. `keep=False` leaves nothing behind: what the request
    computes is neither stored nor found by others. `at_s` is when the turn begins, in seconds, for replays that are
    faster than what they replay.
    """

    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    mode: Mode = "exact"
    session: str | None = None
    agent: str | None = None
    recognised: str | None = None
    tenant: str = "default"
    explain: bool = False
    edits: Edits | None = None
    directives: Sequence[Sequence[Any]] = ()
    apply: bool = False
    expects_splice: bool = False
    scratch: Sequence[Sequence[int]] = ()
    spans_of: str | None = None
    prewarm: bool = False
    rotate: bool = True
    boundary: int | None = None
    keep: bool = True
    at_s: float | None = None

    def to_params(self) -> dict[str, Any]:
        """The value of `kv_transfer_params["ropewalk"]`."""
        return asdict(self)

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> RequestSettings:
        """The inverse of `to_params`. Raises `ValueError` on an unknown mode and `TypeError` on unknown fields."""
        settings = cls(**params)
        if settings.mode not in ("exact", "reuse"):
            raise ValueError(f"mode must be 'exact' or 'reuse', not {settings.mode!r}")
        return settings


def digest(tokens: Sequence[int] | Tokens) -> str:
    """Return what tells prompts apart: two that differ hardly ever have the same."""
    return xxhash.xxh3_128_hexdigest(as_tokens(tokens).tobytes())


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """One range of the prompt as planned: computed, or taken from a chunk and turned by `turn` positions."""

    start: int
    end: int
    source: Literal["compute", "exact", "reuse", "splice"]
    chunk: str | None = None
    turn: int = 0


def describe(plan: Plan) -> list[PlannedRange]:
    """Return the plan as ranges of the prompt, ascending, for a reader."""
    ranges = [PlannedRange(start, end, "compute") for start, end in plan.gaps()]
    for segment in plan.segments:
        if segment.reused:
            source: Literal["reuse", "splice"] = "splice" if segment.spliced else "reuse"
            ranges.append(PlannedRange(segment.start, segment.end, source, segment.chunk, segment.turn))
        elif segment.end <= plan.exact_end:  # the others hold what stages compute
            ranges.append(PlannedRange(segment.start, segment.end, "exact", segment.chunk))
    return sorted(ranges, key=lambda planned: planned.start)


@dataclass(slots=True)
class RequestReport:
    """What happened to one prompt. `tokens` counts prompt tokens, and its four values sum to `num_prompt_tokens`.

    `computed` were prefilled, `exact` came from a cache that equals a prefill, `reused` came from position-independent
    chunks, `spliced` from the session's `lineage`. Counts follow vLLM's own accounting (`num_cached_tokens`).
    `num_loaded` of the cached ones came from the store; the others were in vLLM's prefix cache.
    """

    mode: Mode
    lineage: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_stages: int = 0
    num_computed_by_stages: int = 0
    num_loaded: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"computed": 0, "exact": 0, "reused": 0, "spliced": 0})
    plan: list[PlannedRange] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, as shown to a client that asked for `explain`."""
        return asdict(self)
