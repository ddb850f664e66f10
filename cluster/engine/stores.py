"""The stores that one part of an engine process keeps open, by model and tenant, and what they have counted."""

from __future__ import annotations

from collections import Counter, OrderedDict

from ropewalk.cluster.engine.settings import EngineSettings
from ropewalk.cluster.store.node_store import DiskTier, NodeStore

MAX_PLACES = 256
"""Models and tenants whose stores are kept open. Opening one again costs nothing but its remembered headers."""

Place = tuple[str, str]
"""Model fingerprint and tenant: where chunks lie. The planning process names both, since vLLM's model classes change
their configuration while they load, so that an engine process would compute another fingerprint."""


class OpenStores:
    """Opens stores as they are needed. For one thread: each that reads or writes chunks has its own."""

    def __init__(self, settings: EngineSettings, budget_bytes: int, disk: DiskTier | None, rank: int) -> None:
        self.rank = rank
        self._disk = disk
        self._root = settings.store_root
        self._budget = budget_bytes
        self._open: OrderedDict[Place, NodeStore] = OrderedDict()
        self._counters: Counter[str] = Counter()

    def get(self, place: Place) -> NodeStore:
        """Return the store of this model and tenant; the one that was not asked for longest is closed for it."""
        if place in self._open:
            self._open.move_to_end(place)
        else:
            fingerprint, tenant = place
            self._open[place] = NodeStore(self._root, f"{fingerprint}-r{self.rank}", tenant, self._budget, self._disk)
            if len(self._open) > MAX_PLACES:
                self._counters.update(self._open.popitem(last=False)[1].counters)
        return self._open[place]

    def take_counters(self) -> Counter[str]:
        """Return what was counted since the last call, as `store_<name>`."""
        for store in self._open.values():
            self._counters.update(store.counters)
            store.counters.clear()
        counters = Counter({f"store_{name}": count for name, count in self._counters.items()})
        self._counters.clear()
        return counters
