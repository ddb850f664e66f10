"""Which agent sent this request: a sketch of its anchor, and a registry that recognises the sketch again.

The anchor (system text and tool schemas) is cut into clauses, each clause is hashed, and the smallest hashes are
kept: a bottom-k sketch. Two sketches sample the same pieces, so how much of one text is contained in another can
be read off them. Where a clause stands does not matter: a header that changes in front of the anchor, or a line
that changes inside it, costs only its own pieces.

Three rules turn sketches into agents (see docs/scheduler.md for the reasons and the limits):

* *contained*: a request belongs to the agent whose learned pieces it contains. A piece counts by how regularly the
  agent shows it (support) and how few agents share it (inverse document frequency), so that header text fades and
  agents behind one long preamble still differ;
* *split*: two sets of pieces that keep alternating below one agent are two agents. One that replaces another is a
  new version of the same agent;
* *fold*: many look-alikes seen once each are one agent behind a header that never repeats.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

SKETCH_SIZE = 64
"""Hashes kept a sketch (k of bottom-k): the error of a containment near 0.9 is sqrt(0.9 * 0.1 / 64), about 0.04."""

MAX_ANCHOR_CHARS = 64 * 1024
"""Longest anchor text looked at: about 16,000 tokens, beyond every published agent prompt, so that a pasted book
cannot hold up a request."""

PROMPT_HEAD_CHARS = 8 * 1024
"""A completion's prompt does not say where its anchor ends: its first 2,000 tokens stand for it."""

PROMPT_HEAD_TOKENS = 2048
"""The same head when the prompt comes as token ids."""

MAX_CLAUSE_CHARS = 160
"""A clause longer than this (minified JSON, text without punctuation) is cut again between words."""

MAX_NAME_CHARS = 256
"""Names come from clients and are kept: bounded."""

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

ADOPT_SESSIONS = (4, 8, 16, HISTORY_SESSIONS)
"""Numbers of sessions at which an agent takes over its look-alikes: often enough, and too seldom to cost anything."""

FOLD_LOOKALIKES = 8
"""So many agents, each seen in a session of its own and never again, that share `FOLD_CONTAINMENT` with a request are
one agent. Fewer may well be the agents of a program behind one preamble on their first turn."""

FOLD_CONTAINMENT = 0.5
"""Half of the anchor must be common before look-alikes are folded."""

FOLD_BAND = 0.12
"""Look-alikes are as alike as the most alike of them less this, three standard errors of the sketches: agents that
merely share a preamble with the request lie further off."""

_FULL = (1 << 64) - 1
_HAS_DIGIT = re.compile(r"(?<![\w-])[\w-]{0,40}?\d[\w-]*")
_CLAUSE_END = re.compile(r"[\n\r.;:!?,。！？；，、：]+")
_DIGIT = re.compile(r"\d")
_TWO_LETTERS = re.compile(r"[^\W\d_]{2}")
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class AnchorSketch:
    """Bottom-k sketch of the distinct pieces of an anchor.

    `hashes`: the smallest xxh3-64 hashes, ascending, at most `SKETCH_SIZE`. `num_pieces`: distinct pieces the anchor
    has. `num_chars`: length of the anchor text. Empty (false) for a request without system text and tools.
    """

    hashes: tuple[int, ...] = ()
    num_pieces: int = 0
    num_chars: int = 0

    def __bool__(self) -> bool:
        return bool(self.hashes)

    @property
    def limit(self) -> int:
        """Largest hash up to which this sketch says for sure whether a piece is present."""
        return _FULL if self.num_pieces <= len(self.hashes) else self.hashes[-1]

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that name this exact set of pieces."""
        return f"{xxhash.xxh3_64_intdigest(_pack(self.hashes)) >> 32:08x}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form, about 700 bytes: hashes as little-endian 64-bit words in base64."""
        return {"hashes": _encode(self.hashes), "num_pieces": self.num_pieces, "num_chars": self.num_chars}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AnchorSketch:
        """Inverse of `to_dict`. Raises ValueError when the hashes are not ascending or too many."""
        hashes = _decode(data["hashes"])
        if len(hashes) > SKETCH_SIZE or any(a >= b for a, b in itertools.pairwise(hashes)):
            raise ValueError(f"sketch hashes must be at most {SKETCH_SIZE} and ascending, got {len(hashes)}")
        return cls(hashes, int(data["num_pieces"]), int(data["num_chars"]))


