"""Memory and the disk below it: what moves where, what is found, and what is left after a restart."""

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from ropewalk.cluster.store.chunk import ChunkCorrupt
from ropewalk.cluster.store.node_store import MAX_VERSIONS, DiskTier, NodeStore
from ropewalk.kernels.keys import as_tokens, head_key

from .test_node_store import TENANT, StoreMachine, make_chunk, make_header

LARGE = 1 << 26


class Roots:
    """Two roots, and stores on them as several processes would open them."""

    def __init__(self, folder: Path) -> None:
        self.memory, self.disk = folder / "memory", folder / "disk"

    def open(self, budget: int = LARGE, disk_budget: int = LARGE) -> NodeStore:
        return NodeStore(self.memory, "model", TENANT, budget, DiskTier(self.disk, disk_budget))

    def on_disk(self) -> set[str]:
        return {path.name for path in self.disk.glob("*/*/objects/*/*")}

    def in_memory(self) -> set[str]:
        return {path.name for path in self.memory.glob("*/*/objects/*/*")}

    def damage(self, root: Path, chain: str) -> None:
        (path,) = root.glob(f"*/*/objects/*/{chain}")
        data = bytearray(path.read_bytes())
        data[-5] ^= 4
        path.write_bytes(data)


@pytest.fixture
def roots(tmp_path):
    return Roots(tmp_path)


@pytest.fixture
def chunks():
    return [make_chunk(seed, 64) for seed in range(40)]


def test_what_memory_has_no_room_for_is_found_on_the_disk(roots, chunks):
    store = roots.open(budget=40_000)
    for header, rows in chunks:
        assert store.put(header, rows)
    assert store.usage().num_bytes <= 40_000
    assert roots.on_disk()
    assert roots.on_disk() | roots.in_memory() == {header.chain for header, _ in chunks}
    fresh = roots.open(budget=40_000)
    for header, rows in chunks:
        assert fresh.contains(header.chain)
        assert fresh.by_chain(header.chain).chain == header.chain
        assert [found.chain for found in fresh.by_content(header.content)] == [header.chain]
        assert [found.chain for found in fresh.by_head(head_key(TENANT, header.tokens))] == [header.chain]
        assert torch.equal(fresh.read(header.chain)[1], rows)
    assert store.counters["demoted"] == store.counters["evicted"] == len(roots.on_disk())
    assert store.check_integrity() == []


def test_a_chunk_read_from_the_disk_moves_up_where_memory_has_room(roots, chunks):
    store = roots.open()
    header, rows = chunks[0]
    store.put(header, rows)
    store.evict(0)
    assert (roots.in_memory(), roots.on_disk()) == (set(), {header.chain})
    assert torch.equal(store.read(header.chain)[1], rows)
    assert store.counters["promoted"] == 1
    assert roots.in_memory() == roots.on_disk() == {header.chain}
    assert len(store.by_content(header.content)) == len(store.by_head(head_key(TENANT, header.tokens))) == 1
    store.evict(0)
    assert store.counters["demoted_present"] == 1, "what the disk has is not written again"


def test_reading_drives_nothing_out_of_a_full_memory(roots, chunks):
    store = roots.open(budget=40_000)
    for header, rows in chunks:
        store.put(header, rows)
    for header, rows in chunks:  # whatever room the last eviction left
        assert torch.equal(store.read(header.chain)[1], rows)
    before, num_demoted = roots.in_memory(), store.counters["demoted"]
    for header, rows in chunks:
        assert torch.equal(store.read(header.chain)[1], rows)
        store.by_head(head_key(TENANT, header.tokens))
    assert roots.in_memory() == before
    assert store.counters["demoted"] == num_demoted
    assert store.counters["promote_no_room"] > 0
    assert store.usage().num_bytes <= 40_000


