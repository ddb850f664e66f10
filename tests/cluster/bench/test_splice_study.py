"""A small study of splices on real engines: its figures are there, and say what they must."""

import json
import random

import pytest

from ropewalk.cluster.bench.reuse_study import engines
from ropewalk.cluster.bench.splice_load import SESSIONS, TURNS, append_only, mechanism
from ropewalk.cluster.bench.splice_study import EXACT_ENGINE, Counts, Study
from ropewalk.cluster.cli import main

pytestmark = pytest.mark.engine

MODEL = "recall-mla"


@pytest.fixture(scope="module")
def study():
    with engines(MODEL, min_run=32, max_model_len=2048, dtype="bfloat16") as (plain, ours):
        yield Study(MODEL, plain, ours, seed=1)


def test_splices_say_what_a_reference_says_in_which_the_rest_saw_what_was_removed(study):
    found = study.faithfulness(18)
    json.dumps(found)
    assert found["same_first_token"]["share"] == 1.0
    assert found["same_first_token"]["count"] + found["near_ties"] == found["prompts"] == 18
    assert found["kl"]["mean"] <= 0.01
    assert found["spliced_share"]["mean"] > 0.8
    assert sum(found["follows"].values()) >= 3, "what was removed cannot be answered from the edited prompt"


def test_a_forget_and_an_exact_request_for_spliced_tokens_answer_as_plain_vllm():
    with engines(MODEL, min_run=32, **EXACT_ENGINE) as (plain, ours):
        found = Study(MODEL, plain, ours, seed=1).exactness(12)
    assert found["different"] == {"forget": 0, "exact": 0}
    assert found["set_aside"] <= 1


def test_ten_edits_of_one_place_drift_no_further_than_one(study):
    found = study.chained(3)
    assert found["kl"]["mean"] < 1e-3
    assert found["same_first_token"]["share"] == 1.0


def test_sessions_that_edit_at_every_turn_find_more_than_a_prefix_cache_does(study):
    (row,) = mechanism(study.plain, study.ours, study.task, random.Random(1), 1, [4])
    json.dumps(row)
    assert row["plain"]["turns"] == row["ropewalk"]["turns"] == SESSIONS * TURNS
    assert row["ropewalk"]["hit_rate"] > row["plain"]["hit_rate"] + 0.2


def test_sessions_that_edit_nothing_find_all_they_held(study):
    found = append_only(study.plain, study.ours, study.task, random.Random(2), 1)
    json.dumps(found)
    assert found["hit_rate"] > 0.5
    assert found["ratio_of_pairs"]["count"] == TURNS - 1


def test_edits_are_spliced_and_what_follows_them_is_recalled(study):
    found = study.edits(
        700, Counts(0, 0, documents=1, questions=6, rounds=1, seconds=9, chained=0, append_only=0, policies=0, scale=1)
    )
    json.dumps(found)
    assert found["ttft"]["spliced_share"]["median"] > 0.9
    assert found["kl_splice"] < found["kl_naive"]
    assert found["recall_splice"] >= found["recall_prefill"] - 0.17
    spliced = [found["arms"][arm]["recovered_share"]["mean"] for arm in ("splice", "boundary-16", "boundary-64")]
    assert spliced == sorted(spliced, reverse=True), "boundary recompute computes more"
    assert found["arms"]["naive"]["recovered_share"]["mean"] > 0.9


@pytest.mark.parametrize("arguments", [["--lengths", "10"], ["--models", "./no-such-model"], ["--lengths", "900000"]])
def test_wrong_arguments_are_refused_in_one_line(arguments, capsys):
    assert main(["bench", "splice", *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
