"""Which replica should serve a request: expected warm tokens minus load. Pure, local, and never raises.

A router asks with what it has at hand: hints from the request, queue lengths of the replicas, the last snapshot of the
scheduler (possibly empty or old) and its own memory of what it routed. No remote call, no clock, no randomness: two
routers with the same knowledge decide alike.

In order of precedence:

1. *session*: back to the replica where this agent last spoke in the session, unless waiting there costs more than the
   history is worth elsewhere: on the same node the store has it and a request ahead outweighs thousands of tokens, on
   another node it is computed again. An agent that is new to a session finds nothing of it in an engine's cache, since
   another system prompt stands before it; with position-independent reuse, the store of the node has it;
2. *anchor*: to a replica where the agent's anchor is warm, unless its queue is more than `ANCHOR_SLACK` longer, or it
   already has more than its share of sessions: a hot anchor is computed on a second replica rather than piled on one;
3. *spread*: otherwise the least loaded, of equals the one with the fewest sessions.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import xxhash

from ropewalk.agents.sketch import AnchorSketch
from ropewalk.scheduler.snapshot import EMPTY_SNAPSHOT, Snapshot

SESSION_SLACK = 4
"""Requests by which a session's replica may at most be busier than another, however long the history is."""

ANCHOR_SLACK = 2
"""The same for an anchor: shorter than a history, and once computed elsewhere it is warm there too."""

RELATIVE_SLACK = 0.25
"""With long queues the slack is a quarter of the mean queue instead, so that affinity does not vanish under load while
no replica exceeds the mean by more than that."""

UNEVEN, UNEVEN_BY = 1.5, 2
"""A session leaves its replica, however long its history is, rather than make the queue so many times the mean and so
many requests longer. In large clusters where little waits, a bound by the mean alone would cost 3 points of hits."""

QUEUE_TOKENS = 256
"""What one request ahead costs, in tokens of prefill: in a continuous batch it delays by sharing steps, and most of its
prompt is cached. With twice as much, sessions leave too early: the simulator hits less."""

RECOMPUTED = 2.0
"""Weight of what would have to be computed again: it delays the others, too, where waiting delays the one."""

SESSION_SHARE = 1.0
"""Sessions by which a replica may exceed the mean and still attract new ones by anchors that are warm there alone: a
session is a stream of requests, so skew of sessions becomes skew of queues later."""

NODE_SHARE = 0.9
"""Worth of tokens warm on the same node only: its store has them, but they are read, turned and copied into the engine
first, which takes about a tenth of the time that computing them takes."""

CHARS_PER_TOKEN = 4
"""The usual rule for English and JSON; routing needs no better."""


