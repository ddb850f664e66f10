"""Plans, against a store that remembers every prompt's tokens and KV provenance by brute force."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.agents.lineage import REUSE, Held, Mark, Rows
from ropewalk.cluster.store.chunk import ChunkHeader
from ropewalk.kernels.gear import ChunkSizes, anchors, chunk_limits
from ropewalk.kernels.keys import (
    HEAD_LENGTH,
    Domain,
    as_tokens,
    content_key,
    head_key,
)
from ropewalk.scheduler.plan import Plan, Scratch, empty_plan, pieces
from ropewalk.scheduler.planner import MAX_RUNS, PlannerSettings, make_plan

TENANT = "t"
SMALL = PlannerSettings(ChunkSizes(mean=48, minimum=32, maximum=96), carve_out=32, min_run=40)


class MemoryIndex:
    """A chunk index in dictionaries."""

    def __init__(self) -> None:
        self.chunks: dict[str, ChunkHeader] = {}

    def save(self, tokens: np.ndarray, plan: Plan, settings: PlannerSettings) -> None:
        for piece in pieces(tokens, TENANT, settings.chunks, plan.runs, plan.marks):
            part = tokens[piece.start : piece.end]
            self.chunks[piece.chain] = ChunkHeader(
                piece.chain, piece.parent, content_key(TENANT, part), TENANT, piece.domain, piece.start, part
            )

    def by_chain(self, chain: str) -> ChunkHeader | None:
        return self.chunks.get(chain)

    def by_content(self, content: str) -> list[ChunkHeader]:
        return [chunk for chunk in self.chunks.values() if chunk.content == content]

    def by_head(self, head: str) -> list[ChunkHeader]:
        return [c for c in self.chunks.values() if len(c) >= HEAD_LENGTH and head_key(TENANT, c.tokens) == head]

    def by_anchor(self, head: str) -> list[ChunkHeader]:
        def heads(chunk: ChunkHeader) -> set[str]:
            starts = (start for start in anchors(chunk.tokens) if start + HEAD_LENGTH <= len(chunk))
            return {head_key(TENANT, chunk.tokens[start:]) for start in starts}

        return [chunk for chunk in self.chunks.values() if head in heads(chunk)]


def check(plan: Plan, tokens: np.ndarray, index: MemoryIndex, settings: PlannerSettings) -> None:
    """Check a plan against the tokens and the chunks that it names."""
    plan.check_integrity()
    own = {piece.chain: piece for piece in pieces(tokens, TENANT, settings.chunks, plan.runs, plan.marks)}
    for segment in plan.segments:
        length = segment.end - segment.start
        if segment.reused or segment.end <= plan.exact_end:
            chunk = index.chunks[segment.chunk]
            assert np.array_equal(chunk.tokens[segment.offset :][:length], tokens[segment.start : segment.end])
            assert segment.turn == segment.start - (chunk.start + segment.offset)
            if not segment.reused:
                assert (segment.turn, chunk.domain) == (0, Domain.EXACT)
        else:
            piece = own[segment.chunk]  # what a stage is going to save
            assert not segment.reused
            assert piece.start + segment.offset == segment.start
            assert segment.end <= piece.end
        if segment.reused:
            assert segment.start >= settings.carve_out
    gap_starts = [plan.exact_end, *(end for _, end in plan.runs)]
    assert all(
        start == gap_start or settings.is_worth_a_stage(start, end)
        for gap_start, (start, end) in zip(gap_starts, plan.runs, strict=False)
    )
    assert plan.batched == (settings.block_size is not None)
    if settings.block_size is not None:
        assert all(stage % settings.block_size == 0 for stage in plan.stages)


def words(seed: int, count: int, vocabulary: int = 50_000) -> np.ndarray:
    return as_tokens(np.random.default_rng(seed).integers(0, vocabulary, count))


def serve(tokens: np.ndarray, index: MemoryIndex, settings: PlannerSettings, *, reuse: bool) -> Plan:
    plan = make_plan(tokens, TENANT, index, settings, reuse=reuse)
    check(plan, tokens, index, settings)
    index.save(tokens, plan, settings)
    return plan


def test_a_run_is_worth_more_where_more_stands_before_it():
    planner = PlannerSettings(min_run=300, per_position=0.001)
    assert not planner.is_worth_a_stage(100, 300)
    assert planner.is_worth_a_stage(1000, 1200)
    assert not replace(planner, per_position=0.0).is_worth_a_stage(1000, 1200)


def test_texts_that_are_too_short_alone_are_taken_together_where_they_adjoin():
    index, planner = MemoryIndex(), PlannerSettings(min_run=900)
    for seed in (1, 2):
        source = [*words(10 + seed, 100), *words(seed, 700), *words(30 + seed, 200)]
        serve(as_tokens(source), index, planner, reuse=True)
    prompt = as_tokens([*words(20, 90), *words(1, 700), *words(2, 700), *words(21, 50)])
    plan = serve(prompt, index, planner, reuse=True)
    assert (plan.runs, plan.stages) == (((90, 1490),), (90,))
    alone = as_tokens([*words(20, 90), *words(1, 700), *words(21, 50)])
    assert make_plan(alone, TENANT, index, planner, reuse=True).runs == ()


parts = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 250)), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(parts, st.booleans()), min_size=1, max_size=6),
    st.sampled_from([None, 16, 128]),
    st.sampled_from([0, 1, 16, 64]),
    st.sampled_from([SMALL.chunks, ChunkSizes(mean=300, minimum=256, maximum=400)]),
)
def test_any_sequence_of_prompts_made_of_shared_parts_gives_sound_plans(prompts, block_size, boundary, sizes):
    index, planner = MemoryIndex(), replace(SMALL, block_size=block_size, boundary=boundary, chunks=sizes)
    for spec, reuse in prompts:
        tokens = np.concatenate([words(seed, length) for seed, length in spec])
        if len(tokens):
            serve(as_tokens(tokens), index, planner, reuse=reuse)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=600), st.booleans())
def test_repetitive_prompts_give_sound_plans(bits, reuse):
    index = MemoryIndex()
    for tokens in (as_tokens(bits), as_tokens(bits[::-1]), as_tokens(bits + bits)):
        serve(tokens, index, SMALL, reuse=reuse)


@pytest.mark.parametrize("header", [50, 99, 200])
@pytest.mark.parametrize("length", [512, 1024, 1500, 4096])
def test_a_body_behind_a_changed_header_is_reused_to_its_first_token(header, length):
    index, body = MemoryIndex(), words(1, length)
    serve(as_tokens(np.concatenate([words(2, 128), body])), index, PlannerSettings(), reuse=False)
    tokens = as_tokens(np.concatenate([words(3, header), body, words(4, 20)]))
    plan = serve(tokens, index, PlannerSettings(), reuse=True)
    assert plan.runs == ((header, header + length),)
    assert plan.stages == (header,)


def test_batched_gaps_end_with_a_block():
    index, body = MemoryIndex(), words(1, 1500)
    serve(as_tokens(np.concatenate([words(2, 128), body])), index, PlannerSettings(), reuse=False)
    tokens = as_tokens(np.concatenate([words(3, 99), body, words(4, 20)]))
    plan = serve(tokens, index, PlannerSettings(block_size=64), reuse=True)
    assert (plan.stages, plan.runs) == ((128,), ((128, 1599),))
    assert min(segment.start for segment in plan.segments) == 128


def test_exact_mode_never_takes_kv_from_another_place_or_domain():
    index, body = MemoryIndex(), words(1, 1500)
    serve(as_tokens(np.concatenate([words(2, 128), body])), index, PlannerSettings(), reuse=True)
    tokens = as_tokens(np.concatenate([words(3, 99), body]))
    serve(tokens, index, PlannerSettings(), reuse=True)
    plan = serve(tokens, index, PlannerSettings(), reuse=False)
    assert plan.runs == ()
    assert plan.exact_end <= 99 + 1


def test_the_same_prompt_again_computes_its_last_token_only():
    index, tokens = MemoryIndex(), words(1, 777)
    serve(tokens, index, PlannerSettings(), reuse=False)
    assert make_plan(tokens, TENANT, index, PlannerSettings(), reuse=False).gaps() == [(776, 777)]


def test_a_longer_history_continues_the_exact_chain_through_the_last_short_chunk():
    index, tokens = MemoryIndex(), words(1, 900)
    serve(as_tokens(tokens[:700]), index, PlannerSettings(), reuse=False)
    plan = make_plan(tokens, TENANT, index, PlannerSettings(), reuse=False)
    assert plan.exact_end >= 700 - HEAD_LENGTH


def test_a_turn_that_repeats_a_reused_prompt_keeps_where_exactness_ends():
    """The reuse domain's block hashes start there: if it moved, the session's own blocks would not be found again."""
    index, body = MemoryIndex(), words(1, 1500)
    serve(as_tokens(np.concatenate([words(2, 128), body])), index, PlannerSettings(), reuse=True)
    tokens = as_tokens(np.concatenate([words(3, 99), body, words(4, 300)]))
    first = serve(as_tokens(tokens[:1700]), index, PlannerSettings(), reuse=True)
    second = serve(tokens, index, PlannerSettings(), reuse=True)
    assert first.first_inexact == second.first_inexact == 99
    assert second.num_reused > first.num_reused


def test_an_exact_version_is_preferred_to_a_reused_one():
    index, body = MemoryIndex(), words(1, 600)
    exact = serve(as_tokens(np.concatenate([words(2, 64), body])), index, PlannerSettings(), reuse=False)
    for chain, chunk in list(index.chunks.items()):
        copy = ChunkHeader(f"0{chain}", "", chunk.content, TENANT, Domain.REUSE, chunk.start, chunk.tokens)
        index.chunks = {copy.chain: copy, **index.chunks}
    plan = make_plan(as_tokens(np.concatenate([words(3, 80), body])), TENANT, index, PlannerSettings(), reuse=True)
    assert exact.runs == ()
    assert {index.chunks[s.chunk].domain for s in plan.segments if s.reused} == {Domain.EXACT}


def test_the_attention_sink_is_never_reused():
    index, body = MemoryIndex(), words(1, 800)
    serve(as_tokens(np.concatenate([words(2, 64), body])), index, PlannerSettings(), reuse=False)
    plan = serve(body, index, PlannerSettings(carve_out=32), reuse=True)
    assert plan.first_inexact == 32


def test_runs_too_short_to_pay_for_a_stage_are_computed():
    index, body = MemoryIndex(), words(1, 100)
    serve(as_tokens(np.concatenate([words(2, 128), body])), index, PlannerSettings(), reuse=False)
    tokens = as_tokens(np.concatenate([words(3, 200), body, words(4, 50)]))
    assert make_plan(tokens, TENANT, index, PlannerSettings(min_run=101), reuse=True).runs == ()


def test_a_plan_survives_the_way_through_json():
    index, body = MemoryIndex(), words(1, 800)
    serve(as_tokens(np.concatenate([words(2, 64), body])), index, PlannerSettings(), reuse=False)
    plan = serve(as_tokens(np.concatenate([words(3, 99), body])), index, PlannerSettings(), reuse=True)
    assert plan.num_reused > 0
    assert Plan.from_params(plan.to_params()) == plan


def edited(tokens: np.ndarray, *positions: int) -> np.ndarray:
    copy = tokens.copy()
    copy[list(positions)] += 1
    return copy


def test_misses_are_looked_up_once_more_inside_chunks():
    """A chunk edited at both ends has neither its head nor a neighbour's left edge in common with the stored one."""
    sizes = ChunkSizes(mean=511, minimum=510, maximum=512)
    index = MemoryIndex()
    serve(as_tokens(np.concatenate([words(2, 64), words(1, 1500)])), index, PlannerSettings(sizes), reuse=False)
    stored = next(chunk for chunk in index.chunks.values() if chunk.start > 0 and len(chunk) > 500)
    middle = edited(stored.tokens, 3, len(stored) - 3)
    tokens = as_tokens(np.concatenate([words(3, 77), middle, words(4, 200)]))
    once = make_plan(tokens, TENANT, index, PlannerSettings(sizes, second_pass=False), reuse=True)
    twice = serve(tokens, index, PlannerSettings(sizes), reuse=True)
    assert once.runs == ()
    assert twice.runs == ((77 + 4, 77 + len(stored) - 3),)