def test_a_version_read_from_the_disk_drives_no_other_version_out(roots):
    store, (header, rows) = roots.open(), make_chunk(1)
    versions = [make_header(header.tokens, parent=f"{n:032x}") for n in range(MAX_VERSIONS + 1)]
    store.put(versions[0], rows)
    store.evict(0)
    for version in versions[1:]:
        store.put(version, rows)
    assert torch.equal(store.read(versions[0].chain)[1], rows)
    assert roots.in_memory() == {version.chain for version in versions[1:]}
    assert len(store.by_content(header.content)) == MAX_VERSIONS


def test_the_disks_budget_holds_and_the_least_recently_used_goes_first(roots, chunks):
    store = roots.open(budget=20_000, disk_budget=40_000)
    kept = chunks[0][0].chain
    for header, rows in chunks:
        store.put(header, rows)
        store.read(kept)
    store.evict(0)
    assert store.disk_usage().num_bytes <= 40_000
    assert store.counters["disk_evicted"] > 0
    assert kept in roots.on_disk()


def test_a_damaged_copy_in_memory_gives_way_to_the_disks(roots, chunks):
    store = roots.open()
    header, rows = chunks[0]
    store.put(header, rows)
    store.flush(60)
    roots.damage(roots.memory, header.chain)
    assert torch.equal(store.read(header.chain)[1], rows)
    assert store.counters["quarantined_checksum"] == 1
    roots.damage(roots.disk, header.chain)
    roots.damage(roots.memory, header.chain)
    with pytest.raises(ChunkCorrupt):
        store.read(header.chain)
    assert not store.contains(header.chain)


def test_damage_is_not_carried_to_the_disk(roots, chunks):
    store = roots.open()
    store.put(*chunks[0])
    roots.damage(roots.memory, chunks[0][0].chain)
    store.evict(0)
    assert roots.on_disk() == set()
    assert store.counters["demote_failed_checksum"] == 1


def test_a_disk_that_cannot_be_written_costs_what_was_to_go_there_only(roots, chunks):
    roots.disk.write_text("in the way")
    store = roots.open(budget=40_000)
    for header, rows in chunks:
        assert store.put(header, rows)
    assert store.counters["demote_failed_no_folder"] == store.counters["evicted"] > 0
    assert torch.equal(store.read(chunks[-1][0].chain)[1], chunks[-1][1])
    assert store.by_chain(chunks[0][0].chain) is None


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "no_space"),
        (errno.EROFS, "not_permitted"),
        (errno.EMFILE, "too_many_files"),
        (errno.EIO, "io_error"),
    ],
)
def test_what_the_file_system_refuses_is_counted_by_its_reason(roots, chunks, monkeypatch, number, reason):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    store, (header, rows) = roots.open(), chunks[0]
    monkeypatch.setattr("ropewalk.cluster.store.node_store.write_chunk", refuse)
    assert not store.put(header, rows)
    assert store.counters["put_failed"] == store.counters[f"put_failed_{reason}"] == 1
    monkeypatch.undo()
    store.put(header, rows)
    monkeypatch.setattr("ropewalk.cluster.store.tier.write_bytes", refuse)
    assert store.flush(60) == 0
    assert store.counters[f"demote_failed_{reason}"] == 1
    monkeypatch.undo()
    store.evict(0)
    monkeypatch.setattr("ropewalk.cluster.store.node_store.write_bytes", refuse)
    assert torch.equal(store.read(header.chain)[1], rows), "from the disk"
    assert store.counters[f"promote_failed_{reason}"] == 1


def test_a_tier_that_cannot_be_read_is_counted_and_the_other_one_serves(roots, chunks):
    store, (header, rows) = roots.open(), chunks[0]
    store.put(header, rows)
    store.flush(60)
    (path,) = roots.memory.glob(f"*/*/objects/*/{header.chain}")
    path.unlink()
    path.mkdir()  # a folder: permissions do not keep root out
    fresh = roots.open()
    assert fresh.by_chain(header.chain).chain == header.chain
    assert torch.equal(fresh.read(header.chain)[1], rows)
    assert fresh.counters["unreadable_memory"] == 2


