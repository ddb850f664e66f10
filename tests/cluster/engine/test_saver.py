"""Saving beside the engine: what is queued, what is given up, and when blocks are let go. Imports vLLM."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.cluster.engine.saver import Saver
from ropewalk.cluster.engine.saves import Save, SaveQueue, slots_of
from ropewalk.cluster.engine.settings import EngineSettings
from ropewalk.cluster.engine.stores import OpenStores
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.kernels.gear import ChunkSizes
from ropewalk.kernels.keys import Tokens, as_tokens
from ropewalk.scheduler.plan import Plan

PLACE = ("model", "t")


def exact(tokens: Tokens) -> Plan:
    """A plan that takes nothing from the store."""
    return Plan(len(tokens), 0, (), (), ())


BLOCK_SIZE = 32


class Layout:
    """A paged cache whose rows hold their own slot's number. `gate` makes gathering wait; `broken` makes it fail."""

    def __init__(self) -> None:
        self.numbers = torch.arange(400.0 * BLOCK_SIZE).reshape(1, -1, 1, 1).repeat(2, 1, 1, 4)
        self.gate = threading.Event()
        self.gate.set()
        self.gathering = threading.Event()
        self.broken = False
        self.fences: list[str] = []

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        self.gathering.set()
        assert self.gate.wait(30)
        if self.broken:
            raise RuntimeError("the cache cannot be read")
        return self.numbers[:, slots]

    def scatter(self, parts: Any) -> None:
        raise NotImplementedError

    def fence(self) -> AbstractContextManager[None]:
        @contextmanager
        def fence() -> Iterator[None]:
            self.fences.append(threading.current_thread().name)
            yield

        return fence()


