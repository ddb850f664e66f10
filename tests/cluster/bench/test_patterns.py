"""Prompts of the studies: what is said to be shared is shared, and questions have the answers that they claim."""

import random

import pytest

from ropewalk.cluster.bench.patterns import PATTERNS, applies
from ropewalk.cluster.bench.tasks import RecallTask, TextTask, task_of

LENGTH = 768


@pytest.fixture(scope="module", params=["recall-mla", "smollm2-135m"])
def task(request):
    return task_of(request.param)


def grams(tokens, size=8) -> set[tuple[int, ...]]:
    return {tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)}


def contains(tokens, part) -> bool:
    return any(tuple(tokens[start : start + len(part)]) == tuple(part) for start in range(len(tokens)))


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_shares_what_it_says_and_changes_what_is_before_it(task, name):
    if not applies(name, task):
        assert isinstance(task, TextTask)
        return
    case = PATTERNS[name](task, random.Random(3), LENGTH)
    known = set[tuple[int, ...]]().union(*(grams(source) for source in case.sources))
    num_known = sum(gram in known for gram in grams(case.before))
    assert num_known >= 0.9 * case.num_shared - 60, "less is shared than the recovered share is a share of"
    for source in case.sources:
        assert source[: len(case.before)] != case.before
    assert contains(case.before, case.question.answer)


def test_sections_have_their_lengths_and_their_answers(task):
    for section, length in zip(task.sections(random.Random(4), [300, 512]), [300, 512], strict=True):
        assert len(section.tokens) == length
        asked = [question for question in section.questions if question.answer]
        assert asked
        assert all(contains(section.tokens, question.answer) for question in asked)


def test_headers_and_fillers_have_their_length_and_are_never_the_same(task):
    rng = random.Random(5)
    headers = [tuple(task.header(rng, 96)) for _ in range(5)]
    assert {len(header) for header in headers} == {96}
    assert len(set(headers)) == 5
    assert len(task.filler(rng, 70)) == 70


def test_held_out_text_is_not_in_the_section():
    (section,) = TextTask("smollm2-135m").sections(random.Random(6), [512])
    (held_out,) = [question for question in section.questions if question.continuation]
    assert not contains(section.tokens, held_out.continuation)


def test_an_update_states_the_asked_key_in_both_texts_and_its_answer_is_the_later_one():
    old, new = RecallTask().updates(random.Random(7), 256)
    for question in new.questions:
        is_, key = question.tokens[1:3]  # what is KEY ?
        assert contains(old.tokens, (key, is_))
        assert contains(new.tokens, (key, is_, *question.answer))
    assert not old.questions


def test_a_final_number_is_what_stands_behind_the_mark():
    task = TextTask("smollm2-135m")
    assert task.final_number(task.encode(" 3 + 4 = 7. #### 1,207")) == "1,207"
    assert task.final_number(task.encode(" I do not know.")) is None