def anchor_sketch(body: Mapping[str, Any]) -> AnchorSketch:
    """Sketch the anchor of a chat or completions request body.

    Chat: system and developer messages and tool schemas. Completions: the head of the prompt (text or token ids; of a
    batch the first). Reads only; odd shapes are skipped, never an error: what is no anchor gives an empty sketch.
    """
    num_chars = 0
    pieces: set[bytes] = set()
    for text in _anchor_texts(body):
        text = text[: MAX_ANCHOR_CHARS - num_chars]
        num_chars += len(text)
        pieces.update(_clauses(text))
        if num_chars >= MAX_ANCHOR_CHARS:
            break
    for text in _tool_pieces(body.get("tools")):
        if num_chars >= MAX_ANCHOR_CHARS:
            break
        num_chars += len(text)
        pieces.update(b"\x00tool\x00" + clause for clause in _clauses(text))
    ids = _prompt_ids(body.get("prompt"))
    if ids:
        num_chars += 4 * len(ids)
        pieces.update(_id_runs(ids))
    hashes = sorted({xxhash.xxh3_64_intdigest(piece) for piece in pieces})
    return AnchorSketch(tuple(hashes[:SKETCH_SIZE]), len(hashes), num_chars)


def clean_agent_name(name: object) -> str | None:
    """The agent name a client gave, trimmed and bounded; None when there is none that can be used."""
    if not isinstance(name, str):
        return None
    if name and len(name) <= MAX_NAME_CHARS and name.isprintable() and name == name.strip() and "  " not in name:
        return name
    cleaned = _SPACES.sub(" ", "".join(c for c in name if c.isprintable())).strip()[:MAX_NAME_CHARS].strip()
    return cleaned or None


def _anchor_texts(body: Mapping[str, Any]) -> Iterator[str]:
    messages = body.get("messages")
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
        for message in messages:
            if isinstance(message, Mapping) and message.get("role") in ("system", "developer"):
                yield from _content_texts(message.get("content"))
        return
    prompt = body.get("prompt")
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes) and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        yield prompt[:PROMPT_HEAD_CHARS]


def _content_texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence) and not isinstance(content, bytes):
        for part in content:
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                yield part["text"]


def _tool_pieces(tools: object) -> Iterator[str]:
    """One text a tool name, description and parameter: a changed parameter costs its own piece only."""
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        return
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            continue
        name = str(function.get("name", ""))
        yield f"tool {name}"
        yield str(function.get("description") or "")
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping):
            for key, schema in properties.items():
                yield f"{name} {key} {json.dumps(schema, sort_keys=True, default=str)}"


def _prompt_ids(prompt: object) -> list[int]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes) or not prompt:
        return []
    if isinstance(prompt[0], Sequence) and not isinstance(prompt[0], str | bytes):
        prompt = prompt[0]
    head = list(prompt[:PROMPT_HEAD_TOKENS])
    return head if all(isinstance(token, int) and 0 <= token <= 0xFFFFFFFF for token in head) else []


def _clauses(text: str) -> Iterator[bytes]:
    """Cut at line ends and punctuation, which move with the text. Words with digits (times, ids) are masked."""
    for clause in _CLAUSE_END.split(text):
        clause = " ".join(clause.split())
        if _DIGIT.search(clause):
            clause = _HAS_DIGIT.sub("#", clause)
        if not _TWO_LETTERS.search(clause):
            continue
        if len(clause) <= MAX_CLAUSE_CHARS:
            yield clause.encode("utf-8", "surrogatepass")
        else:
            yield from _word_runs(clause)


def _word_runs(clause: str) -> Iterator[bytes]:
    """Cut after every eighth word on average, chosen by the word itself so that the cuts move with the text."""
    run: list[bytes] = []
    for word in clause.encode("utf-8", "surrogatepass").split():
        run.append(word)
        if xxhash.xxh3_64_intdigest(word) & 7 == 0 or len(run) == 32:
            yield b" ".join(run)
            run = []
    if run:
        yield b" ".join(run)


def _id_runs(ids: Sequence[int]) -> Iterator[bytes]:
    """Token ids cut like words, after every eighth on average."""
    run: list[int] = []
    for token in ids:
        run.append(token)
        if xxhash.xxh3_64_intdigest(token.to_bytes(4, "little")) & 7 == 0 or len(run) == 32:
            yield b"\x00ids\x00" + np.array(run, dtype="<u4").tobytes()
            run = []
    if run:
        yield b"\x00ids\x00" + np.array(run, dtype="<u4").tobytes()


def _pack(hashes: Iterable[int]) -> bytes:
    return np.fromiter(hashes, dtype="<u8").tobytes()


def _encode(hashes: Iterable[int]) -> str:
    return base64.b64encode(_pack(hashes)).decode("ascii")


