"""Exact stays exact: in exact mode, Ropewalk's answers are plain vLLM's, token for token."""

import random

import pytest
import torch

from ropewalk.kernels.keys import HEAD_LENGTH

from .prompts import prompt

pytestmark = pytest.mark.engine

MODELS = {
    # In bf16, near-ties flip with kernel shapes; float32 leaves none to excuse a difference.
    "smollm2": ("smollm2-135m", {"dtype": "float32", "num_gpu_blocks_override": 10}),
    "recall-mla": ("recall-mla", {"dtype": "bfloat16", "num_gpu_blocks_override": 10}),
    "recall-mla-reference": (
        "recall-mla",
        {"dtype": "bfloat16", "num_gpu_blocks_override": 20, "attention_backend": "CPU_MLA"},
    ),
}

MAX_SET_ASIDE = 0.05
MAX_TOKENS = 4


@pytest.fixture(scope="module", params=MODELS)
def engines(request, start_engines, new_store):
    model, arguments = MODELS[request.param]
    if request.param == "recall-mla" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("without AMX, vLLM serves this model by its reference backend, which is the next case")
    arguments = {"max_model_len": 288, "max_num_batched_tokens": 128, **arguments}
    if request.param == "recall-mla-reference":
        del arguments["max_num_batched_tokens"]  # this backend cannot split a prefill
    return model, *start_engines(model, None, new_store(), **arguments)


def make_prompts(model: str) -> dict[str, list[list[int]]]:
    rng = random.Random(20)
    fresh = [prompt(model, rng, rng.randrange(40, 120)) for _ in range(16)]
    prefixes = [prompt(model, rng, length) for length in (40, 64, 97)]
    shared = [[*prefix, *prompt(model, rng, rng.randrange(20, 60))] for prefix in prefixes for _ in range(4)]
    return {
        "fresh": fresh,
        "repeated": fresh,
        "shared prefixes": shared,
        "chunked prefill": [prompt(model, rng, rng.randrange(150, 270)) for _ in range(5)],
        # Each fills its blocks but for one slot. Eight of them fill the cache; the second token fed back by the first
        # four needs a block more each.
        "preempted": [prompt(model, rng, 31) for _ in range(12)],
    }


def test_token_ids_are_those_of_plain_vllm(engines, record_property):
    model, plain, ours = engines
    compared, set_aside, wrong = 0, [], []
    for group, prompts in make_prompts(model).items():
        if group == "preempted":
            answers = [answer.token_ids for answer in ours.ask_together(prompts, max_tokens=MAX_TOKENS)]
        else:
            answers = [ours.ask(tokens, max_tokens=MAX_TOKENS).token_ids for tokens in prompts]
        for number, (tokens, answer) in enumerate(zip(prompts, answers, strict=True)):
            plain.forget_prefixes()
            cold = plain.ask(tokens, max_tokens=MAX_TOKENS).token_ids
            warm = plain.ask(tokens, max_tokens=MAX_TOKENS).token_ids
            compared += 1
            if cold != warm:
                set_aside.append(f"{group} {number}")
            elif answer != cold:
                wrong.append(f"{group} {number}: {answer} instead of {cold}")
    record_property("compared", compared)
    record_property("set_aside", ", ".join(set_aside))
    assert compared >= 60
    assert not wrong
    assert len(set_aside) <= MAX_SET_ASIDE * compared, f"plain vLLM disagrees with itself on {set_aside}"
    assert ours.num_preemptions > 0, "the block budget was not tight enough to preempt anybody"


def test_the_store_served_exact_prefixes(engines):
    """Without this, the test above would also pass for a connector that does nothing."""
    model, _, ours = engines
    tokens = prompt(model, random.Random(21), 250)
    ours.ask(tokens)
    ours.forget_prefixes()
    answer = ours.ask(tokens)
    assert answer.num_cached >= 250 - HEAD_LENGTH  # a shorter last chunk is not stored
    assert answer.report.tokens["exact"] == answer.num_cached
