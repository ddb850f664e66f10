"""What is measured of a simulated cluster, in memory that does not grow with the number of requests."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

PRECISION = 0.01
"""Relative width of a bucket: what quantiles are off by at most half of."""

LEAST_S = 1e-6

IMBALANCE = 1.5
"""Times the mean from which on a queue is too long."""


class Distribution:
    """Seconds, counted in buckets of 1 %: quantiles are exact to half of that, the mean is exact."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._counts: Counter[int] = Counter()
        self._per_bucket = 1 / math.log1p(PRECISION)

    def add(self, seconds: float) -> None:
        """Count one."""
        self.count += 1
        self._sum += seconds
        self._counts[int(math.log(max(seconds, LEAST_S) / LEAST_S) * self._per_bucket)] += 1

    @property
    def mean(self) -> float:
        """The mean; 0 of none."""
        return self._sum / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the seconds that `share` of all do not exceed; 0 of none."""
        left = share * self.count
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return LEAST_S * math.exp((bucket + 0.5) / self._per_bucket)
        return 0.0

    def summary(self) -> dict[str, float]:
        """Mean and quantiles, in seconds."""
        named = {f"p{percent}": self.quantile(percent / 100) for percent in (50, 95, 99)}
        return {"mean": self.mean, **named}


class Queues:
    """Lengths of the replicas' queues, running requests included, and how long any was above 1.5 times the mean.

    A single request is no imbalance: the mean counts as 1 at least. Costs of a change do not grow with the replicas:
    they are kept by length, and only those whose length the limit passes are looked at.
    """

    def __init__(self, num_replicas: int) -> None:
        self.lengths = [0] * num_replicas
        self.longest_s = 0.0
        """Longest time that a replica's queue was too long without a break."""
        self.max_length = 0
        self._total = 0
        self._limit = int(IMBALANCE)
        self._by_length: defaultdict[int, set[int]] = defaultdict(set)
        self._by_length[0] = set(range(num_replicas))
        self._since: dict[int, float] = {}

    @property
    def too_long_since(self) -> Mapping[int, float]:
        """Replicas whose queue is too long now, and since when."""
        return self._since

    def change(self, replica: int, by: int, now_s: float) -> None:
        """Note that a queue has become longer or shorter by one."""
        before = self.lengths[replica]
        after = self.lengths[replica] = before + by
        if after > self.max_length:
            self.max_length = after
        members = self._by_length[before]
        members.discard(replica)
        if not members:
            del self._by_length[before]
        self._by_length[after].add(replica)
        self._total += by
        limit = int(max(IMBALANCE * self._total / len(self.lengths), IMBALANCE))
        if limit != self._limit:
            for length in range(min(limit, self._limit) + 1, max(limit, self._limit) + 1):
                for other in self._by_length.get(length, ()):
                    self._note(other, length > limit, now_s)
            self._limit = limit
        self._note(replica, after > limit, now_s)

    def _note(self, replica: int, is_too_long: bool, now_s: float) -> None:
        if is_too_long:
            self._since.setdefault(replica, now_s)
        elif (since := self._since.pop(replica, None)) is not None:
            self.longest_s = max(self.longest_s, now_s - since)

    def close(self, now_s: float) -> None:
        """Count what is too long still."""
        for since in self._since.values():
            self.longest_s = max(self.longest_s, now_s - since)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the queues are told apart as their lengths say."""
        assert sum(self.lengths) == self._total
        assert all(length >= 0 for length in self.lengths)
        most = max(IMBALANCE * self._total / len(self.lengths), IMBALANCE)
        assert self._since.keys() == {r for r, n in enumerate(self.lengths) if n > most}
        assert all(self.lengths[r] == length for length, members in self._by_length.items() for r in members)
