"""Names of chunks: xxh3-128 over tenant, domain and token ids.

A key only proposes a chunk. Whoever uses one compares the token ids and verifies the checksum.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt
import xxhash

HEAD_LENGTH = 32
"""Tokens that a head key covers: the minimum chunk length, so that every whole chunk has one."""

Tokens = npt.NDArray[np.int32]


class Domain(StrEnum):
    """Who may be served a chunk: `EXACT` equals a prefill; `REUSE` was computed behind position-independent hits;
    `LINEAGE` behind a splice, for the session that it belongs to.
    """

    EXACT = "exact"
    REUSE = "reuse"
    LINEAGE = "lineage"


def _digest(*parts: bytes) -> str:
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def as_tokens(tokens: object) -> Tokens:
    """Return token ids as a contiguous little-endian int32 array, the form that is hashed and stored."""
    return np.ascontiguousarray(np.asarray(tokens, dtype="<i4"))


def root_key(tenant: str) -> str:
    """Return the chain key before the first token of any of the tenant's prompts."""
    return _digest(b"root", tenant.encode())


def chain_key(parent: str, tokens: Tokens, domain: Domain) -> str:
    """Return the key of a chunk at its place: behind the chunk whose chain key is `parent`."""
    return _digest(b"chain", domain.value.encode(), parent.encode(), tokens.tobytes())


def lineage_key(parent: str, label: str) -> str:
    """Return what stands for the chunk `parent` as left neighbour where the lineage `label` begins behind it."""
    return _digest(b"lineage", label.encode(), parent.encode())


def content_key(tenant: str, tokens: Tokens) -> str:
    """Return the key of a chunk's content wherever it stands."""
    return _digest(b"content", tenant.encode(), tokens.tobytes())


def head_key(tenant: str, tokens: Tokens) -> str:
    """Return the key of the first `HEAD_LENGTH` tokens; finds chunks that begin alike. `tokens` must be as long."""
    assert len(tokens) >= HEAD_LENGTH
    return _digest(b"head", tenant.encode(), tokens[:HEAD_LENGTH].tobytes())


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return how many leading token ids `a` and `b` share."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
