"""Columns of numbers as short JSON strings: little-endian, deflated, in base64."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np


def pack(numbers: Iterable[float], kind: str) -> str:
    """Pack numbers of a NumPy `kind`, such as `u1` or `<f2`."""
    return base64.b64encode(zlib.compress(np.array(list(numbers), dtype=kind).tobytes(), 9)).decode("ascii")


def unpack(text: str, kind: str) -> list[Any]:
    """Inverse of `pack`. Raises ValueError for anything else."""
    try:
        return list(np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype=kind).tolist())
    except zlib.error as error:
        raise ValueError(f"not a packed column: {error}") from None


def index_kind(count: int) -> str:
    """The kind of numbers below `count`."""
    return "u1" if count <= 256 else "<u2"
