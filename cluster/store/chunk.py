"""One chunk in one file, in safetensors form: rows of KV, the token ids they belong to, and where they came from.

A file never changes once it has its name: writers fill a temporary file and rename it, nobody truncates or writes in
place. So a reader keeps what it has mapped, also when the file is deleted or replaced. (Truncating a mapped file would
kill its readers by SIGBUS.)

Two checksums, because a planner reads headers alone: one over what a header says and the token ids, one over the rows
too. A plan turns keys by what a header says, and whoever carries it out might read another, undamaged copy of the file.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ropewalk.kernels.keys import Domain, Tokens, chain_key, content_key

FORMAT = "ropewalk-chunk/3"

MAX_HEADER_BYTES = 1 << 16
"""Of the JSON at the beginning: ours has some 700."""

ALIGNMENT = 64
"""Bytes: rows begin at a multiple of it, so that a mapped chunk is read in whole cache lines."""

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


# Rows are views of mapped files, which nobody may write to; torch remarks on it once in a process.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class Damage(StrEnum):
    """Why a chunk file cannot be trusted; part of the counters' names."""

    TRUNCATED = "truncated"
    UNREADABLE = "unreadable"
    FORMAT = "format"
    CHECKSUM = "checksum"
    WRONG_NAME = "wrong_name"
    TOKENS = "tokens"


class ChunkCorrupt(Exception):
    """A chunk file that cannot be trusted, and why."""

    def __init__(self, message: str, damage: Damage) -> None:
        super().__init__(message)
        self.damage = damage


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


def verify_names(header: ChunkHeader, name: str) -> None:
    """Check that a chunk lies under its own name, and that its names follow from its tokens, parent and domain.

    The chain key names all tokens from position 0 on, where they were cut, and in which domain: nothing else may be
    served under it. Raises `ChunkCorrupt`.
    """
    if header.chain != name:
        raise ChunkCorrupt(f"{name}: the file holds chunk {header.chain}", Damage.WRONG_NAME)
    chain = chain_key(header.parent, header.tokens, header.domain)
    if chain != header.chain or content_key(header.tenant, header.tokens) != header.content:
        raise ChunkCorrupt(f"{name}: the tokens are not those that its keys name", Damage.TOKENS)


