"""What an engine says of the store's chunks: which it notes, what it says of them, and what it takes back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ropewalk.agents.directives import Span
from ropewalk.agents.history import Branch
from ropewalk.agents.lineage import Lineage, Rows
from ropewalk.cluster.engine import worth as module
from ropewalk.cluster.engine.sessions import Sessions
from ropewalk.cluster.engine.settings import EngineSettings
from ropewalk.cluster.engine.stores import OpenStores
from ropewalk.cluster.engine.verbs import Verbs
from ropewalk.cluster.engine.worth import MAX_WEIGHED, ChunkWorth
from ropewalk.cluster.store.chunk import ChunkHeader
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.cluster.store.sessions import SessionFiles
from ropewalk.cluster.store.worth import FOLDER, MAX_CHUNKS, Worth
from ropewalk.kernels.gear import ChunkSizes
from ropewalk.kernels.keys import Domain, as_tokens, chain_key, content_key, root_key
from ropewalk.scheduler.foresight import Foresight
from ropewalk.scheduler.plan import Piece, Plan, empty_plan

BUDGET = 1 << 28
PLACE = ("model", "t")
LENGTH = 64


class Bench:
    """An engine that says something, its rule, and a store of chunks named by words."""

    def __init__(self, root: Path) -> None:
        self.settings = EngineSettings(store_root=root, store_budget_bytes=BUDGET)
        self.worth = ChunkWorth(self.settings, OpenStores(self.settings, BUDGET, None, 0))
        self.worth.spared_s = 1e-3
        self.rule = Foresight()
        self.store = NodeStore(root, "model-r0", "t", BUDGET)
        self.files = SessionFiles(self.store.last_base)
        self.verbs = Verbs(Sessions(lambda tenant: self.files, ChunkSizes()), self.store)
        self.now_s = 0.0
        self.num_requests = 0

    def pieces(self, words: list[str]) -> list[Piece]:
        parent, found = root_key("t"), []
        for number, word in enumerate(words):
            chain = chain_key(parent, self.tokens(word), Domain.EXACT)
            found.append(Piece(number * LENGTH, (number + 1) * LENGTH, chain, parent, Domain.EXACT))
            parent = chain
        return found

    @staticmethod
    def tokens(word: str) -> np.ndarray:
        return as_tokens(np.random.default_rng(list(word.encode())).integers(0, 50_000, LENGTH))

    def save(self, words: list[str]) -> None:
        for piece, word in zip(self.pieces(words), words, strict=True):
            tokens = self.tokens(word)
            header = ChunkHeader(
                piece.chain, piece.parent, content_key("t", tokens), "t", piece.domain, piece.start, tokens
            )
            assert self.store.put(header, torch.zeros(2, LENGTH, 1, 8, dtype=torch.bfloat16))

    def turn(self, session: str | None, agent: str, words: list[str], *, plan: Plan | None = None) -> None:
        """A turn that computes and saves all of its words."""
        self.save(words)
        self.now_s += 1.0
        self.num_requests += 1
        name = f"r{self.num_requests}"
        self.rule.begin(session, agent, self.now_s)
        plan = plan or empty_plan(len(words) * LENGTH)
        self.worth.note(self.rule, name, (session or name, agent), PLACE, plan, self.pieces(words))

    def word(self) -> Worth:
        """Let it say a last word; return it. Another turn begins anew."""
        self.worth.close()
        (path,) = [path for path in (self.settings.store_root / FOLDER).iterdir() if path.name != ".lock"]
        return Worth.from_bytes(path.read_bytes())

    def said(self, word: Worth, words: list[str]) -> list[float | None]:
        """Rates of the chunks of a prompt, None for those that nothing is said of."""
        rates = {claim.chain.hex(): claim.rate for claim in word.claims}
        return [rates.get(piece.chain) for piece in self.pieces(words)]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(module, "PERIOD_S", 0.0)
    monkeypatch.setattr(module, "SHARE", 1e9)
    bench = Bench(tmp_path)
    yield bench
    bench.worth.close()


def test_what_several_sessions_share_is_worth_more_than_what_one_has(bench):
    for number in range(12):
        session = "sut"[number % 3]
        bench.turn(session, "ab"[number % 2], ["anchor", f"history of {session}"])
    word = bench.word()
    anchor, history = bench.said(word, ["anchor", "history of s"])
    assert anchor > history > 0
    assert (word.model, word.pause_s) == ("model", bench.rule.pauses.mean_s)
    assert [claim.depth for claim in word.claims if claim.rate == anchor] == [0]
    size = bench.store.size(bench.pieces(["anchor"])[0].chain)
    assert word.cost == pytest.approx(1e-3 * LENGTH / size), "seconds a byte"
    assert all(abs(claim.used_s - time.time()) < 60 for claim in word.claims)


def test_what_a_session_that_is_over_has_used_is_worth_less_than_what_a_live_one_has(bench):
    for number in range(6):
        bench.turn("st"[number % 2], "a", [f"{'st'[number % 2]}"])
    bench.rule.end("s")
    bench.turn("t", "a", ["t"])
    word = bench.word()
    (over,), (live,) = bench.said(word, ["s"]), bench.said(word, ["t"])
    assert live > over > 0, "and not nothing: somebody may come back"


def test_nothing_is_said_of_what_nobody_foretells(bench):
    bench.turn(None, "a", ["alone"])
    bench.turn("s", "a", ["named"])
    word = bench.word()
    assert bench.said(word, ["alone"]) == [None]
    assert bench.said(word, ["named"]) != [None]


def test_chunks_that_are_not_there_are_not_named(bench):
    bench.turn("s", "a", ["x", "y"])
    assert None not in bench.said(bench.word(), ["x", "y"])
    bench.store.evict(0)
    bench.turn("s", "a", ["z"])
    word = bench.word()
    assert bench.said(word, ["x", "y"]) == [None, None]
    assert len(word.claims) == 1


def test_no_more_is_said_than_once_in_a_period(bench, monkeypatch):
    monkeypatch.setattr(module, "PERIOD_S", 3600.0)
    bench.turn("s", "a", ["x"])
    weighed: list[object] = []
    monkeypatch.setattr(bench.rule, "rate", weighed.append)
    bench.turn("s", "a", ["x"])
    assert not weighed


def test_what_took_long_to_weigh_is_weighed_the_less_often(bench, monkeypatch):
    monkeypatch.setattr(module, "SHARE", 1e-9)
    bench.turn("s", "a", ["x"])
    bench.turn("s", "a", ["x"])  # begins another one, after which time is up
    weighed: list[object] = []
    monkeypatch.setattr(bench.rule, "rate", weighed.append)
    bench.turn("s", "a", ["x"])
    assert not weighed


def test_only_so_many_are_weighed_at_a_time(bench, monkeypatch):
    weighed: list[object] = []
    rate = bench.rule.rate
    monkeypatch.setattr(bench.rule, "rate", lambda use: weighed.append(use) or rate(use))
    bench.rule.begin("s", "a", 0.0)
    many = [Piece(n, n + 1, f"{n:032x}", "", Domain.EXACT) for n in range(2 * MAX_WEIGHED + 10)]
    for number, expected in enumerate([MAX_WEIGHED, MAX_WEIGHED, 10]):
        weighed.clear()
        bench.worth.note(bench.rule, f"r{number}", ("s", "a"), PLACE, empty_plan(1), many if number == 0 else [])
        assert len(weighed) == expected
    bench.word()


def test_no_more_chunks_are_remembered_than_said(bench):
    bench.rule.begin("s", "a", 0.0)
    many = [Piece(n, n + 1, f"{n:032x}", "", Domain.EXACT) for n in range(MAX_CHUNKS + 50)]
    bench.worth.note(bench.rule, "r", ("s", "a"), PLACE, empty_plan(1), many)
    assert len(bench.worth._uses) == MAX_CHUNKS


def test_forgetting_takes_back_what_was_said_and_what_is_being_said(bench, monkeypatch):
    bench.turn("s", "a", ["x"])
    bench.word()
    gate, at_it = threading.Event(), threading.Event()
    write = module.write_worth

    def late(*args):
        at_it.set()
        assert gate.wait(30)
        write(*args)

    monkeypatch.setattr(module, "write_worth", late)
    bench.turn("s", "a", ["x"])
    assert at_it.wait(30)
    bench.worth.forget()
    gate.set()
    bench.worth.close()
    assert not [path for path in (bench.settings.store_root / FOLDER).iterdir() if path.name != ".lock"]


def test_a_store_that_cannot_be_written_costs_the_word_alone(bench):
    (bench.settings.store_root).mkdir(exist_ok=True)
    (bench.settings.store_root / FOLDER).write_text("in the way")
    bench.turn("s", "a", ["x"])
    deadline = time.monotonic() + 30
    while not bench.worth.take_counters()["worth_unwritten"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    bench.turn("s", "a", ["x"])


def test_an_engine_that_ends_says_a_last_word(bench, monkeypatch):
    monkeypatch.setattr(module, "PERIOD_S", 3600.0)
    bench.turn("s", "a", ["x"])
    bench.turn("s", "a", ["x", "y"])
    assert None not in bench.said(bench.word(), ["x", "y"])


def test_a_purged_chunk_is_named_by_nobody_and_not_again(bench):
    """The engine itself remembers it: what is not there is not said."""
    words = ["before", "secret", "behind"]
    bench.turn("s", "a", words)
    bench.word()
    tokens = as_tokens(np.concatenate([bench.tokens(word) for word in words]))
    pieces = bench.pieces(words)
    rows = tuple(Rows(piece.start, piece.end, piece.chain, 0, piece.start) for piece in pieces)
    bench.files.update("s", lambda history: history.add(Branch(Lineage(tokens, rows), None, time.time())))
    gone = bench.verbs.purge(bench.verbs.traces("s", Span(LENGTH, LENGTH + 5)))
    assert gone == {piece.chain for piece in pieces[1:]}
    folder = bench.settings.store_root / FOLDER
    assert [path.name for path in folder.iterdir()] == [".lock"]
    bench.turn("t", "a", ["other"])
    word = bench.word()
    assert bench.said(word, words)[1:] == [None, None]
    assert bench.said(word, words)[0] is not None
    names = [bytes.fromhex(piece.chain) for piece in pieces[1:]]
    assert not any(name in path.read_bytes() for name in names for path in folder.iterdir())


def test_the_store_keeps_the_anchor_that_it_would_have_let_go(bench):
    """Used first, and read from the engine's own cache since: by its last use it is the next to go."""
    for number in range(9):
        session = "stu"[number % 3]
        bench.turn(session, "a", ["anchor", f"{session}{number}"])
    bench.word()
    anchor = bench.pieces(["anchor"])[0].chain
    os.utime(bench.store.base / "objects" / anchor[:2] / anchor, (time.time() - 3000.5,) * 2)
    bench.store.evict(2 * bench.store.size(anchor))
    assert bench.store.contains(anchor)
    assert bench.store.counters["evicted_known"] == bench.store.counters["evicted"] == 8
