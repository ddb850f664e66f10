"""Tells whoever shares the store what its chunks are worth to this engine: the scheduler half's share of eviction.

    request_finished ── note: chunks of the turn ──► weigh: a few at a time ──► thread: which are there? ──► file
                       └──────────── engine's thread, which owns the rule ────┘   (`cluster/store/worth.py`)

All but the file is done in the engine's thread, since the rule that foretells uses is for that thread alone: a bounded
number of chunks at the end of each request, and none as long as the last word is new.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from ropewalk.cluster.engine.settings import EngineSettings
from ropewalk.cluster.engine.stores import OpenStores, Place
from ropewalk.cluster.store.worth import FOLDER, MAX_CHUNKS, Claim, Worth, locked, write_worth
from ropewalk.scheduler.foresight import Foresight
from ropewalk.scheduler.plan import Piece, Plan
from ropewalk.scheduler.retention import Retention, Use

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
"""Seconds between the beginnings of two words: half a pause between turns, so that few chunks are judged by what was
expected before their last use."""

SHARE = 0.01
"""Of the time of the engine's thread, so much goes into weighing at most: with many chunks, words are rarer."""

MAX_WEIGHED = 256
"""Chunks that are weighed at the end of a request: about half a millisecond of the engine's thread."""

SLICE = 256
"""Chunks after which the thread lets the engine's have Python's lock, if it waits for it."""

MAX_SAMPLED = 64
"""Chunks of known length whose files tell how many bytes a token takes."""

CLOSE_S = 1.0
"""Seconds that the last word is given when the engine ends."""

NAMELESS = "\0"
"""What the sessions of requests begin with that have none: nobody foretells their uses, so nothing is said of them."""

Chunk = tuple[str, str]
"""Tenant and chain key."""


@dataclass(slots=True)
class _Word:
    """What is to be said: `claims`, as far as the chunks are there. `lengths` are tokens of some chunks, by which the
    bytes of a token are measured. `forgotten`: how many times everything had been forgotten before."""

    model: str
    pause_s: float
    spared_s: float
    forgotten: int
    lengths: dict[Chunk, int]
    time_s: float = 0.0
    claims: list[tuple[Chunk, float, float, int]] = field(default_factory=list)


