"""`Foresight`: the rule of retention that keeps what is expected to be used soonest, and what it learns for that: who
speaks next, how long sessions pause, and how they end.

No clock: times are in seconds and come with the calls.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ropewalk.scheduler.markov import MAX_ORDER, VariableOrder
from ropewalk.scheduler.retention import MAX_BLOCKS, MAX_SESSIONS, RecentAgents, Retention, Use

Past = tuple[str, ...]

HORIZON = 12
"""Turns of a session that are looked ahead."""

BEAM = 12
"""Pasts that are followed at each turn ahead, likeliest first."""

LEAST = 0.004
"""Probability below which a continuation is not followed."""

SILENCE = 6.0
"""Mean pauses after which a session is taken to have ended."""

NEWCOMERS = 0.3
"""Share of an agent's turns that is expected to come from sessions that nobody knows yet."""

END = "\0end"
"""What follows the last turn of a session, for the learner."""

MAX_TURNS = 256
"""Turns of a session that are told apart when it is learned how long sessions are."""

LOSS_FADES = 0.98
"""What is left of a predictor's losses with each new one."""

UNFORESEEN = 0.02
"""Probability below which nobody foresaw a turn."""

SURPRISE_FADES = 0.98
"""What is left of the share of unforeseen turns with each new one."""

STALE_AFTER = 64
"""Observations after which an outlook is computed anew."""

SETTLED_AFTER = 512
"""Observations from which on one outlook is hardly better than one that is `STALE_AFTER` older."""

MAX_RENEWED = 8
"""Old outlooks that are computed anew at once: each takes some 0.3 ms of the engine's thread. The others wait."""


class Pauses:
    """How long sessions pause between two turns: a histogram of seconds in steps of 30 %."""

    EDGES = tuple(0.01 * 1.3**step for step in range(64))

    def __init__(self) -> None:
        # A few imagined pauses around a second, until real ones outweigh them.
        self._counts = [0.5 * math.exp(-(((step - 18) / 6) ** 2)) for step in range(len(self.EDGES))]
        self._survive: list[float] = []
        self._mean_beyond: list[float] = []
        self._is_old = True

    def add(self, seconds: float) -> None:
        """Count a pause."""
        self._counts[self._step(seconds)] += 1
        self._is_old = True

    @property
    def mean_s(self) -> float:
        """The mean."""
        self._update()
        return self._mean_beyond[0]

    def longer(self, seconds: float) -> tuple[float, float]:
        """Return the share of pauses that are longer, and how many seconds more they take in the mean."""
        self._update()
        step = self._step(seconds)
        # Where hardly any pause was as long, what is known of it is that it is long.
        return self._survive[step], max(self._mean_beyond[step] - seconds, 0.5 * seconds, 0.1 * self.mean_s)

    def _step(self, seconds: float) -> int:
        return min(max(bisect.bisect_right(self.EDGES, seconds) - 1, 0), len(self.EDGES) - 1)

    def _update(self) -> None:
        if not self._is_old:
            return
        self._is_old = False
        total = sum(self._counts)
        count = weight = 0.0
        self._survive, self._mean_beyond = [0.0] * len(self.EDGES), [0.0] * len(self.EDGES)
        for step in reversed(range(len(self.EDGES))):
            count += self._counts[step]
            weight += self._counts[step] * self.EDGES[step] * 1.14  # the middle of a step
            self._survive[step] = count / total
            self._mean_beyond[step] = weight / count


class SessionEnds:
    """How likely a session ends with the turn at hand: by its last agents, by how many turns it has had, or by both, as
    far as each has foretold before."""

    def __init__(self) -> None:
        self._reached = [0.0] * MAX_TURNS
        self._ended = [0.0] * MAX_TURNS
        self._losses = [0.0, 0.0]

    def probability(self, by_agents: float, num_turns: int) -> float:
        """Return it, given what the agents alone say."""
        best = max(self._losses)
        one, other = (math.exp(loss - best) for loss in self._losses)
        return min((one * by_agents + other * self.by_turns(by_agents, num_turns)) / (one + other), 0.999)

    def observe(self, by_agents: float, num_turns: int, *, ended: bool) -> None:
        """Learn that a session went on behind a turn, or did not."""
        for index, p in enumerate((by_agents, self.by_turns(by_agents, num_turns))):
            seen = max(p if ended else 1 - p, 1e-4)
            self._losses[index] = LOSS_FADES * self._losses[index] + math.log(seen)
        place = min(num_turns, MAX_TURNS - 1)
        self._reached[place] += 1
        self._ended[place] += ended

    def by_turns(self, by_agents: float, num_turns: int) -> float:
        """Return how likely a session ends that has had so many turns; `by_agents` where few have had as many."""
        place = min(num_turns, MAX_TURNS - 1)
        return (self._ended[place] + 0.5 * by_agents) / (self._reached[place] + 0.5)