class RouteReason(StrEnum):
    """Why the first replica of a ranking is first; counted in metrics."""

    SESSION = "session"
    SESSION_BUSY = "session-busy"
    ANCHOR = "anchor"
    SPREAD = "spread"
    NO_REPLICAS = "no-replicas"
    FALLBACK = "fallback-error"


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What a router knows about a request before it is tokenised. `reuse`: its history may be taken from the store
    behind another agent's system prompt, too."""

    session: str | None = None
    agent: str | None = None
    sketch: AnchorSketch | None = None
    num_prompt_chars: int = 0
    reuse: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One candidate. `queue_len`: requests running or waiting there, None when not known (taken as 0)."""

    replica_id: str
    queue_len: int | None = 0
    node: str | None = None
    max_ongoing: int | None = None


class Ranking(NamedTuple):
    """Replica ids, best first, each candidate exactly once; why the first is first; tokens expected warm there."""

    order: list[str]
    reason: RouteReason
    warm_tokens: int = 0


MAX_ROUTED_SESSIONS = 1 << 16
"""Sessions that a router remembers: some minutes' worth of a cluster of hundreds of replicas. With their agents about
80 MB."""

AGENTS_PER_SESSION = 4
"""Agents of a session, in the mean, whose replicas are remembered."""


class Sent(NamedTuple):
    """To which replica a request was sent, and when, in seconds since the epoch."""

    replica: str
    time_s: float


class LocalAffinity:
    """What this router routed: session to replica, each of its agents to replica, agent to replicas. Used until a
    snapshot says more: of a session, once it has a later turn, which another router may have routed.

    At most `max_sessions` sessions, `AGENTS_PER_SESSION` times as many of their agents, and `max_agents` agents; least
    recently routed forgotten first.
    """

    def __init__(self, max_sessions: int = MAX_ROUTED_SESSIONS, max_agents: int = 512) -> None:
        if max_sessions < 1 or max_agents < 1:
            raise ValueError(f"bounds must be at least 1, got {max_sessions!r} and {max_agents!r}")
        self.max_sessions = max_sessions
        self.max_agents = max_agents
        self._sessions: OrderedDict[str, Sent] = OrderedDict()
        self._turns: OrderedDict[tuple[str, str | None], Sent] = OrderedDict()
        self._agents: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        self._num_sessions: dict[str, int] = {}
        self._num_new: Counter[str] = Counter()
        self._snapshot_version = 0

    def remember(self, replica_id: str, session: str | None, agent: str | None, now_s: float = math.inf) -> None:
        """Record that a request was sent to a replica. `agent`: as `agent_key` gives it. `now_s`: seconds since the
        epoch; without it, no snapshot is taken to be newer."""
        if session:
            sent = Sent(replica_id, now_s)
            self._num_new[replica_id] += session not in self._sessions
            self._leave(self._sessions.pop(session, None))
            self._sessions[session] = sent
            self._num_sessions[replica_id] = self._num_sessions.get(replica_id, 0) + 1
            if len(self._sessions) > self.max_sessions:
                self._leave(self._sessions.popitem(last=False)[1])
            self._turns.pop((session, agent), None)
            self._turns[session, agent] = sent
            if len(self._turns) > AGENTS_PER_SESSION * self.max_sessions:
                self._turns.popitem(last=False)
        if agent:
            replicas = self._agents.setdefault(agent, OrderedDict())
            replicas[replica_id] = None
            replicas.move_to_end(replica_id)
            self._agents.move_to_end(agent)
            if len(self._agents) > self.max_agents:
                self._agents.popitem(last=False)

    def saw(self, snapshot: Snapshot | None) -> None:
        """Count new sessions from this snapshot on: it has those before, without the ones that have ended."""
        if snapshot is not None and snapshot.version != self._snapshot_version:
            self._snapshot_version = snapshot.version
            self._num_new.clear()

    def num_new_sessions(self, replica_id: str) -> int:
        """Sessions first routed, to this replica, since the last snapshot."""
        return self._num_new[replica_id]

    def keep_only(self, replica_ids: Iterable[str]) -> None:
        """Forget every replica that is gone."""
        alive = set(replica_ids)
        for session in [session for session, sent in self._sessions.items() if sent.replica not in alive]:
            self._leave(self._sessions.pop(session))
        for turn in [turn for turn, sent in self._turns.items() if sent.replica not in alive]:
            del self._turns[turn]
        for agent in list(self._agents):
            for replica in self._agents[agent].keys() - alive:
                del self._agents[agent][replica]
            if not self._agents[agent]:
                del self._agents[agent]

    def session_sent(self, session: str | None) -> Sent | None:
        """Where and when the session's last request went."""
        return self._sessions.get(session) if session else None

    def turn_sent(self, session: str | None, agent: str | None) -> Sent | None:
        """Where and when the agent's last request of the session went."""
        return self._turns.get((session, agent)) if session else None

    def agent_replicas(self, agent: str | None) -> list[str]:
        """Where the agent's requests went, most recent first."""
        return list(reversed(self._agents.get(agent, ()))) if agent else []

    def num_sessions(self, replica_id: str) -> int:
        """Remembered sessions whose last request went to this replica."""
        return self._num_sessions.get(replica_id, 0)

    def _leave(self, sent: Sent | None) -> None:
        if sent is not None:
            self._num_sessions[sent.replica] -= 1
            if not self._num_sessions[sent.replica]:
                del self._num_sessions[sent.replica]

    def check_integrity(self) -> None:
        """Raises AssertionError unless the bounds hold and the counts are right."""
        assert len(self._sessions) <= self.max_sessions
        assert len(self._turns) <= AGENTS_PER_SESSION * self.max_sessions
        assert len(self._agents) <= self.max_agents
        assert sum(self._num_sessions.values()) == len(self._sessions)
        assert all(n > 0 for n in self._num_sessions.values())
        assert all(self._agents.values())


def agent_key(hints: RequestHints, snapshot: Snapshot | None) -> str | None:
    """The agent of a request as far as a router can tell; a new anchor goes by its own fingerprint."""
    agent = (snapshot or EMPTY_SNAPSHOT).agent_of(hints.agent, hints.sketch)
    if agent is None and hints.sketch:
        return f"agent-{hints.sketch.fingerprint}"
    return agent


