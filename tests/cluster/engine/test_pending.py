"""Who waits for a save that is under way, and for how long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.cluster.engine.pending import GRACE_S, MAX_PENDING, PendingSaves, heads_of
from ropewalk.cluster.store import folder
from ropewalk.cluster.store.chunk import ChunkHeader
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.kernels.gear import ChunkSizes, chunk_limits
from ropewalk.kernels.keys import HEAD_LENGTH, Domain, as_tokens, chain_key, content_key, head_key, root_key

FOREVER = 60.0
HOLD_S = 2.0


@pytest.fixture
def store(tmp_path: Path) -> NodeStore:
    return NodeStore(tmp_path, "model", "t", 1 << 24)


def put(store: NodeStore, chain: str) -> None:
    # Too short to be listed by its head: the store would look into it, and find that this is not its name.
    tokens = as_tokens(range(20))
    header = ChunkHeader(chain, root_key("t"), content_key("t", tokens), "t", Domain.EXACT, 0, tokens)
    store.put(header, torch.zeros(1, 20, 1, 4))


async def test_a_request_waits_for_what_begins_like_it(store):
    pending = PendingSaves(HOLD_S)
    pending.add(store, {"chain": "aa", "content": "", "heads": ["h1", "h2"], "chains": ["aa"]})
    waiting = asyncio.create_task(pending.wait(FOREVER, {"h2", "h3"}))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    put(store, "aa")
    await waiting
    assert len(pending) == 0


async def test_a_chunk_that_is_there_is_waited_for_until_all_its_markers_are(store, monkeypatch):
    """Else whoever waited for it would look for it by what it begins with, a moment too early."""
    tokens = as_tokens(range(64))
    content = content_key("t", tokens)
    pending = PendingSaves(HOLD_S)
    pending.add(
        store,
        {
            "chain": (name := chain_key(root_key("t"), tokens, Domain.EXACT)),
            "content": content,
            "heads": [],
            "chains": [],
        },
    )
    waits = []
    touch = folder._touch

    def slow(marker: Path) -> None:
        waits.append((store.contains(name), len(pending)))
        touch(marker)

    monkeypatch.setattr(folder, "_touch", slow)
    store.put(ChunkHeader(name, root_key("t"), content, "t", Domain.EXACT, 0, tokens), torch.zeros(1, 64, 1, 4))
    assert len(waits) >= 2
    assert set(waits) == {(True, 1)}
    assert len(pending) == 0


async def test_a_chunk_that_is_stored_again_is_waited_for_though_its_markers_are_there(store):
    """As after damage: quarantine takes the chunk and leaves its markers."""
    tokens = as_tokens(range(64))
    content, name = content_key("t", tokens), chain_key(root_key("t"), tokens, Domain.EXACT)
    header = ChunkHeader(name, root_key("t"), content, "t", Domain.EXACT, 0, tokens)
    store.put(header, torch.zeros(1, 64, 1, 4))
    (path,) = store.base.glob("objects/*/*")
    path.unlink()
    pending = PendingSaves(HOLD_S)
    pending.add(store, {"chain": name, "content": content, "heads": [], "chains": []})
    assert len(pending) == 1
    store.put(header, torch.zeros(1, 64, 1, 4))
    assert len(pending) == 0


async def test_nobody_waits_for_a_chunk_that_a_longer_one_replaces(store):
    tokens = as_tokens(range(80))
    pending = PendingSaves(HOLD_S)
    for length in (48, 80):
        part = tokens[:length]
        content, name = content_key("t", part), chain_key(root_key("t"), part, Domain.EXACT)
        store.put(ChunkHeader(name, root_key("t"), content, "t", Domain.EXACT, 0, part), torch.zeros(1, length, 1, 4))
        pending.add(store, {"chain": name, "content": content, "heads": [], "chains": []})
    assert len(pending) == 0


async def test_a_request_does_not_wait_for_what_it_cannot_use(store):
    pending = PendingSaves(HOLD_S)
    pending.add(store, {"chain": "aa", "content": "", "heads": ["h1"], "chains": ["aa"]})
    await pending.wait(FOREVER, {"h2"})
    assert len(pending) == 1


async def test_nobody_waits_longer_than_said(store):
    pending = PendingSaves(HOLD_S)
    pending.add(store, {"chain": "aa", "content": "", "heads": ["h1"], "chains": ["aa"]})
    await pending.wait(0.01, {"h1"})
    assert len(pending) == 1


async def test_a_save_that_never_lands_is_given_up(store, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pending = PendingSaves(HOLD_S)
    pending.add(store, {"chain": "aa", "content": "", "heads": ["h1"], "chains": ["aa"]})
    now[0] += HOLD_S + GRACE_S + 0.01
    await pending.wait(FOREVER)
    assert len(pending) == 0


def test_what_is_remembered_is_bounded(store):
    pending = PendingSaves(HOLD_S)
    for number in range(2 * MAX_PENDING):
        pending.add(store, {"chain": f"{number:02x}", "content": "", "heads": [], "chains": [f"{number:02x}"]})
    assert len(pending) == MAX_PENDING


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 50), st.integers(40, 900), st.integers(1, 300))
def test_a_longer_history_begins_like_the_shorter_ones_last_chunk(seed, length, more):
    tokens = as_tokens(np.random.default_rng(seed).integers(0, 30_000, length + more))
    shorter, longer = (heads_of(tokens[:n], "t", ChunkSizes()) for n in (length, length + more))
    assert shorter <= longer
    assert head_key("t", tokens[:HEAD_LENGTH]) in shorter


def test_a_text_without_limits_is_waited_for_behind_another_header():
    """The example of the README: one sentence again and again is one chunk with the header before it."""
    introduction = np.random.default_rng(4).integers(0, 900, 20)
    text = as_tokens([*introduction, *[901, 902, 903, 904, 905, 906, 907] * 40])
    prompts = [np.concatenate([as_tokens([first, 12, 13, 14]), text]) for first in (11, 12)]
    assert all(len(chunk_limits(prompt, ChunkSizes())) == 1 for prompt in prompts)
    one, other = (heads_of(prompt, "t", ChunkSizes()) for prompt in prompts)
    assert head_key("t", prompts[0]) not in other
    assert one & other


async def test_a_splice_waits_for_its_own_chunks_by_name(store):
    pending = PendingSaves(HOLD_S)
    pending.add(store, {"chain": "cc", "content": "", "heads": [], "chains": ["aa", "bb", "cc"]})
    put(store, "aa")
    waiting = asyncio.create_task(pending.wait_for(store, {"aa", "bb"}, FOREVER))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    put(store, "bb")
    await waiting
    assert len(pending) == 1, "others' chunks are not waited for"


async def test_nothing_is_waited_for_that_nobody_stores(store):
    pending = PendingSaves(HOLD_S)
    await pending.wait_for(store, {"gone"}, FOREVER)
    pending.add(store, {"chain": "cc", "content": "", "heads": [], "chains": ["cc"]})
    await pending.wait_for(store, {"gone"}, FOREVER)
    assert len(pending) == 1


async def test_a_splice_waits_no_longer_than_said(store):
    pending = PendingSaves(HOLD_S)
    pending.add(store, {"chain": "cc", "content": "", "heads": [], "chains": ["bb", "cc"]})
    await pending.wait_for(store, {"bb"}, 0.01)
    assert not store.contains("bb")
