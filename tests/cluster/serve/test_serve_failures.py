"""A cluster that cannot start says why and goes away."""

from __future__ import annotations

import contextlib
import os
import uuid

import psutil
import pytest

from ropewalk.cluster.config import parse_config
from ropewalk.cluster.serve.local import LocalCluster, StartError, free_port

pytestmark = pytest.mark.engine


def processes_marked(mark: str) -> list[psutil.Process]:
    """Processes, children of whomever, that have inherited `mark` in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and mark in process.environ().values():
                found.append(process)
    return found


def test_a_replica_that_fails_to_start_names_the_reason_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("ROPEWALK_TEST_MARK", mark)
    model = {"source": "recall-mla", "kv_cache_gib": 0.25, "max_model_len": 1_000_000}
    cluster = LocalCluster(parse_config({"http": {"port": free_port()}, "models": [model]}, "test"))
    with pytest.raises(StartError, match="max_model_len"):
        cluster.start()
    assert any("failed to start" in line for line in cluster.output)
    assert any(line.startswith("logs: ") for line in cluster.output)
    assert processes_marked(mark) == []
