"""One chunk in one file, in safetensors form: rows of KV, the token ids they belong to, and where they came from."""

from __future__ import annotations

import json
import math
import mmap
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ropewalk.kernels.keys import Domain, Tokens

FORMAT = "ropewalk-chunk/2"

MAX_HEADER_BYTES = 1 << 16
"""Of the JSON at the beginning: ours has some 700."""

ALIGNMENT = 64
"""Bytes: rows begin at a multiple of it, so that a mapped chunk is read in whole cache lines."""

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


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
    hasher.update(f"{rows.dtype} {tuple(rows.shape)}\n".encode())
    hasher.update(_bytes(rows))
    hasher.update(tokens.tobytes())
    return hasher.hexdigest()


def write_chunk(path: Path, header: ChunkHeader, rows: torch.Tensor) -> int:
    """Write a chunk atomically: a temporary name in the same folder, then a rename. Return the file's size in bytes.

    `rows` is `[L, n, ...]`: layers, tokens, numbers. Contiguous rows on the CPU are written from where they lie.
    Raises `OSError` when they cannot be written; nothing is left then.
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
        size = 0
        with open(temporary, "xb", buffering=0) as file:
            for part in (_front(metadata, rows, header.tokens), header.tokens.tobytes(), _bytes(rows)):
                size += _write_all(file, part)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return size


def _front(metadata: Mapping[str, str], rows: torch.Tensor, tokens: Tokens) -> bytes:
    """Return what stands before the data: the length of the JSON, and the JSON, padded so that rows are aligned.

    Written by hand because the library's `save_file` wants a copy of everything in memory, and holds Python's lock
    while it writes. Mapping the new file and gathering into it costs more than writing: a page fault each 4 KiB.
    """
    num_token_bytes, num_row_bytes = 4 * len(tokens), rows.numel() * rows.element_size()
    entries = {
        "__metadata__": metadata,
        "tokens": {"dtype": "I32", "shape": [len(tokens)], "data_offsets": [0, num_token_bytes]},
        "rows": {
            "dtype": _NAMES[rows.dtype],
            "shape": list(rows.shape),
            "data_offsets": [num_token_bytes, num_token_bytes + num_row_bytes],
        },
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text) + num_token_bytes) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_all(file: FileIO, data: bytes | memoryview) -> int:
    """Write all of `data`, however many calls that takes; return its length in bytes."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    return len(data)


def _bytes(rows: torch.Tensor) -> bytes | memoryview:
    """View the memory of a contiguous CPU tensor."""
    return memoryview(rows.view(torch.uint8).numpy().reshape(-1).data) if rows.numel() else b""


def read_header(path: Path) -> ChunkHeader:
    """Read a chunk's header. Raises `FileNotFoundError` when there is none and `ChunkCorrupt` when it is damaged."""
    return _read(path)[0]


def read_chunk(path: Path) -> tuple[ChunkHeader, torch.Tensor]:
    """Read and verify a whole chunk; rows are mapped from the file, `[L, n, ...]`, and must not be written to.

    Raises `FileNotFoundError` when there is none and `ChunkCorrupt` when it is damaged or its checksum does not fit.
    """
    header, rows, metadata = _read(path)
    found = checksum(metadata, rows, header.tokens)
    if found != metadata.get("checksum"):
        raise ChunkCorrupt(f"{path.name}: checksum is {found}, should be {metadata.get('checksum')}")
    return header, rows


def _read(path: Path) -> tuple[ChunkHeader, torch.Tensor, dict[str, str]]:
    """Map a file and find its way about. The library's own reader takes four times as long and opens the file twice."""
    with open(path, "rb") as file:
        try:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory that could be written to
            length = int.from_bytes(memory[:8], "little")
            if not 0 < length <= min(len(memory) - 8, MAX_HEADER_BYTES):
                raise ChunkCorrupt(f"{path.name}: a header of {length} bytes in a file of {len(memory)}")
            entries = json.loads(memory[8 : 8 + length])
            metadata = entries["__metadata__"]
            if metadata.get("format") != FORMAT:
                raise ChunkCorrupt(f"{path.name}: format is {metadata.get('format')!r}, should be {FORMAT!r}")
            header = ChunkHeader(
                chain=metadata["chain"],
                parent=metadata["parent"],
                content=metadata["content"],
                tenant=metadata["tenant"],
                domain=Domain(metadata["domain"]),
                start=int(metadata["start"]),
                tokens=_tensor(memory, 8 + length, entries["tokens"]).numpy().astype(np.int32),
            )
            rows = _tensor(memory, 8 + length, entries["rows"])
        except (OSError, LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise ChunkCorrupt(f"{path.name}: {type(error).__name__}: {error}") from error
    return header, rows, metadata


def _tensor(memory: mmap.mmap, begin: int, entry: Mapping[str, Any]) -> torch.Tensor:
    """View a tensor in a mapped safetensors file, whose data begins at byte `begin`."""
    first, last = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
    count = math.prod(shape)
    if min([first, *shape]) < 0 or last - first != count * dtype.itemsize or begin + last > len(memory):
        raise ValueError(f"{entry} does not fit a file of {len(memory)} bytes")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin + first).view(shape)
