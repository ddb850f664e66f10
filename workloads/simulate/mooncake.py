"""Traces in Mooncake's format (FAST'25), repeated with fresh blocks for as many requests as are wished for.

One JSON object a line, by time:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, 2354]}

`timestamp` in milliseconds; `hash_ids` name the prompt's blocks of 512 tokens, the last one partial, each by everything
up to its end. What the answers' blocks are called is not in a trace, so that they are never found again.

Traces name no sessions. A request is taken for the next turn of an earlier one whose full blocks it extends, the
longest if there are several; the earlier one must have `LEAST_BLOCKS`, as a system prompt makes no session, and is
continued once: what branches off is a session of its own.
"""

from __future__ import annotations

import bisect
import gzip
import heapq
import json
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from ropewalk.workloads.simulate.request import Request

BLOCK_SIZE = 512

LEAST_BLOCKS = 2

MAX_TIPS = 1 << 16
"""Sessions that may go on while a trace is read; those that were silent longest are forgotten."""


class TraceError(ValueError):
    """A trace that cannot be read; the message says where and why."""


class MooncakeTrace:
    """A trace in memory: some 8 bytes a block. Repeating it takes no more."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises TraceError."""
        self._times_s = array("d")
        self._prompts = array("q")
        self._outputs = array("q")
        self._ends = array("q")
        self._blocks = array("q")
        self._sessions = array("q")
        self._is_last = bytearray()
        self.num_sessions = 0
        names: dict[int, int] = {}
        """Any ids become 0, 1, 2, …, so that copies of them can be told apart by an offset."""
        tips: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Last full block of each session so far: its number, and that of its last request."""
        try:
            with _open(path) as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._add(f"{path}, line {number}", line, names, tips)
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            raise TraceError(f"{path} cannot be read: {error}") from None
        if not self._times_s:
            raise TraceError(f"{path} holds no request")
        self._num_names = len(names)

    def _add(self, where: str, line: str, names: dict[int, int], tips: OrderedDict[int, tuple[int, int]]) -> None:
        row = _row(where, line)
        time_s, num_prompt = row["timestamp"] / 1000, row["input_length"]
        if self._times_s and time_s < self._times_s[-1]:
            raise TraceError(f"{where}: timestamp {row['timestamp']} comes after a later one")
        blocks = [names.setdefault(name, len(names)) for name in row["hash_ids"][: num_prompt // BLOCK_SIZE]]
        found = next((tip for tip in (tips.pop(name, None) for name in reversed(blocks)) if tip is not None), None)
        if found is not None:
            self._is_last[found[1]] = False
            session = found[0]
        else:
            session = self.num_sessions
            self.num_sessions += 1
        if len(blocks) >= LEAST_BLOCKS:
            tips[blocks[-1]] = session, len(self._times_s)
            if len(tips) > MAX_TIPS:
                tips.popitem(last=False)
        self._times_s.append(time_s)
        self._prompts.append(num_prompt)
        self._outputs.append(max(row["output_length"], 1))
        self._blocks.extend(blocks)
        self._ends.append(len(self._blocks))
        self._sessions.append(session)
        self._is_last.append(True)

    def __len__(self) -> int:
        return len(self._times_s)

    @property
    def duration_s(self) -> float:
        """From the first request of one repetition to that of the next: one mean pause longer than the trace."""
        length = self._times_s[-1] - self._times_s[0]
        return length * len(self) / (len(self) - 1) if len(self) > 1 and length > 0 else 1.0

    @property
    def max_blocks(self) -> int:
        """Blocks that the largest request takes."""
        return max(-(-(p + o - 1) // BLOCK_SIZE) for p, o in zip(self._prompts, self._outputs, strict=True))

    def requests(self, count: int, speed: float = 1.0, at_once: int = 1) -> Iterator[Request]:
        """Yield `count` requests: `at_once` copies side by side, each begun at another place of the trace, repeated.

        Every copy and every repetition has blocks and sessions of its own. `speed` divides all times.
        """
        lanes = [self._lane(lane, at_once) for lane in range(at_once)]
        merged = lanes[0] if at_once == 1 else heapq.merge(*lanes, key=itemgetter(0))
        for _, (time_s, index, copy) in zip(range(count), merged, strict=False):
            offset = copy * self._num_names
            begin = self._ends[index - 1] if index else 0
            blocks = self._blocks[begin : self._ends[index]]
            yield Request(
                time_s / speed,
                f"{copy}-{self._sessions[index]}",
                "",
                self._prompts[index],
                self._outputs[index],
                tuple([name + offset for name in blocks]) if offset else tuple(blocks),
                0,
                bool(self._is_last[index]),
            )

    def _lane(self, lane: int, at_once: int) -> Iterator[tuple[float, int, int]]:
        """Yield times, requests and numbers of copies without end."""
        begun_s = self._times_s[0] + self.duration_s * lane / at_once
        copy, index = lane, bisect.bisect_left(self._times_s, begun_s)
        while True:
            for place in range(index, len(self)):
                yield self._times_s[place] - begun_s, place, copy
            copy, index = copy + at_once, 0
            begun_s -= self.duration_s


def _open(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _row(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        raise TraceError(f"{where}: not JSON") from None
    if not isinstance(row, dict):
        raise TraceError(f"{where}: not an object")
    for name, kinds, least in (("timestamp", (int, float), 0), ("input_length", int, 1), ("output_length", int, 0)):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < 1 << 40:
            raise TraceError(f"{where}: {name} must be a number of at least {least}, got {value!r}")
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(name) is int for name in ids):
        raise TraceError(f"{where}: hash_ids must be a list of integers")
    if len(ids) < row["input_length"] // BLOCK_SIZE:
        raise TraceError(
            f"{where}: {row['input_length']} tokens fill more than {len(ids)} blocks of {BLOCK_SIZE} (hash_ids)"
        )
    return row
