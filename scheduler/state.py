"""Everything the scheduler knows, as one value: learned from observations, published as snapshots, kept as JSON.

Pure: no Ray, no clock, no files except `load_state` and `save_state`.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx as nx

from ropewalk.agents.identity import AgentRegistry
from ropewalk.agents.sessions import Past, SessionTable
from ropewalk.agents.sketch import AnchorSketch
from ropewalk.scheduler.handovers import HandoverCounts, Table, predictability
from ropewalk.scheduler.markov import EPSILON, HALF_LIFE, MAX_ORDER, Smoothing, VariableOrder
from ropewalk.scheduler.snapshot import LIVE_S, AgentView, SessionView, Snapshot, Stand, Warmth
from ropewalk.scheduler.survival import MAX_HOPS, TAU, Chain

FORMAT_VERSION = 2
"""Format of the state file; raised when a reader of the old one would misread the new one. 1: first order only."""

CONTEXTS_PER_AGENT = 16
"""Contexts remembered for each agent that may be: with three likely successors each an agent ends 1 + 3 + 9 of them."""

MAX_WARM_REPLICAS = 16
"""Replicas remembered an agent, least recently used forgotten: where an anchor was that long ago it is gone."""

NEXT_AGENTS = 8
"""Successors a snapshot carries an agent: with tau = 0.1 at most ten can matter, and eight hold nearly all the mass."""

MAX_STANDS = 256
"""Sessions whose outlook a snapshot carries: where more are live, hardly any replica is idle, and snapshots go to every
process."""

OUTLOOK_AGENTS = 4
"""Agents of an outlook that a snapshot carries: those that are needed first."""

MAX_ID_CHARS = 256
"""Session, replica, node and model names come over the wire and are kept: bounded."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What can be set; every default is CacheScout's or has its reason beside it."""

    order: int = MAX_ORDER
    smoothing: Smoothing = "back-off"
    half_life: float = HALF_LIFE
    epsilon: float = EPSILON
    tau: float = TAU
    max_hops: int = MAX_HOPS
    max_agents: int = 256  # some programs create agents on the fly: 191 were seen in one public data set
    max_sessions: int = 4096  # about 0.5 MB
    session_ttl_s: float = 1800.0  # half an hour of silence: its cache has long gone elsewhere
    snapshot_sessions: int = 1024  # a router asks about sessions of the last minutes; older ones fall back to load
    state_path: str | None = None  # None: nothing is kept across restarts
    save_interval_s: float = 3.0  # what a crash may forget; writing costs about a millisecond

    def __post_init__(self) -> None:
        for name in ("epsilon", "session_ttl_s", "save_interval_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"scheduler.{name} must be a positive number, got {value!r}")
        if not 0 < self.tau <= 1:
            raise ValueError(f"scheduler.tau must be above 0 and at most 1, got {self.tau!r}")
        if not 0 <= self.order <= MAX_ORDER:
            raise ValueError(f"scheduler.order must be 0 to {MAX_ORDER}, got {self.order!r}")
        if self.smoothing not in ("back-off", "additive"):
            raise ValueError(f"scheduler.smoothing must be 'back-off' or 'additive', got {self.smoothing!r}")
        if not self.half_life >= 1:
            raise ValueError(f"scheduler.half_life must be at least 1, got {self.half_life!r}")
        for name, least in (("max_hops", 1), ("max_agents", 2), ("max_sessions", 1), ("snapshot_sessions", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"scheduler.{name} must be at least {least}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Observation:
    """One answered request, as a replica reports it.

    `time_s`: seconds since the epoch when it was answered. `prompt_tokens` of which `cached_tokens` came from the
    prefix cache or exact chunks and `reused_tokens` from position-independent ones.
    """

    session: str | None
    agent: str | None
    sketch: AnchorSketch | None
    model: str
    replica: str
    node: str
    time_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reused_tokens: int = 0


@dataclass(slots=True)
class _Use:
    """What an agent's requests were: replicas with node and time, least recent first; its model; its tokens."""

    warm: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict)
    model: str = ""
    prompt: int = 0
    cached: int = 0
    reused: int = 0

    def note(self, replica: str, node: str, time_s: float) -> None:
        """The anchor was used on this replica."""
        self.warm[replica] = (node, time_s)
        self.warm.move_to_end(replica)
        if len(self.warm) > MAX_WARM_REPLICAS:
            self.warm.popitem(last=False)

    def absorb(self, other: _Use) -> None:
        """Add what was another agent's until now."""
        merged = {**other.warm, **self.warm}
        self.warm = OrderedDict(sorted(merged.items(), key=lambda item: item[1][1])[-MAX_WARM_REPLICAS:])
        self.model = self.model or other.model
        self.prompt += other.prompt
        self.cached += other.cached
        self.reused += other.reused


@dataclass
class SchedulerState:
    """Learns from observations. `version` grows with every one that is taken in."""

    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    version: int = 1

    def __post_init__(self) -> None:
        s = self.settings
        self.registry = AgentRegistry(s.max_agents)
        self.sessions = SessionTable(s.max_sessions, s.session_ttl_s)
        self.learner = VariableOrder(s.order, **_learner_settings(s))
        self.handovers = HandoverCounts()
        self.num_observations = 0
        self.num_refused = 0
        self.forget_chain()
        self._uses: dict[str, _Use] = {}
        self._now_s = 0.0

    def observe(self, observation: Observation) -> str | None:
        """Take in one request and return its agent, None when it has none.

        What cannot be read (no replica, a time that is no number) is refused and counted in `num_refused`.
        """
        o = _cleaned(observation)
        if o is None:
            self.num_refused += 1
            return None
        self.version += 1
        self.num_observations += 1
        time_s, session = o.time_s, o.session
        if time_s > self._now_s:
            self._now_s = time_s
        evicted: tuple[str, ...] = ()
        agent = self.registry.again(o.agent, session) if not o.sketch else None
        if agent is None:
            agent, _, renamed, evicted = self.registry.resolve(o.agent, o.sketch, session)
            for old, new in renamed:
                self._rename(old, new)
        past: Past | None = None
        if session is not None:
            past = self.sessions.update(session, agent, o.replica, time_s, o.prompt_tokens)
        if agent is not None:
            if past is None:  # without a session, or reported late, it is not known what came before it
                self.learner.add_agent(agent)
            else:
                if past:
                    self.handovers.observe(self.sessions.group(session), past[-1], agent)
                if not past or past[-1] != agent:
                    self.learner.observe(past, agent)
            use = self._uses.get(agent)
            if use is None:
                use = self._uses[agent] = _Use()
            use.note(o.replica, o.node, time_s)
            use.model = o.model
            use.prompt += o.prompt_tokens
            use.cached += o.cached_tokens
            use.reused += o.reused_tokens
        for gone in evicted:
            self._forget(gone)
        return agent

    def _rename(self, old: str, new: str) -> None:
        self.learner.rename(old, new)
        self.handovers.rename(old, new)
        self.sessions.rename_agent(old, new)
        use = self._uses.pop(old, None)
        if use is not None:
            self._uses.setdefault(new, _Use()).absorb(use)

    def _forget(self, agent: str) -> None:
        self.learner.remove(agent)
        self.handovers.remove(agent)
        self.sessions.rename_agent(agent, None)
        self._uses.pop(agent, None)

    def note_warm(self, agent: str, replica: str, node: str, time_s: float) -> bool:
        """Note that an agent's anchor was warmed on a replica; False for an agent that is not known.

        Nothing is learned from it: no turn of the agent took place.
        """
        use = self._uses.get(agent)
        if use is None or use.warm.get(replica, (node, -math.inf))[1] >= time_s:
            return False
        use.note(replica, node, time_s)
        self.version += 1
        return True

    def survival(self) -> dict[str, float]:
        """Survival of each agent's anchor over the live sessions."""
        return self._chain.survival(self.sessions.live_pasts())

    def outlook(self, past: Sequence[str]) -> dict[str, float]:
        """Turns until each agent has the floor again in a session that stands at `past` (see `Chain.outlook`).

        `past`: the last agents of the session, oldest first, as `sessions.get(session).past` has them.
        """
        return self._chain.outlook(past)

    def forget_chain(self) -> None:
        """Let survival and outlook be worked out anew when they are asked for next."""
        self._chain = Chain(self.learner, self.handovers, tau=self.settings.tau, max_hops=self.settings.max_hops)

    def snapshot(self, *, outlooks: bool = False) -> Snapshot:
        """The state as routers and replicas need it. `outlooks`: with `stands` and `outlooks`, for replicas that
        prewarm; to work the chain's outlooks out anew takes several times as long as all the rest.
        """
        self.sessions.expire(self._now_s)
        alive = self.survival()
        counts = self.handovers.totals()
        agents = {}
        for entry in self.registry.entries():
            profile = self.registry.index.core(entry.agent)
            use = self._uses.get(entry.agent, _NO_USE)
            agents[entry.agent] = AgentView(
                agent=entry.agent,
                named=entry.named,
                num_requests=entry.num_requests,
                several_sessions=entry.several_sessions,
                survival=alive.get(entry.agent, 0.0),
                # Four characters a token is the usual rule for English and JSON.
                anchor_tokens=0 if profile is None else profile.num_chars // 4,
                profile=profile,
                next=tuple(self._successors(entry.agent, counts)[:NEXT_AGENTS]),
                warm=tuple(Warmth(replica, node, last_s) for replica, (node, last_s) in reversed(use.warm.items())),
                model=use.model,
            )
        recent = list(self.sessions.recent(self.settings.snapshot_sessions))
        sessions = {
            session: SessionView(s.agent, s.replicas, s.prompt_tokens, s.last_s, dict(s.spoke)) for session, s in recent
        }
        stands = tuple(
            Stand(session, s.past, s.group, s.last_s)
            for session, s in (recent[:MAX_STANDS] if outlooks else ())
            if s.past and self._now_s - s.last_s <= LIVE_S
        )
        return Snapshot(
            version=self.version,
            time_s=self._now_s,
            agents=agents,
            sessions=sessions,
            predictability=predictability(counts).r,
            num_handovers=self.handovers.num_handovers,
            num_observations=self.num_observations,
            groups=self.handovers.groups(),
            stands=stands,
            outlooks=self._chain.nearest(list({stand.past for stand in stands}), OUTLOOK_AGENTS),
        )

    def _successors(self, agent: str, counts: Table) -> list[tuple[str, float, int]]:
        """(agent, probability, count) of those counted after `agent`, likeliest first (ties: by name)."""
        row = counts.get(agent, {})
        probabilities = self.learner.handover((agent,), row)
        return sorted(((a, p, row[a]) for a, p in probabilities.items()), key=lambda item: (-item[1], item[0]))

    def graph(self) -> nx.DiGraph[str]:
        """Agents and hand-overs; nodes carry what `graph_payload` shows of them, edges `count` and `probability`."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        alive = self.survival()
        at = self.sessions.live_agents()
        counts = self.handovers.totals()
        for entry in self.registry.entries():
            agent = entry.agent
            use = self._uses.get(agent, _NO_USE)
            profile = self.registry.index.get(agent)
            graph.add_node(
                agent,
                repeats=counts.get(agent, {}).get(agent, 0),
                named=entry.named,
                model=use.model,
                requests=entry.num_requests,
                survival=alive.get(agent, 0.0),
                sessions=at.get(agent, 0),
                anchor_tokens=0 if profile is None else profile.num_chars // 4,
                prompt_tokens=use.prompt,
                cached_tokens=use.cached,
                reused_tokens=use.reused,
                warm_replicas=list(reversed(use.warm)),
            )
        for agent in list(graph):
            for other, probability, count in self._successors(agent, counts):
                graph.add_edge(agent, other, count=count, probability=probability)
        return graph

    def clear(self) -> None:
        """Forget everything learned; the version goes on."""
        version = self.version + 1
        self.__post_init__()
        self.version = version

    def to_dict(self) -> dict[str, Any]:
        """JSON form for the state file.

        `uses`: for each agent of `registry`, in its order, `[model, prompt tokens, cached, reused, replica, age,
        replica, age, ...]`, replicas and models by number, ages in seconds before `time_s`, least recent first.
        """
        models: dict[str, int] = {}
        replicas: dict[tuple[str, str], int] = {}
        uses = []
        for entry in self.registry.entries():
            use = self._uses.get(entry.agent, _NO_USE)
            row = [models.setdefault(use.model, len(models)), use.prompt, use.cached, use.reused]
            for replica, (node, last_s) in use.warm.items():
                row += [replicas.setdefault((replica, node), len(replicas)), round(self._now_s - last_s)]
            uses.append(row)
        return {
            "format": FORMAT_VERSION,
            "version": self.version,
            "time_s": self._now_s,
            "num_observations": self.num_observations,
            "registry": self.registry.to_dict(),
            "learner": self.learner.to_dict(),
            "handovers": self.handovers.to_dict(),
            "sessions": self.sessions.to_dict(),
            "models": list(models),
            "replicas": [list(pair) for pair in replicas],
            "uses": uses,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], settings: SchedulerSettings | None = None) -> SchedulerState:
        """Inverse of `to_dict`. Raises StateFormatError when the format is unknown or the content does not fit."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT_VERSION:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise StateFormatError("unknown-format", f"state format must be {FORMAT_VERSION}, got {found!r}")
        state = cls(settings or SchedulerSettings(), int(data["version"]))
        s = state.settings
        try:
            state._now_s = float(data["time_s"])
            state.num_observations = int(data["num_observations"])
            state.registry = AgentRegistry.from_dict(data["registry"], s.max_agents)
            state.learner = VariableOrder.from_dict(data["learner"], s.order, **_learner_settings(s))
            state.handovers = HandoverCounts.from_dict(data["handovers"])
            state.sessions = SessionTable.from_dict(data["sessions"], s.max_sessions, s.session_ttl_s)
            state.forget_chain()
            for (agent, *_), row in zip(data["registry"], data["uses"], strict=True):
                model, prompt, cached, reused, *warm = row
                use = state._uses[str(agent)] = _Use(OrderedDict(), str(data["models"][model]), prompt, cached, reused)
                for number, age in zip(warm[::2], warm[1::2], strict=True):
                    replica, node = data["replicas"][number]
                    use.warm[str(replica)] = (str(node), state._now_s - int(age))
            for agent in state._known_somewhere() - {entry.agent for entry in state.registry.entries()}:
                state._forget(agent)
            state.check_integrity()
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise StateFormatError("damaged", f"{type(error).__name__}: {error}") from error
        return state

    def _known_somewhere(self) -> set[str]:
        return {*self.learner.agents, *self.handovers.agents, *self.sessions.agents(), *self._uses}

    def check_integrity(self) -> None:
        """Raises AssertionError or ValueError unless all tables speak of the same agents and keep their bounds."""
        self.registry.check_integrity()
        self.sessions.check_integrity()
        self.learner.check_integrity()
        self.handovers.check_integrity()
        unknown = self._known_somewhere() - {entry.agent for entry in self.registry.entries()}
        assert not unknown, f"tables speak of unknown agents {sorted(unknown)}"
        assert all(len(use.warm) <= MAX_WARM_REPLICAS for use in self._uses.values())


_NO_USE = _Use()


def _learner_settings(s: SchedulerSettings) -> dict[str, Any]:
    return {
        "smoothing": s.smoothing,
        "half_life": s.half_life,
        "epsilon": s.epsilon,
        "max_contexts": CONTEXTS_PER_AGENT * s.max_agents,
    }


class StateFormatError(ValueError):
    """A state that cannot be read. `reason`: `unknown-format`, `damaged` or `unreadable`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def load_state(path: Path, settings: SchedulerSettings, *, put_aside: bool = True) -> tuple[SchedulerState, str | None]:
    """State from a file, or an empty one and the reason when the file is there but cannot be used.

    With `put_aside`, a file that cannot be used is renamed to `<name>.<reason>`, so that it is neither lost nor read
    again.
    """
    try:
        return SchedulerState.from_dict(json.loads(path.read_bytes()), settings), None
    except FileNotFoundError:
        return SchedulerState(settings), None
    except StateFormatError as error:
        reason = error.reason
    except (ValueError, KeyError, TypeError):
        reason = "damaged"
    except OSError:
        return SchedulerState(settings), "unreadable"
    if not put_aside:
        return SchedulerState(settings), reason
    try:
        path.replace(path.with_name(f"{path.name}.{reason}"))
    except OSError:
        reason = f"{reason}, and could not be put aside"
    return SchedulerState(settings), reason


def save_state(data: Mapping[str, Any], path: Path) -> None:
    """Write a state's dict so that a reader sees the old file or the new one whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(data, file, separators=(",", ":"))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _cleaned(o: Observation) -> Observation | None:
    """The observation with bounded strings and non-negative counts, None when it names no replica or no time.

    Names of agents are cleaned by the registry.
    """
    try:
        if _is_clean(o):
            return o
        if not isinstance(o.replica, str) or not o.replica or not math.isfinite(o.time_s):
            return None
        return Observation(
            session=o.session[:MAX_ID_CHARS] if isinstance(o.session, str) and o.session else None,
            agent=o.agent,
            sketch=o.sketch if isinstance(o.sketch, AnchorSketch) else None,
            model=str(o.model)[:MAX_ID_CHARS],
            replica=o.replica[:MAX_ID_CHARS],
            node=str(o.node)[:MAX_ID_CHARS],
            time_s=float(o.time_s),
            prompt_tokens=max(0, int(o.prompt_tokens)),
            cached_tokens=max(0, int(o.cached_tokens)),
            reused_tokens=max(0, int(o.reused_tokens)),
        )
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None


def _is_clean(o: Observation) -> bool:
    """Whether nothing of an observation has to change, as is nearly always so."""
    sketch, session = o.sketch, o.session
    return (
        type(o.replica) is type(o.node) is type(o.model) is str
        and 0 < len(o.replica) <= MAX_ID_CHARS
        and len(o.node) <= MAX_ID_CHARS
        and len(o.model) <= MAX_ID_CHARS
        and (session is None or (type(session) is str and 0 < len(session) <= MAX_ID_CHARS))
        and (sketch is None or type(sketch) is AnchorSketch)
        and type(o.time_s) is float
        and math.isfinite(o.time_s)
        and type(o.prompt_tokens) is type(o.cached_tokens) is type(o.reused_tokens) is int
        and o.prompt_tokens >= 0
        and o.cached_tokens >= 0
        and o.reused_tokens >= 0
    )
