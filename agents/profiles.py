"""What an agent's anchor looks like, learned from the sketches of its sessions, and an index to find it by.

* *contained*: a request belongs to the agent whose learned pieces it contains. A piece counts by how regularly the
  agent shows it (support) and how few agents share it (inverse document frequency), so that header text fades and
  agents behind one long preamble still differ;
* *split*: two sets of pieces that keep alternating below one agent are two agents. One that replaces another is a
  new version of the same agent.

See docs/scheduler.md for the reasons and the limits.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ropewalk.agents.sketch import FULL_LIMIT, SKETCH_SIZE, AnchorSketch, pack_hashes, unpack_hashes

MATCH_CONTAINMENT = 0.85
"""Share of an agent's weighted pieces that a request must contain. A header of 50 to 200 tokens before an anchor of
1,500 leaves 0.88 on the very first comparison, before anything is known about which pieces vary."""

MIN_EXPLAINED = 0.35
"""Share of the request's own pieces that the agent must explain: a one-line prompt ("You are a helpful assistant.")
may not claim every longer prompt that quotes it."""

HISTORY_SESSIONS = 32
"""Sessions an agent's anchor is learned from. Each speaks with its latest request alone, so that neither a long session
nor a header that stays the same within one outweighs the rest. A new version of a prompt has replaced the old one after
so many sessions. 32 fit the bits of one small integer."""

MAX_PIECES = 4 * SKETCH_SIZE
"""Pieces remembered an agent, the rarest forgotten: room for the anchor and the header text of the last sessions."""

SPLIT_SESSIONS = 8
"""Sessions before an agent may be split in two; fewer say nothing about what alternates."""

SPLIT_SHOWN = 4
"""Sessions that must show a set of pieces for it to be an agent of its own, so that a coincidence is none."""

SPLIT_COVERED = 0.9
"""Share of the sessions that must show one or the other of two agents; a tenth may be of a third one, seen once."""

STEADY_SUPPORT = 0.85
"""Pieces shown by this share of the sessions belong to all agents below a profile and say nothing about a split."""

SHORTLIST = 8
"""Agents compared in full: those with the rarest pieces in common. A piece that more agents hold picks none of them."""

MATCHES_KEPT = 1024
"""Answers remembered an index, about 1 MB."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What one agent's anchor looks like from its sessions so far.

    `support[h]`: share of the sessions that show piece `h`, in (0, 1]. `limit`: largest hash the support says anything
    about. `num_sessions`: how many sessions that rests on; from two on, a piece must have come back to be in it.
    """

    support: Mapping[int, float]
    limit: int
    num_chars: int
    num_sessions: int = 1

    def core(self) -> Profile:
        """The regular pieces alone, at most `SKETCH_SIZE`, strongest first: what snapshots and files carry."""
        floor = 0.5 * max(self.support.values(), default=0.0)
        kept = sorted(((s, h) for h, s in self.support.items() if s >= floor), key=lambda item: (-item[0], item[1]))
        return Profile({h: s for s, h in kept[:SKETCH_SIZE]}, self.limit, self.num_chars, self.num_sessions)

    def as_sketch(self) -> AnchorSketch:
        """The pieces of a profile from one session, as the sketch they came from."""
        hashes = tuple(sorted(self.support))
        return AnchorSketch(hashes, len(hashes) + (self.limit != FULL_LIMIT), self.num_chars)

    def to_dict(self) -> list[Any]:
        """JSON form, about 0.4 KB: `[hashes, supports, limit, num_chars, num_sessions]`.

        Hashes are packed, supports are bytes of 1/255, both in base64. Supports of the first pieces are left out as
        long as they are full: in a core, where the strongest come first, that is most of them.
        """
        supports = bytes(max(1, round(255 * s)) for s in self.support.values()).lstrip(b"\xff")
        hashes = base64.b64encode(pack_hashes(self.support)).decode("ascii")
        return [
            hashes,
            base64.b64encode(supports).decode("ascii"),
            self.limit,
            self.num_chars,
            self.num_sessions,
        ]

    @classmethod
    def from_dict(cls, data: Sequence[Any]) -> Profile:
        """Inverse of `to_dict` up to the rounding of the supports. Raises ValueError when the lengths do not fit."""
        packed, faint, limit, num_chars, num_sessions = data
        hashes = unpack_hashes(base64.b64decode(packed, validate=True))
        supports = base64.b64decode(faint, validate=True).rjust(len(hashes), b"\xff")
        support = {h: s / 255 for h, s in zip(hashes, supports, strict=True) if s}
        return cls(support, int(limit), int(num_chars), max(1, int(num_sessions)))


class AnchorIndex:
    """Finds the agent whose profile a sketch contains. Agents are kept in the order they were first added."""

    def __init__(self, profiles: Mapping[str, Profile] | None = None) -> None:
        self._profiles: dict[str, Profile] = {}
        self._holders: dict[int, set[str]] = {}
        self._cores: dict[str, Profile] = {}
        self._matches: dict[tuple[int, ...], str | None] = {}
        for agent, profile in (profiles or {}).items():
            self.put(agent, profile)

    def __len__(self) -> int:
        return len(self._profiles)

    def get(self, agent: str) -> Profile | None:
        """Profile of an agent, None when it has none."""
        return self._profiles.get(agent)

    def holders(self, piece: int) -> Set[str]:
        """Agents whose profile has a piece; not to be changed."""
        return self._holders.get(piece, frozenset())

    def core(self, agent: str) -> Profile | None:
        """The core of an agent's profile, None when it has none."""
        if agent not in self._cores and agent in self._profiles:
            self._cores[agent] = self._profiles[agent].core()
        return self._cores.get(agent)

    def put(self, agent: str, profile: Profile) -> None:
        """Add or replace an agent's profile."""
        old = self._profiles.get(agent)
        if old == profile:
            return
        self._cores.pop(agent, None)
        self._matches.clear()
        if old is not None:
            for piece in old.support.keys() - profile.support.keys():
                self._release(piece, agent)
        for piece in profile.support:
            self._holders.setdefault(piece, set()).add(agent)
        self._profiles[agent] = profile

    def remove(self, agent: str) -> None:
        """Forget an agent; unknown ones are ignored."""
        profile = self._profiles.pop(agent, None)
        self._cores.pop(agent, None)
        self._matches.clear()
        for piece in profile.support if profile is not None else ():
            self._release(piece, agent)

    def _release(self, piece: int, agent: str) -> None:
        holders = self._holders[piece]
        holders.discard(agent)
        if not holders:
            del self._holders[piece]

    def match(self, sketch: AnchorSketch) -> str | None:
        """The agent this request belongs to, None when no profile is contained well enough.

        Programs send the same prompt again and again: answers are remembered until a profile changes.
        """
        if sketch.hashes not in self._matches:
            if len(self._matches) >= MATCHES_KEPT:
                self._matches.clear()
            # Nearly always an agent with rare pieces of its own; only if none fits are all compared.
            best = self._best(self.candidates(sketch, self._shortlist(sketch)))
            self._matches[sketch.hashes] = best or self._best(self.candidates(sketch))
        return self._matches[sketch.hashes]

    def _shortlist(self, sketch: AnchorSketch) -> set[str]:
        """The agents that share the rarest pieces with a request."""
        shared = [holders for piece in sketch.hashes if (holders := self._holders.get(piece))]
        score: Counter[str] = Counter()
        for holders in shared:
            if len(holders) <= SHORTLIST:
                for agent in holders:
                    score[agent] += 1
        return {agent for agent, _ in score.most_common(SHORTLIST)}

    @staticmethod
    def _best(candidates: Iterable[tuple[str, float, float]]) -> str | None:
        best, best_score = None, 0.0
        for agent, contained, explained in candidates:
            if contained >= MATCH_CONTAINMENT and explained >= MIN_EXPLAINED and contained * explained > best_score:
                best, best_score = agent, contained * explained
        return best

    def candidates(self, sketch: AnchorSketch, among: Set[str] | None = None) -> list[tuple[str, float, float]]:
        """(agent, contained, explained) for each agent that shares a piece (or `among` these), in order of arrival.

        `contained`: share of the agent's pieces found in the request. `explained`: share of the request's pieces
        found in the agent. Both are weighted by `support * idf`, `idf = log(1 + agents / holders)`, over the hashes
        that both sides know about. A profile from one session is weighted flat: its header is as rare as its own text.
        """
        count = len(self._profiles)
        holders = self._holders
        present = set(sketch.hashes)
        if among is None:
            among = set().union(*(holders.get(piece, ()) for piece in sketch.hashes))
        if not among:
            return []
        idf = [0.0] + [math.log1p(count / n) for n in range(1, count + 1)]
        found = []
        for agent in (a for a in self._profiles if a in among):
            profile = self._profiles[agent]
            limit = min(sketch.limit, profile.limit)
            flat = profile.num_sessions == 1
            common = total = 0.0
            for piece, support in profile.support.items():
                if piece <= limit:
                    weight = 1.0 if flat else support * idf[len(holders[piece])]
                    total += weight
                    if piece in present:
                        common += weight
            asked = shown = 0.0
            for piece in sketch.hashes:
                if piece <= limit:
                    # A piece nobody holds is most likely header: it weighs no more than one that all share.
                    weight = idf[len(holders.get(piece, ())) or count]
                    asked += weight
                    shown += weight * profile.support.get(piece, 0.0)
            if total and asked:
                found.append((agent, common / total, shown / asked))
        return found

    def check_integrity(self) -> None:
        """Raises AssertionError unless pieces and holders describe the same profiles."""
        for piece, holders in self._holders.items():
            assert holders, f"piece {piece} has no holder"
            assert all(piece in self._profiles[agent].support for agent in holders)
        assert sum(map(len, self._holders.values())) == sum(len(p.support) for p in self._profiles.values())


