"""Which anchor a replica should warm next, or why none. Pure: no Ray, no clock, no randomness.

CacheScout (arXiv 2608.14624, "Prefetch") warms the predicted agent's anchor in idle time. What is decided here:

1. *who is wanted*: agents that are expected within `MAX_TURNS` turns in live sessions of predictable programs, weighed
   by `sum over sessions of 1 / turns`;
2. *where*: each such session has one home among the replicas of the agent's model (`home_of`), by the router's own
   ranking, which all replicas work out alike from the same snapshot, so that one of them warms the anchor;
3. *whether*: not what is warm, nor an agent again within `min_interval_s`, nor while too much was warmed for nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ropewalk.scheduler.routing import ReplicaView, RequestHints, rank_replicas
from ropewalk.scheduler.snapshot import LIVE_S, Snapshot, Stand

MAX_TURNS = 4.0
"""Turns of a session within which an agent must be expected: in a group chat everybody is within a round of six, and
what is warmed earlier than needed is evicted, or the session has ended, before it is used."""

MAX_HOMES = 128
"""Homes looked for in one decision, those of the most recent sessions first: each takes some ten microseconds of the
replica's event loop."""

MIN_OUTCOMES = 8
"""Prewarms whose outcome must be known before their share of waste says anything."""

MAX_OUTCOMES, OUTCOME_WINDOW_S = 64, 600.0
"""Outcomes remembered, and seconds for which they are: the sliding window of the waste budget."""

PAUSE_S, MAX_PAUSE_S = 30.0, 1800.0
"""First and longest pause after too much waste; each one in a row is twice as long as the one before."""

MAX_OUTSTANDING = 256
"""Prewarmed anchors whose use is awaited: as many as a book has agents."""


