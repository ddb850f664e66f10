"""Turns of an engine's sessions, looked up and noted in a thread of their own: files, locks, histories to compare."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from vllm.exceptions import VLLMValidationError

from ropewalk.agents.directives import DirectiveError
from ropewalk.cluster.engine.request import RequestSettings
from ropewalk.cluster.engine.sessions import Sessions, Turn
from ropewalk.cluster.engine.verbs import Verbs
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.cluster.store.sessions import SessionFiles
from ropewalk.kernels.gear import ChunkSizes
from ropewalk.kernels.keys import Tokens
from ropewalk.scheduler.plan import Plan

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Turns:
    """Sessions of one model. `store` opens a tenant's store, beside which its histories lie."""

    def __init__(self, store: Callable[[str], NodeStore], chunks: ChunkSizes) -> None:
        self._store = store
        self._files: dict[str, SessionFiles] = {}
        self._thread = ThreadPoolExecutor(1, "ropewalk-sessions")
        self._num_failed = 0
        self.sessions = Sessions(self._files_of, chunks)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call something that reads or writes sessions or many files, behind what was noted of turns before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def begin(self, settings: RequestSettings, tokens: Tokens, *, can_turn: bool) -> Turn:
        """See `Sessions.begin`. Raises vLLM's error for what is wrong with a request."""
        begin = functools.partial(self.sessions.begin, settings, tokens, can_turn=can_turn)
        try:
            return begin() if settings.session is None else await self.call(begin)
        except DirectiveError as error:
            raise VLLMValidationError(str(error), parameter=f"ropewalk.{error.field}") from error

    def end(self, settings: RequestSettings, turn: Turn, plan: Plan, answer: Sequence[int]) -> None:
        """See `Sessions.end`. Not waited for: the next turn's look-up stands behind it in the same thread."""
        self._thread.submit(self._end, settings, turn, plan, answer)

    def verbs(self, tenant: str) -> Verbs:
        """What may be done with the KV of a tenant's sessions."""
        return Verbs(self.sessions, self._store(tenant))

    def counters(self) -> Counter[str]:
        """Return what was counted, by name."""
        counters = Counter({"session_failed": self._num_failed} if self._num_failed else {})
        for files in list(self._files.values()):
            counters.update(files.counters)
        return counters

    def _end(self, settings: RequestSettings, turn: Turn, plan: Plan, answer: Sequence[int]) -> None:
        try:
            self.sessions.end(settings, turn, plan, answer)
        except Exception:  # the answer is given; the session's next prompt is computed
            logger.exception("What session %r holds could not be noted", settings.session)
            self._num_failed += 1

    def _files_of(self, tenant: str) -> SessionFiles:
        if tenant not in self._files:
            self._files[tenant] = SessionFiles(self._store(tenant).last_base)
        return self._files[tenant]