class ChunkWorth:
    """Notes which chunks turns use, and says from time to time what they are worth. `stores` are for its thread alone.

    All methods are for the engine's thread. The thread starts with the first word.
    """

    def __init__(self, settings: EngineSettings, stores: OpenStores) -> None:
        self.spared_s = 0.0
        """Seconds of prefill that a token from the store spares on this replica; 0: not known yet."""
        self._folder = settings.store_root / FOLDER
        self._stores = stores
        self._replica = uuid.uuid4().hex
        self._model = ""
        self._rule: Foresight | None = None
        self._uses: OrderedDict[Chunk, Use] = OrderedDict()
        self._lengths: OrderedDict[Chunk, int] = OrderedDict()
        self._word: _Word | None = None
        self._left: Iterator[Chunk] = iter(())
        self._due_s = 0.0
        self._spent_s = 0.0
        self._queue: SimpleQueue[_Word | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._forgotten = 0
        self._lock = threading.Lock()  # guards the rest
        self._counters: Counter[str] = Counter()

    def note(
        self,
        rule: Retention,
        request_id: str,
        turn: tuple[str | None, str],
        place: Place,
        plan: Plan,
        pieces: Sequence[Piece],
    ) -> None:
        """Note the chunks of a finished turn: those that were planned, and those that are saved of it; weigh some by
        `rule`, which knows of the turn.
        """
        assert isinstance(rule, Foresight)
        self._rule = rule
        self._model, tenant = place
        session, agent = turn
        if session == request_id:
            session = NAMELESS + request_id
        elif session is not None:
            rule.look_ahead(session)
        starts = {segment.chunk: segment.start for segment in plan.segments}
        starts |= {piece.chain: piece.start for piece in pieces}
        chunks = [(tenant, chain) for chain in sorted(starts, key=starts.__getitem__)]
        rule.note(self._uses, session, agent, chunks, MAX_CHUNKS)
        for piece in pieces[:MAX_SAMPLED]:
            self._lengths[tenant, piece.chain] = piece.end - piece.start
        while len(self._lengths) > MAX_SAMPLED:
            self._lengths.popitem(last=False)
        begin = time.monotonic()
        is_due = begin >= self._due_s and not self._queue.qsize()
        if self._word is not None or (is_due and self._uses):
            self._weigh(MAX_WEIGHED)
            self._spent_s += time.monotonic() - begin

    def forget(self) -> None:
        """Forget everything, and take back what was said."""
        self._forgotten += 1
        self._word = None
        self._uses.clear()
        self._lengths.clear()
        self._take_back()

    def take_counters(self) -> Counter[str]:
        """Return what was counted since the last call."""
        with self._lock:
            counters, self._counters = self._counters, Counter()
        return counters

    def close(self) -> None:
        """Say a last word and end the thread. What was said stays: somebody may have to choose what to keep."""
        if self._thread is None:
            return
        self._word = None
        if self._uses:
            self._weigh(MAX_CHUNKS + 1)
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        self._thread = None

    def _weigh(self, most: int) -> None:
        rule = self._rule
        assert rule is not None
        if self._word is None:
            self._due_s, self._left = time.monotonic() + max(PERIOD_S, self._spent_s / SHARE), iter(list(self._uses))
            self._spent_s = 0.0
            self._word = _Word(self._model, rule.pauses.mean_s, self.spared_s, self._forgotten, dict(self._lengths))
        word = self._word
        before = time.time() - rule.now_s
        for _ in range(most):
            chunk = next(self._left, None)
            if chunk is None:
                self._say(word)
                self._word = None
                return
            use = self._uses.get(chunk)
            if use is not None and not (use.session or "").startswith(NAMELESS):
                word.claims.append((chunk, rule.rate(use), before + use.time_s, use.depth))

    def _say(self, word: _Word) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ropewalk-worth", daemon=True)
            self._thread.start()
        word.time_s = time.time()
        self._queue.put(word)

    # The thread

    def _run(self) -> None:
        while (word := self._queue.get()) is not None:
            outcome = "worth_published"
            try:
                self._write(word)
            except OSError as error:
                logger.debug("Not saying what chunks are worth: %s", error)
                outcome = "worth_unwritten"
            except Exception:  # the next word may do better; without any, last use decides
                logger.exception("Not saying what chunks are worth")
                outcome = "worth_unwritten"
            with self._lock:
                self._counters[outcome] += 1

    def _write(self, word: _Word) -> None:
        # What is looked up and written is one step to whoever removes chunks that are to be forgotten.
        with locked(self._folder):
            stores = {tenant: self._stores.get((word.model, tenant)) for (tenant, _), *_ in word.claims}
            there = {tenant: store.chains() for tenant, store in stores.items()}
            num_bytes = num_tokens = 0
            for (tenant, chain), length in word.lengths.items():
                size = stores[tenant].size(chain) if tenant in stores else 0
                num_bytes, num_tokens = num_bytes + size, num_tokens + (length if size else 0)
            claims: list[Claim] = []
            for first in range(0, len(word.claims), SLICE):
                claims += [
                    Claim(bytes.fromhex(chain), rate, used_s, depth)
                    for (tenant, chain), rate, used_s, depth in word.claims[first : first + SLICE]
                    if chain in there[tenant]
                ]
                time.sleep(0)  # lets the engine's thread have Python's lock
            cost = word.spared_s * num_tokens / num_bytes if num_bytes else 0.0
            write_worth(self._folder, self._replica, Worth(word.model, word.time_s, word.pause_s, cost, claims))
        if word.forgotten != self._forgotten:
            self._take_back()

    def _take_back(self) -> None:
        with contextlib.suppress(OSError):
            (self._folder / self._replica).unlink()
