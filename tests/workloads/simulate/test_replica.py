"""How long a simulated replica takes: as its steps say, none of which is simulated."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.workloads.simulate.cache import ReplicaCache
from ropewalk.workloads.simulate.replica import Replica, Running, Service
from ropewalk.workloads.simulate.request import Request

SERVICE = Service(prefill_tokens_per_s=1000.0, decode_s=0.01, decode_s_per_request=0.002, max_running=2, chunk=100)


def answer(service, requests, num_blocks=1000):
    """Serve (time, tokens of prompt, of answer); return when each had its first token and when it ended."""
    replica = Replica(service, ReplicaCache(num_blocks, 16))
    coming = deque(Running(Request(t, None, "", p, o, ()), 0, t) for t, p, o in sorted(requests))
    ended = []
    while coming or replica.next_s < math.inf:
        if coming and coming[0].arrived_s <= replica.next_s:
            running = coming.popleft()
            replica.enqueue(running, running.arrived_s)
        else:
            now_s = replica.next_s
            running = replica.step()
            if running is not None:
                ended.append((running.arrived_s, running.first_token_s, now_s))
    assert replica.num_running == 0
    assert replica.cache.num_held == 0
    return sorted(ended)


def by_small_steps(service, requests, dt):
    """The same by stepping through time."""
    waiting, coming = deque(), deque(sorted(requests))
    prefill, decoding, ended, now = None, [], [], 0.0
    while coming or waiting or prefill or decoding:
        while coming and coming[0][0] <= now:
            waiting.append(coming.popleft())
        if prefill is None and waiting and len(decoding) < service.max_running:
            prefill = [*waiting.popleft(), 0.0]
            prefill[3] = float(prefill[1])
        step_s = service.decode_s + len(decoding) * service.decode_s_per_request if decoding else 0.0
        step_s += service.chunk / service.prefill_tokens_per_s if prefill else 0.0
        now += dt
        for entry in decoding:
            entry[2] -= dt / step_s
        if prefill:
            prefill[3] -= dt / step_s * service.chunk
        for entry in [e for e in decoding if e[2] <= 0]:
            decoding.remove(entry)
            ended.append((entry[0], entry[1], now))
        if prefill and prefill[3] <= 0:
            decoding.append([prefill[0], now, prefill[2] - 1])
            prefill = None
    return sorted(ended)


def test_a_request_alone_takes_its_prefill_and_a_step_for_each_further_token():
    ((_, first_s, end_s),) = answer(SERVICE, [(1.0, 500, 11)])
    assert first_s == pytest.approx(1.5)
    assert end_s == pytest.approx(1.5 + 10 * 0.012)


def test_an_answer_of_one_token_ends_with_the_prefill():
    ((_, first_s, end_s),) = answer(SERVICE, [(0.0, 500, 1)])
    assert first_s == end_s == pytest.approx(0.5)


def test_prefills_wait_for_each_other():
    first, second = answer(SERVICE, [(0.0, 500, 1), (0.1, 500, 1)])
    assert first[1] == pytest.approx(0.5)
    assert second[1] == pytest.approx(1.0)


def test_no_more_decode_than_may_run():
    ended = answer(SERVICE, [(0.0, 100, 1001), (0.1, 100, 1001), (0.2, 100, 1)])
    assert ended[-1][1] > 10.0


def test_who_has_no_blocks_waits_for_those_that_run():
    one, other = answer(SERVICE, [(0.0, 160, 100), (0.1, 160, 1)], num_blocks=17)
    assert other[1] == pytest.approx(one[2] + 0.16)


requests = st.tuples(st.floats(0, 2), st.integers(1, 400), st.integers(2, 40))


@given(asked=st.lists(requests, min_size=1, max_size=6, unique_by=lambda request: request[0]))
@settings(max_examples=25, deadline=None)
def test_events_come_when_small_steps_say(asked):
    dt = 2e-4
    for event, step in zip(answer(SERVICE, asked), by_small_steps(SERVICE, asked, dt), strict=True):
        assert event == pytest.approx(step, abs=100 * dt)


@pytest.mark.parametrize("wrong", [{"decode_s": 0.0}, {"max_running": 0}, {"prefill_tokens_per_s": math.inf}])
def test_a_service_that_cannot_be_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Service(**wrong)