def rank_replicas(
    hints: RequestHints,
    views: Sequence[ReplicaView],
    snapshot: Snapshot | None = None,
    local_affinity: LocalAffinity | None = None,
    agent: str | None = None,
) -> Ranking:
    """Order all candidates, best first. Changes nothing; call `LocalAffinity.remember` once the request is sent.

    `agent`: `agent_key(hints, snapshot)` when the caller has it already. Odd input of any kind gives the replicas by
    queue length, or as they came, with reason `fallback-error`: an exception in a router would hang the request.
    """
    try:
        return _rank(hints, views, snapshot or EMPTY_SNAPSHOT, local_affinity or LocalAffinity(1, 1), agent)
    except Exception:  # the reason says so, and the caller counts it
        return _fallback(views)


def _rank(
    hints: RequestHints, views: Sequence[ReplicaView], snapshot: Snapshot, local: LocalAffinity, agent: str | None
) -> Ranking:
    replicas = {view.replica_id: view for view in views}
    if not replicas:
        return Ranking([], RouteReason.NO_REPLICAS)
    queue = {replica: _queue_len(view) for replica, view in replicas.items()}
    shortest, mean = min(queue.values()), sum(queue.values()) / len(queue)
    full = {r for r, view in replicas.items() if view.max_ongoing is not None and queue[r] >= view.max_ongoing}
    sessions = _sessions_by_replica(replicas, snapshot, local)
    agent = agent if agent is not None else agent_key(hints, snapshot)
    anchor_warm = _anchor_tokens(hints, agent, replicas, snapshot, local)

    last = _last(hints.session, replicas, snapshot, local)
    home = _home(hints.session, agent, last, replicas, snapshot, local)
    near = last if home is None and hints.reuse else home
    history = _history_tokens(hints, snapshot)
    fair_share = sum(sessions.values()) / len(sessions) + SESSION_SHARE
    elsewhere = max((anchor_warm.get(r, 0.0) for r in replicas if sessions[r] < fair_share), default=0.0)

    def anchor_worth(replica: str) -> float:
        is_within = replica not in full and queue[replica] <= max(shortest + ANCHOR_SLACK, mean * (1 + RELATIVE_SLACK))
        warm = anchor_warm.get(replica, 0.0) if is_within else 0.0
        # Beyond its share it has no advantage over the others; nor a disadvantage, where they have the anchor too.
        return min(warm, elsewhere) if home is None and sessions[replica] >= fair_share else warm

    def score(replica: str) -> tuple[bool, float, bool, float, int]:
        warm = anchor_worth(replica)
        if near is not None and _share_node(replicas[replica], replicas[near]):
            warm += NODE_SHARE * max(history - warm, 0.0)
        # Equals are told apart by where the session was last, then by sessions, then by a hash that spreads different
        # sessions over equal replicas.
        tie = xxhash.xxh3_64_intdigest(f"{hints.session}\0{agent}\0{replica}".encode("utf-8", "surrogatepass"))
        return (replica in full, QUEUE_TOKENS * queue[replica] - warm, replica != last, sessions[replica], tie)

    def stays(home: str) -> bool:
        is_long = queue[home] > mean * (1 + RELATIVE_SLACK)
        after = mean + 1 / len(queue)
        is_uneven = is_long and queue[home] + 1 > max(UNEVEN * after, after + UNEVEN_BY)
        if home in full or is_uneven:
            return False
        for other in replicas.keys() - full:
            slack = _session_slack(history, anchor_warm.get(other, 0.0), replicas[home], replicas[other])
            # A history that another replica has to compute costs everybody: not for a queue that is like all others.
            if queue[home] - queue[other] > slack and (is_long or _share_node(replicas[home], replicas[other])):
                return False
        return True

    order = sorted(replicas, key=score)
    if home is not None and stays(home):
        order.remove(home)
        return Ranking([home, *order], RouteReason.SESSION, history)
    warm = anchor_worth(order[0])
    if warm:
        reason = RouteReason.ANCHOR
    else:
        reason = RouteReason.SPREAD if home is None else RouteReason.SESSION_BUSY
    return Ranking(order, reason, int(warm))


def _last(
    session: str | None, replicas: Mapping[str, ReplicaView], snapshot: Snapshot, local: LocalAffinity
) -> str | None:
    """The replica of the session's last turn."""
    if not session:
        return None
    return _newest(local.session_sent(session), _told_last(session, replicas, snapshot), replicas)


def _told_last(session: str, replicas: Mapping[str, ReplicaView], snapshot: Snapshot) -> Sent | None:
    known = snapshot.sessions.get(session)
    told = next((replica for replica in known.replicas if replica in replicas), None) if known else None
    return None if known is None or told is None else Sent(told, known.last_s)


