"""Anchors by token ids: the prefix that an agent's prompts share, found in each replica, and the table that shares it.

Pure: no Ray, no clock. An `AnchorBook` belongs to one replica and learns from the prompts that its engine sees; the
`AnchorTable` of the scheduler actor holds what all replicas of all models know, under bounds of its own.

    replica: AnchorBook ──message()──► AnchorTable.sync ──update──► AnchorBook.take     every replica, once a second
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ropewalk.kernels.keys import Tokens, as_tokens
from ropewalk.scheduler.packing import pack, unpack

FORMAT_VERSION = 1
"""Format of the table as JSON; raised when a reader of the old one would misread the new one."""

MIN_ANCHOR_TOKENS = 32
"""Shorter ones are not worth a request: vLLM caches whole blocks, of 16 tokens or more, and a prefill of two blocks is
hardly noticed. Chat templates alone share a dozen tokens."""

MAX_ANCHOR_TOKENS = 8192
"""What is kept of a prompt: system prompts with tools are longer only where examples of many pages stand in them, and
the first part of those is as good an anchor."""

MAX_AGENTS = 256
"""Agents of a book, and of each model of a table: as many as the scheduler knows."""

MAX_TOKENS = 1 << 20
"""Tokens of all anchors together, of a book and of a table: 4 MB."""

MAX_RECENT = 3
"""Sessions of an agent whose latest prompts are compared: two make an anchor, and three that share more than it say
that it can be longer."""

MAX_RECENT_TOKENS = 1 << 21
"""Tokens of all prompts that are kept for comparing: 8 MB."""

MAX_SENT = 8
"""Anchors in one message to the table, so that it stays below 300 kB."""

Origin = Literal["learned", "registered"]


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """The token ids that an agent's prompts to a model begin with."""

    agent: str
    tokens: Tokens
    origin: Origin = "learned"

    def same(self, other: Anchor | None) -> bool:
        """Whether the other says the same of the same agent."""
        return (
            other is not None
            and (self.agent, self.origin) == (other.agent, other.origin)
            and np.array_equal(self.tokens, other.tokens)
        )

    def own(self) -> Anchor:
        """A copy whose tokens lie in no message that they came in."""
        return replace(self, tokens=self.tokens.copy())

    def begins(self, prompt: Tokens) -> bool:
        """Whether a prompt begins with this anchor."""
        return common_prefix(self.tokens, prompt) == len(self.tokens)


@dataclass(frozen=True, slots=True)
class AnchorMessage:
    """What a replica tells the table. `since`: version up to which it knows the table of that `life`. `epoch`: see
    `AnchorTable`.

    `anchors` changed here, or are not known there. `warmed`: agents whose anchors were warmed here since the last
    message, and when, in seconds since the epoch.
    """

    model: str
    replica: str
    node: str
    epoch: int
    life: int
    since: int
    anchors: tuple[Anchor, ...] = ()
    warmed: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AnchorUpdate:
    """What the table answers: the model's anchors that changed since, and all agents that have one."""

    epoch: int
    life: int
    version: int
    changed: tuple[Anchor, ...]
    agents: frozenset[str]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of tokens that two prompts share at their beginnings."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length


@dataclass(slots=True)
class _Entry:
    anchor: Anchor | None = None
    recent: OrderedDict[str, Tokens] = field(default_factory=OrderedDict)
    """The latest prompt of each of the latest sessions, least recent first."""


