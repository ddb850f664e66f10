"""A real engine says what its chunks are worth, and the store heeds it: what is shared stays, though used long ago."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

from ropewalk.agents.directives import Span
from ropewalk.cluster.bench.engine import Engine
from ropewalk.cluster.models.tiny import SERVED, write
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.cluster.store.worth import FOLDER, Worth

pytestmark = pytest.mark.engine

SESSIONS = ("s", "t", "u", "v")
ANCHOR, MESSAGE = 400, 150
PATIENCE_S = 90


@pytest.fixture(scope="module")
def engine(start_engines, new_store, tmp_path_factory) -> Engine:
    family = next(family for family in SERVED if family.name == "Qwen2.5")
    model = write(family, tmp_path_factory.mktemp("model") / "model")
    (engine,) = start_engines(
        str(model), new_store(), threads=1, skip_tokenizer_init=True, max_model_len=4096, dtype="bfloat16"
    )
    return engine


class Talk:
    """Sessions of one agent, whose anchor all of them begin with; each turn says something more."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.anchor = self.words(ANCHOR)
        self.history: dict[str, list[int]] = {f"{session}{seed}": [] for session in SESSIONS}
        self.agent = f"agent-{seed}"
        self.at_s = 1000.0 * seed

    def words(self, count: int) -> list[int]:
        return self.rng.choices(range(16, 480), k=count)

    def turn(self, session: str) -> None:
        self.at_s += 1.0
        tokens = [*self.anchor, *self.history[session][-8 * MESSAGE :], *self.words(MESSAGE)]
        self.engine.ask(tokens, session=session, agent=self.agent, at_s=self.at_s, max_tokens=1, ignore_eos=True)
        self.history[session] = tokens[ANCHOR:]

    def until_said(self, *chains: str) -> Worth:
        """Go on until the engine's word names these chunks; return it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for session in self.history:
                self.turn(session)
            for path in (self.engine.store_root / FOLDER).glob("[0-9a-f]*"):
                word = Worth.from_bytes(path.read_bytes())
                if {bytes.fromhex(chain) for chain in chains} <= {claim.chain for claim in word.claims}:
                    return word
        raise AssertionError("nothing was said")


def open_store(engine: Engine, root: Path) -> NodeStore:
    return NodeStore(root, f"{engine.client.facts.fingerprint}-r0", "default", 1 << 30)


def anchor_chunks(store: NodeStore, talk: Talk) -> list[str]:
    """Names of the whole chunks of an anchor."""
    return [
        chain
        for chain, header in store.headers().items()
        if header is not None
        and header.start + len(header) <= ANCHOR
        and header.tokens.tolist() == talk.anchor[header.start : header.start + len(header)]
    ]


def test_a_shared_anchor_outlives_what_was_used_later(engine, tmp_path):
    talk = Talk(engine, 1)
    for session in talk.history:
        talk.turn(session)
    store = open_store(engine, engine.store_root)
    anchor = anchor_chunks(store, talk)
    assert anchor
    word = talk.until_said(*anchor)
    assert word.model == engine.client.facts.fingerprint
    assert word.cost > 0, "what a token costs was measured at start"
    rates = {claim.chain.hex(): claim.rate for claim in word.claims}
    own = [rates[chain] for chain, header in store.headers().items() if header.start >= ANCHOR and chain in rates]
    assert min(rates[chain] for chain in anchor) > max(own)
    # vLLM's own cache has served it since: in the store it was not used for longest.
    plain = tmp_path / "plain"
    shutil.copytree(engine.store_root, plain)
    shutil.rmtree(plain / FOLDER)
    without = open_store(engine, plain)
    for copy in (store, without):
        copy.evict(copy.usage().num_bytes // 2)
    assert all(store.contains(chain) for chain in anchor)
    assert not any(without.contains(chain) for chain in anchor)
    assert store.counters["evicted_known"] > 0
    counters = engine.client.status()["counters"]
    assert counters["worth_published"] > 0
    assert "worth_unwritten" not in counters


def test_a_purged_chunk_is_named_no_more(engine):
    talk = Talk(engine, 2)
    for session in talk.history:
        talk.turn(session)
    anchor = anchor_chunks(open_store(engine, engine.store_root), talk)
    talk.until_said(*anchor)
    session = next(iter(talk.history))
    engine.settle()
    traces = engine.client.turns.verbs("default").traces(session, Span(0, 10))
    assert engine.run(engine.client.discard("default", traces)) >= len(anchor)
    assert engine.run(engine.client.empty_prefix_cache())
    other = Talk(engine, 3)
    other.turn(next(iter(other.history)))
    word = other.until_said(*anchor_chunks(open_store(engine, engine.store_root), other))
    assert not {bytes.fromhex(chain) for chain in anchor} & {claim.chain for claim in word.claims}
    for path in engine.store_root.rglob("*"):
        assert not path.is_file() or not any(bytes.fromhex(chain) in path.read_bytes() for chain in anchor)
