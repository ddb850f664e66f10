"""What replicas say of chunks decides what goes first: the order, what is said in files, and what is not believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from ropewalk.cluster.store.folder import SUPERSEDED
from ropewalk.cluster.store.node_store import DiskTier, NodeStore
from ropewalk.cluster.store.tier import Tier
from ropewalk.cluster.store.worth import (
    FOLDER,
    MAX_CHUNKS,
    MAX_FILES,
    STALE_S,
    Claim,
    Worth,
    Worths,
    is_told,
    read_worths,
    remove_worths,
    told,
    write_worth,
)

from .test_node_store import TENANT, make_chunk
from .test_tiers import TieredMachine

LARGE = 1 << 26


def claim(chain: str, rate: float, *, used_s: float = 0.0, depth: int = 0) -> Claim:
    return Claim(bytes.fromhex(chain), rate, used_s, depth)


def worth(*claims: Claim, model: str = "model", time_s: float | None = None, cost: float = 1.0) -> Worth:
    return Worth(model, time.time() if time_s is None else time_s, 3.0, cost, claims)


class Place:
    """A store of chunks of one size, used in the order of their numbers, a second apart, the last one a minute ago."""

    def __init__(self, root: Path, num_chunks: int = 8) -> None:
        self.root = root
        self.store = NodeStore(root / "memory", "model-r0", TENANT, LARGE, DiskTier(root / "disk", LARGE))
        self.folder = root / "memory" / FOLDER
        self.chains = []
        for number in range(num_chunks):
            header, rows = make_chunk(number, 64)
            assert self.store.put(header, rows)
            self.chains.append(header.chain)
            self.use(number, time.time() - 60.5 - (num_chunks - number))

    def path(self, number: int) -> Path:
        chain = self.chains[number]
        return self.store.base / "objects" / chain[:2] / chain

    def use(self, number: int, time_s: float) -> None:
        os.utime(self.path(number), (time_s, time_s))

    def say(self, *rates: float, replica: str | None = None, depths: tuple[int, ...] | None = None, **facts) -> Path:
        """Write a replica's word: rates of the first chunks, used half a minute ago."""
        used_s = time.time() - 30
        claims = [
            claim(chain, rate, used_s=used_s, depth=depth)
            for chain, rate, depth in zip(self.chains, rates, depths or (0,) * len(rates), strict=False)
        ]
        name = replica or uuid.uuid4().hex
        self.folder.mkdir(parents=True, exist_ok=True)
        write_worth(self.folder, name, worth(*claims, **facts))
        return self.folder / name

    def order(self) -> list[int]:
        """Evict chunk by chunk; return their numbers."""
        gone: list[int] = []
        while left := self.store.usage().num_bytes:
            self.store.evict(left - 1)
            gone += [n for n in range(len(self.chains)) if n not in gone and not self.path(n).exists()]
        return gone

    @property
    def counters(self) -> Counter[str]:
        return self.store.counters


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_without_a_word_the_least_recently_used_goes_first(place):
    assert place.order() == list(range(8))
    assert place.counters["evicted_unknown"] == place.counters["evicted"] == 8
    assert place.counters["evicted_known"] == 0


def test_what_is_worth_least_goes_first_whenever_it_was_used(place):
    place.say(0.5, 0.1, 0.4, 0.2, 0.8, 0.3, 0.7, 0.6)
    assert place.order() == [1, 3, 5, 2, 0, 7, 6, 4]
    assert place.counters["evicted_known"] == 8


def test_what_is_said_by_several_is_added(place):
    place.say(0.5, 0.3, 0.4, 0.1)
    place.say(0.0, 0.3, 0.0, 0.1)
    assert place.order()[4:] == [3, 2, 0, 1]


def test_a_chunk_that_nobody_knows_is_judged_by_its_last_use(place):
    """Between those that are expected sooner than it was used last, and those that are expected later."""
    place.say(0.5, 0.001, 0.2, 0.0)
    place.use(7, time.time() - 2)  # 1 / (2 s + a pause of 3 s)
    place.use(4, time.time() - 600)
    assert place.order() == [3, 1, 4, 5, 6, 7, 2, 0]


