"""One chunk in one file, in safetensors form: rows of KV, the token ids they belong to, and where they came from."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ropewalk.kernels.keys import Domain, Tokens

FORMAT = "ropewalk-chunk/1"


class ChunkCorrupt(Exception):
    """A chunk file that cannot be trusted: unreadable, of another format, or with a wrong checksum."""


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What is known of a chunk without its rows.

    `tokens` are the `n` token ids, int32. `start` is the position that its first row was computed at. `chain` is its
    name: it depends on `parent`, the name of the chunk left of it when it was computed. `content` names its token ids.
    """

    chain: str
    parent: str
    content: str
    tenant: str
    domain: Domain
    start: int
    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens)


def checksum(metadata: Mapping[str, str], rows: torch.Tensor, tokens: Tokens) -> str:
    """Return the xxh3-64 of everything that a chunk says. `rows` is a contiguous CPU tensor of any dtype.

    A wrong `start` would turn keys wrongly, so the metadata counts as much as the rows.
    """
    hasher = xxhash.xxh3_64()
    for name in sorted(metadata):
        if name != "checksum":
            hasher.update(f"{name}={metadata[name]}\n".encode())
    hasher.update(rows.view(torch.uint8).numpy().data if rows.numel() else b"")
    hasher.update(tokens.tobytes())
    return hasher.hexdigest()


def write_chunk(path: Path, header: ChunkHeader, rows: torch.Tensor) -> int:
    """Write a chunk atomically: a temporary name in the same folder, then a rename. Return the file's size in bytes.

    `rows` is `[L, n, ...]`: layers, tokens, numbers. Raises `OSError` when it cannot be written; nothing is left then.
    """
    assert rows.shape[1] == len(header), (tuple(rows.shape), len(header))
    rows = rows.contiguous().cpu()
    metadata = {
        "format": FORMAT,
        "chain": header.chain,
        "parent": header.parent,
        "content": header.content,
        "tenant": header.tenant,
        "domain": header.domain.value,
        "start": str(header.start),
    }
    metadata["checksum"] = checksum(metadata, rows, header.tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file({"rows": rows, "tokens": torch.from_numpy(header.tokens.copy())}, temporary, metadata)
        size = temporary.stat().st_size
        temporary.rename(path)
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"cannot write {temporary.name}: {error}") from error
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return size


def read_header(path: Path) -> ChunkHeader:
    """Read a chunk's header. Raises `FileNotFoundError` when there is none and `ChunkCorrupt` when it is damaged."""
    return _read(path, with_rows=False)[0]


def read_chunk(path: Path) -> tuple[ChunkHeader, torch.Tensor]:
    """Read and verify a whole chunk; rows are mapped from the file, `[L, n, ...]`, and must not be written to.

    Raises `FileNotFoundError` when there is none and `ChunkCorrupt` when it is damaged or its checksum does not fit.
    """
    header, rows, metadata = _read(path, with_rows=True)
    assert rows is not None
    found = checksum(metadata, rows, header.tokens)
    if found != metadata.get("checksum"):
        raise ChunkCorrupt(f"{path.name}: checksum is {found}, should be {metadata.get('checksum')}")
    return header, rows


def _read(path: Path, *, with_rows: bool) -> tuple[ChunkHeader, torch.Tensor | None, dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ChunkCorrupt(f"{path.name}: format is {metadata.get('format')!r}, should be {FORMAT!r}")
            tokens = file.get_tensor("tokens").numpy().astype(np.int32)
            rows = file.get_tensor("rows") if with_rows else None
        header = ChunkHeader(
            chain=metadata["chain"],
            parent=metadata["parent"],
            content=metadata["content"],
            tenant=metadata["tenant"],
            domain=Domain(metadata["domain"]),
            start=int(metadata["start"]),
            tokens=tokens,
        )
    except FileNotFoundError:
        raise
    except (SafetensorError, KeyError, ValueError, OSError, RuntimeError) as error:
        # The library opens the file twice, and torch calls one that vanished in between a `RuntimeError`.
        if not path.exists():
            raise FileNotFoundError(f"{path.name} was deleted while it was opened") from error
        raise ChunkCorrupt(f"{path.name}: {error}") from error
    return header, rows, metadata
