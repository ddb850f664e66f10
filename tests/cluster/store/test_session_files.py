"""Histories in files: what one process writes another reads, and damage costs a prefill."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ropewalk.agents.history import Branch
from ropewalk.agents.lineage import Lineage, Mark, Rows
from ropewalk.cluster.store.sessions import SessionFiles
from ropewalk.kernels.keys import as_tokens


def branch(first, length=100):
    rows = (Rows(0, 60, f"chunk-{first}", 3, 7), Rows(70, length, "other", 0, 70))
    lineage = Lineage(as_tokens(range(first, first + length)), rows, (Mark(70, "lineage"),))
    return Branch(lineage, as_tokens(range(5)), time.time())


def same(a, b):
    assert np.array_equal(a.lineage.tokens, b.lineage.tokens)
    assert (a.lineage.rows, a.lineage.marks, a.used_s) == (b.lineage.rows, b.lineage.marks, b.used_s)
    assert (a.sent is None) == (b.sent is None)
    assert a.sent is None or np.array_equal(a.sent, b.sent)


def add(*branches):
    def change(history):
        for one in branches:
            history.add(one)

    return change


def test_what_is_written_is_read_by_others(tmp_path):
    one, two = SessionFiles(tmp_path), SessionFiles(tmp_path)
    assert two.get("s").branches == []
    first, second = branch(0), branch(1000)
    one.update("s", add(first))
    same(two.get("s").branches[0], first)
    two.update("s", add(second))
    assert [b.lineage.tokens[0] for b in one.get("s").branches] == [1000, 0]
    assert two.names() == ["s"]
    assert one.delete("s")
    assert not one.delete("s")
    assert two.get("s").branches == []


def test_writers_at_the_same_time_do_not_lose_each_others_branches(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: SessionFiles(tmp_path).update("s", add(branch(1000 * n))), range(8)))
    assert len(SessionFiles(tmp_path).get("s").branches) == 8


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "another's"])
def test_a_damaged_history_is_dropped_and_counted(tmp_path, damage):
    files = SessionFiles(tmp_path)
    files.update("s", add(branch(0)))
    (path,) = [p for p in (tmp_path / "sessions").iterdir() if not p.name.startswith(".")]
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 4
    if damage == "another's":
        files.update("t", add(branch(0)))
        (other,) = [p for p in (tmp_path / "sessions").iterdir() if not p.name.startswith(".") and p != path]
        data = bytearray(other.read_bytes())
    path.write_bytes({"truncate": data[:-9], "empty": b""}.get(damage, data))
    reader = SessionFiles(tmp_path)
    assert reader.get("s").branches == []
    assert reader.counters["session_damaged"] == 1
    assert not path.exists()


def test_sessions_are_forgotten_when_idle_or_too_many(tmp_path):
    files = SessionFiles(tmp_path, ttl_s=100.0, max_sessions=2)
    for name in "abc":
        files.update(name, add(branch(0)))
    for number, path in enumerate(p for p in (tmp_path / "sessions").iterdir() if not p.name.startswith(".")):
        os.utime(path, (time.time() - 10 * number, time.time() - 10 * number))
    files._next_expiry = 0.0
    files.expire()
    assert len(files.names()) == 2
    for path in (tmp_path / "sessions").iterdir():
        os.utime(path, (0, 0))
    files._next_expiry = 0.0
    files.expire()
    assert files.names() == []
    assert files.counters["session_expired"] == 3


def test_a_file_system_that_refuses_costs_the_session(tmp_path):
    (tmp_path / "sessions").write_text("in the way")
    files = SessionFiles(tmp_path)
    files.update("s", add(branch(0)))
    assert files.counters["session_failed"] == 1
    assert files.get("s").branches == []