def _home(
    session: str | None,
    agent: str | None,
    last: str | None,
    replicas: Mapping[str, ReplicaView],
    snapshot: Snapshot,
    local: LocalAffinity,
) -> str | None:
    """The replica whose cache has what the agent has read of the session; None when it has not spoken there yet."""
    if not session:
        return None
    sent = local.turn_sent(session, agent)
    if agent is None:
        return _newest(sent, _told_last(session, replicas, snapshot), replicas) or last
    known = snapshot.sessions.get(session)
    spoke = known.spoke.get(agent) if known else None
    home = _newest(sent, Sent(*spoke) if spoke else None, replicas)
    if home is not None:
        return home
    is_new = local.session_sent(session) is not None or (known is not None and bool(known.spoke))
    return None if is_new else last


def _newest(sent: Sent | None, told: Sent | None, replicas: Mapping[str, ReplicaView]) -> str | None:
    """What this router did itself, unless the scheduler has heard of a later turn; if that replica is there."""
    found = [one for one in (sent, told) if one is not None and one.replica in replicas]
    return max(found, key=lambda one: one.time_s).replica if found else None  # of equals the first


def _share_node(one: ReplicaView, other: ReplicaView) -> bool:
    return bool(one.node) and one.node == other.node


def _session_slack(history: int, warm: float, home: ReplicaView, other: ReplicaView) -> float:
    """Requests that `home` may have more than `other`: what moving loses, in requests' worth of tokens.

    `history`: tokens of the prompt that `home` has, as far as is known; `warm`: those that `other` has of its anchor.
    """
    if not history:
        return SESSION_SLACK
    lost = max(history - warm, 0.0) * (1 - NODE_SHARE if _share_node(home, other) else RECOMPUTED)
    return min(SESSION_SLACK, lost / QUEUE_TOKENS)


def _history_tokens(hints: RequestHints, snapshot: Snapshot) -> int:
    known = snapshot.sessions.get(hints.session) if hints.session else None
    prompt = _count(hints.num_prompt_chars) // CHARS_PER_TOKEN
    if known is None or not known.prompt_tokens:
        return prompt
    return min(known.prompt_tokens, prompt) if prompt else known.prompt_tokens


def _anchor_tokens(
    hints: RequestHints,
    agent: str | None,
    replicas: Mapping[str, ReplicaView],
    snapshot: Snapshot,
    local: LocalAffinity,
) -> dict[str, float]:
    """Tokens of the agent's anchor expected warm on each replica; replicas without any are left out."""
    if agent is None:
        return {}
    view = snapshot.agents.get(agent)
    size = hints.sketch.num_chars // CHARS_PER_TOKEN if hints.sketch else 0
    if not size and view is not None:
        size = view.anchor_tokens
    holders = {w.replica: w.node for w in view.warm} if view is not None else {}
    nodes = set(holders.values())
    for replica in local.agent_replicas(agent):
        if replica in replicas:
            holders[replica] = replicas[replica].node or ""
            nodes.add(holders[replica])
    warm = {}
    for replica, candidate in replicas.items():
        if replica in holders:
            warm[replica] = float(size)
        elif candidate.node and candidate.node in nodes:
            warm[replica] = NODE_SHARE * size
    return warm


def _sessions_by_replica(
    replicas: Mapping[str, ReplicaView], snapshot: Snapshot, local: LocalAffinity
) -> dict[str, int]:
    """Live sessions on each replica: those of the snapshot and what this router has sent since."""
    if not snapshot.version:
        return {replica: local.num_sessions(replica) for replica in replicas}
    known = snapshot.sessions_by_replica
    return {replica: known.get(replica, 0) + local.num_new_sessions(replica) for replica in replicas}


def _queue_len(view: ReplicaView) -> int:
    return _count(view.queue_len)


def _count(value: object) -> int:
    return max(0, int(value)) if isinstance(value, int | float) and math.isfinite(value) else 0


def _fallback(views: object) -> Ranking:
    """Least loaded first as far as the views can be read at all."""
    readable: dict[str, int] = {}
    try:
        for view in views:  # type: ignore[attr-defined]
            replica_id = getattr(view, "replica_id", None)
            if isinstance(replica_id, str):
                readable[replica_id] = _count(getattr(view, "queue_len", 0))
    except Exception:  # not even a sequence of views
        pass
    return Ranking(sorted(readable, key=readable.__getitem__), RouteReason.FALLBACK)