@dataclass(frozen=True, slots=True)
class PrewarmSettings:
    """What can be set; every default is CacheScout's or has its reason beside it.

    `min_handovers` must have been seen of a program before its predictability counts. From `N` hand-overs an entropy
    over `m` successors is too low by about `(m - 1) / (2 N ln 2)` bits (Miller 1955): with four and 32, 0.07.
    """

    r_min: float = 0.3
    min_handovers: int = 32
    idle_s: float = 0.25  # in a program that goes on at once, the next request comes within some 50 ms
    min_interval_s: float = 2.0
    max_waste: float = 0.5  # of two tokens that are warmed one must be used
    window_s: float = 60.0  # for which an anchor that was used or warmed is taken to be in the cache

    def __post_init__(self) -> None:
        if not 0 <= self.r_min <= 1:
            raise ValueError(f"prewarm.r_min must be 0 to 1, got {self.r_min!r}")
        if not 0 < self.max_waste <= 1:
            raise ValueError(f"prewarm.max_waste must be above 0 and at most 1, got {self.max_waste!r}")
        if self.min_handovers < 1:
            raise ValueError(f"prewarm.min_handovers must be at least 1, got {self.min_handovers!r}")
        for name in ("idle_s", "min_interval_s", "window_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"prewarm.{name} must be a positive number of seconds, got {value!r}")


class Verdict(StrEnum):
    """Why an anchor is warmed, or none is; in the order in which a candidate gets so far."""

    NO_SESSIONS = "no-sessions"
    UNPREDICTABLE = "unpredictable"
    NOBODY_EXPECTED = "nobody-expected"
    NO_ANCHOR = "no-anchor"
    ALL_WARM = "all-warm"
    TOO_SOON = "too-soon"
    ELSEWHERE = "elsewhere"
    PAUSED = "paused"
    WARM = "warm"


@dataclass(frozen=True, slots=True)
class Decision:
    """The agent whose anchor is to be warmed, None when there is none; `verdict` says why."""

    agent: str | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Situation:
    """What one replica knows at `now_s`, in seconds since the epoch. `reuse`: its requests reuse histories by default.

    `anchors`: tokens of the anchors known for this replica's model, by agent. `used`: when each was used or warmed here
    last. `tried`: when a prewarm of each was started last. The snapshot's own word on what is warm here counts too.
    """

    snapshot: Snapshot
    model: str
    replica: str
    anchors: Mapping[str, int]
    used: Mapping[str, float]
    tried: Mapping[str, float]
    now_s: float
    reuse: bool = False


def decide(situation: Situation, settings: PrewarmSettings, *, paused: bool = False) -> Decision:
    """The anchor to warm next on this replica. `paused`: too much was warmed for nothing (`WasteBudget`)."""
    snapshot, now_s = situation.snapshot, situation.now_s
    reached: set[Verdict] = {Verdict.NO_SESSIONS}
    wanted: dict[str, float] = {}
    num_homes = 0
    for stand in snapshot.stands:
        if now_s - stand.last_s > LIVE_S:
            continue
        if not is_predictable(stand, snapshot, settings):
            reached.add(Verdict.UNPREDICTABLE)
            continue
        reached.add(Verdict.NOBODY_EXPECTED)
        for agent, turns in snapshot.outlooks.get(stand.past, ()):
            if turns > MAX_TURNS or num_homes == MAX_HOMES:
                continue
            verdict = _obstacle(agent, situation, settings)
            if verdict is None:
                num_homes += 1
                if home_of(agent, stand, snapshot, situation.model, situation.reuse) == situation.replica:
                    wanted[agent] = wanted.get(agent, 0.0) + 1.0 / max(turns, 1.0)
                    continue
                verdict = Verdict.ELSEWHERE
            reached.add(verdict)
    if wanted and not paused:
        return Decision(min(wanted, key=lambda agent: (-wanted[agent], agent)), Verdict.WARM)
    if wanted:
        reached.add(Verdict.PAUSED)
    return Decision(None, max(reached, key=list(Verdict).index))


def is_predictable(stand: Stand, snapshot: Snapshot, settings: PrewarmSettings) -> bool:
    """Whether the program that a session runs has shown that it can be foretold."""
    found = snapshot.groups.get(stand.group) if stand.group is not None else None
    return found is not None and found.r >= settings.r_min and found.num_handovers >= settings.min_handovers


def home_of(agent: str, stand: Stand, snapshot: Snapshot, model: str, reuse: bool = False) -> str | None:
    """The replica of a model to which the router would send the agent's turn in this session if none had anything to
    do; None when the model has no replica that prewarms.

    It is the router's own ranking, from the snapshot alone: where the agent spoke last in the session, else where the
    anchor was used or warmed, else where the session was last (`ropewalk.scheduler.routing`).
    """
    views = [ReplicaView(replica, 0, node) for replica, node in snapshot.replicas.get(model, ())]
    hints = RequestHints(stand.session, agent, reuse=reuse)
    ranking = rank_replicas(hints, views, snapshot, agent=agent)
    return next(iter(ranking.order), None)


def last_use(agent: str, situation: Situation) -> float:
    """When an agent's anchor was used or warmed on this replica last; `-inf` when never."""
    view = situation.snapshot.agents.get(agent)
    told = [w.last_s for w in view.warm if w.replica == situation.replica] if view is not None else []
    return max([situation.used.get(agent, -math.inf), *told])


def _obstacle(agent: str, situation: Situation, settings: PrewarmSettings) -> Verdict | None:
    """Why an agent is not to be warmed on this replica, wherever its sessions stand; None when it may be."""
    view = situation.snapshot.agents.get(agent)
    if agent not in situation.anchors or (view is not None and view.model not in ("", situation.model)):
        return Verdict.NO_ANCHOR
    if situation.now_s - last_use(agent, situation) <= settings.window_s:
        return Verdict.ALL_WARM
    if situation.now_s - situation.tried.get(agent, -math.inf) < settings.min_interval_s:
        return Verdict.TOO_SOON
    return None


@dataclass(slots=True)
class WasteBudget:
    """Pauses prewarming when too large a share of prewarmed tokens is not used. Times are seconds, never going back.

    A pause that ends starts afresh: until `MIN_OUTCOMES` outcomes are known again, nothing is judged.
    """

    max_waste: float
    num_pauses: int = 0
    _outcomes: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=MAX_OUTCOMES))
    _paused_until: float = -math.inf
    _pause_s: float = PAUSE_S

    def settle(self, now_s: float, num_tokens: int, num_used: int) -> None:
        """Note what became of one prewarm: `num_used` of its tokens were used."""
        assert 0 <= num_used <= num_tokens
        if num_tokens == 0 or self.is_paused(now_s):
            return
        self._outcomes.append((now_s, num_tokens, num_used))
        share = self.waste(now_s)
        if share is None:
            return
        if share > self.max_waste:
            self._paused_until = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self.num_pauses += 1
            self._outcomes.clear()
        else:
            self._pause_s = PAUSE_S

    def is_paused(self, now_s: float) -> bool:
        """Whether nothing should be warmed now."""
        return now_s < self._paused_until

    def waste(self, now_s: float) -> float | None:
        """Share of prewarmed tokens that were not used, None while too few outcomes are known."""
        while self._outcomes and now_s - self._outcomes[0][0] > OUTCOME_WINDOW_S:
            self._outcomes.popleft()
        if len(self._outcomes) < MIN_OUTCOMES:
            return None
        warmed = sum(tokens for _, tokens, _ in self._outcomes)
        return 1.0 - sum(used for _, _, used in self._outcomes) / warmed

    def status(self, now_s: float) -> dict[str, Any]:
        """JSON-able."""
        return {
            "paused": self.is_paused(now_s),
            "paused_for_s": round(max(self._paused_until - now_s, 0.0), 1),
            "next_pause_s": self._pause_s,
            "waste": self.waste(now_s),
            "max_waste": self.max_waste,
            "num_pauses": self.num_pauses,
        }


