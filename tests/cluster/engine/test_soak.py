"""Exact answers stay exact beside requests that reuse the same texts, one after the other and all at once."""

import random

import pytest

from ropewalk.cluster.bench.engine import Engine

from .prompts import recall

pytestmark = pytest.mark.engine

NUM_PROMPTS = 200
WAVE = 8
MAX_TOKENS = 3
MAX_SET_ASIDE = 0.05


@pytest.fixture(scope="module")
def engines(start_engines, new_store) -> tuple[Engine, Engine]:
    plain, ours = start_engines(
        "recall-mla", None, new_store(), dtype="bfloat16", max_model_len=1024, settings={"min_run": 32}
    )
    return plain, ours


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts about forty texts: the same text behind other headers and before other questions."""
    rng = random.Random(50)
    texts = [recall(rng, rng.randrange(150, 400)) for _ in range(NUM_PROMPTS // 5)]
    made = [[*recall(rng, rng.randrange(45, 90))[:-6], *text[6:]] for text in texts for _ in range(5)]
    rng.shuffle(made)
    return made


@pytest.fixture(scope="module")
def truth(engines, prompts) -> list[tuple[int, ...] | None]:
    """Plain vLLM's answers; None where it disagrees with itself between a cold and a warm prefix cache."""
    plain, _ = engines
    answers = []
    for tokens in prompts:
        plain.forget_prefixes()
        cold, warm = (plain.ask(tokens, max_tokens=MAX_TOKENS).token_ids for _ in range(2))
        answers.append(cold if cold == warm else None)
    assert answers.count(None) <= MAX_SET_ASIDE * len(answers)
    return answers


def test_exact_answers_between_reuse_requests_over_the_same_texts_are_those_of_plain_vllm(engines, prompts, truth):
    _, ours = engines
    num_reused, wrong = 0, []
    for number, (tokens, answer) in enumerate(zip(prompts, truth, strict=True)):
        reused = ours.ask(tokens, mode="reuse", max_tokens=MAX_TOKENS)
        num_reused += reused.report.tokens["reused"]
        exact = ours.ask(tokens, mode="exact", max_tokens=MAX_TOKENS)
        assert exact.report.tokens["reused"] == 0
        if answer is not None and exact.token_ids != answer:
            wrong.append((number, exact.token_ids, answer))
    assert num_reused > 0.4 * sum(map(len, prompts)), "hardly anything was reused, so that nothing was tested"
    assert not wrong


def in_waves(engine: Engine, prompts: list[list[int]], modes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Answers in the first of `modes`, while the same prompts are asked in the others."""
    answers = []
    for start in range(0, len(prompts), WAVE):
        wave = prompts[start : start + WAVE]
        work = [engine.ask_async(t, mode=mode, max_tokens=MAX_TOKENS) for mode in modes for t in wave]
        answers += [answer.token_ids for answer in engine.gather(work)[: len(wave)]]
    return answers


def test_under_load_exact_answers_differ_no_more_often_than_plain_vllm_does_from_itself(
    engines, prompts, truth, record_property
):
    """In bf16, near-ties flip with what shares a batch, in plain vLLM as well."""
    plain, ours = engines
    ours.forget_prefixes()
    plain.forget_prefixes()
    found = in_waves(ours, prompts, ("exact", "reuse"))
    usual = in_waves(plain, prompts, ("exact", "exact"))
    mismatches, usual_mismatches = (
        sum(answer is not None and answer != other for answer, other in zip(truth, answers, strict=True))
        for answers in (found, usual)
    )
    record_property("mismatches", mismatches)
    record_property("mismatches_of_plain_vllm", usual_mismatches)
    # Three standard deviations of two counts with the same chance.
    assert mismatches <= usual_mismatches + 3 * (2 * max(usual_mismatches, 1)) ** 0.5
