"""One simulated replica: a queue, a prefill at a time, a batch that decodes, and the cache behind them.

    waiting ──► prefill (one request at a time, in chunks) ──► decode (all at once, a token a step)

A step computes `chunk` tokens of the prefill at hand, if there is one, and a token for each of the `b` requests that
decode, and so takes

    chunk / prefill_tokens_per_s  (if there is a prefill)  +  decode_s + b · decode_s_per_request  (if b > 0)

seconds. Between two events both rates are constant, so no step is simulated: a request that has `n` tokens to decode
ends when `n` more steps have passed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from ropewalk.workloads.simulate.cache import ReplicaCache
from ropewalk.workloads.simulate.request import Request


@dataclass(frozen=True, slots=True)
class Service:
    """How fast a replica is. Defaults: about an 8B model on one large GPU; nobody's measurement."""

    prefill_tokens_per_s: float = 20_000.0
    decode_s: float = 0.008
    decode_s_per_request: float = 0.0002
    max_running: int = 64
    chunk: int = 2048

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "decode_s", "max_running", "chunk"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)!r}")
        if not 0 <= self.decode_s_per_request < math.inf:
            raise ValueError(f"decode_s_per_request must be at least 0, got {self.decode_s_per_request!r}")


@dataclass(slots=True, eq=False)
class Running:
    """A request on a replica, when it came there (seconds), when its first token did, and its cached tokens."""

    request: Request
    replica: int
    arrived_s: float
    first_token_s: float = 0.0
    num_cached: int = 0


class Replica:
    """Serves requests. `next_s` is when something happens next, `math.inf` when nothing runs; call `step` then."""

    __slots__ = (
        "_decoding",
        "_last_s",
        "_left",
        "_number",
        "_prefilling",
        "_service",
        "_steps",
        "_steps_per_s",
        "_tokens_per_s",
        "_waiting",
        "cache",
        "next_s",
        "num_computed",
    )

    def __init__(self, service: Service, cache: ReplicaCache) -> None:
        self.cache = cache
        self.next_s = math.inf
        self.num_computed = 0
        """Prompt tokens computed."""
        self._service = service
        self._waiting: deque[Running] = deque()
        self._prefilling: Running | None = None
        self._left = 0.0
        """Tokens left of the prefill."""
        self._decoding: list[tuple[float, int, Running]] = []
        """(steps at which it ends, number, request), soonest first."""
        self._steps = 0.0
        self._last_s = 0.0
        self._steps_per_s = self._tokens_per_s = 0.0
        self._number = 0

    @property
    def num_running(self) -> int:
        """Requests that are not waiting."""
        return len(self._decoding) + (self._prefilling is not None)

    def enqueue(self, running: Running, now_s: float) -> bool:
        """Take in a request; return whether `next_s` has changed."""
        self._waiting.append(running)
        if self._prefilling is not None or len(self._decoding) >= self._service.max_running:
            return False
        self._advance(now_s)
        return self._start(now_s)

    def step(self) -> Running | None:
        """Let pass what happens at `next_s`; return the request that is answered by it, if one is."""
        now_s = self.next_s
        decoding = self._decoding
        prefill_s, decode_s = self._times()
        self._advance(now_s)
        answered = None
        if prefill_s <= decode_s:
            running = self._prefilling
            assert running is not None
            self._prefilling = None
            running.first_token_s = now_s
            if running.request.num_output > 1:
                self._number += 1
                heapq.heappush(decoding, (self._steps + running.request.num_output - 1, self._number, running))
            else:
                answered = running
        else:
            self._steps, _, answered = heapq.heappop(decoding)
        if answered is not None:
            self.cache.release(answered.request)
        if self._prefilling is not None or not self._start(now_s):
            self._set_rates()
        return answered

    def _start(self, now_s: float) -> bool:
        """Begin the next request's prefill, if there is room for it."""
        if not self._waiting or len(self._decoding) >= self._service.max_running:
            return False
        running = self._waiting[0]
        num_cached = self.cache.admit(running.request)
        if num_cached is None:
            return False
        self._waiting.popleft()
        running.num_cached = num_cached
        computed = running.request.num_prompt - num_cached
        self.num_computed += computed
        self._prefilling = running
        self._left = float(computed)
        self._last_s = now_s
        self._set_rates()
        return True

    def _advance(self, now_s: float) -> None:
        elapsed = now_s - self._last_s
        self._last_s = now_s
        self._steps += elapsed * self._steps_per_s
        self._left -= elapsed * self._tokens_per_s

    def _set_rates(self) -> None:
        service, batch = self._service, len(self._decoding)
        step_s = service.decode_s + batch * service.decode_s_per_request if batch else 0.0
        if self._prefilling is not None:
            step_s += service.chunk / service.prefill_tokens_per_s
            self._tokens_per_s = service.chunk / step_s
        else:
            self._tokens_per_s = 0.0
        self._steps_per_s = 1.0 / step_s if batch else 0.0
        self.next_s = min(self._times())

    def _times(self) -> tuple[float, float]:
        """When the prefill ends, and when the next request has decoded all."""
        last_s = self._last_s
        prefill_s = math.inf if self._prefilling is None else last_s + max(self._left, 0.0) / self._tokens_per_s
        if not self._decoding:
            return prefill_s, math.inf
        return prefill_s, last_s + max(self._decoding[0][0] - self._steps, 0.0) / self._steps_per_s
