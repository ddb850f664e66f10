"""Turns of multi-agent sessions as names of blocks, without end: those of `ropewalk.workloads.traces` without tokens.

A block is named by what it ends in: all messages up to there, and how far its end is from the beginning. Messages with
other names have other tokens, so that equal names mean equal tokens and the other way round. Only live sessions are
kept in memory. Names are 64-bit hashes of integers: of a hundred million, two are the same in one run of thousands.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ropewalk.workloads.block_cache import block_names
from ropewalk.workloads.simulate.request import Request
from ropewalk.workloads.traces import (
    PATTERNS,
    TRANSCRIPTS,
    Message,
    Scheduled,
    Sizes,
    TraceTurn,
    chats,
    schedule,
    transcript_sessions,
)

DEFAULT_SIZES = Sizes()

WORKLOADS = (*PATTERNS, *TRANSCRIPTS)


def session_requests(
    workload: str,
    block_size: int,
    *,
    seed: int = 0,
    sizes: Sizes = DEFAULT_SIZES,
    programs: int = 1,
    scale: int = 1,
    folder: Path | None = None,
    speed: float = 1.0,
) -> Iterator[Request]:
    """Return turns without end, by time; `sizes.concurrency` sessions are live at once, and `speed` divides all times.

    `scale` multiplies all lengths; `programs` as `traces.chats` has it. Transcripts, which lie in `folder`, are
    repeated, every time with messages of their own. Raises OSError.
    """
    rng = random.Random(f"{seed}/{workload}/pauses")
    sessions: Iterable[Sequence[Message]]
    if workload in TRANSCRIPTS:
        assert folder is not None
        sessions = itertools.cycle(transcript_sessions(workload, folder, random.Random(f"{seed}/{workload}"), sizes))
    else:
        sessions = chats(workload, seed, sizes, programs)
    turns = schedule(sessions, rng, sizes)
    return as_requests(workload, turns, sizes.preamble, block_size, programs=programs, scale=scale, speed=speed)


def as_requests(
    workload: str,
    turns: Iterable[Scheduled],
    num_preamble: int,
    block_size: int,
    *,
    programs: int = 1,
    scale: int = 1,
    speed: float = 1.0,
) -> Iterator[Request]:
    """Name the blocks of scheduled turns. All agents of a program share its preamble."""
    anchors: dict[str, int] = {}
    histories: dict[int, list[tuple[int, int]]] = {}
    """Of each live session: number and length of every message."""
    num_preamble *= scale
    for turn in turns:
        message = turn.message
        history = histories.setdefault(turn.number, [])
        for heard in turn.heard:
            history.append((_message(turn.number, len(history)), heard.length * scale))
        said = _message(turn.number, len(history)), message.length * scale
        anchor = anchors.setdefault(message.anchor, len(anchors))
        num_anchor = message.num_anchor * scale
        segments = [(turn.number % programs, num_preamble), (anchor, num_anchor), *history]
        num_prompt = num_preamble + num_anchor + sum(length for _, length in history)
        yield Request(
            turn.time_s / speed,
            f"{workload}-{turn.number}",
            message.agent,
            num_prompt,
            said[1],
            tuple(_names([*segments, said], num_prompt + said[1] - 1, block_size)),
            num_preamble + num_anchor,
            turn.is_last,
        )
        history.append(said)
        if turn.is_last:
            del histories[turn.number]


def from_turns(turns: Iterable[TraceTurn], block_size: int) -> Iterator[Request]:
    """Turns that have their tokens as requests: for small traces."""
    for turn in turns:
        names = block_names((*turn.prompt, *turn.output[:-1]), block_size)
        blocks = tuple([int.from_bytes(name, "little") for name in names])
        num_prompt, num_output = len(turn.prompt), len(turn.output)
        yield Request(turn.time_s, turn.session, turn.agent, num_prompt, num_output, blocks, 0, turn.is_last)


def _message(session: int, place: int) -> int:
    return (session << 20) + place


def _names(segments: Sequence[tuple[int, int]], num_tokens: int, block_size: int) -> Iterator[int]:
    """Name each full block of the first `num_tokens` tokens of (number, length) segments."""
    chain = end = 0
    block_end = block_size
    for place, (number, length) in enumerate(segments):
        chain = hash((chain, place, number))
        end += length
        while block_end <= end and block_end <= num_tokens:
            yield hash((chain, block_end))
            block_end += block_size
