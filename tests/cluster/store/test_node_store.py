"""The chunk store: what goes in comes out, damage is noticed, budgets hold, and nothing depends on files staying."""

import errno
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ropewalk.cluster.store.chunk import ChunkCorrupt, ChunkHeader, read_chunk, write_chunk
from ropewalk.cluster.store.folder import ChunkFolder
from ropewalk.cluster.store.node_store import MAX_HEADS, MAX_VERSIONS, NodeStore
from ropewalk.kernels.keys import Domain, as_tokens, chain_key, content_key, head_key, root_key

TENANT = "acme"


def make_chunk(seed: int, length: int = 40, parent: str | None = None, domain: Domain = Domain.EXACT):
    generator = torch.Generator().manual_seed(seed)
    tokens = as_tokens(torch.randint(0, 50_000, (length,), generator=generator).numpy())
    rows = torch.randn(2, length, 1, 8, generator=generator).to(torch.bfloat16)
    return make_header(tokens, parent, domain), rows


def make_header(tokens, parent=None, domain=Domain.EXACT, start=0):
    parent = parent or root_key(TENANT)
    chain = chain_key(parent, tokens, domain)
    return ChunkHeader(chain, parent, content_key(TENANT, tokens), TENANT, domain, start, tokens)


@pytest.fixture
def store(tmp_path):
    return NodeStore(tmp_path / "root", "model", TENANT, budget_bytes=1 << 20)


def chunk_file(store: NodeStore, header: ChunkHeader) -> Path:
    (path,) = store.base.glob(f"objects/*/{header.chain}")
    return path


def test_what_is_evicted_leaves_no_directory_entries(tmp_path):
    store = NodeStore(tmp_path, "model", TENANT, budget_bytes=40_000)
    for seed in range(100):
        store.put(*make_chunk(seed, 64))
    remaining = store.usage().num_chunks
    names = {path.name for path in tmp_path.rglob("*") if path.is_file() and path.name != ".evicting"}
    assert len(names) == remaining, "a chunk's markers have its name"
    assert store.check_integrity() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_chunk_comes_back_as_it_was_stored(store, dtype):
    header, rows = make_chunk(1)
    assert store.put(header, rows.to(dtype))
    found, found_rows = store.read(header.chain)
    assert (found.chain, found.parent, found.domain, found.start) == (header.chain, header.parent, header.domain, 0)
    assert found.tokens.tolist() == header.tokens.tolist()
    assert torch.equal(found_rows, rows.to(dtype))


def test_a_chunk_deleted_under_its_readers_is_whole_or_gone(tmp_path):
    """A reader opens the file twice. A child that hides and shows it all along hits the moment between."""
    header, rows = make_chunk(1)
    path = tmp_path / "chunk"
    write_chunk(path, header, rows)
    hidden = tmp_path / "hidden"
    hide, show = (f"os.rename({str(a)!r}, {str(b)!r})" for a, b in ((path, hidden), (hidden, path)))
    loop = f"import os\nwhile True: {hide}; {show}"
    found = Counter()
    with subprocess.Popen([sys.executable, "-c", loop]) as child:
        try:
            while found["read"] < 300 or found["gone"] < 300:
                try:
                    assert torch.equal(read_chunk(path)[1], rows)
                    found["read"] += 1
                except FileNotFoundError:
                    found["gone"] += 1
                except ChunkCorrupt:
                    found["gone"] += 1  # it was there again when the reader looked
        finally:
            child.kill()


def test_a_chunk_is_found_by_name_content_and_head_from_another_process_view(store):
    header, rows = make_chunk(1)
    store.put(header, rows)
    other = NodeStore(store.root, "model", TENANT, budget_bytes=1 << 20)
    assert other.by_chain(header.chain).chain == header.chain
    assert [c.chain for c in other.by_content(header.content)] == [header.chain]
    assert [c.chain for c in other.by_head(head_key(TENANT, header.tokens))] == [header.chain]


def test_tenants_and_models_do_not_see_each_other(store):
    header, rows = make_chunk(1)
    store.put(header, rows)
    for other in (NodeStore(store.root, "model", "else", 1 << 20), NodeStore(store.root, "other", TENANT, 1 << 20)):
        assert other.by_chain(header.chain) is None
        assert other.by_content(header.content) == []


