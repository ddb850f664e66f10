"""Reuse is real: a body behind a changed header is served from the store, turned, and nobody else sees it."""

import random
import threading
from pathlib import Path

import pytest

from ropewalk.cluster.bench.engine import Answer, Engine
from ropewalk.cluster.bench.statistics import divergence
from ropewalk.kernels.keys import HEAD_LENGTH

from .prompts import body_and_headers, prompt

pytestmark = pytest.mark.engine

NUM_BODY = 1500
MODELS = {
    "smollm2": ("smollm2-135m", {"dtype": "bfloat16"}),
    "recall-mla": ("recall-mla", {"dtype": "bfloat16"}),
    "recall-mla-reference": ("recall-mla", {"dtype": "bfloat16", "attention_backend": "CPU_MLA"}),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request, start_engines, new_store):
    model, arguments = MODELS[request.param]
    return model, *start_engines(model, new_store(), **arguments)


def assert_same_distribution(engine: Engine, tokens: list[int], other_tenant: str) -> Answer:
    """In bf16, near-ties flip with what was cached; what a first token is drawn from does not."""
    answer = engine.ask(tokens, mode="exact", max_tokens=1, logprobs=True)
    alone = engine.ask(tokens, mode="exact", tenant=other_tenant, max_tokens=1, logprobs=True)
    assert divergence(alone.first_logprobs, answer.first_logprobs) < 0.02
    return answer


