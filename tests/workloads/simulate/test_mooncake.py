"""Traces in Mooncake's format: read, told apart by session, and repeated with fresh blocks."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise

import pytest

from ropewalk.workloads.simulate.mooncake import BLOCK_SIZE, MooncakeTrace, TraceError

ROWS = [
    # (milliseconds, full blocks and a partial one, tokens of the partial one)
    (0, [7, 1, 2], 5),
    (1000, [7, 1, 3, 4], 5),  # goes on from the first one
    (2000, [7, 8, 9], 1),
    (3000, [7, 1, 3, 5, 6], 1),  # goes on from the second one
    (9000, [7, 1, 10], 1),  # branches off from the first one, which has gone on already
]


def row(milliseconds, blocks, tail):
    num_prompt = (len(blocks) - 1) * BLOCK_SIZE + tail
    return {"timestamp": milliseconds, "input_length": num_prompt, "output_length": 20, "hash_ids": blocks}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row(*entry)) + "\n" for entry in ROWS))
    return file


def test_a_trace_is_read_as_it_is_plain_or_zipped(path, tmp_path):
    zipped = tmp_path / "trace.jsonl.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    requests = list(MooncakeTrace(path).requests(len(ROWS)))
    assert requests == list(MooncakeTrace(zipped).requests(len(ROWS)))
    assert [request.time_s for request in requests] == [0, 1, 2, 3, 9]
    assert [request.num_prompt for request in requests] == [row(*entry)["input_length"] for entry in ROWS]
    assert [len(request.blocks) for request in requests] == [2, 3, 2, 4, 2]
    assert {request.blocks[0] for request in requests} == {requests[0].blocks[0]}
    assert {request.num_output for request in requests} == {20}


def test_a_request_that_extends_an_earlier_ones_blocks_is_its_sessions_next_turn(path):
    requests = list(MooncakeTrace(path).requests(len(ROWS)))
    one, two, three, four, five = (request.session for request in requests)
    assert one == two == four
    assert len({one, three, five}) == 3
    assert [request.is_last for request in requests] == [False, False, True, True, True]


def test_a_system_prompt_alone_makes_no_session(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row(ms, blocks, 9)) + "\n" for ms, blocks in ((0, [1, 2]), (1, [1, 3, 4]))))
    one, other = MooncakeTrace(file).requests(2)
    assert one.session != other.session


@pytest.mark.parametrize("at_once", [1, 3])
def test_repetitions_have_blocks_and_sessions_of_their_own(path, at_once):
    trace = MooncakeTrace(path)
    requests = list(trace.requests(200, at_once=at_once))
    assert len(requests) == 200
    assert all(one.time_s <= other.time_s for one, other in pairwise(requests))
    copies = {}
    for request in requests:
        copy = request.session.split("-")[0]
        for name in request.blocks:
            assert copies.setdefault(name, copy) == copy
    assert len(set(copies.values())) >= 200 // len(ROWS)
    rate = (len(requests) - 1) / requests[-1].time_s
    assert rate == pytest.approx(at_once / trace.duration_s * len(trace), rel=0.1)


def test_speed_divides_times(path):
    trace = MooncakeTrace(path)
    slow, fast = list(trace.requests(30)), list(trace.requests(30, speed=4.0))
    assert [request.time_s / 4 for request in slow] == [request.time_s for request in fast]
    assert [request[1:] for request in slow] == [request[1:] for request in fast]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 6: not JSON"),
        ("[]", "line 6: not an object"),
        (json.dumps(row(8999, [1], 3)), "line 6: timestamp 8999 comes after a later one"),
        (json.dumps(row(9000, [1], 3) | {"input_length": 0}), "line 6: input_length must be"),
        (json.dumps(row(9000, [1], 3) | {"output_length": None}), "line 6: output_length must be"),
        (json.dumps(row(9000, [1], 3) | {"input_length": 2000}), "2000 tokens fill more than 1 blocks"),
        (json.dumps(row(9000, [1], 3) | {"hash_ids": ["a"]}), "hash_ids must be a list of integers"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_line(path, line, said):
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(TraceError, match=said):
        MooncakeTrace(path)


def test_a_file_that_is_none_or_empty_is_said(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        MooncakeTrace(tmp_path / "nothing")
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8b no")
    with pytest.raises(TraceError, match="cannot be read"):
        MooncakeTrace(tmp_path / "broken.gz")
    (tmp_path / "empty").touch()
    with pytest.raises(TraceError, match="holds no request"):
        MooncakeTrace(tmp_path / "empty")


def test_one_request_can_be_repeated_too(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(row(5, [1, 2], 3)))
    assert [request.time_s for request in MooncakeTrace(file).requests(3)] == [0.0, 1.0, 2.0]