def _decode(text: str) -> tuple[int, ...]:
    return tuple(int(h) for h in np.frombuffer(base64.b64decode(text, validate=True), dtype="<u8"))


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
        return AnchorSketch(hashes, len(hashes) + (self.limit != _FULL), self.num_chars)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, about 0.8 KB: supports as bytes of 1/255."""
        supports = bytes(max(1, round(255 * s)) for s in self.support.values())
        return {
            "hashes": _encode(self.support),
            "support": base64.b64encode(supports).decode("ascii"),
            "limit": self.limit,
            "num_chars": self.num_chars,
            "num_sessions": self.num_sessions,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """Inverse of `to_dict` up to the rounding of the supports. Raises ValueError when the lengths differ."""
        hashes = _decode(data["hashes"])
        supports = base64.b64decode(data["support"], validate=True)
        pairs = zip(hashes, supports, strict=True)
        support = {h: s / 255 for h, s in pairs if s}
        return cls(support, int(data["limit"]), int(data["num_chars"]), max(1, int(data["num_sessions"])))


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


@dataclass(slots=True)
class AgentEntry:
    """One known agent. `named`: a client gave the name. `first_session`: the first it was seen in, if it had an id."""

    agent: str
    named: bool
    num_requests: int = 0
    first_session: str | None = None
    several_sessions: bool = False
    last_s: float = 0.0
    history: AnchorHistory = field(default_factory=AnchorHistory)


@dataclass(frozen=True, slots=True)
class Resolution:
    """The agent of a request, and what had to change to say so."""

    agent: str | None
    created: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    """(old, new): what was learned about `old` belongs to `new` from here on."""
    evicted: tuple[str, ...] = ()
    """Agents forgotten because the registry was full."""


@dataclass(slots=True)
class AgentRegistry:
    """Recognises agents and remembers at most `max_agents` of them; the least recently seen is forgotten."""

    max_agents: int = 256
    index: AnchorIndex = field(default_factory=AnchorIndex)
    _entries: OrderedDict[str, AgentEntry] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        if self.max_agents < 2:
            raise ValueError(f"max_agents must be at least 2, got {self.max_agents!r}")

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, agent: str) -> bool:
        return agent in self._entries

    def entries(self) -> list[AgentEntry]:
        """Known agents, least recently seen first."""
        return list(self._entries.values())

    def resolve(
        self, name: str | None, sketch: AnchorSketch | None, session: str | None = None, time_s: float = 0.0
    ) -> Resolution:
        """Say which agent sent a request, and learn from it.

        An explicit `name` wins; its anchor is learned, so that later requests without the name are recognised, and an
        unnamed agent with that anchor takes the name. Without either there is no agent (`agent` is None).
        """
        name = clean_agent_name(name)
        if name is None and not sketch:
            return Resolution(None)
        renamed: list[tuple[str, str]] = []
        agent = name
        history: AnchorHistory | None = None
        if sketch and name is None:
            agent = self.index.match(sketch) or self._fold(sketch, renamed)
            if agent is not None and not self._entries[agent].named:
                history = self._entries[agent].history.split(sketch)
                if history is not None:
                    self.index.put(agent, self._entries[agent].history.profile())
                    agent = None
            if agent is None:
                agent = self._new_id(sketch)
        elif sketch and name is not None and self.index.get(name) is None:
            twin = self.index.match(sketch)
            if twin is not None and not self._entries[twin].named:
                self._rename(twin, name, renamed)
        assert agent is not None
        entry = self._entries.get(agent)
        created = entry is None
        if entry is None:
            entry = self._entries[agent] = AgentEntry(agent, named=name is not None, first_session=session)
        self._entries.move_to_end(agent)
        if history is not None:
            entry.history, entry.several_sessions = history, True
        entry.named = entry.named or name is not None
        entry.num_requests += 1
        entry.last_s = time_s
        entry.several_sessions = entry.several_sessions or session != entry.first_session
        if sketch:
            known = entry.history.num_sessions
            if entry.history.add(sketch, session):
                self.index.put(agent, entry.history.profile())
            if known < entry.history.num_sessions in ADOPT_SESSIONS:
                self._adopt(agent, renamed)
        evicted = tuple(self._evict()) if len(self._entries) > self.max_agents else ()
        return Resolution(agent, created, tuple(renamed), evicted)

    def _new_id(self, sketch: AnchorSketch) -> str:
        agent = f"agent-{sketch.fingerprint}"
        if agent not in self._entries:
            return agent
        # The same pieces once named an agent whose profile has moved on since.
        return next(name for n in range(2, len(self._entries) + 3) if (name := f"{agent}-{n}") not in self._entries)

    def _fold(self, sketch: AnchorSketch, renamed: list[tuple[str, str]]) -> str | None:
        """Fold look-alikes that were each seen in one session alone into the oldest of them, and return it."""
        once = [
            (contained, entry)
            for agent, contained, _ in self.index.candidates(sketch)
            if not (entry := self._entries[agent]).named and entry.history.num_sessions == 1
        ]
        least = max(FOLD_CONTAINMENT, max((contained for contained, _ in once), default=1.0) - FOLD_BAND)
        alike = [entry for contained, entry in once if contained >= least]
        # Look-alikes within one session are the agents of one program.
        sessions = [entry.first_session for entry in alike]
        if sessions.count(None) + len(set(sessions) - {None}) < FOLD_LOOKALIKES:
            return None
        keeper = alike[0]
        for entry in alike[1:]:
            keeper.history.absorb(entry.history)
            self._rename(entry.agent, keeper.agent, renamed)
        self.index.put(keeper.agent, keeper.history.profile())
        return keeper.agent

    def _adopt(self, agent: str, renamed: list[tuple[str, str]]) -> None:
        """Give an agent that knows its anchor by now the look-alikes that its first headers left behind."""
        profile = self.index.get(agent)
        if profile is None:
            return
        sharing = set().union(*(self.index.holders(piece) for piece in profile.support)) - {agent}
        for other in sorted(sharing):
            entry, seen = self._entries[other], self.index.get(other)
            if entry.named or entry.history.num_sessions > 1 or seen is None:
                continue
            match = self.index.candidates(seen.as_sketch(), {agent})
            if any(contained >= MATCH_CONTAINMENT and explained >= MIN_EXPLAINED for _, contained, explained in match):
                self._rename(other, agent, renamed)

    def _rename(self, old: str, new: str, renamed: list[tuple[str, str]]) -> None:
        """Give an agent's entry to `new`; when that is known already, only the counts."""
        entry, target, profile = self._entries.pop(old), self._entries.get(new), self.index.get(old)
        self.index.remove(old)
        if target is None:
            entry.agent = new
            target = self._entries[new] = entry
        else:
            target.num_requests += entry.num_requests
            target.several_sessions = target.several_sessions or entry.several_sessions
            if not target.history.num_sessions:
                target.history = entry.history
        if profile is not None and self.index.get(new) is None:
            self.index.put(new, profile)
        renamed.append((old, new))

    def _evict(self) -> Iterator[str]:
        while len(self._entries) > self.max_agents:
            agent, _ = self._entries.popitem(last=False)
            self.index.remove(agent)
            yield agent

    def to_dict(self) -> list[dict[str, Any]]:
        """JSON form: agents with the regular pieces of their profiles, least recently seen first."""
        agents = []
        for entry in self._entries.values():
            profile = self.index.core(entry.agent)
            agents.append(
                {
                    "agent": entry.agent,
                    "named": entry.named,
                    "num_requests": entry.num_requests,
                    "several_sessions": entry.several_sessions,
                    "last_s": entry.last_s,
                    "profile": None if profile is None else profile.to_dict(),
                }
            )
        return agents

    @classmethod
    def from_dict(cls, rows: Sequence[Mapping[str, Any]], max_agents: int = 256) -> AgentRegistry:
        """Inverse of `to_dict`; keeps the `max_agents` most recently seen."""
        registry = cls(max_agents)
        for item in list(rows)[-max_agents:]:
            agent = str(item["agent"])
            profile = None if item["profile"] is None else Profile.from_dict(item["profile"])
            registry._entries[agent] = AgentEntry(
                agent,
                named=bool(item["named"]),
                num_requests=int(item["num_requests"]),
                several_sessions=bool(item["several_sessions"]),
                last_s=float(item["last_s"]),
                history=AnchorHistory() if profile is None else AnchorHistory.restored(profile),
            )
            if profile is not None:
                registry.index.put(agent, profile)
        return registry

    def check_integrity(self) -> None:
        """Raises AssertionError unless the bounds hold and every profile belongs to a known agent."""
        assert len(self._entries) <= self.max_agents
        assert all(entry.agent == agent for agent, entry in self._entries.items())
        for agent, entry in self._entries.items():
            assert entry.num_requests >= 1
            entry.history.check_integrity()
            assert (self.index.get(agent) is None) == (entry.history.num_sessions == 0)
        assert sum(entry.history.num_sessions > 0 for entry in self._entries.values()) == len(self.index)
        self.index.check_integrity()
