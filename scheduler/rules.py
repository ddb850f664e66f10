"""The rules of retention by name, as settings have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ropewalk.scheduler.foresight import Foresight
from ropewalk.scheduler.retention import Anchors, FirstOrder, Lru, Retention, TtlPin

RuleName = Literal["lru", "ttl", "anchors", "first-order", "foresight"]

RULES: Mapping[str, type[Retention]] = {
    "lru": Lru,
    "ttl": TtlPin,
    "anchors": Anchors,
    "first-order": FirstOrder,
    "foresight": Foresight,
}