@pytest.mark.parametrize("boundary", [16, 64])
def test_boundary_recompute_computes_the_beginning_of_each_stretch_from_one_source(boundary):
    index, planner = MemoryIndex(), PlannerSettings(boundary=boundary)
    one, two = words(1, 600), words(2, 600)
    for part in (one, two):
        serve(as_tokens(np.concatenate([words(9, 64), part])), index, planner, reuse=False)
    plan = serve(as_tokens(np.concatenate([words(3, 80), one, two, words(4, 20)])), index, planner, reuse=True)
    (first, first_end), (second, second_end) = plan.runs
    assert (first, second, second_end) == (80 + boundary, 680 + boundary, 1280)
    assert 680 - HEAD_LENGTH < first_end <= 680  # a short last chunk is not found


def test_chunks_of_one_source_make_one_run_under_boundary_recompute():
    index, planner, body = MemoryIndex(), PlannerSettings(boundary=16), words(1, 2000)
    serve(as_tokens(np.concatenate([words(2, 64), body])), index, planner, reuse=False)
    plan = serve(as_tokens(np.concatenate([words(3, 99), body, words(4, 9)])), index, planner, reuse=True)
    assert plan.runs == ((99 + 16, 2099),)


@pytest.mark.parametrize(("markers", "num_found"), [((7,), 301), ((), 0)])
def test_markers_let_a_region_begin_and_end_with_a_chunk(markers, num_found):
    sizes = ChunkSizes(mean=511, minimum=32, maximum=512, markers=markers)
    index, region = MemoryIndex(), as_tokens(np.concatenate([[7], words(4, 300) + 8, [7]]))
    for header in (40, 90):
        tokens = as_tokens(np.concatenate([words(header, header) + 8, region, words(header, 50) + 8]))
        plan = serve(tokens, index, PlannerSettings(sizes, second_pass=False), reuse=True)
    assert plan.num_reused == num_found