@pytest.mark.parametrize("position", [10, 200, -3])
def test_a_flipped_byte_is_noticed_and_the_chunk_taken_out_of_service(store, position):
    header, rows = make_chunk(1)
    store.put(header, rows)
    path = chunk_file(store, header)
    damaged = bytearray(path.read_bytes())
    damaged[position] ^= 0x55
    path.write_bytes(damaged)
    with pytest.raises(ChunkCorrupt):
        store.read(header.chain)
    assert not store.contains(header.chain)
    assert store.counters["quarantined"] == 1


def test_a_truncated_chunk_is_noticed(store):
    header, rows = make_chunk(1)
    store.put(header, rows)
    path = chunk_file(store, header)
    path.write_bytes(path.read_bytes()[:-100])
    fresh = NodeStore(store.root, "model", TENANT, 1 << 20)
    assert fresh.by_chain(header.chain) is None
    assert fresh.counters["quarantined"] == 1


def test_a_file_under_a_wrong_name_is_not_served(store):
    (first, first_rows), (second, second_rows) = make_chunk(1), make_chunk(2)
    store.put(first, first_rows)
    store.put(second, second_rows)
    shutil.copy(chunk_file(store, first), chunk_file(store, second))
    with pytest.raises(ChunkCorrupt, match="holds chunk"):
        store.read(second.chain)


def test_the_budget_holds_and_the_least_recently_used_goes_first(tmp_path):
    store = NodeStore(tmp_path, "model", TENANT, budget_bytes=40_000)
    chunks = [make_chunk(seed, 64) for seed in range(40)]
    store.put(*chunks[0])
    for header, rows in chunks[1:]:
        store.put(header, rows)
        store.read(chunks[0][0].chain)
    assert store.usage().num_bytes <= 40_000
    assert store.counters["evicted"] > 0
    assert store.contains(chunks[0][0].chain), "a chunk in use was evicted before idle ones"


def test_a_chunk_larger_than_half_the_budget_is_refused(tmp_path):
    store = NodeStore(tmp_path, "model", TENANT, budget_bytes=1000)
    assert not store.put(*make_chunk(1, 64))
    assert store.counters["put_over_budget"] == 1


def test_versions_of_one_content_are_bounded(store):
    tokens, rows = make_chunk(1)[0].tokens, make_chunk(1)[1]
    headers = [make_header(tokens, parent=f"{n:032x}") for n in range(MAX_VERSIONS + 3)]
    for header in headers:
        store.put(header, rows)
    assert len(store.by_content(headers[0].content)) == MAX_VERSIONS
    assert store.contains(headers[-1].chain)


def test_the_list_of_one_head_is_bounded(store):
    first, rows = make_chunk(1, 60)
    for last in range(MAX_HEADS + 5):
        tokens = first.tokens.copy()
        tokens[-1] = last
        store.put(make_header(tokens), rows)
    assert len(store.by_head(head_key(TENANT, first.tokens))) <= MAX_HEADS


def test_a_longer_chunk_of_the_same_place_hides_the_shorter_one_and_outlives_it(store):
    header, rows = make_chunk(1, 80)
    shorter = make_header(as_tokens(header.tokens[:50]))
    store.put(shorter, rows[:, :50])
    store.put(header, rows)
    assert [found.chain for found in store.by_head(head_key(TENANT, header.tokens))] == [header.chain]
    assert store.contains(shorter.chain), "a plan may still name it"
    store.evict(store.usage().num_bytes - 1)
    assert store.contains(header.chain)
    assert not store.contains(shorter.chain)


def test_the_whole_root_may_vanish_at_any_time(store):
    header, rows = make_chunk(1)
    store.put(header, rows)
    shutil.rmtree(store.root)
    assert store.by_chain(header.chain) is None
    assert store.by_content(header.content) == []
    with pytest.raises(FileNotFoundError):
        store.read(header.chain)
    assert store.put(header, rows)
    assert store.contains(header.chain)


