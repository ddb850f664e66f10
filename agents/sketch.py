"""A sketch of a request's anchor: what recognises an agent in a bounded number of bytes.

The anchor (system text and tool schemas) is cut into clauses, each clause is hashed, and the smallest hashes are
kept: a bottom-k sketch. Two sketches sample the same pieces, so how much of one text is contained in another can
be read off them. Where a clause stands does not matter: a header that changes in front of the anchor, or a line
that changes inside it, costs only its own pieces.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

HASH_BYTES = 4
"""Bytes kept of a piece's hash: among the 65,536 pieces that 256 agents may hold, one of a request's 64 meets a
stranger of the same hash in a few requests of a thousand, and that is a 64th of the evidence."""

FULL_LIMIT = (1 << 8 * HASH_BYTES) - 1
"""Limit of a sketch that left no piece out."""

_HAS_DIGIT = re.compile(r"(?<![\w-])[\w-]{0,40}?\d[\w-]*")
_CLAUSE_END = re.compile(r"[\n\r.;:!?,。！？；，、：]+")
_DIGIT = re.compile(r"\d")
_TWO_LETTERS = re.compile(r"[^\W\d_]{2}")
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class AnchorSketch:
    """Bottom-k sketch of the distinct pieces of an anchor.

    `hashes`: the smallest hashes (upper 32 bits of xxh3-64), ascending, at most `SKETCH_SIZE`. `num_pieces`: distinct
    pieces the anchor has. `num_chars`: length of the anchor text. Empty (false) for a request without system text and
    tools.
    """

    hashes: tuple[int, ...] = ()
    num_pieces: int = 0
    num_chars: int = 0

    def __bool__(self) -> bool:
        return bool(self.hashes)

    @property
    def limit(self) -> int:
        """Largest hash up to which this sketch says for sure whether a piece is present."""
        return FULL_LIMIT if self.num_pieces <= len(self.hashes) else self.hashes[-1]

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that name this exact set of pieces."""
        return f"{xxhash.xxh3_64_intdigest(pack_hashes(self.hashes)) >> 32:08x}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form, about 400 bytes: hashes packed, in base64."""
        return {
            "hashes": base64.b64encode(pack_hashes(self.hashes)).decode("ascii"),
            "num_pieces": self.num_pieces,
            "num_chars": self.num_chars,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AnchorSketch:
        """Inverse of `to_dict`. Raises ValueError when the hashes are not ascending or too many."""
        hashes = unpack_hashes(base64.b64decode(data["hashes"], validate=True))
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
    hashes = sorted({xxhash.xxh3_64_intdigest(piece) >> 64 - 8 * HASH_BYTES for piece in pieces})
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


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Hashes as little-endian words of `HASH_BYTES` bytes."""
    return np.fromiter(hashes, dtype=f"<u{HASH_BYTES}").tobytes()


def unpack_hashes(packed: bytes) -> tuple[int, ...]:
    """Inverse of `pack_hashes`. Raises ValueError when the length is no multiple of `HASH_BYTES`."""
    return tuple(np.frombuffer(packed, dtype=f"<u{HASH_BYTES}").tolist())