@pytest.mark.parametrize("settings_", [{"carve_out": -1}, {"min_run": 0}, {"boundary": -1}])
def test_impossible_settings_are_refused(settings_):
    with pytest.raises(ValueError, match=next(iter(settings_))):
        PlannerSettings(**settings_)


def test_what_an_anchor_in_the_carve_out_finds_is_reused_behind_it():
    """A short header and a text in which no chunk begins: the only anchor both prompts share is in the carve-out."""
    rng = np.random.default_rng(0)
    settings = replace(SMALL, chunks=ChunkSizes(mean=128, minimum=32, maximum=512), min_run=32)
    sentence = as_tokens([901, 902, 903, 904, 905, 906, 907] * 20)
    found = 0
    for _ in range(600):
        body = np.concatenate([as_tokens(rng.integers(0, 900, 20)), sentence])
        before, after = (np.concatenate([as_tokens(rng.integers(0, 900, 8)), body]) for _ in range(2))
        index = MemoryIndex()
        index.save(before, make_plan(before, TENANT, index, settings, reuse=True), settings)
        plan = make_plan(after, TENANT, index, settings, reuse=True)
        check(plan, after, index, settings)
        in_carve_out = [place for place in anchors(after) if 8 + 16 <= place < settings.carve_out]
        elsewhere = [place for place in anchors(after) if place >= settings.carve_out]
        if in_carve_out and not elsewhere and len(chunk_limits(before, settings.chunks)) == 1:
            found += 1
            assert plan.runs == ((settings.carve_out, len(after) - 1),)
    assert found >= 20


