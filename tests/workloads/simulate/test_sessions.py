"""Generated sessions as names of blocks: the same blocks as their tokens give."""

from __future__ import annotations

import gzip
import json
import random
from itertools import islice, pairwise

import pytest

from ropewalk.workloads.block_cache import block_names
from ropewalk.workloads.simulate.sessions import as_requests, session_requests
from ropewalk.workloads.traces import PATTERNS, TRANSCRIPTS, Sizes, _interleaved, chats, schedule

BLOCK = 32
SIZES = Sizes(concurrency=5)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_blocks_are_told_apart_as_their_tokens_are(pattern):
    sessions = list(islice(chats(pattern, 3, SIZES), 20))
    turns = list(_interleaved(pattern, sessions, random.Random(1), SIZES))
    requests = list(as_requests(pattern, schedule(sessions, random.Random(1), SIZES), SIZES.preamble, BLOCK))
    assert len(turns) == len(requests) > 100
    by_tokens, by_names = {}, {}
    for turn, request in zip(turns, requests, strict=True):
        assert (turn.time_s, turn.session, turn.agent, turn.is_last) == (
            request.time_s,
            request.session,
            request.agent,
            request.is_last,
        )
        assert (request.num_prompt, request.num_output) == (len(turn.prompt), len(turn.output))
        names = block_names((*turn.prompt, *turn.output[:-1]), BLOCK)
        assert len(names) == len(request.blocks)
        for one, other in zip(names, request.blocks, strict=True):
            assert by_tokens.setdefault(one, other) == other
            assert by_names.setdefault(other, one) == one


def test_sessions_go_on_without_end_the_same_for_the_same_seed():
    one, other, third = (list(islice(session_requests("random", BLOCK, seed=s), 500)) for s in (1, 1, 2))
    assert one == other != third
    assert all(a.time_s <= b.time_s for a, b in pairwise(one))


def test_programs_share_nothing_and_scale_multiplies_lengths():
    requests = list(islice(session_requests("pipeline", BLOCK, programs=3), 300))
    programs = [
        {name for request in requests for name in request.blocks if int(request.session.split("-")[1]) % 3 == program}
        for program in range(3)
    ]
    assert all(programs)
    assert not programs[0] & programs[1]
    assert not programs[1] & programs[2]
    assert len({request.agent for request in requests}) == 18
    small, large = (next(session_requests("pipeline", BLOCK, scale=scale)) for scale in (1, 4))
    assert (large.num_prompt, large.num_output) == (4 * small.num_prompt, 4 * small.num_output)


def test_transcripts_come_again_with_messages_of_their_own(tmp_path):
    said = [("human", "x" * 160), ("boss", "y" * 3200), ("web", "z" * 640), ("boss", "w" * 1600)]
    run = {"id": "r", "question": "q" * 320, "turns": [{"agent": agent, "content": text} for agent, text in said]}
    (tmp_path / "whowhen").mkdir()
    with gzip.open(tmp_path / "whowhen" / TRANSCRIPTS["magentic-one"], "wt") as file:
        file.write(json.dumps(run) + "\n")
    sizes = Sizes(preamble=64, anchor=64, concurrency=1)
    requests = list(islice(session_requests("magentic-one", BLOCK, sizes=sizes, folder=tmp_path), 6))
    assert [request.agent for request in requests] == ["boss", "web", "boss"] * 2
    assert [request.num_prompt for request in requests[:3]] == [request.num_prompt for request in requests[3:]]
    assert requests[0].blocks[:4] == requests[3].blocks[:4] == requests[2].blocks[:4]
    assert not set(requests[2].blocks[4:]) & set(requests[5].blocks[4:])
