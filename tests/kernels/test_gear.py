"""Chunk limits: the vectorised hash against the definition, and the properties that reuse relies on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.kernels.gear import (
    ANCHOR_WINDOW,
    BLOCK,
    WINDOW,
    ChunkSizes,
    anchors,
    chunk_limits,
    gear_hash,
    token_weights,
)

tokens_strategy = st.lists(st.integers(0, 200_000), max_size=700).map(lambda t: np.array(t, dtype=np.int32))


def test_a_hash_does_not_depend_on_where_its_block_begins():
    tokens = np.random.default_rng(0).integers(0, 200_000, 2 * BLOCK + 1000).astype(np.int32)
    whole = gear_hash(tokens)
    for start in (1, 63, 64, 1000, BLOCK - 1):
        assert np.array_equal(whole[start + WINDOW - 1 :], gear_hash(tokens[start:])[WINDOW - 1 :])


@given(tokens_strategy)
def test_the_vectorised_hash_equals_the_recurrence(tokens):
    state, expected = 0, []
    for weight in token_weights(tokens):
        state = ((state << 1) + int(weight)) % 2**64
        expected.append(state)
    assert gear_hash(tokens).tolist() == expected


def test_the_hash_depends_on_the_window_and_on_nothing_before_it():
    rng = np.random.default_rng(0)
    window = rng.integers(0, 50_000, WINDOW)
    hashes = {int(gear_hash(np.concatenate([rng.integers(0, 50_000, n), window]))[-1]) for n in (0, 1, 63, 200)}
    assert len(hashes) == 1


@given(tokens_strategy, st.integers(1, 20), st.integers(1, 20), st.integers(1, 40))
def test_limits_ascend_end_at_the_last_token_and_keep_the_sizes(tokens, minimum, more, still_more):
    sizes = ChunkSizes(minimum + more, minimum, minimum + more + still_more)
    limits = chunk_limits(tokens, sizes)
    lengths = np.diff([0, *limits])
    assert (limits[-1:] or [0]) == [len(tokens)]
    assert all(sizes.minimum <= length <= sizes.maximum for length in lengths[:-1])
    assert all(0 < length <= sizes.maximum for length in lengths[-1:])


def test_chunks_have_about_the_mean_length():
    limits = chunk_limits(np.random.default_rng(1).integers(0, 50_000, 200_000), ChunkSizes())
    assert 118 < 200_000 / len(limits) < 138


@pytest.mark.parametrize("header", [1, 50, 131, 700])
def test_limits_come_back_into_step_behind_a_changed_header(header):
    rng = np.random.default_rng(header)
    body = rng.integers(0, 50_000, 6000)
    plain = set(chunk_limits(body, ChunkSizes()))
    shifted = {
        limit - header for limit in chunk_limits(np.concatenate([rng.integers(0, 50_000, header), body]), ChunkSizes())
    }
    assert len(plain - shifted) <= 8, "an insertion changes a bounded number of chunks"
    assert {limit for limit in plain if limit > 2000} <= shifted


edits = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=4
)  # where, tokens deleted, tokens inserted


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 20_000), edits)
def test_edits_change_a_bounded_number_of_chunks_however_long_the_text(seed, length, edits):
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 50_000, length)
    after = before
    for where, deleted, inserted in edits:
        at = int(where * len(after))
        after = np.concatenate([after[:at], rng.integers(0, 50_000, inserted), after[at + deleted :]])

    def contents(tokens):
        return {part.tobytes() for part in np.split(tokens, chunk_limits(tokens, ChunkSizes()))}

    # Limits come back into step with probability one half or so at each chunk.
    assert len(contents(after) ^ contents(before)) <= 48 * len(edits)


@given(st.integers(0, 2**32 - 1), st.integers(0, 400), st.integers(0, 100))
def test_anchors_depend_on_sixteen_tokens_only(seed, length, before):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50_000, length)
    found = anchors(tokens)
    assert all(ANCHOR_WINDOW <= start <= length for start in found)
    shifted = anchors(np.concatenate([rng.integers(0, 50_000, before), tokens]))
    assert [start - before for start in shifted if start - before >= ANCHOR_WINDOW] == found


@given(st.integers(0, 2**32 - 1), st.integers(0, 2000))
def test_chunks_end_before_markers_wherever_the_minimum_allows(seed, length):
    tokens = np.random.default_rng(seed).integers(0, 200, length).astype(np.int32)
    limits = [0, *chunk_limits(tokens, ChunkSizes(markers=(5, 9)))]
    for place in np.flatnonzero(np.isin(tokens, (5, 9))):
        assert place in limits or any(0 <= place - limit < 32 for limit in limits)


@pytest.mark.parametrize(("minimum", "mean", "maximum"), [(0, 9, 12), (128, 128, 512), (32, 512, 512), (32, 600, 512)])
def test_sizes_that_contradict_each_other_are_refused(minimum, mean, maximum):
    with pytest.raises(ValueError, match=f"maximum={maximum}"):
        ChunkSizes(mean, minimum, maximum)