def held_of(index, marks, edited_from=None, moved_marks=()):
    """What a lineage has of a prompt all of whose chunks are stored."""
    rows = [Rows(chunk.start, chunk.start + len(chunk), chunk.chain, 0, chunk.start) for chunk in index.chunks.values()]
    return Held(tuple(sorted(rows, key=lambda row: row.start)), marks, edited_from, "s", moved_marks)


def stored(tokens, marks):
    """An index with a lineage's chunks of a prompt."""
    index = MemoryIndex()
    for piece in pieces(tokens, TENANT, SMALL.chunks, (), marks):
        part = tokens[piece.start : piece.end]
        index.chunks[piece.chain] = ChunkHeader(
            piece.chain, piece.parent, content_key(TENANT, part), TENANT, piece.domain, piece.start, part
        )
    return index


def test_marks_behind_what_a_lineage_still_has_are_dropped():
    tokens, marks = words(1, 600), (Mark(100, "one"), Mark(400, "two"))
    index = stored(tokens, marks)
    held = held_of(index, marks)
    index.chunks = {chain: chunk for chain, chunk in index.chunks.items() if chunk.start < 300}
    plan = make_plan(tokens, TENANT, index, SMALL, reuse=False, held=held)
    assert plan.marks == (Mark(100, "one"),)
    assert plan.runs[-1][1] <= 400


