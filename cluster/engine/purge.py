"""Which chunks of a node a purge removes: copies of a text, and all that was computed behind it, whoever computed it.

    names       the purged session's own chunks, from the text on
    copies      chunks of the same text, wherever it stands, and shorter or longer ones of the same places
    behind      chunks whose left neighbour goes, and what any session computed behind a chunk that goes

The last follows histories across splices and reuse, where a chunk's left neighbour is not the one it was computed
behind. What a request without a session computed behind a reused chunk leaves no such trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from ropewalk.agents.history import History
from ropewalk.cluster.store.chunk import ChunkHeader
from ropewalk.cluster.store.node_store import Traces

Place = tuple[int, int]
"""A branch, and a row of it."""


def doomed(headers: Mapping[str, ChunkHeader | None], histories: Iterable[History], traces: Traces) -> set[str]:
    """Return the names of chunks that go. `headers` are the node's, by name; None for one that cannot be read: nobody
    knows what is in it.
    """
    behind: defaultdict[str | Place, set[str | Place]] = defaultdict(set)
    for name, header in headers.items():
        if header is not None:
            behind[header.parent].add(name)
    branches = (branch for history in histories for branch in history.branches)
    for number, branch in enumerate(branches):
        for index, rows in enumerate(branch.lineage.rows):
            behind[rows.chunk].add((number, index))
            behind[number, index].add((number, index + 1))
            if rows.turn == 0:  # else it was computed elsewhere, behind something else
                behind[number, index - 1].add(rows.chunk)
    gone: set[str | Place] = set()
    waiting: set[str | Place] = {name for name, header in headers.items() if header is None or traces.are_of(header)}
    waiting |= traces.names
    while waiting:
        one = waiting.pop()
        gone.add(one)
        waiting |= behind[one] - gone
    return {one for one in gone if isinstance(one, str)}