def header_checksum(metadata: Mapping[str, str], tokens: Tokens) -> str:
    """Return the xxh3-64 of what a chunk says without its rows."""
    hasher = xxhash.xxh3_64()
    for name in sorted(metadata):
        if name not in ("checksum", "header_checksum"):
            hasher.update(f"{name}={metadata[name]}\n".encode())
    hasher.update(tokens.tobytes())
    return hasher.hexdigest()


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
    metadata["header_checksum"] = header_checksum(metadata, header.tokens)
    metadata["checksum"] = checksum(metadata, rows, header.tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
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


def write_bytes(path: Path, data: bytes | bytearray) -> None:
    """Write a chunk file that is in memory already, atomically as `write_chunk` does. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def temporary_name(path: Path) -> Path:
    """Return a name beside `path`, nobody else's, that no look-up takes for a chunk."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def read_header(path: Path) -> ChunkHeader:
    """Read and verify a chunk's header, without its rows.

    Raises `FileNotFoundError` when there is none, `ChunkCorrupt` when it is damaged, another `OSError` when it cannot
    be read.
    """
    with open(path, "rb") as file, _damaged(path.name):
        size = os.fstat(file.fileno()).st_size
        length = _json_length(file.read(8), size, path.name)
        entries = _entries(file.read(length), size - 8 - length, path.name)
        first, last = entries["tokens"]["data_offsets"]
        file.seek(8 + length + max(first, 0))
        tokens = _tensor(bytearray(file.read(last - first)), -first, entries["tokens"])
        return _header(entries["__metadata__"], tokens, path.name)


def read_chunk(path: Path) -> tuple[ChunkHeader, torch.Tensor]:
    """Map and verify a whole chunk; rows are a view of the file, `[L, n, ...]`, and must not be written to.

    Raises `FileNotFoundError` when there is none, `ChunkCorrupt` when it is damaged or its checksum does not fit,
    another `OSError` when it cannot be read.
    """
    with open(path, "rb") as file, _damaged(path.name):  # an empty file cannot be mapped
        # All pages at once: half of the time that a fault for each takes.
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    return parse_chunk(memory, path.name)


def parse_chunk(memory: mmap.mmap | bytearray, name: str) -> tuple[ChunkHeader, torch.Tensor]:
    """Verify a whole chunk file in memory; rows are a view of it. Raises `ChunkCorrupt`, which calls it `name`.

    The library's own reader takes four times as long and opens the file twice.
    """
    with _damaged(name):
        length = _json_length(memory[:8], len(memory), name)
        entries = _entries(memory[8 : 8 + length], len(memory) - 8 - length, name)
        header = _header(entries["__metadata__"], _tensor(memory, 8 + length, entries["tokens"]), name)
        rows = _tensor(memory, 8 + length, entries["rows"])
        if rows.shape[1] != len(header):
            raise ValueError(f"rows {tuple(rows.shape)} for {len(header)} tokens")
        found, said = checksum(entries["__metadata__"], rows, header.tokens), entries["__metadata__"].get("checksum")
    if found != said:
        raise ChunkCorrupt(f"{name}: checksum is {found}, should be {said}", Damage.CHECKSUM)
    return header, rows


@contextlib.contextmanager
def _damaged(name: str) -> Iterator[None]:
    """Call whatever goes wrong while a file is taken apart damage; not what the system refuses (`OSError`)."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ChunkCorrupt(f"{name}: {type(error).__name__}: {error}", Damage.UNREADABLE) from error


def _json_length(prefix: bytes | bytearray, size: int, name: str) -> int:
    """Return the length of the JSON behind the first 8 bytes of a file of `size` bytes."""
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= MAX_HEADER_BYTES:
        raise ChunkCorrupt(f"{name}: a header of {length} bytes in a file of {size}", Damage.UNREADABLE)
    if 8 + length > size:
        raise ChunkCorrupt(f"{name}: a header of {length} bytes in a file of {size}", Damage.TRUNCATED)
    return length


def _entries(text: bytes | bytearray, num_bytes: int, name: str) -> dict[str, Any]:
    """Read the JSON of a file that has `num_bytes` of data behind it."""
    entries: dict[str, Any] = json.loads(text)
    found = entries["__metadata__"].get("format")
    if found != FORMAT:
        raise ChunkCorrupt(f"{name}: format is {found!r}, should be {FORMAT!r}", Damage.FORMAT)
    expected = max(entries[tensor]["data_offsets"][1] for tensor in ("rows", "tokens"))
    if num_bytes != expected:
        damage = Damage.TRUNCATED if num_bytes < expected else Damage.UNREADABLE
        raise ChunkCorrupt(f"{name}: {num_bytes} bytes of data, should be {expected}", damage)
    return entries


def _header(metadata: Mapping[str, str], tokens: torch.Tensor, name: str) -> ChunkHeader:
    """Put a header together and verify its checksum."""
    header = ChunkHeader(
        chain=metadata["chain"],
        parent=metadata["parent"],
        content=metadata["content"],
        tenant=metadata["tenant"],
        domain=Domain(metadata["domain"]),
        start=int(metadata["start"]),
        tokens=tokens.numpy().astype(np.int32),
    )
    found, said = header_checksum(metadata, header.tokens), metadata.get("header_checksum")
    if found != said:
        raise ChunkCorrupt(f"{name}: checksum of the header is {found}, should be {said}", Damage.CHECKSUM)
    return header


def _tensor(memory: mmap.mmap | bytearray, begin: int, entry: Mapping[str, Any]) -> torch.Tensor:
    """View a tensor in a safetensors file, whose data begins at byte `begin` of `memory`."""
    first, last = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
    count = math.prod(shape)
    if min([first, *shape]) < 0 or last - first != count * dtype.itemsize or begin + last > len(memory):
        raise ValueError(f"{entry} does not fit into {len(memory)} bytes")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin + first).view(shape)