def test_a_root_that_cannot_be_written_refuses_without_raising(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = NodeStore(tmp_path / "file", "model", TENANT, 1 << 20)
    assert not store.put(*make_chunk(1))
    assert store.counters["put_failed"] == 1


def test_a_chunk_that_cannot_be_listed_is_not_kept(store, monkeypatch):
    header, rows = make_chunk(1)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no room for a marker")

    monkeypatch.setattr(ChunkFolder, "add_markers", refuse)
    assert not store.put(header, rows)
    assert not store.contains(header.chain)
    monkeypatch.undo()
    assert store.put(header, rows)
    assert store.by_content(header.content)


def test_a_neighbour_that_cannot_be_read_does_not_keep_a_chunk_out(store, monkeypatch):
    header, rows = make_chunk(1)
    shorter = make_header(header.tokens[:35])
    store.put(shorter, rows[:, :35])
    read = NodeStore.by_chain

    def refuse(self, chain):
        if chain == shorter.chain:
            raise PermissionError(errno.EACCES, "another user's")
        return read(self, chain)

    monkeypatch.setattr(NodeStore, "by_chain", refuse)
    assert store.put(header, rows)
    monkeypatch.undo()
    assert [found.chain for found in store.by_content(header.content)] == [header.chain]


def test_a_failed_write_leaves_what_another_writer_stored(store, monkeypatch):
    header, rows = make_chunk(1)

    def overtaken(path, *_):
        write_chunk(path, header, rows)
        raise OSError(errno.ENOSPC, "no room for a second copy")

    monkeypatch.setattr("ropewalk.cluster.store.node_store.write_chunk", overtaken)
    assert not store.put(header, rows)
    assert torch.equal(store.read(header.chain)[1], rows)


def test_a_chunk_that_the_device_cannot_read_gives_way_to_a_new_one(store, monkeypatch):
    header, rows = make_chunk(1)
    store.put(header, rows)

    def fail(_):
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr("ropewalk.cluster.store.node_store.read_chunk", fail)
    with pytest.raises(OSError, match="bad sector"):
        store.read(header.chain)
    monkeypatch.undo()
    assert store.counters["quarantined_unreadable"] == 1
    assert store.put(header, rows)
    assert torch.equal(store.read(header.chain)[1], rows)


def test_a_reader_keeps_its_rows_when_the_chunk_is_evicted(store):
    header, rows = make_chunk(1)
    store.put(header, rows)
    _, mapped = store.read(header.chain)
    store.evict(0)
    assert not store.contains(header.chain)
    assert torch.equal(mapped, rows)


def test_no_budget_is_refused(tmp_path):
    with pytest.raises(ValueError, match="positive, not 0"):
        NodeStore(tmp_path, "model", TENANT, 0)


class StoreMachine(RuleBasedStateMachine):
    """Two processes' views of one root against a dictionary, with eviction and deletion in between."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="rw-store-")
        self.views = [NodeStore(Path(self.folder), "model", TENANT, 60_000) for _ in range(2)]
        self.stored: dict[str, torch.Tensor] = {}

    @rule(view=st.integers(0, 1), seed=st.integers(0, 30), length=st.integers(1, 90))
    def put(self, view, seed, length):
        header, rows = make_chunk(seed, length)
        if self.views[view].put(header, rows):
            self.stored[header.chain] = rows

    @rule(view=st.integers(0, 1), size=st.integers(0, 60_000))
    def evict(self, view, size):
        self.views[view].evict(size)
        assert self.views[view].usage().num_bytes <= size

    @rule(view=st.integers(0, 1), index=st.integers(0, 30))
    def delete_a_file(self, view, index):
        files = sorted(self.views[view].base.glob("objects/*/*"))
        if files:
            files[index % len(files)].unlink()

    @invariant()
    def what_is_found_is_what_was_stored(self):
        for view in self.views:
            for chain, rows in self.stored.items():
                if view.contains(chain):
                    assert torch.equal(view.read(chain)[1], rows)
                    assert view.by_chain(chain).chain == chain

    @invariant()
    def the_budget_holds(self):
        # Each view takes stock once per twentieth of the budget that it wrote.
        assert self.views[0].usage().num_bytes <= 60_000 * 1.1

    @invariant()
    def files_are_whole(self):
        assert not [line for line in self.views[0].check_integrity() if "marker without" not in line]

    def teardown(self):
        shutil.rmtree(self.folder)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def test_no_temporary_files_are_left(store):
    for seed in range(5):
        store.put(*make_chunk(seed))
    assert not list(store.root.rglob("*.tmp"))
    assert all(read_chunk(path) for path in store.base.glob("objects/*/*"))
