"""The learner of variable order against a learner that stores every observation and counts anew each time."""

import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.scheduler.markov import EPSILON, MAX_SUCCESSORS, VariableOrder, top_hits
from ropewalk.scheduler.packing import pack

agents = st.sampled_from("abcd")
sequences = st.lists(st.lists(agents, max_size=12), max_size=8)
FOREVER = float("inf")


def learned(given_sequences, order, **options):
    learner = VariableOrder(order, **options)
    for sequence in given_sequences:
        for position, agent in enumerate(sequence):
            learner.observe(sequence[:position], agent)
    return learner


def naive(given_sequences, past, order):
    """Witten-Bell from the whole list of observations, written from the formula."""
    known = {agent for sequence in given_sequences for agent in sequence}
    probability = dict.fromkeys(known, 1 / len(known))
    for length in range(min(order, len(past)) + 1):
        context = tuple(past[len(past) - length :])
        row = Counter(
            sequence[i]
            for sequence in given_sequences
            for i in range(length, len(sequence))
            if tuple(sequence[i - length : i]) == context
        )
        total, different = sum(row.values()), len(row)
        if not row:
            break
        probability = {a: (row[a] + different * p) / (total + different) for a, p in probability.items()}
    return probability


@given(sequences, st.lists(agents, max_size=4), st.integers(0, 3))
def test_probabilities_are_those_of_the_formula(given_sequences, past, order):
    learner = learned(given_sequences, order, half_life=FOREVER)
    learner.check_integrity()
    found = learner.distribution(past)
    assert {a: learner.probability(past, a) for a in found} == pytest.approx(found)
    assert learner.probability(past, "nobody") == 0.0
    if not any(given_sequences):
        assert found == {}
        return
    assert found == pytest.approx(naive(given_sequences, past, order))
    assert sum(found.values()) == pytest.approx(1)
    ranked = learner.predict(past)
    assert [p for _, p in ranked] == sorted(found.values(), reverse=True)
    assert learner.predict(past, 1) == ranked[:1]


@given(sequences, st.lists(agents, min_size=1, max_size=3))
def test_the_papers_learner_adds_a_hundredth_to_every_pair(given_sequences, past):
    learner = learned(given_sequences, 1, smoothing="additive", half_life=FOREVER)
    pairs = Counter(pair for sequence in given_sequences for pair in pairwise(sequence))
    known = {agent for sequence in given_sequences for agent in sequence}
    total = sum(n for (before, _), n in pairs.items() if before == past[-1]) + EPSILON * len(known)
    assert learner.distribution(past) == pytest.approx({a: (pairs[past[-1], a] + EPSILON) / total for a in known})


def test_what_was_long_ago_counts_less():
    learner = VariableOrder(1, half_life=4)
    for _ in range(20):
        learner.observe(["a"], "b")
    for _ in range(6):
        learner.observe(["a"], "c")
    assert learner.predict(["a"], 1)[0][0] == "c"
    counts = learner.counts(["a"])
    assert counts["c"] == pytest.approx(sum(2 ** (-i / 4) for i in range(6)))
    assert counts["b"] == pytest.approx(sum(2 ** (-i / 4) for i in range(6, 26)))
    forever = VariableOrder(1, half_life=FOREVER)
    for agent in [*"b" * 20, *"c" * 6]:
        forever.observe(["a"], agent)
    assert forever.predict(["a"], 1)[0][0] == "b"


def test_counts_stay_finite_however_long_one_context_is_met():
    learner = VariableOrder(0, half_life=1)
    for number in range(5000):
        learner.observe([], "ab"[number % 2])
    learner.check_integrity()
    assert sum(learner.counts([]).values()) == pytest.approx(2, rel=0.01)


def test_a_longer_past_decides_where_it_has_been_seen_and_a_shorter_one_elsewhere():
    learner = learned(["xab", "yac"] * 20, 2)
    assert learner.predict("xa", 1)[0][0] == "b"
    assert learner.predict("ya", 1)[0][0] == "c"
    assert learner.predict("za", 1)[0][0] in "bc"
    assert learner.distribution("za") == pytest.approx(learner.distribution("a"))


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 200).map(str), min_size=2, max_size=30), max_size=20))
def test_memory_is_bounded_and_what_is_left_is_sound(given_sequences):
    learner = learned(given_sequences, 3, max_contexts=20)
    learner.check_integrity()
    assert learner.num_contexts <= 20