def test_a_chunk_that_somebody_uses_who_says_nothing_is_not_worthless(place):
    place.say(*[0.1] * 8)
    place.use(2, time.time())
    assert place.order()[-1] == 2


def test_among_equals_the_end_of_a_chain_goes_first(place):
    place.say(*[0.1] * 8, depths=(3, 1, 0, 2, 7, 4, 6, 5))
    assert place.order() == [4, 6, 7, 5, 0, 3, 1, 2]


def test_a_second_of_prefill_counts_whichever_model_spares_it(tmp_path):
    """A byte of the large model's KV costs ten times as much to compute: its chunks stay, though used less."""
    small, large = (NodeStore(tmp_path, f"{name}-r0", TENANT, LARGE) for name in ("small", "large"))
    for number in range(4):
        small.put(*make_chunk(number, 64))
        large.put(*make_chunk(number, 64))
    chains = [make_chunk(number, 64)[0].chain for number in range(4)]
    (tmp_path / FOLDER).mkdir()
    for model, cost, rate in (("small", 1e-9, 0.3), ("large", 1e-8, 0.1)):
        claims = [claim(chain, rate, used_s=time.time() + 1) for chain in chains]
        write_worth(tmp_path / FOLDER, uuid.uuid4().hex, worth(*claims, model=model, cost=cost, time_s=time.time() + 1))
    size = small.usage().num_bytes
    small.evict(size // 2)
    assert [small.contains(chain) for chain in chains] == [False] * 4
    assert [large.contains(chain) for chain in chains] == [True] * 4


def test_pins_stay_and_replaced_chunks_go_whatever_is_said(place):
    place.say(0.9, 0.0, 0.5, 0.4)
    place.use(1, time.time() + 60)
    place.use(0, SUPERSEDED)
    order = place.order()
    assert order[0] == 0
    assert order[-1] == 1


def test_a_chunk_that_was_told_to_age_is_judged_by_that(place):
    place.say(*[0.5] * 8)
    place.use(6, told(time.time() - 3600))
    assert place.order()[0] == 6


def test_a_clock_does_not_tell_chunks_to_age(place):
    assert not any(is_told(time.time() + n / 7) for n in range(1, 7))
    assert is_told(told(time.time()))


def test_what_is_damaged_goes_before_all_chunks(place):
    place.say(*[0.0] * 8)
    place.path(7).write_bytes(b"damaged")
    place.use(7, time.time() + 60)
    assert NodeStore(place.store.root, "model-r0", TENANT, LARGE).by_chain(place.chains[7]) is None
    place.store.evict(place.store.usage().num_bytes - 1)
    assert place.counters["evicted_quarantine"] == 1
    assert place.counters["evicted"] == 0


def test_the_disk_lets_go_by_the_same_order(place):
    place.store.evict(0)
    place.say(0.5, 0.1, 0.4, 0.2, 0.8, 0.3, 0.7, 0.6)
    disk = Tier(place.root / "disk", LARGE, place.counters, "disk_", worth_root=place.root / "memory")
    disk.evict(disk.usage().num_bytes // 2)
    left = {path.name for path in place.root.glob("disk/*/*/objects/*/*")}
    assert left == {place.chains[n] for n in (0, 4, 6, 7)}
    assert place.counters["disk_evicted_known"] == 4


def test_what_is_worth_most_is_copied_first_even_if_the_word_is_old(place):
    place.say(0.5, 0.1, 0.4, 0.2, 0.8, 0.3, 0.7, 0.6, time_s=time.time() - 10 * STALE_S)
    for number in range(8):
        place.use(number, time.time() - 1000 - number)
    size = place.path(0).stat().st_size
    below = Tier(place.root / "disk", 4 * size + size, Counter())
    below._slack = 0
    Tier(place.root / "memory", LARGE, Counter(), below=below).flush(60)
    assert {path.name for path in place.root.glob("disk/*/*/objects/*/*")} >= {place.chains[n] for n in (0, 4, 6, 7)}


def test_a_word_that_is_old_counts_no_more_and_goes(place):
    path = place.say(*reversed([n / 10 for n in range(8)]), time_s=time.time() - STALE_S - 1)
    os.utime(path, (time.time() - STALE_S - 1,) * 2)
    place.store.evict(place.store.usage().num_bytes - 1)
    assert not place.path(0).exists()
    assert place.counters["worth_stale"] == 1
    assert not path.exists()
    assert place.order() == list(range(8))


def valid() -> bytes:
    return worth(claim("ab" * 16, 0.5), claim("cd" * 16, 0.25, depth=3)).to_bytes()


def sealed(head: dict[str, object] | list[object] | str, body: bytes = b"") -> bytes:
    line = head if isinstance(head, str) else json.dumps(head)
    data = line.encode() + b"\n" + body
    return data + xxhash.xxh3_64_digest(data)


HEAD = {"format": "ropewalk-worth/1", "model": "model", "time_s": 1e9, "pause_s": 3.0, "cost": 1.0, "chunks": 0}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        valid()[:-1],
        valid() + b"x",
        valid()[:50] + b"\xff" + valid()[51:],
        b"x" * ((MAX_CHUNKS + 100) * 32),
        sealed({**HEAD, "format": "ropewalk-worth/9"}),
        sealed({**HEAD, "chunks": 5}),
        sealed({**HEAD, "chunks": "many"}),
        sealed({**HEAD, "pause_s": 0}),
        sealed({**HEAD, "pause_s": "NaN"}),
        sealed({**HEAD, "cost": -1}),
        sealed({**HEAD, "time_s": None}),
        sealed({**HEAD, "time_s": 10**400}),
        sealed({**HEAD, "time_s": 1e12}),
        sealed([HEAD]),
        sealed("[" * 1000),
        sealed("not json"),
        sealed({**HEAD, "model": "m" * 2000}),
        sealed({**HEAD, "chunks": 1}, np.float32("nan").tobytes() * 8),
    ],
)
def test_what_cannot_be_believed_is_ignored_and_counted(place, content):
    place.folder.mkdir(exist_ok=True)
    path = place.folder / uuid.uuid4().hex
    path.write_bytes(content)
    assert place.order() == list(range(8))
    assert place.counters["worth_damaged"] >= 1
    assert path.exists(), "it may be of a newer version"
    os.utime(path, (1.0, 1.0))
    place.store.put(*make_chunk(99, 64))
    place.store.evict(0)
    assert not path.exists(), "its writer is dead"


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "foreign"])
def test_what_is_no_file_of_ours_is_left_alone(place, kind):
    place.folder.mkdir(exist_ok=True)
    path = place.folder / ("notes.txt" if kind == "foreign" else uuid.uuid4().hex)
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("theirs")
        os.utime(path, (1.0, 1.0))
    assert place.order() == list(range(8))
    assert place.counters["worth_damaged"] >= 1
    assert os.path.lexists(path)


