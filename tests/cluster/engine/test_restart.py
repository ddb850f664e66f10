"""What a cluster computed before it was stopped, a new one finds on the disk."""

import random
import shutil

import pytest

from ropewalk.cluster.engine.settings import EngineSettings, flush_store
from ropewalk.kernels.keys import HEAD_LENGTH

from .prompts import body_and_headers

pytestmark = pytest.mark.engine

NUM_BODY = 1000


def test_a_new_engine_is_warm_from_the_disk(start_engines, new_store, tmp_path):
    root, disk_root = new_store(), tmp_path / "disk"
    body, make_header, questions = body_and_headers("recall-mla", random.Random(60), NUM_BODY)
    tokens = [*make_header(128), *body, *questions[0]]
    moved = [*make_header(70), *body, *questions[1]]

    (engine,) = start_engines("recall-mla", root, dtype="bfloat16", disk_root=disk_root)
    before = engine.ask(tokens, max_tokens=1)
    assert before.num_cached == 0
    engine.settle()
    engine.stop()
    assert flush_store(EngineSettings(store_root=root, disk_root=disk_root), 60) > 0
    shutil.rmtree(root)

    (engine,) = start_engines("recall-mla", root, dtype="bfloat16", disk_root=disk_root)
    reused = engine.ask(moved, mode="reuse", max_tokens=1)
    assert reused.report.tokens["reused"] >= 0.85 * NUM_BODY
    again = engine.ask(tokens, max_tokens=1)
    assert again.num_cached >= len(tokens) - HEAD_LENGTH
    assert again.report.tokens["exact"] == again.num_cached
    assert again.token_ids == before.token_ids
    assert reused.report.fallbacks == again.report.fallbacks == []
    status = engine.client.status()["store"]
    assert status["num_chunks"] >= 4, "what was read from the disk is in memory again"
    assert status["disk"]["num_chunks"] > 0
    assert status["disk"]["scan"]["state"] in ("running", "done")
    assert not any(name.startswith("quarantined") for name in status["disk"]["scan"])