def chunk_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*/objects/*/*"))


def test_the_turn_probe_accepts_the_engine(case):
    _, engine = case
    status = engine.client.status()
    assert status["reuse_refused"] is None
    assert 0 < status["turn_error"] < 1.5e-2


def test_a_body_behind_a_changed_header_is_served_from_the_store_and_turning_it_matters(case, record_property):
    model, engine = case
    body, make_header, questions = body_and_headers(model, random.Random(30), NUM_BODY)
    first = make_header(128)
    for turning in (True, False):
        engine.ask([*first, *body, *questions[0]], mode="reuse", rotate=turning, max_tokens=1)
    turned, unturned = [], []
    for length, question in zip((50, 99, 150, 200), questions[1:], strict=False):
        tokens = [*make_header(length), *body, *question]
        answer = engine.ask(tokens, mode="reuse", max_tokens=1, logprobs=True)
        assert answer.num_cached >= 0.85 * NUM_BODY, "vLLM counts fewer cached tokens than 85 % of the body"
        assert answer.report.tokens["reused"] == answer.num_cached
        assert answer.report.fallbacks == []
        reused = [planned for planned in answer.report.plan if planned.source == "reuse"]
        assert {planned.turn for planned in reused} == {length - 128}
        assert [planned.source for planned in answer.report.plan][:1] == ["compute"]
        truth = engine.ask(tokens, mode="exact", tenant=f"fresh-{length}", max_tokens=1, logprobs=True)
        assert truth.num_cached == 0
        turned.append(divergence(truth.first_logprobs, answer.first_logprobs))
        other = engine.ask(tokens, mode="reuse", rotate=False, max_tokens=1, logprobs=True)
        assert other.num_cached >= 0.85 * NUM_BODY
        unturned.append(divergence(truth.first_logprobs, other.first_logprobs))
    record_property("kl_turned", turned)
    record_property("kl_unturned", unturned)
    assert sum(turned) < 0.5 * sum(unturned)
    assert sum(turned) / len(turned) < 0.1


def test_an_exact_request_sees_nothing_that_a_reuse_request_left(case):
    model, engine = case
    body, make_header, questions = body_and_headers(model, random.Random(31), NUM_BODY)
    engine.ask([*make_header(128), *body, *questions[0]], mode="reuse")
    header = make_header(96)
    tokens = [*header, *body, *questions[1]]
    reused = engine.ask(tokens, mode="reuse", max_tokens=70, ignore_eos=True)
    assert reused.report.tokens["reused"] >= 0.85 * NUM_BODY
    exact = engine.ask(tokens, mode="exact")
    assert exact.num_cached <= len(header) + 1
    # What was generated behind reused KV is no more exact than what it was generated from.
    continued = assert_same_distribution(engine, [*tokens, *reused.token_ids, *questions[2]], "alone")
    assert continued.report.tokens["reused"] == 0
    assert continued.report.tokens["exact"] == continued.num_cached


@pytest.mark.parametrize("case", ["smollm2", "recall-mla"], indirect=True)
def test_the_next_turn_of_a_reuse_session_finds_its_own_generated_tokens(case):
    model, engine = case
    body, make_header, questions = body_and_headers(model, random.Random(32), NUM_BODY)
    engine.ask([*make_header(128), *body, *questions[0]], mode="reuse")
    tokens = [*make_header(77), *body, *questions[1]]
    reused = engine.ask(tokens, mode="reuse", max_tokens=70, ignore_eos=True)
    following = engine.ask([*tokens, *reused.token_ids, *questions[2]], mode="reuse")
    assert following.num_cached >= len(tokens) + 69 - 32


@pytest.mark.parametrize("case", ["smollm2", "recall-mla"], indirect=True)
def test_the_same_content_under_another_tenant_is_computed(case):
    model, engine = case
    tokens = prompt(model, random.Random(33), 500)
    engine.ask(tokens, mode="reuse", tenant="one")
    assert engine.ask(tokens, mode="reuse", tenant="two").num_cached == 0


@pytest.mark.parametrize("case", ["smollm2", "recall-mla"], indirect=True)
def test_a_damaged_chunk_is_recomputed_with_a_named_reason(case):
    model, engine = case
    tokens = prompt(model, random.Random(34), 600)
    before = set(chunk_files(engine.store_root))
    truth = engine.ask(tokens)
    engine.settle()
    own = sorted(set(chunk_files(engine.store_root)) - before)
    assert own
    for path in own:
        data = bytearray(path.read_bytes())
        data[-20] ^= 0xFF
        path.write_bytes(data)
    if engine.client.status()["block_size"] == 32:
        engine.forget_prefixes()
    answer = engine.ask(tokens)
    assert answer.report.fallbacks == ["chunk_corrupt"]
    assert answer.token_ids == truth.token_ids
    assert answer.num_cached == 0
    engine.ask(tokens)  # and the engine goes on


@pytest.mark.parametrize("case", ["smollm2", "recall-mla"], indirect=True)
def test_requests_survive_a_store_that_is_emptied_all_the_time(case):
    model, engine = case
    body, make_header, questions = body_and_headers(model, random.Random(35), 800)
    stop = threading.Event()

    def empty() -> None:
        while not stop.wait(0.05):
            for path in chunk_files(engine.store_root):
                path.unlink(missing_ok=True)

    thread = threading.Thread(target=empty)
    thread.start()
    try:
        prompts = [[*make_header(60 + n), *body, *questions[n % len(questions)]] for n in range(6)]
        for tokens in prompts:
            # Not `ask`, which would wait for saves that are deleted.
            assert engine.run(engine.ask_async(tokens, mode="reuse")).token_ids
    finally:
        stop.set()
        thread.join()
    for tokens in prompts[:3]:  # and nothing wrong was left behind
        assert_same_distribution(engine, tokens, "untouched")


@pytest.mark.parametrize("case", ["smollm2", "recall-mla"], indirect=True)
def test_prompts_that_cannot_be_planned_say_why(case):
    model, engine = case
    short = prompt(model, random.Random(36), 20 if model != "recall-mla" else 40)[:20]
    answer = engine.ask(short, mode="reuse")
    assert answer.report.tokens["computed"] == 20


def test_two_engines_share_one_store(start_engines, new_store):
    """What one replica computed, the other one reuses."""
    model, arguments = MODELS["recall-mla"]
    store = new_store()
    engine, other = start_engines(model, store, store, **arguments)
    body, make_header, questions = body_and_headers(model, random.Random(37), NUM_BODY)
    tokens = [*make_header(128), *body, *questions[0]]
    engine.ask(tokens, mode="exact")
    engine.settle()
    assert other.ask(tokens, mode="exact").num_cached >= len(tokens) - HEAD_LENGTH
    moved = other.ask([*make_header(64), *body, *questions[1]], mode="reuse")
    assert moved.report.tokens["reused"] >= 0.85 * NUM_BODY
