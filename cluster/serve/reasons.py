"""Why requests of each deployment went where they went, counted in the process that routes them.

Apart from the router, because Ray Serve pickles the router's module by value: what it holds would be a copy.
"""

from __future__ import annotations

from collections import Counter

_REASONS: dict[str, Counter[str]] = {}


def reasons_of(deployment: str) -> Counter[str]:
    """The counter of a deployment, shared by all routers to it in this process."""
    return _REASONS.setdefault(deployment, Counter())
