"""What start-up is waiting for, and why it failed, read from Serve's state and the replicas' logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STAGES = (
    ("Application startup complete|Supported tasks", "opening for requests"),
    ("init engine", "building the OpenAI layer"),
    ("KV cache size|for KV cache on node", "warming up"),
    ("Loading weights took|Loading safetensors checkpoint shards: 100%", "allocating the KV cache"),
    ("Starting to load model", "loading weights"),
    ("Initializing a V1 LLM engine", "starting the engine's worker process"),
    ("Resolved architecture", "starting the engine process"),
)
"""vLLM's log lines and the stage that each one begins, latest first."""

_ERROR = re.compile(r"(?:^|\s)((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt)): (\S.*)")
_PREFIX = re.compile(r"^(\x1b\[[\d;]*m)*(\(\w+ pid=\d+\)(\x1b\[[\d;]*m)* )?([A-Z]+ \d\d-\d\d [\d:]+ \[[\w.]+:\d+\] ?)?")
_VAGUE = (
    "Engine core initialization failed",
    "Engine core proc",
    "WorkerProc initialization failed",
    "cancelled by",
    "Worker failed with error",
)
"""Errors that only report that another process failed; the other process's log says why."""


def stage(log: str) -> str:
    """The start-up stage of a replica whose log is `log`."""
    for pattern, name in STAGES:
        if re.search(pattern, log):
            return name
    return "importing vLLM"


def replica_log(log_dir: Path, worker_id: str | None) -> str:
    """Everything that the worker process `worker_id` and its children have printed so far."""
    if not worker_id:
        return ""
    return "".join(
        path.read_text(errors="replace")
        for suffix in ("out", "err")
        for path in sorted(log_dir.glob(f"worker-{worker_id}-*.{suffix}"))
    )


def describe(deployments: Mapping[str, Any], names: Mapping[str, str], log_dir: Path | None) -> list[str]:
    """One line for each model: how many replicas are ready and what the others wait for.

    Args:
        deployments: `deployments` of the application in Serve's details.
        names: deployment name by model name.
        log_dir: Ray's log directory, if it is on this machine.
    """
    lines = []
    for model, deployment in names.items():
        state = deployments.get(deployment)
        if state is None:
            lines.append(f"{model}: waiting for Ray Serve")
            continue
        replicas = state.get("replicas", [])
        wanted = state.get("target_num_replicas", len(replicas))
        ready = sum(replica["state"] == "RUNNING" for replica in replicas)
        line = f"{model}: {ready} of {wanted} replicas ready"
        waiting = [
            f"{replica['replica_id']}: {_stage_of(replica, log_dir)}"
            for replica in replicas
            if replica["state"] != "RUNNING"
        ]
        if ready < wanted and not waiting:
            waiting = ["waiting for free CPUs or GPUs"]
        lines.append("; ".join([line, *waiting]))
    return lines


def _stage_of(replica: Mapping[str, Any], log_dir: Path | None) -> str:
    if not replica.get("worker_id"):
        return "waiting for a worker process"
    return stage(replica_log(log_dir, replica["worker_id"])) if log_dir else str(replica["state"]).lower()


def failure(details: Mapping[str, Any], log_dir: Path | None, since: float = 0.0) -> str | None:
    """Why the application will not start, or `None` while it still may.

    Looks for the first error in the workers' logs written after `since` (seconds since the epoch) that says more than
    "another process failed"; without one, falls back to Serve's own message.
    """
    deployments = details.get("deployments", {})
    failed = details.get("status") == "DEPLOY_FAILED" or any(
        deployment.get("status") in ("DEPLOY_FAILED", "UNHEALTHY") for deployment in deployments.values()
    )
    if not failed:
        return None
    messages = [details.get("message", ""), *(deployment.get("message", "") for deployment in deployments.values())]
    logs = [path for kind in ("err", "out") for path in sorted(log_dir.glob(f"worker-*.{kind}"))] if log_dir else []
    recent = [path.read_text(errors="replace") for path in logs if path.stat().st_mtime >= since]
    return true_reason([*recent, *messages])


def true_reason(texts: Iterable[str]) -> str:
    """The last error line of the first text that holds a telling one; else the last vague one."""
    texts = list(texts)
    vague = ""
    for text in texts:
        telling = ""
        lines = text.splitlines()
        for number, line in enumerate(lines):
            found = _ERROR.search(line)
            if found is None:
                continue
            message = f"{found[1]}: {found[2]}".strip()
            if "validation error" in message:  # pydantic says on the next lines which field it was and why
                message = " ".join([message, *(_bare(more) for more in lines[number + 1 : number + 3])])
            if any(words in message for words in _VAGUE):
                vague = message
            else:
                telling = message
        if telling:
            return telling
    return vague or " ".join(text.strip() for text in texts if text.strip())[-500:] or "no reason was logged"


def _bare(line: str) -> str:
    """A log line without vLLM's prefix of process, level and place."""
    return _PREFIX.sub("", line).strip()
