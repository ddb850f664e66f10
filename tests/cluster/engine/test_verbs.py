"""Keep, age, share and purge the KV of a span: what happens to the files."""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ropewalk.agents.directives import DirectiveError, Span
from ropewalk.agents.history import Branch, History
from ropewalk.agents.lineage import Lineage, Mark, Rows
from ropewalk.cluster.engine.sessions import Sessions
from ropewalk.cluster.engine.verbs import PIN_SHARE, Verbs
from ropewalk.cluster.store.chunk import ChunkHeader
from ropewalk.cluster.store.node_store import DiskTier, NodeStore
from ropewalk.cluster.store.sessions import SessionFiles
from ropewalk.kernels.gear import ChunkSizes
from ropewalk.kernels.keys import Domain, as_tokens, chain_key, content_key, lineage_key, root_key

TENANT = "acme"
LENGTH = 64


def words(seed: int, length: int = LENGTH):
    return as_tokens(np.random.default_rng(seed).integers(0, 50_000, length))


class Place:
    """A session of four chunks: two exact ones, two of a lineage."""

    def __init__(self, root: Path, budget: int = 50_000_000) -> None:
        self.store = NodeStore(root / "memory", "model", TENANT, budget, DiskTier(root / "disk", budget))
        self.files = SessionFiles(self.store.last_base)
        self.sessions = Sessions(lambda tenant: self.files, ChunkSizes())
        self.verbs = Verbs(self.sessions, self.store)
        parent, rows = root_key(TENANT), []
        self.headers = []
        for number in range(4):
            domain = Domain.EXACT if number < 2 else Domain.LINEAGE
            parent = lineage_key(parent, "label") if number == 2 else parent
            header = self.put(words(number), parent, domain, number * LENGTH)
            rows.append(Rows(number * LENGTH, (number + 1) * LENGTH, header.chain, 0, number * LENGTH))
            parent = header.chain
        tokens = as_tokens(np.concatenate([header.tokens for header in self.headers]))
        branch = Branch(Lineage(tokens, tuple(rows)), None, time.time())
        self.files.update("s", lambda history: history.add(branch))

    def put(self, tokens, parent, domain, start):
        chain = chain_key(parent, tokens, domain)
        header = ChunkHeader(chain, parent, content_key(TENANT, tokens), TENANT, domain, start, tokens)
        assert self.store.put(header, torch.randn(2, len(tokens), 1, 8).to(torch.bfloat16))
        self.headers.append(header)
        return header

    def purge(self) -> set[str]:
        """Purge the second chunk of the session, as far as this node goes."""
        return self.verbs.purge(self.verbs.traces("s", Span(LENGTH, LENGTH + 10)))

    def last_use(self, number: int) -> float:
        chain = self.headers[number].chain
        return os.stat(self.store.base / "objects" / chain[:2] / chain).st_mtime

    def bytes(self) -> bytes:
        root = self.store.root.parent
        return b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_a_pin_outlives_what_was_used_later_and_reading_does_not_end_it(place):
    found = place.verbs.pin("s", Span(0, LENGTH), 600)
    assert found["pinned_bytes"] > 0
    assert not found["quota_reached"]
    assert place.last_use(0) > time.time() + 500
    place.store.read(place.headers[0].chain)
    assert place.last_use(0) > time.time() + 500
    place.store.evict(place.store.usage().num_bytes // 4)
    assert place.store.usage().num_chunks == 1
    assert os.path.exists(place.store.base / "objects" / place.headers[0].chain[:2] / place.headers[0].chain)


def test_a_pin_is_soft_and_a_decay_ends_it(place):
    place.verbs.pin("s", None, 600)
    place.verbs.decay("s", Span(LENGTH, 2 * LENGTH), 600)
    assert place.last_use(1) < time.time() - 500 < time.time() + 500 < place.last_use(0)
    place.store.evict(0)
    assert place.store.usage().num_chunks == 0


def test_a_tenant_pins_no_more_than_its_quota(tmp_path):
    size = 8_000
    place = Place(tmp_path, budget=int(2.5 * size / PIN_SHARE / 4))
    found = place.verbs.pin("s", None, 600)
    assert found["quota_reached"]
    assert 0 < found["pinned_bytes"] < place.store.usage().num_bytes


def test_what_is_shared_is_listed_for_sessions_that_reuse(place):
    own = place.headers[2]
    assert place.store.by_content(own.content) == []
    assert place.verbs.share("s", None) == {"shared_chunks": 2}
    (offered,) = place.store.by_content(own.content)
    assert (offered.domain, offered.start) == (Domain.REUSE, own.start)
    assert offered.parent not in {header.chain for header in place.headers}, (
        "nor is it said what it was computed behind"
    )
    assert torch.equal(place.store.read(offered.chain)[1], place.store.read(own.chain)[1])
    assert place.store.check_integrity() == []


def test_what_is_purged_leaves_no_byte_in_any_tier(place):
    """Its chunk, those behind it, copies behind other texts, shorter ones of the same place, quarantine."""
    removed = place.headers[1]
    place.put(removed.tokens, "another parent", Domain.REUSE, 7)
    place.put(removed.tokens[:40], removed.parent, Domain.EXACT, LENGTH)
    place.store.flush(10)
    quarantine = place.store.base / "quarantine"
    quarantine.mkdir()
    (quarantine / "x").write_bytes(removed.tokens.tobytes())
    needle = removed.tokens[:8].tobytes()
    assert place.bytes().count(needle) >= 5
    kept = place.headers[0].tokens[:8].tobytes()
    assert len(place.purge()) >= 5
    place.sessions.delete(TENANT, "s")
    everything = place.bytes()
    assert needle not in everything
    assert place.headers[3].tokens[:8].tobytes() not in everything, "it was computed behind what was removed"
    assert kept in everything
    assert place.store.check_integrity() == []
    with pytest.raises(KeyError):
        place.sessions.tokens(TENANT, "s")


def test_another_node_knows_the_chunks_by_what_this_one_remembers(tmp_path):
    """Even those that are evicted here; another session has computed the text there, behind another one."""
    here, there = Place(tmp_path / "a"), Place(tmp_path / "b")
    there.sessions.delete(TENANT, "s")
    copy = there.put(here.headers[1].tokens, "another parent", Domain.EXACT, 7)
    for path in tmp_path.glob("a/*/*/*/objects/*/*"):
        path.unlink()
    assert here.store.usage().num_chunks == 0
    traces = here.verbs.traces("s", Span(LENGTH, LENGTH + 10))
    assert there.verbs.purge(traces) == {header.chain for header in there.headers[1:]}, (
        "the text, and what is behind it"
    )
    assert not there.store.contains(copy.chain)
    assert there.store.contains(there.headers[0].chain)


def test_what_others_computed_behind_the_text_goes_and_what_they_computed_elsewhere_stays(place):
    """A request without a session went on from the text; another session did so too, across a splice and with a text
    that it reused."""
    text = place.headers[1]
    further = place.put(words(10), text.chain, Domain.EXACT, 2 * LENGTH)
    last = place.put(words(11), further.chain, Domain.EXACT, 3 * LENGTH)
    reused = place.put(words(12), "elsewhere", Domain.EXACT, 500)
    behind_reuse = place.put(words(13), "a neighbour that is not stored", Domain.REUSE, 3 * LENGTH)
    before = place.put(words(14), root_key(TENANT), Domain.EXACT, 0)
    rows = (
        Rows(0, LENGTH, before.chain, 0, 0),
        Rows(LENGTH, 2 * LENGTH, text.chain, 0, LENGTH),
        Rows(2 * LENGTH, 3 * LENGTH, reused.chain, 0, 500),
        Rows(3 * LENGTH, 4 * LENGTH, behind_reuse.chain, 0, 3 * LENGTH),
    )
    tokens = as_tokens(np.concatenate([words(n) for n in (14, 1, 12, 13)]))
    place.files.update("other", lambda history: history.add(Branch(Lineage(tokens, rows), None, time.time())))
    own = {header.chain for header in place.headers[1:4]}
    assert place.purge() == {*own, further.chain, last.chain, behind_reuse.chain}
    assert place.store.contains(reused.chain)
    assert place.store.contains(before.chain)


def test_a_copy_that_was_shared_goes_with_its_original(place):
    place.verbs.share("s", None)
    assert place.store.by_content(place.headers[2].content)
    place.purge()
    assert not place.store.by_content(place.headers[2].content)


def test_a_purge_that_is_asked_for_again_finds_what_it_would_have_found(place):
    """The chunks by whose headers it knew them are gone: shorter ones of the same places are not."""
    place.purge()
    shorter = place.put(place.headers[1].tokens[:40], place.headers[1].parent, Domain.EXACT, LENGTH)
    assert place.purge() == {shorter.chain}
    assert not place.store.contains(shorter.chain)


def test_a_damaged_chunk_does_not_outlive_a_purge(place):
    chain = place.headers[1].chain
    (place.store.base / "objects" / chain[:2] / chain).write_bytes(b"x" + place.headers[1].tokens.tobytes())
    place.purge()
    place.sessions.delete(TENANT, "s")
    assert place.headers[1].tokens[:8].tobytes() not in place.bytes()


def test_what_was_computed_with_a_scratch_in_view_is_shared_with_nobody(place):
    def mark(history: History) -> None:
        (branch,) = history.branches
        marks = (Mark(3 * LENGTH, "scratch/1/dropped"),)
        history.branches[0] = replace(branch, lineage=replace(branch.lineage, marks=marks))

    place.files.update("s", mark)
    assert place.verbs.share("s", None) == {"shared_chunks": 1}
    assert place.store.by_content(place.headers[3].content) == []


@pytest.mark.parametrize("span", [Span(10, 10), Span(-1, 5), Span(0, 4 * LENGTH + 1)])
def test_a_span_that_is_not_held_is_refused_and_nothing_changes(place, span):
    before = [place.last_use(number) for number in range(4)]
    for verb in (lambda: place.verbs.pin("s", span, 1), lambda: place.verbs.check("s", span)):
        with pytest.raises(DirectiveError, match="is no span of the 256 tokens held"):
            verb()
    assert [place.last_use(number) for number in range(4)] == before
    assert isinstance(place.sessions.history(TENANT, "s"), History)


def test_a_session_that_is_not_known_is_named(place):
    with pytest.raises(KeyError):
        place.verbs.share("nobody", None)