def test_a_root_whose_words_cannot_be_listed_serves_by_last_use(place):
    place.folder.write_text("in the way")
    assert place.order() == list(range(8))


def test_no_more_files_are_read_than_said(place):
    for number in range(MAX_FILES + 3):
        path = place.say(0.1)
        os.utime(path, (time.time() - number / 10,) * 2)
    found = Counter[str]()
    assert read_worths(place.folder, time.time(), found)
    assert found == {"worth_too_many": 3}


def test_a_word_comes_back_as_it_was_said():
    said = worth(claim("00" * 16, 0.5, used_s=12.5, depth=7), claim("ff" * 16, 0.0), model="m-r1", cost=1e-12)
    assert Worth.from_bytes(said.to_bytes()) == replace(said, claims=list(said.claims))
    assert Worth.from_bytes(worth().to_bytes()).claims == []


def test_all_words_can_be_taken_back(place):
    place.say(0.1)
    place.say(0.2)
    place.store.forget_worths()
    assert not [path for path in place.folder.iterdir() if path.name != ".lock"]
    remove_worths(place.root / "nowhere" / FOLDER)
    assert not (place.root / "nowhere").exists(), "what nobody uses is not made"


RATES = st.floats(0, 1e6, width=32)
CHAINS = [f"{n:032x}" for n in range(6)]
FILES = st.lists(
    st.builds(
        lambda model, age, cost, rates: Worth(
            model, 1000.0 - age, 3.0, cost, [claim(c, r, used_s=900.0) for c, r in rates.items()]
        ),
        st.sampled_from(["a", "b"]),
        st.floats(0, 50),
        st.sampled_from([0.0, 1e-9, 1e-8]),
        st.dictionaries(st.sampled_from(CHAINS), RATES),
    ),
    max_size=4,
)
SEEN = st.tuples(st.sampled_from(["a-r0", "a-r1", "b-r0", "c"]), st.sampled_from([*CHAINS, "not a name"]))
TIMES = st.floats(1, 1000)


