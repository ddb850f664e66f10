"""A small study of reuse on real engines: its figures are there, and say what they must."""

import json
import random
from dataclasses import replace

import pytest

from ropewalk.cluster.bench.engine import Engine
from ropewalk.cluster.bench.reuse_study import Counts, Study, engines
from ropewalk.cluster.bench.tasks import task_of
from ropewalk.cluster.cli import main

pytestmark = pytest.mark.engine

MODEL = "recall-mla"
COUNTS = Counts(documents=2, questions=4, rounds=2, patterns=2, gsm8k=0)


@pytest.fixture(scope="module")
def study():
    settings = {"markers": ("<|user|>",)}
    with engines(MODEL, min_run=32, settings=settings, max_model_len=2048, dtype="bfloat16") as (plain, ours):
        yield Study(MODEL, plain, ours, task_of(MODEL), seed=1)


def test_a_length_has_all_figures_and_turning_matters(study):
    found = study.lengths(768, COUNTS)
    json.dumps(found)
    assert found["recovered_share"] >= 0.85
    assert found["ttft_ratio"] > 0
    assert found["kl_reuse"] < found["kl_naive"]
    assert found["recall_reuse"] >= found["recall_full"] - 0.25
    assert {arm: entry["kl_first"]["count"] for arm, entry in found["arms"].items()} == dict.fromkeys(
        ("full", "reuse", "naive", "boundary-16", "boundary-64"), 8
    ), "arms are compared on the same prompts"
    recovered = [found["arms"][arm]["recovered_share"]["mean"] for arm in ("reuse", "boundary-16", "boundary-64")]
    assert recovered == sorted(recovered, reverse=True), "boundary recompute computes more"


def test_no_further_document_is_begun_once_the_time_of_a_length_is_up(study):
    found = study.lengths(512, replace(COUNTS, rounds=1, seconds=0))
    assert found["arms"]["full"]["kl_first"]["count"] == COUNTS.questions


@pytest.mark.parametrize("name", ["header", "re-rank", "updates"])
def test_a_pattern_is_served_from_what_was_computed_before(study, name):
    found = study.pattern(name, 768, COUNTS)
    assert found["arms"]["reuse"]["recovered_share"]["mean"] > 0.6
    assert found["arms"]["full"]["recovered_share"]["mean"] == 0


def test_requests_that_keep_nothing_leave_nothing_and_meet_nothing(study):
    ours, task = study.ours, study.task
    rng = random.Random(8)
    (body,) = task.sections(rng, [400])
    tokens = [*task.header(rng, 90), *body.tokens, *body.questions[0].tokens]
    before = ours.client.status()["store"]["num_chunks"]
    for _ in range(2):
        answer = ours.ask(tokens, mode="reuse", tenant="keeps nothing", keep=False, max_tokens=2)
        assert answer.num_cached == 0
    assert ours.client.status()["store"]["num_chunks"] == before


def test_forced_tokens_are_said_and_their_probability_is_the_models_own(study):
    plain: Engine = study.plain
    tokens = study.task.header(random.Random(9), 60)
    free = plain.ask(tokens, max_tokens=3, ignore_eos=True, logprobs=True)
    wanted = [int(free.logprobs[0].argsort()[-3]), 11, 12]
    forced = plain.ask(tokens, max_tokens=3, ignore_eos=True, logprobs=True, forced=wanted)
    assert list(forced.token_ids) == wanted
    assert abs(forced.logprobs[0] - free.logprobs[0]).max() < 0.05
    assert forced.logprobs[0].argmax() == free.token_ids[0]


def test_markers_are_looked_up_in_the_models_vocabulary(study):
    from ropewalk.cluster.models import resolve

    with open(f"{resolve(MODEL)}/tokenizer.json", encoding="utf-8") as file:
        added = {entry["content"]: entry["id"] for entry in json.load(file)["added_tokens"]}
    assert study.ours.client._settings.marker_ids == (added["<|user|>"],)


def test_a_marker_that_is_not_one_token_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="'not a token' is not one token of"):
        Engine(MODEL, store_root=tmp_path, settings={"markers": ("not a token",)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "20000"], "do not fit recall-mla"),
        (["--lengths", "100"], "at least 256 tokens"),
        (["--min-run", "-3"], "--min-run: at least 1 token, not -3"),
        (["--models", "/nowhere"], "no directory /nowhere"),
        (["--json", "/proc/none/reuse.json"], "--json '/proc/none/reuse.json' cannot be written"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(["bench", "reuse", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
