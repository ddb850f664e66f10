"""Turns of multi-agent sessions, and the model of a cache that answers them."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict

import pytest

from ropewalk.scheduler.foresight import Foresight
from ropewalk.scheduler.retention import Anchors, Retention
from ropewalk.scheduler.rules import RULES
from ropewalk.workloads.block_cache import BlockCache, Clairvoyant, Foretold, block_names, hit_rate
from ropewalk.workloads.traces import MAX_TURNS, NUM_AGENTS, PATTERNS, Sizes, TraceTurn, chat, in_waves, transcripts

BLOCK = 32


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_chat_is_the_same_for_the_same_seed_and_each_session_reads_what_it_has_said(pattern):
    turns = chat(pattern, 12, seed=3)
    assert turns == chat(pattern, 12, seed=3)
    assert turns != chat(pattern, 12, seed=4)
    assert [turn.time_s for turn in turns] == sorted(turn.time_s for turn in turns)
    sizes = Sizes()
    said: defaultdict[str, list[int]] = defaultdict(list)
    anchors: dict[str, tuple[int, ...]] = {}
    for turn in turns:
        head = sizes.preamble + sizes.anchor
        assert list(turn.prompt[head:]) == said[turn.session]
        assert anchors.setdefault(turn.agent, turn.prompt[:head]) == turn.prompt[:head]
        said[turn.session] += turn.output
    assert len({prompt[: sizes.preamble] for prompt in anchors.values()}) == 1
    assert len(set(anchors.values())) == len(anchors) <= NUM_AGENTS
    by_session = defaultdict(list)
    for turn in turns:
        by_session[turn.session].append(turn)
    assert len(by_session) == 12
    for own in by_session.values():
        assert [turn.is_last for turn in own] == [False] * (len(own) - 1) + [True]
        assert len(own) <= MAX_TURNS


def test_no_more_sessions_are_live_than_said():
    live: set[str] = set()
    for turn in chat("random", 20):
        live.add(turn.session)
        assert len(live) <= Sizes().concurrency
        if turn.is_last:
            live.discard(turn.session)


@pytest.mark.parametrize("most", [1, 3])
def test_turns_come_together_as_far_as_they_are_of_different_sessions(most):
    turns = chat("random", 6, sizes=Sizes(concurrency=4))
    waves = defaultdict(list)
    for before, after in zip(turns, in_waves(turns, most), strict=True):
        assert (before.session, before.prompt) == (after.session, after.prompt)
        assert after.time_s >= before.time_s
        waves[after.time_s].append(after.session)
    assert max(len(wave) for wave in waves.values()) == most
    assert all(len(set(wave)) == len(wave) for wave in waves.values())
    assert in_waves(turns, 1) == turns


def write_runs(folder, runs):
    (folder / "whowhen").mkdir()
    with gzip.open(folder / "whowhen" / "magentic_one_hand_crafted.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(run) + "\n" for run in runs)


def test_a_transcript_keeps_agents_order_and_lengths(tmp_path):
    said = [("human", "x" * 160), ("boss", "y" * 320), ("web", "z" * 64), ("boss", "w" * 16)]
    run = {"id": "r", "question": "q" * 320, "turns": [{"agent": a, "content": text} for a, text in said]}
    write_runs(tmp_path, [run | {"system_prompts": {"web": "s" * 800}}])
    turns = transcripts("magentic-one", tmp_path)
    assert [turn.agent for turn in turns] == ["boss", "web", "boss"]
    assert [len(turn.output) for turn in turns] == [21, 5, 4]
    sizes = Sizes()
    question = 21 + 11
    assert [len(turn.prompt) - sizes.preamble for turn in turns] == [
        sizes.anchor + question,
        201 + question + 21,
        sizes.anchor + question + 21 + 5,
    ]


def test_a_run_ends_before_its_prompt_is_too_long(tmp_path):
    turns = [{"agent": "a", "content": "x" * 3200} for _ in range(40)]
    write_runs(tmp_path, [{"id": "r", "question": "q", "turns": turns}])
    found = transcripts("magentic-one", tmp_path, sizes=Sizes(max_prompt=1000))
    assert 1 <= len(found) < 5
    assert all(len(turn.prompt) + len(turn.output) <= 1000 for turn in found)
    assert found[-1].is_last


def turn(session: str, agent: str, tokens: list[int], output: int = 1, time_s: float = 0.0) -> TraceTurn:
    return TraceTurn(session, agent, time_s, tuple(tokens), tuple(range(900, 900 + output)), False)


def test_blocks_are_named_by_all_tokens_up_to_their_end():
    one, other = block_names(range(100), BLOCK), block_names([5, *range(1, 100)], BLOCK)
    assert len(one) == len(other) == 3
    assert not set(one) & set(other)
    assert block_names(range(64), BLOCK) == one[:2]


def test_the_last_token_is_always_computed_and_a_whole_prompt_hits_but_for_its_block():
    cache = BlockCache(10, BLOCK, Retention())
    assert cache.serve(turn("s", "a", list(range(64)))) == 0
    assert cache.serve(turn("s", "a", list(range(64)))) == 32
    assert cache.serve(turn("s", "a", list(range(65)))) == 64


def test_what_has_no_room_is_said():
    with pytest.raises(ValueError, match="4 blocks does not fit into 3"):
        BlockCache(3, BLOCK, Retention()).serve(turn("s", "a", list(range(100))))


def test_the_least_recently_used_goes_first():
    cache = BlockCache(4, BLOCK, Retention())
    prompts = [[n] * 64 for n in (1, 2, 3)]
    for prompt in prompts:
        cache.serve(turn("s", "a", prompt))
    assert cache.serve(turn("s", "a", [*prompts[2], 7])) == 64
    assert cache.serve(turn("s", "a", [*prompts[0], 7])) == 0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_nobody_beats_the_clairvoyant_and_an_unlimited_cache(pattern):
    turns = chat(pattern, 10)
    unlimited = hit_rate(turns, 1 << 20, BLOCK, Retention())
    for num_blocks in (110, 220):
        best = hit_rate(turns, num_blocks, BLOCK, Clairvoyant(turns, BLOCK))
        assert best <= unlimited
        for name, rule in RULES.items():
            assert hit_rate(turns, num_blocks, BLOCK, rule()) <= best + 1e-9, name


def test_ours_closes_most_of_the_gap_on_a_chat_whose_speakers_can_be_foretold():
    turns = chat("selector", 24)
    for num_blocks in (100, 200):
        plain, best = (hit_rate(turns, num_blocks, BLOCK, r) for r in (Retention(), Clairvoyant(turns, BLOCK)))
        ours, anchors = (hit_rate(turns, num_blocks, BLOCK, rule()) for rule in (Foresight, Anchors))
        assert best - plain > 0.1
        assert (ours - plain) / (best - plain) >= 0.7
        assert ours > anchors


def test_to_be_told_of_ends_does_no_harm():
    turns = chat("debate", 24)
    told = hit_rate(turns, 200, BLOCK, Foresight(), told=True)
    assert told >= hit_rate(turns, 200, BLOCK, Foresight()) - 0.01


@pytest.mark.parametrize("pattern", ["selector", "random"])
def test_who_is_told_the_speakers_is_between_ours_and_the_optimum(pattern):
    turns = chat(pattern, 24)
    told = hit_rate(turns, 200, BLOCK, Foretold(turns))
    assert hit_rate(turns, 200, BLOCK, Foresight()) < told <= hit_rate(turns, 200, BLOCK, Clairvoyant(turns, BLOCK))