@given(FILES, SEEN, TIMES, st.integers(0, 3), st.floats(1.5, 100))
def test_expecting_a_chunk_more_often_never_makes_it_go_sooner(files, seen, mtime, index, times):
    before = Worths(files).rank(*seen, mtime, 1000.0)
    more = [
        replace(file, claims=[c._replace(rate=c.rate * times) for c in file.claims]) if n == index else file
        for n, file in enumerate(files)
    ]
    assert Worths(more).rank(*seen, mtime, 1000.0) >= before


@given(FILES, SEEN, TIMES, TIMES)
def test_a_later_use_never_makes_a_chunk_go_sooner(files, seen, one, other):
    if is_told(one) != is_told(other):
        return  # a client said so
    worths = Worths(files)
    first, last = sorted((one, other))
    assert worths.rank(*seen, first, 1000.0) <= worths.rank(*seen, last, 1000.0)


@given(FILES, st.lists(TIMES, min_size=2, max_size=6, unique=True))
def test_chunks_that_nobody_knows_go_in_the_order_of_their_last_use(files, mtimes):
    worths = Worths(files)
    ranked = sorted(mtimes, key=lambda mtime: worths.rank("c", CHAINS[0], mtime, 1000.0))
    assert ranked == sorted(mtimes)


@given(FILES, SEEN, TIMES)
def test_the_order_of_replicas_does_not_matter(files, seen, mtime):
    one, other = (Worths(some).rank(*seen, mtime, 1000.0) for some in (files, files[::-1]))
    assert one.worth == pytest.approx(other.worth)
    assert one[1:] == other[1:]


WRITER = """
import sys, time, uuid
from pathlib import Path
from ropewalk.cluster.store.worth import Claim, Worth, locked, write_worth
folder = Path(sys.argv[1])
name = uuid.uuid4().hex
while True:
    claims = [Claim(n.to_bytes(16, "big"), 0.1, time.time(), n) for n in range(500)]
    with locked(folder):
        write_worth(folder, name, Worth("model", time.time(), 3.0, 1e-9, claims))
"""


def test_while_others_write_a_reader_sees_whole_words_only(place):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(place.folder)]) for _ in range(2)]
    try:
        deadline = time.monotonic() + 60
        found = Counter[str]()
        num_read = 0
        while num_read < 300:
            assert time.monotonic() < deadline
            num_read += read_worths(place.folder, time.time(), found).knows("model-r0", f"{7:032x}")
        assert not +found
        while time.monotonic() < deadline and num_read < 320:  # and they go on when all is taken back
            remove_worths(place.folder)
            num_read += read_worths(place.folder, time.time(), found).knows("model-r0", f"{7:032x}")
        assert num_read == 320
        assert not +found
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


class WorthMachine(TieredMachine):
    """The same with replicas that say things, true or not, and take them back."""

    @rule(seeds=st.lists(st.integers(0, 30)), rate=RATES, age=st.sampled_from([0, 30, 100]), replica=st.integers(0, 2))
    def say(self, seeds, rate, age, replica):
        claims = [claim(make_chunk(seed, 40)[0].chain, rate, used_s=time.time()) for seed in seeds]
        (self.roots.memory / FOLDER).mkdir(parents=True, exist_ok=True)
        write_worth(self.roots.memory / FOLDER, f"{replica:032x}", worth(*claims, time_s=time.time() - age))

    @rule(content=st.binary(max_size=200), replica=st.integers(0, 2))
    def damage(self, content, replica):
        (self.roots.memory / FOLDER).mkdir(parents=True, exist_ok=True)
        (self.roots.memory / FOLDER / f"{replica:032x}").write_bytes(content)

    @rule(view=st.integers(0, 1))
    def take_back(self, view):
        self.views[view].forget_worths()


TestWorthMachine = WorthMachine.TestCase
TestWorthMachine.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