class AnchorBook:
    """One replica's anchors. Not safe to use from several threads.

    An anchor is the longest prefix that an agent's prompts of two sessions share. It is *replaced* once two sessions
    have sent prompts that do not begin with it: a new version of a prompt, or an anchor that was taken too long. It
    *grows* when the latest prompts of `MAX_RECENT` sessions all begin with it and share more. A registered anchor stays
    as it is. Agents that were not met longest are forgotten when a bound is reached.
    """

    def __init__(
        self,
        *,
        max_agents: int = MAX_AGENTS,
        max_tokens: int = MAX_TOKENS,
        max_recent_tokens: int = MAX_RECENT_TOKENS,
    ) -> None:
        if max_agents < 1 or max_tokens < MAX_ANCHOR_TOKENS or max_recent_tokens < MAX_RECENT * MAX_ANCHOR_TOKENS:
            raise ValueError(
                "an anchor book needs room for one agent, one anchor and its prompts, got "
                f"{max_agents!r} agents, {max_tokens!r} and {max_recent_tokens!r} tokens"
            )
        self.max_agents = max_agents
        self.max_tokens = max_tokens
        self.max_recent_tokens = max_recent_tokens
        self.epoch = 0
        self.life = 0
        self.version = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._unsent: dict[str, Anchor] = {}
        self._num_tokens = 0
        self._num_recent = 0

    def __len__(self) -> int:
        """Agents that have an anchor."""
        return sum(entry.anchor is not None for entry in self._entries.values())

    def get(self, agent: str) -> Anchor | None:
        """The agent's anchor, None when none is known. Does not count as use."""
        entry = self._entries.get(agent)
        return None if entry is None else entry.anchor

    def lengths(self) -> dict[str, int]:
        """Tokens of each agent's anchor."""
        return {a: len(entry.anchor.tokens) for a, entry in self._entries.items() if entry.anchor is not None}

    def learn(self, agent: str, session: str | None, prompt: Sequence[int] | Tokens) -> bool:
        """Take in a prompt that was answered; says whether the agent's anchor changed.

        Without a session it cannot be told whether two prompts are of two: nothing is learned.
        """
        if session is None:
            return False
        tokens = as_tokens(prompt)[:MAX_ANCHOR_TOKENS].copy()  # not a view of what may be much longer
        entry = self._entry(agent)
        self._num_recent += len(tokens) - len(entry.recent.pop(session, ()))
        entry.recent[session] = tokens
        while len(entry.recent) > MAX_RECENT:
            self._num_recent -= len(entry.recent.popitem(last=False)[1])
        length = _anchor_length(entry, session, tokens)
        if length is not None:
            anchor = Anchor(agent, tokens[:length].copy())
            self._set(entry, anchor)
            self._unsent[agent] = anchor
        self._bound()
        return length is not None

    def register(self, anchor: Anchor) -> None:
        """Take an anchor that somebody vouches for."""
        self._set(self._entry(anchor.agent), anchor)
        self._bound()

    def forget(self, agent: str) -> bool:
        """Forget an agent: its anchor, and the prompts that it was learned from. False when it was not known."""
        entry = self._entries.pop(agent, None)
        self._unsent.pop(agent, None)
        if entry is None:
            return False
        self._drop(entry)
        return True

    def forget_learned(self) -> None:
        """Forget everything that came from prompts, as after a purge; what was registered stays."""
        self.epoch += 1
        for agent, entry in list(self._entries.items()):
            if entry.anchor is None or entry.anchor.origin == "learned":
                self.forget(agent)
            else:
                self._num_recent -= sum(map(len, entry.recent.values()))
                entry.recent.clear()

    def forget_session(self, session: str) -> None:
        """Forget the prompts of a session; the anchors that it shares with others stay."""
        for entry in self._entries.values():
            self._num_recent -= len(entry.recent.pop(session, ()))

    def message(self, model: str, replica: str, node: str, warmed: Iterable[tuple[str, float]] = ()) -> AnchorMessage:
        """What the table should hear. `take` confirms it."""
        unsent = tuple(self._unsent.values())[:MAX_SENT]
        return AnchorMessage(model, replica, node, self.epoch, self.life, self.version, unsent, tuple(warmed))

    def take(self, message: AnchorMessage, update: AnchorUpdate) -> None:
        """Take in what the table answered to a message."""
        for anchor in message.anchors:
            if self._unsent.get(anchor.agent) is anchor:
                del self._unsent[anchor.agent]
        if update.epoch < self.epoch:
            return  # it has not heard of our purge yet: what it says may be what was purged
        if update.epoch > self.epoch:
            self.forget_learned()
            self.epoch = update.epoch
        if update.life != self.life:  # it has started again, perhaps without what it knew
            known = {a: entry.anchor for a, entry in self._entries.items() if entry.anchor is not None}
            self._unsent.update((a, anchor) for a, anchor in known.items() if a not in update.agents)
            self.life, self.version = update.life, 0
        for anchor in update.changed:
            if anchor.agent not in self._unsent or anchor.origin == "registered":
                self._set(self._entry(anchor.agent), anchor.own())
        if update.version != self.version:
            # What was learned here and not sent yet is not known there; all else that is not has been deleted.
            for agent in [a for a, entry in self._entries.items() if entry.anchor is not None]:
                if agent not in update.agents and agent not in self._unsent:
                    self.forget(agent)
        self.version = update.version
        self._bound()

    def _entry(self, agent: str) -> _Entry:
        entry = self._entries.setdefault(agent, _Entry())
        self._entries.move_to_end(agent)
        return entry

    def _set(self, entry: _Entry, anchor: Anchor) -> None:
        self._num_tokens += len(anchor.tokens) - (0 if entry.anchor is None else len(entry.anchor.tokens))
        entry.anchor = anchor
        self._unsent.pop(anchor.agent, None)

    def _drop(self, entry: _Entry) -> None:
        self._num_tokens -= 0 if entry.anchor is None else len(entry.anchor.tokens)
        self._num_recent -= sum(map(len, entry.recent.values()))

    def _bound(self) -> None:
        while len(self._entries) > self.max_agents or self._num_tokens > self.max_tokens:
            self.forget(next(iter(self._entries)))
        if self._num_recent > self.max_recent_tokens:
            for entry in self._entries.values():  # anchors stay
                self._num_recent -= sum(map(len, entry.recent.values()))
                entry.recent.clear()
                if self._num_recent <= self.max_recent_tokens:
                    break

    def check_integrity(self) -> None:
        """Raises AssertionError unless the bounds hold and the counts are right."""
        anchors = [entry.anchor for entry in self._entries.values() if entry.anchor is not None]
        assert len(self._entries) <= self.max_agents
        assert self._num_tokens == sum(len(anchor.tokens) for anchor in anchors) <= self.max_tokens
        recent = [prompt for entry in self._entries.values() for prompt in entry.recent.values()]
        assert self._num_recent == sum(map(len, recent)) <= self.max_recent_tokens
        assert all(len(entry.recent) <= MAX_RECENT for entry in self._entries.values())
        assert all(agent == a.agent for agent, e in self._entries.items() if (a := e.anchor) is not None)
        assert all(MIN_ANCHOR_TOKENS <= len(anchor.tokens) <= MAX_ANCHOR_TOKENS for anchor in anchors)
        assert self._unsent.keys() <= self._entries.keys()


