"""The integrity scan: it finds every kind of damage, repairs what can be repaired, and harms nothing else."""

import fcntl
import os
import shutil
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch

from ropewalk.cluster.store.chunk import ChunkCorrupt, write_chunk
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.cluster.store.scan import BackgroundScan, scan
from ropewalk.cluster.store.tier import STALE_S
from ropewalk.kernels.keys import as_tokens, head_key

from .test_node_store import TENANT, make_chunk, make_header

NUM_CHUNKS = 6


@pytest.fixture
def store(tmp_path):
    store = NodeStore(tmp_path, "model", TENANT, 1 << 20)
    for seed in range(NUM_CHUNKS):
        store.put(*make_chunk(seed))
    return store


def file_of(store: NodeStore, seed: int) -> Path:
    chain = make_chunk(seed)[0].chain
    return store.base / "objects" / chain[:2] / chain


def flip_rows(store: NodeStore) -> None:
    data = bytearray(file_of(store, 0).read_bytes())
    data[-9] ^= 1
    file_of(store, 0).write_bytes(data)


def cut(store: NodeStore) -> None:
    file_of(store, 0).write_bytes(file_of(store, 0).read_bytes()[:-1])


def empty(store: NodeStore) -> None:
    file_of(store, 0).write_bytes(b"")


def age_format(store: NodeStore) -> None:
    file_of(store, 0).write_bytes(file_of(store, 0).read_bytes().replace(b"ropewalk-chunk/", b"ropewalk-chunk-"))


def swap(store: NodeStore) -> None:
    shutil.copy(file_of(store, 1), file_of(store, 0))


def belie_tokens(store: NodeStore) -> None:
    header, rows = make_chunk(0)
    other = make_header(make_chunk(1)[0].tokens)
    write_chunk(file_of(store, 0), type(header)(header.chain, *_rest(other)), rows)


def _rest(header) -> tuple:
    return header.parent, header.content, header.tenant, header.domain, header.start, header.tokens


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_rows, "checksum"),
        (cut, "truncated"),
        (empty, "unreadable"),
        (age_format, "format"),
        (swap, "wrong_name"),
        (belie_tokens, "tokens"),
    ],
)
def test_damage_of_each_kind_is_quarantined_under_its_name(store, damage, reason):
    damage(store)
    found = Counter(scan(store.root))
    assert found[f"quarantined_{reason}"] == 1
    assert found["chunks"] == NUM_CHUNKS - 1
    assert not file_of(store, 0).exists()
    assert (store.base / "quarantine" / file_of(store, 0).name).exists()
    assert Counter(scan(store.root)) == {"chunks": NUM_CHUNKS - 1}, "everything is in order after one scan"
    assert store.check_integrity() == []


def test_what_is_quarantined_is_never_served_and_goes_first(store):
    flip_rows(store)
    list(scan(store.root))
    header, rows = make_chunk(0)
    fresh = NodeStore(store.root, "model", TENANT, 1 << 20)
    assert not fresh.contains(header.chain)
    assert fresh.by_content(header.content) == []
    with pytest.raises(FileNotFoundError):
        fresh.read(header.chain)
    assert fresh.put(header, rows)
    assert torch.equal(fresh.read(header.chain)[1], rows)
    assert fresh.usage().num_quarantined == 1
    fresh.evict(fresh.usage().num_bytes - 1)
    assert (fresh.usage().num_chunks, fresh.usage().num_quarantined) == (NUM_CHUNKS, 0)


def test_missing_markers_are_made_and_those_without_a_chunk_removed(store):
    shutil.rmtree(store.base / "content")
    shutil.rmtree(store.base / "heads")
    file_of(store, 1).unlink()
    assert Counter(scan(store.root)) == {"chunks": NUM_CHUNKS - 1, "markers_rebuilt": 2 * (NUM_CHUNKS - 1)}
    fresh = NodeStore(store.root, "model", TENANT, 1 << 20)
    header = make_chunk(2)[0]
    assert [found.chain for found in fresh.by_content(header.content)] == [header.chain]
    assert [found.chain for found in fresh.by_head(head_key(TENANT, header.tokens))] == [header.chain]
    file_of(store, 2).unlink()
    assert Counter(scan(store.root)) == {"chunks": NUM_CHUNKS - 2, "markers_removed": 2}
    assert store.check_integrity() == []


def test_a_chunk_that_a_longer_one_replaces_is_not_listed_again(store):
    header, rows = make_chunk(50, 80)
    shorter = make_header(as_tokens(header.tokens[:50]))
    store.put(shorter, rows[:, :50])
    store.put(header, rows)
    assert Counter(scan(store.root)) == {"chunks": NUM_CHUNKS + 2}
    assert [found.chain for found in store.by_head(head_key(TENANT, header.tokens))] == [header.chain]


def test_temporary_files_go_when_their_writer_must_be_dead(store):
    folder = file_of(store, 0).parent
    fresh, stale = folder / ".chunk.1.tmp", folder / ".chunk.2.tmp"
    for path in (fresh, stale):
        path.write_bytes(b"half")
    os.utime(stale, (time.time() - STALE_S - 1,) * 2)
    assert Counter(scan(store.root)) == {"chunks": NUM_CHUNKS, "temporaries_removed": 1}
    assert fresh.exists()
    assert not stale.exists()


def test_a_step_handles_one_file(store):
    flip_rows(store)
    steps = scan(store.root)
    first = list(islice(steps, 2))
    assert len(first) == 2
    assert len(first) + len(list(steps)) == NUM_CHUNKS + 2, "each chunk once, and two markers of the damaged one"


def test_a_chunk_that_vanishes_during_the_scan_is_no_damage(store):
    steps = scan(store.root)
    next(steps)
    shutil.rmtree(store.base)
    assert set(steps) <= {"vanished"}


def test_a_root_that_is_not_there_has_nothing_to_scan(tmp_path):
    assert list(scan(tmp_path / "absent")) == []


def test_other_files_are_left_alone(tmp_path):
    for place in ("project/.git/objects/aa/0123", "a/b/objects/aa/0123", "notes.txt", "x/y"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("theirs")
    assert list(scan(tmp_path)) == []
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 4


def test_a_scan_in_the_background_ends_and_tells_what_it_found(store):
    flip_rows(store)
    background = BackgroundScan(store.root)
    assert background.wait(60)
    assert background.state == "done"
    assert background.counters == {"chunks": NUM_CHUNKS - 1, "quarantined_checksum": 1, "markers_removed": 2}
    with pytest.raises((ChunkCorrupt, FileNotFoundError)):
        store.read(make_chunk(0)[0].chain)


def test_a_root_is_scanned_by_one_process_at_a_time(store):
    with open(store.root / ".scanning", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        background = BackgroundScan(store.root)
        assert background.wait(60)
    assert background.state == "elsewhere"
    assert not background.counters


def test_a_scan_in_the_background_can_be_stopped(store, monkeypatch):
    monkeypatch.setattr("ropewalk.cluster.store.scan.SHARE", 1e-6)  # it pauses for ever after the first file
    background = BackgroundScan(store.root)
    background.stop()
    assert background.state == "stopped"
    assert sum(background.counters.values()) <= 1


def test_a_root_that_cannot_be_scanned_is_reported(tmp_path):
    (tmp_path / "file").write_text("in the way")
    background = BackgroundScan(tmp_path / "file")
    assert background.wait(60)
    assert background.state == "failed"