def test_a_new_process_finds_what_was_flushed(roots, chunks):
    store = roots.open()
    for header, rows in chunks:
        store.put(header, rows)
    assert store.flush(60) == len(chunks)
    assert store.flush(60) == 0, "nothing is copied twice"
    shutil.rmtree(roots.memory)
    fresh = roots.open()
    for header, rows in chunks:
        assert fresh.by_chain(header.chain).tokens.tolist() == header.tokens.tolist()
        found, found_rows = fresh.read(header.chain)
        assert (found.chain, found.start) == (header.chain, header.start)
        assert torch.equal(found_rows, rows)
    assert fresh.counters["promoted"] == len(chunks)
    assert roots.in_memory() == roots.on_disk()
    assert fresh.check_integrity() == []


def test_a_flush_ends_when_its_time_is_up(roots, chunks):
    store = roots.open()
    store.put(*chunks[0])
    assert store.flush(-1.0) == 0
    assert roots.on_disk() == set()


def test_a_flush_into_a_small_disk_keeps_what_was_used_last(roots, chunks):
    store = roots.open(disk_budget=20_000)
    for age, (header, rows) in enumerate(chunks):
        store.put(header, rows)
        (path,) = roots.memory.glob(f"*/*/objects/*/{header.chain}")
        os.utime(path, (time.time() - age, time.time() - age))
    store.flush(60)
    assert store.disk_usage().num_bytes <= 20_000
    assert roots.on_disk() == {header.chain for header, _ in chunks[: len(roots.on_disk())]} != set()


def test_a_chunk_that_a_longer_one_replaces_is_not_carried_to_the_disk(roots):
    store = roots.open()
    header, rows = make_chunk(1, 80)
    store.put(make_header(as_tokens(header.tokens[:50])), rows[:, :50])
    store.put(header, rows)
    store.evict(0)
    assert roots.on_disk() == {header.chain}


def test_nobody_else_can_read_what_lies_in_either_root(roots, chunks):
    store = roots.open()
    store.put(*chunks[0])
    store.flush(60)
    for root in (roots.memory, roots.disk):
        assert root.stat().st_mode & 0o077 == 0


def test_folders_of_others_under_a_root_are_left_alone(tmp_path):
    """Git, for one, keeps its objects in folders of the same form."""
    theirs = tmp_path / "project" / ".git" / "objects" / "aa" / "0123456789"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    NodeStore(tmp_path, "model", TENANT, LARGE).evict(0)
    assert theirs.exists()


class TieredMachine(StoreMachine):
    """The same rules with a disk below, chunks that move between the two, and restarts."""

    def __init__(self):
        super().__init__()
        self.roots = Roots(Path(self.folder))
        self.views = [self.roots.open(30_000, 60_000) for _ in range(2)]

    @rule(view=st.integers(0, 1), seed=st.integers(0, 30), length=st.integers(1, 90))
    def read(self, view, seed, length):
        header, rows = make_chunk(seed, length)
        if self.views[view].contains(header.chain):
            assert torch.equal(self.views[view].read(header.chain)[1], rows)

    @rule(view=st.integers(0, 1), index=st.integers(0, 30), damaged=st.booleans())
    def delete_or_damage_a_file_on_the_disk(self, view, index, damaged):
        files = sorted(self.roots.disk.glob("*/*/objects/*/*"))
        if files and damaged:
            self.roots.damage(self.roots.disk, files[index % len(files)].name)
            shutil.rmtree(self.roots.memory, ignore_errors=True)
            with pytest.raises(ChunkCorrupt):
                self.views[view].read(files[index % len(files)].name)
        elif files:
            files[index % len(files)].unlink()

    @rule(is_flushed=st.booleans())
    def restart(self, is_flushed):
        if is_flushed:
            self.views[0].flush(60)
        shutil.rmtree(self.roots.memory, ignore_errors=True)
        self.views = [self.roots.open(30_000, 60_000) for _ in range(2)]

    @invariant()
    def the_disks_budget_holds(self):
        assert self.views[0].disk_usage().num_bytes <= 60_000 * 1.1


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
