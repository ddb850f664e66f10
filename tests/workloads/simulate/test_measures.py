"""Quantiles in bounded memory, and how long queues are too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.workloads.simulate.measures import IMBALANCE, Distribution, Queues


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=200))
def test_quantiles_are_right_to_a_percent(seconds):
    found = Distribution()
    for value in seconds:
        found.add(value)
    for share in (0.5, 0.95, 0.99):
        rank = next(i for i in range(len(seconds)) if i + 1 >= share * len(seconds))
        assert found.quantile(share) == pytest.approx(sorted(seconds)[rank], rel=0.011)
    assert found.mean == pytest.approx(sum(seconds) / len(seconds))


def test_nothing_counted_gives_zeros():
    assert set(Distribution().summary().values()) == {0.0}


changes = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=120)


@given(changes=changes)
def test_the_longest_imbalance_is_what_looking_at_every_queue_finds(changes):
    queues, lengths = Queues(5), [0] * 5
    since: dict[int, float] = {}
    longest = 0.0
    for time_s, (replica, grows) in enumerate(changes):
        if not grows and not lengths[replica]:
            continue
        by = 1 if grows else -1
        lengths[replica] += by
        queues.change(replica, by, float(time_s))
        queues.check_integrity()
        most = IMBALANCE * max(sum(lengths) / 5, 1)
        for number, length in enumerate(lengths):
            if length > most + 1e-9:
                since.setdefault(number, float(time_s))
            elif number in since:
                longest = max(longest, time_s - since.pop(number))
    assert queues.lengths == lengths
    assert queues.longest_s == longest
    queues.close(1000.0)
    assert queues.longest_s == max([longest, *(1000.0 - begun for begun in since.values())])


def test_one_request_is_no_imbalance():
    queues = Queues(10)
    queues.change(0, 1, 0.0)
    assert not queues.too_long_since
    queues.change(0, 1, 5.0)
    assert queues.too_long_since == {0: 5.0}
    queues.change(0, -1, 7.0)
    assert queues.longest_s == 2.0
