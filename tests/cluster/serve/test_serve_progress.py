"""What start-up says while it waits, and the reason it gives when a replica fails."""

from __future__ import annotations

from pathlib import Path

from ropewalk.cluster.serve.progress import describe, failure, stage, true_reason

STARTING = """
(ServeReplica pid=1) INFO 11-29 18:36:16 [model.py:684] Resolved architecture: LlamaForCausalLM
(EngineCore pid=2) INFO 11-29 18:36:26 [core.py:123] Initializing a V1 LLM engine (v0.29.0) with config: model='x'
"""
FAILED = """
(EngineCore pid=2) ERROR 11-29 18:40:01 [core.py:900] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-29 18:40:01 [core.py:900]     raise ValueError(
(EngineCore pid=2) ERROR 11-29 18:40:01 [core.py:900] ValueError: To serve at least one request 3.2 GiB is needed
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_stage_is_the_latest_that_the_log_shows() -> None:
    assert stage("") == "importing vLLM"
    assert stage(STARTING) == "starting the engine's worker process"
    assert stage(STARTING + "Starting to load model x") == "loading weights"


def test_a_line_says_how_many_replicas_are_ready_and_what_the_others_wait_for(tmp_path: Path) -> None:
    (tmp_path / "worker-abc-01-17.out").write_text(STARTING)
    replicas = [
        {"replica_id": "r1", "state": "RUNNING", "worker_id": "xyz"},
        {"replica_id": "r2", "state": "STARTING", "worker_id": "abc"},
    ]
    deployments = {"ropewalk:m": {"replicas": replicas, "target_num_replicas": 2}}
    assert describe(deployments, {"m": "ropewalk:m"}, tmp_path) == [
        "m: 1 of 2 replicas ready; r2: starting the engine's worker process"
    ]


def test_a_model_without_replicas_waits_for_resources() -> None:
    [line] = describe({"d": {"replicas": [], "target_num_replicas": 1}}, {"m": "d"}, None)
    assert "waiting for free CPUs or GPUs" in line


def test_the_true_reason_is_the_error_of_the_process_that_failed_first() -> None:
    assert true_reason([FAILED]) == "ValueError: To serve at least one request 3.2 GiB is needed"


def test_a_reason_over_several_lines_is_told_whole() -> None:
    log = """(Worker pid=3) ERROR 11-29 18:40:01 [worker.py:1] pydantic.ValidationError: 1 validation error for Settings
(Worker pid=3) ERROR 11-29 18:40:01 [worker.py:1] min_run
(Worker pid=3) ERROR 11-29 18:40:01 [worker.py:1]   Input should be greater than 0
"""
    reason = true_reason([log])
    assert reason == "pydantic.ValidationError: 1 validation error for Settings min_run Input should be greater than 0"


def test_a_vague_reason_is_better_than_none() -> None:
    assert "Engine core initialization failed" in true_reason(["RuntimeError: Engine core initialization failed. See"])
    assert true_reason(["", "the replica went away"]) == "the replica went away"
    assert true_reason([]) == "no reason was logged"


def test_only_a_failed_deployment_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "worker-abc-01-17.err").write_text(FAILED)
    assert failure({"status": "DEPLOYING", "deployments": {"d": {"status": "UPDATING"}}}, tmp_path) is None
    reason = failure({"status": "DEPLOYING", "deployments": {"d": {"status": "DEPLOY_FAILED"}}}, tmp_path)
    assert reason == "ValueError: To serve at least one request 3.2 GiB is needed"
