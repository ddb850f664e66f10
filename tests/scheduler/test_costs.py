"""The shortest run worth a stage is where computing it costs what a stage does."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.scheduler.costs import LEAST_RUN, LONGEST_RUN, StageCost


def test_before_anything_is_measured_the_assumption_holds():
    assert StageCost(initial_run=100).min_run == 100


def test_the_break_even_is_found_through_noise():
    rng = random.Random(0)
    cost = StageCost(initial_run=32)
    for _ in range(300):
        n, s = rng.randrange(16, 1500), rng.randrange(4)
        cost.observe(n, s, 0, (0.05 + 0.001 * n + 0.12 * s) * rng.uniform(0.95, 1.05))
    assert 90 <= cost.min_run <= 150


def test_stages_that_run_one_by_one_are_taken_to_cost_a_request_each():
    cost = StageCost(initial_run=None)
    for n in [32, 416] * 2:
        cost.observe(n, 0, 0, 0.2 + 0.001 * n)
    assert 190 <= cost.min_run <= 210


def test_it_follows_a_machine_that_becomes_faster():
    cost = StageCost(initial_run=32)
    for n, s in [(32, 0), (512, 1), (512, 0), (32, 1)] * 40:
        cost.observe(n, s, 0, 0.1 + 0.001 * n + 0.1 * s)
    assert 90 <= cost.min_run <= 105
    for n, s in [(32, 0), (512, 1), (512, 0), (32, 1)] * 100:
        cost.observe(n, s, 0, 0.1 + 0.0005 * n + 0.1 * s)
    assert 180 <= cost.min_run <= 205


@pytest.mark.parametrize("lengths", [(500, 1000, 2000, 4000), (4000,)])
def test_what_long_runs_take_to_load_is_not_taken_for_the_cost_of_a_stage(lengths):
    """A machine where stages cost 30 computed tokens, and 4,000 loaded ones 500."""
    rng = random.Random(1)
    cost = StageCost(initial_run=32)
    for n in [32, 416]:
        cost.observe(n, 0, 0, 0.025 + 1e-4 * n)
    for _ in range(100):
        n, length = rng.randrange(60, 300), rng.choice(lengths)
        s, m = (0, 0) if rng.random() < 0.2 else (1, length)
        n += length - m
        cost.observe(n, s, m, (0.025 + 1e-4 * n + 3e-3 * s + 1.25e-5 * m) * rng.uniform(0.95, 1.05))
    assert cost.min_run <= 64
    assert 0.8e-5 < cost.per_cached_s < 1.7e-5


def test_observations_that_are_all_alike_change_nothing():
    cost = StageCost(initial_run=77)
    for n in [500, 510, 520] * 20:
        cost.observe(n, 1, 0, 0.5)
    assert cost.min_run == 77


@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(0, 50), st.integers(0, 100_000), st.floats(0, 1e4)), max_size=60
    )
)
def test_any_measurement_keeps_the_bounds(observations):
    cost = StageCost(initial_run=64)
    for n, s, m, seconds in observations:
        cost.observe(n, s, m, seconds)
    assert LEAST_RUN <= cost.min_run <= LONGEST_RUN


def test_one_odd_measurement_changes_little():
    cost = StageCost(initial_run=32)
    for n, s, m in [(32, 0, 0), (400, 0, 0), (40, 1, 500), (200, 1, 500)] * 10:
        cost.observe(n, s, m, 0.02 + 1e-4 * n + 5e-3 * s)
    before = cost.min_run
    cost.observe(150, 1, 500, 3.0)
    assert abs(cost.min_run - before) <= 0.5 * before


def test_attention_to_long_prompts_is_not_taken_for_the_cost_of_a_stage():
    """Prompts that take the longer the more they grow: a line through them would leave much to be blamed on stages."""
    cost = StageCost(initial_run=32)
    for n in [32, 416]:
        cost.observe(n, 0, 0, 0.012 + 4e-5 * n)
    for length in (512, 1024, 2048, 4096):
        for n, m in [(length + 150, 0)] * 4 + [(35, length), (99, length), (131, length), (227, length)] * 2:
            s = int(m > 0)
            cost.observe(n, s, m, 0.012 + 4e-5 * n + 3e-3 * s + 3e-6 * m + 1e-8 * n * (m + n / 2))
        assert 50 <= cost.min_run <= 100


def test_what_attention_to_a_position_costs_is_found():
    rng = random.Random(2)
    cost = StageCost(initial_run=32)
    for _ in range(200):
        n, m = rng.randrange(60, 1500), rng.choice([0, 0, 500, 2000, 4000])
        s = int(m > 0)
        seconds = 0.02 + 1e-4 * n + 5e-3 * s + 1e-5 * m + 2e-7 * n * (m + n / 2)
        cost.observe(n, s, m, seconds * rng.uniform(0.97, 1.03))
    assert 1.5e-3 < cost.per_position < 3e-3
    assert StageCost(initial_run=32).per_position == 0.0


@pytest.mark.parametrize("per_token_s", [1e-5, 1e-4, 1.5e-3, 1e-2])
def test_two_prefills_tell_what_a_token_costs_however_much_that_is(per_token_s):
    cost = StageCost(LEAST_RUN)
    for length in (32, 416):
        cost.observe(length, 0, 0, 0.02 + per_token_s * length)
    assert cost.per_token_s == pytest.approx(per_token_s, rel=0.35)


def test_what_a_token_spares_is_what_computing_it_takes_more_than_loading_it():
    cost = StageCost(None)
    assert cost.spared_s == 0.0
    for cached in (0, 400, 800):
        for length in (32, 200, 400):
            cost.observe(length, 0, cached, 0.01 + 1e-4 * length + 2e-5 * cached)
    assert cost.spared_s == pytest.approx(8e-5, rel=0.3)