class AnchorHistory:
    """Which of the last `HISTORY_SESSIONS` sessions showed which piece, as one bit each (bit 0: the newest session).

    A session that comes again within that time rewrites its bit. Requests without a session count as one of their own.
    """

    def __init__(self) -> None:
        self._shown: dict[int, int] = {}
        self._limits: list[int] = []  # newest first, one a session
        self._sessions: dict[str, int] = {}  # session: serial number of its bit
        self._latest: dict[str, tuple[int, ...]] = {}  # what that bit says, by session
        self._serial = 0
        self.num_chars = 0

    @property
    def num_sessions(self) -> int:
        """Sessions remembered, at most `HISTORY_SESSIONS`."""
        return len(self._limits)

    def add(self, sketch: AnchorSketch, session: str | None) -> bool:
        """Let a session speak with this request; False when it says what it said before."""
        if session is not None and self._latest.get(session) == sketch.hashes:
            return False
        age = self._serial - self._sessions[session] if session in self._sessions else HISTORY_SESSIONS
        if age >= HISTORY_SESSIONS:
            age = 0
            self._serial += 1
            self._limits = [sketch.limit, *self._limits[: HISTORY_SESSIONS - 1]]
            window = (1 << len(self._limits)) - 1
            self._shown = {p: bits for p, b in self._shown.items() if (bits := b << 1 & window)}
            self._sessions = {s: n for s, n in self._sessions.items() if self._serial - n < HISTORY_SESSIONS}
            if session is not None:
                self._sessions[session] = self._serial
            self._latest = {s: hashes for s, hashes in self._latest.items() if s in self._sessions}
        else:
            self._limits[age] = sketch.limit
            self._shown = {p: bits for p, b in self._shown.items() if (bits := b & ~(1 << age))}
        for piece in sketch.hashes:
            self._shown[piece] = self._shown.get(piece, 0) | 1 << age
        if len(self._shown) > MAX_PIECES:
            kept = sorted(self._shown.items(), key=lambda item: (-item[1].bit_count(), item[1] & -item[1], item[0]))
            self._shown = dict(kept[:MAX_PIECES])
        if session is not None:
            self._latest[session] = sketch.hashes
        self.num_chars += round((sketch.num_chars - self.num_chars) / len(self._limits))
        return True

    def profile(self) -> Profile:
        """Support of every piece that came back (of all pieces while there is one session only)."""
        least = min(2, len(self._limits))
        support = {p: self._support(p, b) for p, b in self._shown.items() if b.bit_count() >= least}
        return Profile(support, max(self._limits, default=0), self.num_chars, len(self._limits))

    def _support(self, piece: int, bits: int) -> float:
        asked = sum(piece <= limit for limit in self._limits) if piece > min(self._limits) else len(self._limits)
        return bits.bit_count() / max(1, asked)

    def split(self, sketch: AnchorSketch) -> AnchorHistory | None:
        """Take the sessions of another agent out of these: those that show the pieces by which `sketch` differs.

        There is another agent when the pieces of `sketch` that only some sessions show always come together (one
        block), never beside the pieces that `sketch` lacks, one or the other is in nearly every session, and the others
        were still seen after the block had first come up. The last part tells two agents from two versions of one; the
        first three tell an agent from header text drawn from a pool.
        """
        block = self._block(sketch)
        if not block:
            return None
        ages = range(len(self._limits))
        ours, rest = [a for a in ages if block >> a & 1], [a for a in ages if not block >> a & 1]
        taken = AnchorHistory()
        taken._limits = [self._limits[a] for a in ours]
        taken._shown = _picked(self._shown, ours)
        taken.num_chars = sketch.num_chars
        serial_of = {n: a for a, n in enumerate(rest)}
        sessions = {s: serial_of.get(self._serial - n) for s, n in self._sessions.items()}
        self._sessions = {s: self._serial - age for s, age in sessions.items() if age is not None}
        self._latest = {s: hashes for s, hashes in self._latest.items() if s in self._sessions}
        self._limits = [self._limits[a] for a in rest]
        self._shown = _picked(self._shown, rest)
        return taken

    def _block(self, sketch: AnchorSketch) -> int:
        """Sessions to split off, as bits; 0 for none."""
        if len(self._limits) < SPLIT_SESSIONS:
            return 0
        present = set(sketch.hashes)
        block: int | None = None
        others = 0
        least = min(self._limits)
        for piece, bits in self._shown.items():
            # Pieces beyond some session's limit have bits that say nothing.
            if piece > least or bits.bit_count() < 2 or bits.bit_count() >= STEADY_SUPPORT * len(self._limits):
                continue
            if piece not in present:
                others |= bits if piece <= sketch.limit else 0
            elif block is None:
                block = bits
            elif bits != block:
                return 0
        if not block or not others or block.bit_count() < SPLIT_SHOWN or block & others:
            return 0
        covered = (block | others).bit_count() >= SPLIT_COVERED * len(self._limits)
        return block if covered and (others & -others) < 1 << (block.bit_length() - 1) else 0

    def absorb(self, other: AnchorHistory) -> None:
        """Take in the sessions of another history as older ones."""
        room = HISTORY_SESSIONS - len(self._limits)
        shift, window = len(self._limits), (1 << HISTORY_SESSIONS) - 1
        self._limits += other._limits[:room]
        for piece, bits in other._shown.items():
            merged = self._shown.get(piece, 0) | bits << shift & window
            if merged:
                self._shown[piece] = merged

    @classmethod
    def restored(cls, profile: Profile) -> AnchorHistory:
        """A history whose profile is about `profile`; which session showed what is not known any more."""
        history = cls()
        num = min(profile.num_sessions, HISTORY_SESSIONS)
        history._limits = [profile.limit] * num
        history._serial = num
        history._shown = {p: (1 << max(1, round(s * num))) - 1 for p, s in profile.support.items()}
        history.num_chars = profile.num_chars
        return history

    def check_integrity(self) -> None:
        """Raises AssertionError unless the bounds hold and no bit lies outside the sessions."""
        assert len(self._limits) <= HISTORY_SESSIONS
        assert self._latest.keys() <= self._sessions.keys()
        assert len(self._sessions) <= HISTORY_SESSIONS
        assert len(self._shown) <= MAX_PIECES
        assert all(0 < bits < 1 << len(self._limits) for bits in self._shown.values())


def _picked(shown: Mapping[int, int], ages: Sequence[int]) -> dict[int, int]:
    """The bits at `ages`, moved together; pieces left without any are dropped."""
    moved = {piece: sum((bits >> age & 1) << new for new, age in enumerate(ages)) for piece, bits in shown.items()}
    return {piece: bits for piece, bits in moved.items() if bits}