def _anchor_length(entry: _Entry, session: str, prompt: Tokens) -> int | None:
    """How much of `prompt` is the agent's anchor from now on, None when it stays what it is."""
    anchor = entry.anchor
    if anchor is not None and anchor.origin == "registered":
        return None
    if anchor is not None and anchor.begins(prompt):
        shared = min(common_prefix(prompt, other) for other in entry.recent.values())
        return shared if len(entry.recent) == MAX_RECENT and shared > len(anchor.tokens) else None
    others = (o for s, o in entry.recent.items() if s != session and not (anchor is not None and anchor.begins(o)))
    shared = max((common_prefix(prompt, other) for other in others), default=0)
    return shared if shared >= MIN_ANCHOR_TOKENS else None


@dataclass(slots=True)
class _Row:
    anchor: Anchor
    version: int


class AnchorTable:
    """All models' anchors, in the scheduler actor. `version` grows with every change. `life` differs between actors
    that came after each other: to a new one replicas send again what it does not know.

    `epoch` grows with every purge of a model. What a replica learned before the purge, and sends after it, is refused,
    and a replica of an older epoch forgets what it learned.
    """

    def __init__(self, life: int = 1, *, max_agents: int = MAX_AGENTS, max_tokens: int = MAX_TOKENS) -> None:
        if max_agents < 1 or max_tokens < MAX_ANCHOR_TOKENS:
            raise ValueError(f"an anchor table needs room for one anchor, got {max_agents!r} and {max_tokens!r}")
        self.life = life
        self.version = 0
        self.max_agents = max_agents
        self.max_tokens = max_tokens
        self._rows: OrderedDict[tuple[str, str], _Row] = OrderedDict()  # by model and agent, least recent first
        self._epochs: dict[str, int] = {}
        self._num_tokens = 0

    def sync(self, message: AnchorMessage) -> AnchorUpdate:
        """Take in what a replica learned, and answer what changed since it asked last."""
        model = message.model
        if message.epoch > self._epochs.get(model, 0):
            self.purge(model, message.epoch)
        if message.epoch == self._epochs.get(model, 0):
            for anchor in message.anchors:
                known = self._rows.get((model, anchor.agent))
                if known is None or known.anchor.origin == "learned":
                    self.put(model, anchor)
        since = message.since if message.life == self.life else 0
        own = [row for (owner, _), row in self._rows.items() if owner == model]
        return AnchorUpdate(
            self._epochs.get(model, 0),
            self.life,
            self.version,
            tuple(row.anchor for row in own if row.version > since),
            frozenset(row.anchor.agent for row in own),
        )

    def put(self, model: str, anchor: Anchor) -> None:
        """Add an anchor, or take it in the place of an older one."""
        length = len(anchor.tokens)
        if not MIN_ANCHOR_TOKENS <= length <= MAX_ANCHOR_TOKENS:
            raise ValueError(f"an anchor must have {MIN_ANCHOR_TOKENS} to {MAX_ANCHOR_TOKENS} tokens, got {length}")
        key = (model, anchor.agent)
        known = self._rows.get(key)
        if known is not None and known.anchor.same(anchor):
            self._rows.move_to_end(key)
            return
        self._remove(key)
        self.version += 1
        self._rows[key] = _Row(anchor.own(), self.version)
        self._num_tokens += length
        while self._num_tokens > self.max_tokens:
            self._remove(next(iter(self._rows)))
        mine = [key for key in self._rows if key[0] == model]
        if len(mine) > self.max_agents:
            self._remove(mine[0])

    def delete(self, agent: str, model: str | None = None) -> list[str]:
        """Remove an agent's anchors, of one model or of all; return the models that had one."""
        keys = [key for key in self._rows if key[1] == agent and model in (None, key[0])]
        for key in keys:
            self._remove(key)
        return [owner for owner, _ in keys]

    def purge(self, model: str, epoch: int | None = None) -> int:
        """Forget what was learned for a model, and what its replicas learned until now; return the new epoch."""
        self._epochs[model] = max(self._epochs.get(model, 0) + 1, epoch or 0)
        for key in [k for k, row in self._rows.items() if k[0] == model and row.anchor.origin == "learned"]:
            self._remove(key)
        self.version += 1
        return self._epochs[model]

    def anchors(self) -> list[tuple[str, Anchor]]:
        """Models and anchors, by name."""
        return [(model, row.anchor) for (model, _), row in sorted(self._rows.items(), key=lambda item: item[0])]

    def _remove(self, key: tuple[str, str]) -> None:
        row = self._rows.pop(key, None)
        if row is not None:
            self._num_tokens -= len(row.anchor.tokens)
            self.version += 1

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "format": FORMAT_VERSION,
            "epochs": dict(self._epochs),
            "anchors": [
                [model, row.anchor.agent, row.anchor.origin, pack(row.anchor.tokens.tolist(), "<i4")]
                for (model, _), row in self._rows.items()
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], life: int = 1) -> AnchorTable:
        """Inverse of `to_dict`. Raises ValueError for anything else."""
        table = cls(life)
        try:
            if data["format"] != FORMAT_VERSION:
                raise ValueError(f"format of anchors must be {FORMAT_VERSION}, got {data['format']!r}")
            table._epochs = {str(model): int(epoch) for model, epoch in data["epochs"].items()}
            for model, agent, origin, packed in data["anchors"]:
                if origin not in ("learned", "registered"):
                    raise ValueError(f"an anchor is learned or registered, not {origin!r}")
                table.put(str(model), Anchor(str(agent), as_tokens(unpack(packed, "<i4")), origin))
            table.check_integrity()
        except (AssertionError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"damaged table of anchors: {type(error).__name__}: {error}") from error
        return table

    def check_integrity(self) -> None:
        """Raises AssertionError unless the bounds hold and the counts are right."""
        assert self._num_tokens == sum(len(row.anchor.tokens) for row in self._rows.values()) <= self.max_tokens
        models = [model for model, _ in self._rows]
        assert all(models.count(model) <= self.max_agents for model in set(models))
        assert all(row.version <= self.version for row in self._rows.values())