@dataclass(slots=True)
class _Live:
    """A session: its last agents, turns, when the last one began, and whether it ends with it."""

    past: Past = ()
    num_turns: int = 0
    last_s: float = 0.0
    p_end: float = 0.0


class Foresight(Retention):
    """A block is worth the rate at which it is expected to be used, per second.

        rate(s, a) = Σ_h P(s has h more turns) · P(a's next turn is the h-th) / (rest of the pause + (h - 1) · pause)

    summed over the live sessions for a block of several sessions, alone for a block that one session has used. What
    follows is learned with variable order (`markov.py`), every turn counted, repeats too; so is how sessions end, and
    how long they pause. A session that is silent for `SILENCE` mean pauses has ended.

    Added to that, as far as there are turns that nobody foresaw, is what the last use says: `surprise / (time since +
    pause)`, with the share of such turns, 1 at first, times P(s goes on) for what one session alone has used. Where
    nothing is predictable, the order is that of plain LRU.
    """

    def __init__(self, order: int = MAX_ORDER, max_blocks: int = MAX_BLOCKS) -> None:
        super().__init__(max_blocks)
        self.order = order
        self.pauses = Pauses()
        self._learner = VariableOrder(order)
        self._agents = RecentAgents(self._learner)
        self._ends = SessionEnds()
        self._live: OrderedDict[str, _Live] = OrderedDict()
        self._outlooks: OrderedDict[Past, tuple[int, Mapping[str, Sequence[tuple[int, float]]]]] = OrderedDict()
        self._num_observed = 0
        self._began: list[float] = []
        self._rates: dict[str, float] = {}
        self._own: dict[str, tuple[float, dict[str, float]]] = {}
        """For each session, how likely it goes on, and the rates of its agents."""
        self._lasting: dict[int, list[float]] = {}
        self._surprise = 1.0
        self._num_renewed = 0
        self._num_unsummed = 0
        """Turns since rates were summed up: only whoever asks for a worth needs them."""

    def begin(self, session: str | None, agent: str, now_s: float) -> None:
        super().begin(session, agent, now_s)
        self._began.append(now_s)
        del self._began[:-300]
        self._num_unsummed += 1
        if session is None:
            self._observe((), agent)
            return
        live = self._live.pop(session, None)
        if live is None:
            live = _Live()
            self._observe((), agent)
        else:
            self.pauses.add(max(now_s - live.last_s, 0.0))
            self._went_on(live, agent)
        live.past = (*live.past, agent)[-MAX_ORDER:]
        live.num_turns += 1
        live.last_s = now_s
        live.p_end = self._ends.probability(self._p_end(live.past), live.num_turns)
        self._live[session] = live
        if len(self._live) > MAX_SESSIONS:
            self._live.popitem(last=False)
        silent = self.now_s - SILENCE * self.pauses.mean_s
        while (first := next(iter(self._live))) != session and self._live[first].last_s < silent:
            self.end(first)
        self._own.pop(session, None)

    def end(self, session: str) -> None:
        live = self._live.pop(session, None)
        if live is not None:
            self._went_on(live, END)
        self._own.pop(session, None)

    def worth(self, use: Use) -> float:
        # With many sessions, one turn hardly changes the sum over all.
        if self._num_unsummed > len(self._live) // 16:
            self._sum_up()
        goes_on = 1.0
        if use.session is None:
            rate = sum(self._rates.get(agent, 0.0) for agent in use.agents)
        elif use.session in self._live:
            goes_on, rates = self._own_rates(use.session)
            rate = max((rates.get(agent, 0.0) for agent in use.agents), default=0.0)
        else:
            return 0.0
        return rate + goes_on * self._surprise / (self.now_s - use.time_s + self.pauses.mean_s)

    def rate(self, use: Use) -> float:
        """As `worth`, for a cache that outlives sessions: what only ended ones have used may be used again, as far as
        there are turns that nobody foresaw."""
        return self.worth(use) or self._surprise / (self.now_s - use.time_s + self.pauses.mean_s)

    def look_ahead(self, session: str) -> None:
        """Compute now what a worth will rest on: after many turns, all of it at once would hold the engine up.

        Not while little is known: an outlook stays for `STALE_AFTER` observations.
        """
        live = self._live.get(session)
        is_settled = self._num_observed >= SETTLED_AFTER
        if live is not None and is_settled and live.past not in self._outlooks:
            self._outlook(live.past)

    def _went_on(self, live: _Live, following: str) -> None:
        self._ends.observe(self._p_end(live.past), live.num_turns, ended=following == END)
        self._observe(live.past, following)

    def _observe(self, past: Past, following: str) -> None:
        if past and following != END:
            foreseen = self._learner.probability(past, following) >= UNFORESEEN
            self._surprise = SURPRISE_FADES * self._surprise + (1 - SURPRISE_FADES) * (not foreseen)
        self._learner.observe(past, following)
        self._num_observed += 1
        if following != END:
            self._agents.note(following)

    def _p_end(self, past: Past) -> float:
        return self._learner.probability(past, END)

    def _sum_up(self) -> None:
        self._own.clear()
        self._lasting.clear()
        self._num_unsummed = self._num_renewed = 0
        newest = self._learner.counts(())
        total = sum(newest.values())
        elapsed = self._began[-1] - self._began[0]
        turns_per_s = (len(self._began) - 1) / elapsed if elapsed > 0 else 0.0
        rates = {agent: NEWCOMERS * turns_per_s * n / total for agent, n in newest.items()}
        pause = self.pauses.mean_s
        chances: dict[Past, list[float]] = {}
        """Sum over the sessions that stand at a past, for each turn ahead, of `P(it comes) / seconds until then`."""
        for live in self._live.values():
            goes_on, rest = self._standing(live)
            own = [goes_on * p / (rest + turns * pause) for turns, p in enumerate(self._lasts(live.num_turns))]
            known = chances.get(live.past)
            chances[live.past] = own if known is None else [a + b for a, b in zip(known, own, strict=True)]
        for past, sums in chances.items():
            for agent, times in self._outlook(past).items():
                rates[agent] = rates.get(agent, 0.0) + sum(p * sums[turns - 1] for turns, p in times)
        self._rates = rates

    def _standing(self, live: _Live) -> tuple[float, float]:
        """Return how likely a session goes on, silent for as long as it has been, and how soon then, in seconds."""
        longer, rest = self.pauses.longer(self.now_s - live.last_s)
        goes_on = (1 - live.p_end) * longer
        return goes_on / (goes_on + live.p_end), rest

    def _lasts(self, num_turns: int) -> list[float]:
        """Return, for each turn ahead, how likely a session comes to it that has had so many turns and goes on."""
        lasts = self._lasting.get(num_turns)
        if lasts is None:
            by_agents, lasts = self._p_end(()), [1.0]
            for turns in range(1, HORIZON):
                lasts.append(lasts[-1] * (1 - self._ends.by_turns(by_agents, num_turns + turns)))
            self._lasting[num_turns] = lasts
        return lasts

    def _own_rates(self, session: str) -> tuple[float, dict[str, float]]:
        """How likely a session goes on, and its agents' rates; what was computed since the last sum stands."""
        own = self._own.get(session)
        if own is None:
            live = self._live[session]
            pause = self.pauses.mean_s
            goes_on, rest = self._standing(live)
            weights = [goes_on * p / (rest + turns * pause) for turns, p in enumerate(self._lasts(live.num_turns))]
            rates = {
                agent: sum(p * weights[turns - 1] for turns, p in times)
                for agent, times in self._outlook(live.past).items()
            }
            own = self._own[session] = goes_on, rates
        return own

    def _outlook(self, past: Past) -> Mapping[str, Sequence[tuple[int, float]]]:
        """Return when each agent has its next turn: `(h, P(it is the h-th from here))`, for `h` up to `HORIZON`."""
        known = self._outlooks.get(past)
        if known is not None:
            if self._num_observed - known[0] < STALE_AFTER or self._num_renewed >= MAX_RENEWED:
                return known[1]
            self._num_renewed += 1
        outlook: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        absent: defaultdict[str, float] = defaultdict(lambda: 1.0)
        front: dict[Past, float] = {past: 1.0}
        following: dict[Past, list[tuple[str, float]]] = {}
        for turns in range(1, HORIZON + 1):
            reached: defaultdict[Past, float] = defaultdict(float)
            present: defaultdict[str, float] = defaultdict(float)
            for current, weight in front.items():
                if current not in following:
                    following[current] = self._goes_on(current)
                for agent, p in following[current]:
                    if weight * p < LEAST:
                        break
                    present[agent] += weight * p
                    reached[(*current, agent)[-MAX_ORDER:]] += weight * p
            # An agent's first turn from here on: independent of whether it had one before, which is near enough.
            for agent, p in present.items():
                outlook[agent].append((turns, absent[agent] * min(p, 1.0)))
                absent[agent] *= 1.0 - min(p, 1.0)
            front = dict(heapq.nlargest(BEAM, reached.items(), key=lambda item: item[1]))
        self._outlooks[past] = self._num_observed, outlook
        self._outlooks.move_to_end(past)
        if len(self._outlooks) > MAX_SESSIONS:
            self._outlooks.popitem(last=False)
        return outlook

    def _goes_on(self, past: Past) -> list[tuple[str, float]]:
        """Return who is next if the session goes on, likeliest first."""
        found = [(agent, p) for agent, p in self._learner.predict(past) if agent != END]
        total = sum(p for _, p in found)
        return [(agent, p / total) for agent, p in islice(found, 16)] if total else []