class Bench:
    """A saver with a store, and the queue that feeds it."""

    def __init__(self, root: Path, *, budget: int = 1 << 28, max_hold_s: float = 60) -> None:
        self.settings = EngineSettings(store_root=root, store_budget_bytes=budget)
        self.layout = Layout()
        self.saver = Saver(self.layout, OpenStores(self.settings, budget, None, 0), max_hold_s)
        self.queue = SaveQueue(ChunkSizes(), BLOCK_SIZE, OpenStores(self.settings, budget, None, 0))
        self.queue.max_blocks = 100
        self.store = NodeStore(root, "model-r0", "t", budget)
        self.counters: Counter[str] = Counter()

    def finish(self, name: str, tokens: Tokens, block_ids: list[int] | None = None) -> Save | None:
        """End a request, as the connector does; hand what it has to save to the saver."""
        block_ids = block_ids or list(range(1, len(tokens) // BLOCK_SIZE + 2))
        save, _ = self.queue.add(name, PLACE, tokens, exact(tokens), block_ids)
        if save is not None:
            self.saver.submit(save)
        return save

    def step(self) -> set[str]:
        released = self.saver.take_finished()
        self.queue.release(released)
        self.counters.update(self.saver.take_counters())
        return released

    def settle(self) -> set[str]:
        """Step until nothing is held any more; return whose blocks were let go."""
        released: set[str] = set()
        poll(lambda: released.update(self.step()) or not self.queue._held)
        return released

    def stored(self) -> dict[str, torch.Tensor]:
        return {path.name: self.store.read(path.name)[1] for path in self.store.base.glob("objects/*/*")}


def poll(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def words(seed: int, count: int) -> Tokens:
    return as_tokens(np.random.default_rng(seed).integers(0, 30_000, count))


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(tmp_path / f"store-{len(made)}", **options))
        return made[-1]

    yield make
    for bench in made:
        bench.layout.gate.set()
        bench.saver.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


def test_what_a_finished_request_computed_is_stored_row_by_row(bench: Bench) -> None:
    save = bench.finish("a", words(1, 700), block_ids=list(range(50, 28, -1)))
    assert save is not None
    assert bench.settle() == {"a"}
    bench.saver.close()
    stored = bench.stored()
    assert len(stored) == len(save.parts) > 1
    for part in save.parts:
        assert stored[part.header.chain][0, :, 0, 0].tolist() == part.slots.tolist()
    bench.step()
    assert bench.counters["saved_chunks"] == len(save.parts)
    assert bench.counters["saved_bytes"] == sum(rows.numel() * 4 for rows in stored.values())


def test_rows_are_gathered_behind_the_fence_and_not_in_the_engines_thread(bench: Bench) -> None:
    bench.finish("a", words(1, 300))
    bench.settle()
    assert bench.layout.fences == ["ropewalk-saver"]


def test_blocks_are_held_until_their_rows_are_out(bench: Bench) -> None:
    bench.layout.gate.clear()
    bench.finish("a", words(1, 300))
    assert bench.layout.gathering.wait(30)
    assert bench.step() == set()
    bench.layout.gate.set()
    assert bench.settle() == {"a"}


def test_two_requests_that_end_together_with_one_prefix_save_it_once(bench: Bench) -> None:
    bench.queue.max_blocks = 200
    bench.layout.gate.clear()
    first = bench.finish("a", words(1, 1500))
    again = bench.finish("b", words(1, 1500))
    longer = bench.finish("c", as_tokens(np.concatenate([words(1, 1500), words(2, 400)])))
    assert first is not None
    assert again is None, "its blocks need not be held"
    assert longer is not None
    names = {part.header.chain for part in first.parts}
    assert names.isdisjoint(part.header.chain for part in longer.parts)
    bench.layout.gate.set()
    assert bench.settle() == {"a", "c"}
    bench.saver.close()
    assert set(bench.stored()) >= names


def test_what_is_stored_already_is_not_queued(bench: Bench) -> None:
    bench.finish("a", words(1, 1500))
    bench.settle()
    bench.saver.close()
    assert bench.queue.add("b", PLACE, words(1, 1500), exact(words(1, 1500)), list(range(60))) == (None, None)


def test_what_another_process_stored_meanwhile_is_not_written_again(bench: Bench, make_bench: Any) -> None:
    other = Bench(bench.settings.store_root)
    bench.layout.gate.clear()
    save = bench.finish("a", words(1, 1500))
    assert save is not None
    other.finish("a", words(1, 1500))
    other.settle()
    other.saver.close()
    bench.layout.gate.set()
    bench.settle()
    bench.saver.close()
    bench.step()
    # The first chunk was being gathered already.
    assert bench.counters["save_present"] >= len(save.parts) - 1


def test_a_saver_that_is_behind_loses_saves_and_says_so(bench: Bench) -> None:
    bench.layout.gate.clear()
    saves = [bench.finish(f"r{n}", words(n, 1000)) for n in range(10)]  # 32 blocks each, of the 100 that may be held
    assert [save is not None for save in saves] == [True] * 3 + [False] * 7
    assert bench.queue.counters["save_dropped_queue_full"] >= 7
    bench.layout.gate.set()
    assert bench.settle() == {"r0", "r1", "r2"}
    assert bench.finish("r3", words(3, 1000)) is not None, "and it goes on"


def test_one_request_may_always_be_saved_however_small_the_cache(bench: Bench) -> None:
    bench.queue.max_blocks = 1
    assert bench.finish("a", words(1, 1000)) is not None


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(40, 900), st.booleans()), max_size=30))
def test_no_more_is_held_than_the_bound_and_no_name_twice(finished: list[tuple[int, int, bool]]) -> None:
    queue = SaveQueue(ChunkSizes(), BLOCK_SIZE, OpenStores(EngineSettings(store_root=Path("/nowhere")), 1, None, 0))
    queue.max_blocks = 40
    held: dict[str, Save] = {}
    for number, (seed, length, released) in enumerate(finished):
        if released and held:
            name = next(iter(held))
            del held[name]
            queue.release([name])
        save, awaited = queue.add(
            str(number), PLACE, words(seed, length), exact(words(seed, length)), list(range(length // BLOCK_SIZE + 1))
        )
        assert save is None or awaited is not None
        if save is not None:
            held[save.request_id] = save
        names = [part.header.chain for save in held.values() for part in save.parts]
        assert len(names) == len(set(names))
        assert len(held) <= 1 or sum(blocks for blocks, _ in queue._held.values()) <= 40


def test_a_store_without_room_costs_saves_only(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(budget=1000)
    save = bench.finish("a", words(1, 1000))
    assert save is not None
    assert bench.settle() == {"a"}
    bench.saver.close()
    bench.step()
    assert bench.counters["store_put_over_budget"] == len(save.parts)
    assert bench.counters["saved_chunks"] == 0


def test_a_cache_that_cannot_be_read_costs_this_save_only(bench: Bench) -> None:
    bench.layout.broken = True
    bench.finish("a", words(1, 300))
    assert bench.settle() == {"a"}
    assert bench.counters["save_failed"] > 0
    bench.layout.broken = False
    bench.finish("b", words(2, 300))
    bench.settle()
    bench.saver.close()
    assert bench.stored()


def test_a_saver_that_hangs_lets_blocks_go_and_never_stores_what_it_read_behind_that(make_bench: Any) -> None:
    bench = make_bench(max_hold_s=0.05)
    bench.layout.gate.clear()
    save = bench.finish("a", words(1, 1000))
    assert bench.settle() == {"a"}
    assert bench.counters["save_dropped_too_slow"] == len(save.parts)
    bench.layout.numbers[:] = -1  # the blocks are another request's now
    bench.layout.gate.set()
    bench.saver.close()
    assert bench.stored() == {}


def test_closing_saves_what_waits(bench: Bench) -> None:
    save = bench.finish("a", words(1, 1500))
    assert save is not None
    bench.saver.close(drain_s=30)
    assert len(bench.stored()) == len(save.parts)
    assert not list(bench.settings.store_root.rglob("*.tmp"))


def test_closing_a_saver_that_hangs_gives_up(bench: Bench) -> None:
    bench.layout.gate.clear()
    first, second = bench.finish("a", words(1, 700)), bench.finish("b", words(2, 700))
    assert first is not None
    assert second is not None
    bench.saver.close(drain_s=0.05)
    assert bench.step() == {"a", "b"}
    assert bench.counters["save_dropped_shutdown"] == len(first.parts) + len(second.parts)
    bench.layout.gate.set()
    poll(lambda: "ropewalk-saver" not in {thread.name for thread in threading.enumerate()})
    assert bench.stored() == {}


def test_closing_twice_or_before_anything_was_saved_does_nothing(bench: Bench) -> None:
    bench.saver.close()
    bench.finish("a", words(1, 300))
    bench.saver.close()
    bench.saver.close()


def test_slots_follow_the_block_table() -> None:
    assert slots_of([7, 3], 2, 5, 4).tolist() == [30, 31, 12]