def test_rows_that_reuse_brought_stay_marked_behind_an_edit():
    tokens = words(1, 600)
    index = stored(tokens, ())
    held = held_of(index, (), edited_from=100, moved_marks=(Mark(300, REUSE),))
    plan = make_plan(tokens, TENANT, index, SMALL, reuse=False, held=held)
    assert [mark.label for mark in plan.marks][1:] == [REUSE]
    assert plan.marks[1].start == 300


def test_what_is_computed_behind_reuse_in_a_lineage_has_names_of_its_own():
    tokens = words(1, 600)
    names = [
        {piece.chain for piece in pieces(tokens, TENANT, SMALL.chunks, (), marks) if piece.start >= 300}
        for marks in ([Mark(100, "one")], [Mark(100, "one"), Mark(300, REUSE)])
    ]
    assert not names[0] & names[1]


def test_a_prompt_of_many_edits_has_a_bounded_number_of_stages():
    index, planner = MemoryIndex(), replace(SMALL, min_run=32)
    serve(words(1, 12_000), index, planner, reuse=True)
    body = words(1, 12_000)
    edited = as_tokens(
        np.concatenate([part for n in range(60) for part in (body[n * 200 : n * 200 + 190], words(n, 9))])
    )
    plan = serve(as_tokens([*words(2, 50), *edited]), index, planner, reuse=True)
    assert len(plan.runs) == MAX_RUNS


def test_scratch_is_computed_and_stored_nowhere():
    rng = np.random.default_rng(8)
    tokens = as_tokens(rng.integers(0, 50_000, 600))
    index = MemoryIndex()
    index.save(tokens, make_plan(tokens, TENANT, index, SMALL, reuse=False), SMALL)
    for keeps_rest in (True, False):
        scratch = Scratch(((200, 250), (300, 310)), "label", keeps_rest)
        plan = make_plan(tokens, TENANT, index, SMALL, reuse=True, scratch=scratch)
        assert plan.exact_end == 200, "what is stored behind it may not be served: it would not be computed apart"
        assert plan.num_tokens == 600
        assert plan.marks == (Mark(200, "label"),)
        assert Plan.from_params(plan.to_params()) == plan
        saved = pieces(tokens, TENANT, SMALL.chunks, plan.runs, plan.marks, plan.unsaved)
        covered = {position for piece in saved for position in range(piece.start, piece.end)}
        assert covered == ({*range(200), *range(250, 300), *range(310, 600)} if keeps_rest else {*range(200)})
        assert all((piece.domain is Domain.LINEAGE) == (piece.start >= 200) for piece in saved)


def test_behind_scratch_nothing_is_reused_and_before_it_everything():
    rng = np.random.default_rng(9)
    body, other = (as_tokens(rng.integers(0, 50_000, 300)) for _ in range(2))
    index = MemoryIndex()
    for text in (body, other):
        whole = as_tokens([*rng.integers(0, 50_000, 70), *text])
        index.save(whole, make_plan(whole, TENANT, index, SMALL, reuse=False), SMALL)
    tokens = as_tokens([*rng.integers(0, 50_000, 90), *body, *rng.integers(0, 50_000, 40), *other, 5])
    scratch = Scratch(((390, 430),), "label", True)
    plan = make_plan(tokens, TENANT, index, SMALL, reuse=True, scratch=scratch)
    ((start, end),) = plan.runs
    assert (start, end) == (90, 363), "to where its last whole chunk ends"
    assert plan.marks == (Mark(90, REUSE), Mark(390, "label"))


@pytest.mark.parametrize("keeps_rest", [True, False])
def test_a_plan_without_the_store_still_stores_no_scratch(keeps_rest):
    tokens = as_tokens(range(300))
    plan = empty_plan(300, Scratch(((100, 150),), "label", keeps_rest))
    saved = pieces(tokens, TENANT, SMALL.chunks, plan.runs, plan.marks, plan.unsaved)
    assert {p for piece in saved for p in range(piece.start, piece.end)} == {
        *range(100),
        *(range(150, 300) if keeps_rest else ()),
    }


def test_names_of_what_stands_behind_scratch_say_nothing_of_it():
    def behind(scratch):
        tokens = as_tokens([*range(100), *scratch, *range(100, 130)])  # what stands behind is too short to be cut
        return pieces(tokens, TENANT, SMALL.chunks, [], [Mark(100, "label")], [(100, 110)])[-1]

    assert behind(range(1000, 1010)) == behind(range(2000, 2010))
    assert behind(range(1000, 1010)).domain is Domain.LINEAGE