def test_successors_are_bounded():
    learner = VariableOrder(1)
    for number in range(3 * MAX_SUCCESSORS):
        learner.observe(["a"], f"agent {number}")
    assert len(learner.counts(["a"])) == MAX_SUCCESSORS
    assert f"agent {3 * MAX_SUCCESSORS - 1}" in learner.counts(["a"])
    assert len(learner.counts([])) == 3 * MAX_SUCCESSORS, "how frequent an agent is is known of all"


@given(sequences, st.integers(0, 3), st.sampled_from(["back-off", "additive"]), st.lists(agents, max_size=4))
def test_a_hand_over_is_to_another_agent(given_sequences, order, smoothing, past):
    learner = learned(given_sequences, order, smoothing=smoothing)
    whole, found = learner.distribution(past), learner.handover(past)
    others = {agent: p for agent, p in whole.items() if agent not in past[-1:]}
    assert found == pytest.approx({agent: p / sum(others.values()) for agent, p in others.items()})
    likely = learner.likely(past, 0.2)
    seen = learner.counts(past[-1:] if order else ())
    if smoothing == "back-off" or order < 2:
        assert likely == pytest.approx({agent: p for agent, p in found.items() if p >= 0.2 and agent in seen})


def test_what_has_faded_is_forgotten():
    learner = VariableOrder(1, half_life=5)
    for agent in ["b", *"c" * 200]:
        learner.observe(["a"], agent)
    assert learner.counts(["a"]).keys() == {"c"}


@given(sequences, st.sampled_from("abcd"), st.sampled_from("abcde"))
def test_what_was_learned_stays_sound_through_renames_and_json(given_sequences, old, new):
    learner = learned(given_sequences, 3, max_contexts=30)
    learner.rename(old, new)
    learner.check_integrity()
    assert old == new or old not in learner.agents
    VariableOrder.from_dict(json.loads(json.dumps(learner.to_dict())), 3, max_contexts=30)
    for sequence in given_sequences:
        for position, agent in enumerate(sequence):
            learner.observe(sequence[:position], agent)
    learner.check_integrity()


@pytest.mark.parametrize(
    "damage",
    [
        {"agents": ["a"]},
        {"shapes": pack([255], "u1")},
        {"counts": pack([], "<f2")},
        {"counts": pack([0.0] * 3, "<f2")},
        {"counts": pack([float("nan")] * 3, "<f2")},
        {"contexts": "?"},
        {"frequent": pack([1.0], "<f2")},
    ],
)
def test_damaged_contexts_are_refused(damage):
    data = learned(["abc"], 2).to_dict()
    assert VariableOrder.from_dict(data, 2).to_dict() == data
    with pytest.raises((ValueError, IndexError)):
        VariableOrder.from_dict({**data, **damage}, 2)


@given(sequences, st.integers(0, 3), st.lists(agents, max_size=3))
def test_it_survives_the_way_through_json(given_sequences, order, past):
    learner = learned(given_sequences, order)
    again = VariableOrder.from_dict(json.loads(json.dumps(learner.to_dict())), order)
    assert again.distribution(past) == pytest.approx(learner.distribution(past), abs=2e-3)
    learner.observe(past, "e")
    again.observe(past, "e")
    assert again.distribution(past) == pytest.approx(learner.distribution(past), abs=2e-3)


def test_a_removed_agent_is_gone_from_contexts_and_successors():
    learner = learned(["abcabc"] * 3, 3)
    learner.remove("b")
    learner.check_integrity()
    assert "b" not in learner.distribution("a")
    assert "b" not in json.dumps(learner.to_dict())


@pytest.mark.parametrize(
    "settings_", [{"order": 4}, {"order": -1}, {"smoothing": "none"}, {"half_life": 0}, {"order": 2, "max_contexts": 2}]
)
def test_impossible_settings_are_refused(settings_):
    with pytest.raises(ValueError, match="must be"):
        VariableOrder(**settings_)


def test_nothing_is_seen_before_it_is_predicted():
    """A first visit to a sequence without repetition is never right; a second one always is."""
    sequence = [str(number) for number in range(20)]
    learner = VariableOrder(1)
    assert top_hits([sequence], learner) == {"predictions": 19, "top_1": 0, "top_3": 0}
    assert top_hits([sequence], learner)["top_1"] == 19
