"""A small study of splices on real engines: its figures are there, and say what they must."""

import json
import random
from dataclasses import replace

import pytest

from ropewalk.cluster.bench.reference import reference, references
from ropewalk.cluster.bench.reuse_study import engines
from ropewalk.cluster.bench.splice_load import SESSIONS, TURNS, append_only, mechanism
from ropewalk.cluster.bench.splice_policies import policy_table, stale_tasks
from ropewalk.cluster.bench.splice_study import EXACT_ENGINE, Counts, Study
from ropewalk.cluster.bench.statistics import divergence
from ropewalk.cluster.bench.tasks import RandomTask, task_of
from ropewalk.cluster.cli import main
from ropewalk.cluster.models.tiny import DEEP_MLA, SERVED, build, write

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


def test_a_hundred_forgets_and_exact_requests_answer_as_plain_vllm_where_it_has_a_prefix_cache(tmp_path):
    """Here blocks of a splice are in the cache in which exact requests for the same token ids look."""
    (family,) = (family for family in SERVED if family.name == "Qwen2.5")
    model = str(write(family, tmp_path))
    with engines(model, min_run=32, skip_tokenizer_init=True, dtype="float32") as (plain, ours):
        found = Study(model, plain, ours, 1, RandomTask()).exactness(100)
        assert ours.client.status()["batched"], "there is none"
    assert found["prompts"] == 100
    assert found["different"] == {"forget": 0, "exact": 0}
    assert found["set_aside"] <= 2


def test_ten_edits_of_one_place_drift_no_further_than_one(study):
    found = study.chained(3)
    assert found["kl"]["mean"] < 1e-3
    assert found["same_first_token"]["share"] == 1.0


def test_policies_solve_tasks_and_amortize_is_spliced(study):
    tasks = stale_tasks(study.task)
    found = policy_table(study.ours, tasks, random.Random(3), 12)
    json.dumps(found)
    assert found["spliced"] == found["tasks"] == 12
    assert all(entry["share"] >= 0.7 for entry in found["solved"].values()), "the newer fact is the one that holds"
    assert found["differ"] <= 3


def test_a_policy_without_the_newer_output_solves_nothing(study):
    """Else the tasks would not need their context."""
    tasks = stale_tasks(study.task)

    class Cut(type(tasks)):
        def make(self, rng):
            task = super().make(rng)
            return replace(task, newer=task.note)

    found = policy_table(study.ours, Cut(study.task), random.Random(3), 12)
    assert found["solved"]["forget"]["share"] <= 0.2


def test_problems_of_gsm8k_come_with_a_stale_answer_and_the_right_one():
    task = task_of("smollm2-135m")
    tasks = stale_tasks(task)
    for seed in range(5):
        stale = tasks.make(random.Random(seed))
        assert tasks.is_right(stale, task.encode(f" {stale.answer}. That is"))
        assert not tasks.is_right(stale, task.encode(f" 1{stale.answer}"))
        assert not tasks.is_right(stale, task.encode(" not known"))
        whole = task.decode(stale.whole)
        assert f"The answer is {stale.answer}." in whole
        assert f"The answer is {stale.answer}." not in task.decode(stale.stale)
        assert whole.count("The answer is") == 3
        assert task.decode(stale.stale) not in task.decode(stale.cut)


def test_the_reference_sees_no_tail_through_another():
    model = build(DEEP_MLA)
    rng = random.Random(5)
    task = RandomTask()
    source, target = task.filler(rng, 150), task.filler(rng, 60)
    target += source[90:140]
    tails = [task.filler(rng, 9), task.filler(rng, 4)]
    runs = [(60, 110)]
    together = references(model, source, target, tails, runs, -30)
    alone = [reference(model, source, [*target, *tail], runs, -30) for tail in tails]
    for one, other in zip(together, alone, strict=True):
        assert divergence(one, other) < 1e-6
    assert divergence(together[0], together[1]) > 0.1
    assert divergence(alone[0], reference(model, source, [*target, *tails[0]], [], 0)) > 0.01


def test_sessions_that_edit_at_every_turn_find_more_than_a_prefix_cache_does(study):
    (row,) = mechanism(study.plain, study.ours, study.task, random.Random(1), 1, [4])
    json.dumps(row)
    assert row["plain"]["turns"] == row["ropewalk"]["turns"] == SESSIONS * TURNS
    assert row["ropewalk"]["hit_rate"] > row["plain"]["hit_rate"] + 0.3
    assert row["ropewalk"]["spliced"] > 0.3


def test_sessions_that_edit_nothing_find_all_they_held(study):
    found = append_only(study.plain, study.ours, study.task, random.Random(2), 1)
    json.dumps(found)
    assert found["hit_rate"] > 0.9
    assert found["hit_rate_plain"] in (0, pytest.approx(found["hit_rate"], abs=0.05)), "none without a prefix cache"
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


WRONG = [["--lengths", "10"], ["--keep", "1"], ["--models", "./no-such-model"], ["--lengths", "900000"]]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments_are_refused_in_one_line(arguments, capsys):
    assert main(["bench", "splice", *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
