"""Sequences of what agents did, one a session: of public multi-agent runs, or of files of one's own.

A file of sequences is text with one sequence a line: elements parted by blanks, or a JSON list of strings.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ropewalk.workloads.files import BrokenFileError, lines_of, records_of

SHARED = Path("../shared/data")
"""Where the public runs are looked for, beside the repository."""

SOURCES = {
    "magentic-one": "https://github.com/mingyin1/Agents_Failure_Attribution (Who&When, hand-crafted)",
    "captain-agent": "https://github.com/mingyin1/Agents_Failure_Attribution (Who&When, algorithm-generated)",
    "tau-bench": "https://github.com/sierra-research/tau-bench (historical trajectories, gpt-4o, airline)",
    "coding-agent": "mini-swe-agent runs on SWE-bench Lite",
}


class SequencesError(ValueError):
    """A file that is not there, or holds no sequences; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """A name, what its elements are, and one sequence a session."""

    name: str
    elements: str
    sequences: tuple[tuple[str, ...], ...]


def public_sequences(folder: Path = SHARED) -> list[Sequences]:
    """Return those public runs that `folder` holds. Raises OSError for one that cannot be read."""
    return [found for read in _PUBLIC if (found := read(folder)) is not None]


def read_sequences(path: Path) -> Sequences:
    """Read a file of sequences. Raises `SequencesError`."""
    try:
        lines = lines_of(path)
    except OSError as error:
        raise SequencesError(f"{path}: cannot be read ({error})") from None
    sequences = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if line.lstrip().startswith("["):
            try:
                values = json.loads(line)
            except ValueError:
                raise SequencesError(f"{path}, line {number}: no JSON list") from None
        else:
            values = line.split()
        if not all(isinstance(value, str) and value for value in values):
            raise SequencesError(f"{path}, line {number}: a sequence is a list of names")
        sequences.append(tuple(values))
    if not any(len(sequence) > 1 for sequence in sequences):
        raise SequencesError(f"{path}: no line has two elements or more, so there is nothing to predict")
    return Sequences(path.name, "elements", tuple(sequences))


def handovers(turns: Sequence[str]) -> tuple[str, ...]:
    """Return who spoke, each once as long as they kept the floor."""
    return tuple(agent for agent, _ in groupby(turns))


def _magentic_one(folder: Path) -> Sequences | None:
    path = folder / "whowhen" / "magentic_one_hand_crafted.jsonl.gz"
    sequences = _records(path, lambda record: handovers([turn["agent"] for turn in record["turns"]]))
    return None if sequences is None else Sequences("magentic-one", "hand-overs", sequences)


def _captain_agent(folder: Path) -> Sequences | None:
    path = folder / "whowhen" / "captainagent_algorithm_generated.jsonl.gz"
    sequences = _records(path, lambda record: handovers([turn["agent"] for turn in record["turns"]]))
    return None if sequences is None else Sequences("captain-agent", "hand-overs", sequences)


def _tau_bench(folder: Path) -> Sequences | None:
    path = folder / "taubench" / "gpt-4o-airline.jsonl.gz"

    def actions(record: Any) -> tuple[str, ...]:
        said = [message for message in record["messages"] if message["role"] == "assistant"]
        return tuple(
            message["tool_calls"][0]["function"]["name"] if message.get("tool_calls") else "respond" for message in said
        )

    sequences = _records(path, actions)
    return None if sequences is None else Sequences("tau-bench", "actions", sequences)


def _coding_agent(folder: Path) -> Sequences | None:
    path = folder / "minisweagent" / "derived_calls.csv.gz"
    if not path.is_file():
        return None
    sessions: dict[str, list[str]] = {}
    rows = csv.DictReader(lines_of(path))
    if not {"session", "tool"} <= set(rows.fieldnames or ()):
        raise BrokenFileError(f"{path} has no columns 'session' and 'tool'")
    for row in rows:
        sessions.setdefault(row["session"], []).append(row["tool"])
    return Sequences("coding-agent", "commands", tuple(tuple(commands) for commands in sessions.values()))


_PUBLIC = (_magentic_one, _captain_agent, _tau_bench, _coding_agent)


def _records(path: Path, sequence_of: Callable[[Any], tuple[str, ...]]) -> tuple[tuple[str, ...], ...] | None:
    if not path.is_file():
        return None
    return tuple(records_of(path, sequence_of))
