"""Reads files of records, plain or gzipped, and says where one is not what it should be."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class BrokenFileError(OSError):
    """A file that is there but cannot be used; the message says where and why."""


def lines_of(path: Path) -> list[str]:
    """Return the lines of a text file. Raises OSError."""
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
    except (EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
        raise BrokenFileError(f"{path} cannot be read: {error}") from None


def records_of(path: Path, read: Callable[[Any], T]) -> list[T]:
    """Return what `read` makes of each line's JSON. Raises OSError."""
    found = []
    for number, line in enumerate(lines_of(path), 1):
        try:
            found.append(read(json.loads(line)))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise BrokenFileError(f"{path}, line {number} is not as it should be ({what})") from None
    return found