@dataclass(slots=True)
class Ledger:
    """Prewarms whose use is awaited. Each ends as used, wasted, or both in part: an outcome, `(tokens, used)`.

    All methods return the outcomes that came to be known.
    """

    window_s: float
    _outstanding: OrderedDict[str, tuple[float, int, int]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._outstanding)

    def warmed(self, agent: str, now_s: float, anchor_tokens: int, num_tokens: int) -> list[tuple[int, int]]:
        """Note that `num_tokens` of an anchor were loaded or computed; the others were there."""
        assert 0 <= num_tokens <= anchor_tokens
        outcomes = self.expire(now_s)
        if agent in self._outstanding:  # warmed again before it was used
            outcomes.append((self._outstanding.pop(agent)[2], 0))
        if num_tokens:
            self._outstanding[agent] = (now_s, anchor_tokens, num_tokens)
        if len(self._outstanding) > MAX_OUTSTANDING:
            outcomes.append((self._outstanding.popitem(last=False)[1][2], 0))
        return outcomes

    def used(self, agent: str, now_s: float, num_cached: int) -> list[tuple[int, int]]:
        """Note that a request of the agent found `num_cached` tokens of the anchor at the beginning of its prompt.

        What was there before the prewarm is the anchor's beginning, so what was warmed is used from its end.
        """
        outcomes = self.expire(now_s)
        found = self._outstanding.pop(agent, None)
        if found is not None:
            _, anchor_tokens, num_tokens = found
            there_before = anchor_tokens - num_tokens
            outcomes.append((num_tokens, min(max(num_cached - there_before, 0), num_tokens)))
        return outcomes

    def expire(self, now_s: float) -> list[tuple[int, int]]:
        """End those that were not used within the window."""
        outcomes = []
        for agent, (then_s, _, num_tokens) in list(self._outstanding.items()):
            if now_s - then_s > self.window_s:
                del self._outstanding[agent]
                outcomes.append((num_tokens, 0))
        return outcomes
