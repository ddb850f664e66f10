"""Which of vLLM's free blocks go first, on its own block pool."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from ropewalk.cluster.engine.pool import WINDOW, PoolOrder
from ropewalk.scheduler.foresight import Foresight
from ropewalk.scheduler.retention import Anchors, Retention

BLOCK = 16


class Bench:
    """A pool whose requests are made of named blocks."""

    def __init__(self, num_blocks: int, rule: type[Retention] = Anchors) -> None:
        self.pool = BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=BLOCK)
        self.order = PoolOrder(rule, BLOCK)
        self.order.bind(self.pool)
        self.numbers = itertools.count()

    def serve(self, session: str, agent: str, names: list[str], now_s: float = 0.0) -> int:
        """Answer a request of these blocks and one token more; return how many were cached."""
        request: Any = SimpleNamespace(
            request_id=f"r{next(self.numbers)}",
            num_tokens=len(names) * BLOCK + 1,
            max_tokens=1,
            block_hashes=[name.encode() for name in names],
        )
        self.order.begin(request.request_id, {"session": session, "agent": agent, "at_s": now_s})
        found = []
        for name in names:
            block = self.pool.get_cached_block(name.encode(), [0])
            if block is None:
                break
            found += block
        self.order.make_room(request, len(found) * BLOCK)
        self.pool.touch(found)
        new = self.pool.get_new_blocks(len(names) + 1 - len(found))
        for name, block in zip(names[len(found) :], new, strict=False):
            block.set_block_hash(make_block_hash_with_group_id(name.encode(), 0), BLOCK)
            self.pool.cached_block_hash_to_block.insert(block.block_hash, block)
        self.order.end(request, request.num_tokens)
        self.pool.free_blocks(reversed([*found, *new]))
        return len(found)

    def check(self) -> None:
        """All blocks are free again, none twice, and vLLM's own list of them is whole."""
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        assert sorted(free) == list(range(1, self.pool.num_gpu_blocks))
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)


def test_an_anchor_stays_while_histories_go():
    plain, ours = Bench(10, Retention), Bench(10)
    for bench in (plain, ours):
        for session in ("s", "t"):
            bench.serve(session, "a", ["anchor0", "anchor1", f"{session}0"])
        for number in range(6):
            bench.serve(f"u{number}", "b", [f"u{number}/0", f"u{number}/1"])
        bench.check()
    assert plain.serve("v", "a", ["anchor0", "anchor1", "v0"]) == 0
    assert ours.serve("v", "a", ["anchor0", "anchor1", "v0"]) == 2
    assert ours.order.num_kept > 0


def test_as_long_as_there_is_room_nothing_moves():
    bench = Bench(50)
    for number in range(8):
        bench.serve(f"s{number}", "a", ["anchor0", f"s{number}/0", f"s{number}/1"])
    assert bench.order.num_kept == 0


def test_no_more_blocks_are_weighed_than_said():
    bench = Bench(3 * WINDOW)
    for number in range(3 * WINDOW):
        bench.serve(f"s{number % 7}", "a", [f"b{number}"])
    weighed = []
    rank = bench.order.rule.rank
    bench.order.rule.rank = lambda block: weighed.append(block) or rank(block)  # type: ignore[method-assign]
    bench.serve("x", "a", ["x0", "x1", "x2"])
    assert 0 < len(weighed) <= WINDOW + 5


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_asked_the_pool_stays_whole(seed):
    rng = random.Random(seed)
    bench = Bench(30)
    for turn in range(300):
        agent = rng.choice("abc")
        session = f"s{rng.randrange(6)}"
        history = [f"{session}/{agent}/{n}" for n in range(rng.randrange(1, 8))]
        bench.serve(session, agent, [f"{agent}0", f"{agent}1", *history], float(turn))
        bench.check()


def test_the_blocks_that_a_request_shares_are_no_room_for_it():
    """It takes them out of the queue: another one that is worth something would go in their place."""
    bench = Bench(8)
    bench.serve("u", "b", ["u0", "u1"])
    for session in ("s", "t"):
        bench.serve(session, "a", ["anchor0"])
    bench.serve("s", "b", ["s0", "s1"])
    assert bench.serve("u", "b", ["u0", "u1", "u2", "u3", "u4"]) == 2
    bench.check()
    assert bench.serve("v", "a", ["anchor0", "v0"]) == 1


def test_forgetting_makes_all_blocks_alike():
    bench = Bench(10)
    for session in ("s", "t"):
        bench.serve(session, "a", ["anchor0", "anchor1", f"{session}0"])
    bench.order.forget()
    assert bench.order.rule.rank(b"anchor0") == (-1.0, 0, 0)


def test_a_prewarmed_anchor_is_its_agents_and_no_turn():
    order = Bench(10, Foresight).order
    order.begin("real", {"session": "s", "agent": "a", "ended": []})
    order.begin("warm", {"session": None, "agent": "b", "ended": [], "prewarm": True})
    assert order.rule.num_turns == 1
    order.end(request_of("warm", [b"0", b"1", b"2"]), 32)
    assert {block: (use.session, use.agents) for block, use in order.rule._uses.items()} == {
        b"0": (None, {"b"}),
        b"1": (None, {"b"}),
    }


def test_turns_are_told_to_the_rule_and_forgotten_with_their_requests(monkeypatch):
    order, said = Bench(10).order, []
    monkeypatch.setattr(order.rule, "begin", lambda *turn: said.append(("begin", *turn)))
    monkeypatch.setattr(order.rule, "used", lambda session, agent, blocks: said.append(("used", session, agent)))
    monkeypatch.setattr(order.rule, "end", lambda session: said.append(("end", session)))
    order.begin("r0", {"session": "t/s", "agent": "coder", "at_s": 3.0, "ended": ["t/old"]})
    order.begin("r1", {"at_s": 5.0})
    assert said == [("end", "t/old"), ("begin", "t/s", "coder", 3.0), ("begin", None, "", 5.0)]
    said.clear()
    for name in ("r0", "r1", "unknown"):
        order.end(request_of(name, []), 64)
    assert said == [("used", "t/s", "coder"), ("used", "r1", "")]
    assert not order._turns


def test_a_request_that_waits_for_room_is_weighed_once(monkeypatch):
    bench = Bench(10)
    for number in range(6):
        bench.serve(f"s{number}", "a", [f"b{number}", f"c{number}"])
    weighed = []
    rank = bench.order.rule.rank
    monkeypatch.setattr(bench.order.rule, "rank", lambda block: weighed.append(block) or rank(block))
    waiting = SimpleNamespace(**vars(request_of("w", [b"w0", b"w1"])), num_tokens=40, max_tokens=1)
    bench.order.make_room(waiting, 0)
    assert weighed
    weighed.clear()
    bench.order.make_room(waiting, 0)
    assert not weighed
    bench.pool.get_new_blocks(1)
    bench.order.make_room(waiting, 0)
    assert weighed


def request_of(name: str, hashes: list[bytes]) -> Any:
    return SimpleNamespace(request_id=name, block_hashes=hashes)
