"""Several arms on the same work, taking turns, so that drift of the machine falls on all of them alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from ropewalk.workloads.client import ChatClient
from ropewalk.workloads.config import WORKLOAD_FIELDS, ReplayConfig
from ropewalk.workloads.errors import WorkloadError
from ropewalk.workloads.load import Arm, Progress, prepare, run_until
from ropewalk.workloads.metrics import ReplayResult


async def run_arms(
    configs: Sequence[ReplayConfig],
    *,
    block_sessions: int | None = None,
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
) -> dict[str, ReplayResult]:
    """Replay the same sessions on every arm, block by block, and return the results by the arms' names.

    The sessions are cut into blocks of `block_sessions` (`None`: as many as run at a time, so single sessions at
    concurrency 1; all of them in an open loop, which a pause between blocks would close). Each block goes to all arms,
    one after the other; who goes first rotates from block to block.
    Only one arm is under load at any time. The arms get identical bodies but for `model` and `ropewalk`, unless
    `live` feeds their own replies back.

    Raises `WorkloadError` if names repeat or the arms don't agree on the work (`WORKLOAD_FIELDS`).
    """
    check_arms(configs)
    program, sessions = prepare(configs[0])
    size = block_sessions or (configs[0].concurrency if configs[0].rate is None else len(sessions))
    blocks = [sessions[start : start + size] for start in range(0, len(sessions), size)]
    async with AsyncExitStack() as stack:
        origin = time.perf_counter()
        arms = []
        for config in configs:
            client = await stack.enter_async_context(ChatClient(config))
            arms.append(Arm(config, program, client, await client.resolve_model(config.model), origin, progress))
        if progress:
            progress.begin(len(arms) * sum(len(session.turns) for session in sessions))

        async def run_all() -> None:
            for number, block in enumerate(blocks):
                first = number % len(arms)
                for arm in (*arms[first:], *arms[:first]):
                    await arm.run_block(block)

        deadlines = [config.deadline_s for config in configs if config.deadline_s is not None]
        try:
            complete = await run_until(run_all(), min(deadlines, default=None), stop)
        finally:
            if progress:
                progress.end()
        for arm in arms:
            arm.aborted = not complete
        return {arm.config.name: arm.result() for arm in arms}


def check_arms(configs: Sequence[ReplayConfig]) -> None:
    """Raise `WorkloadError` unless these arms can be compared."""
    if not configs:
        raise WorkloadError("arms: give at least one")
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise WorkloadError(f"arms: the names {names} must differ")
    for field in WORKLOAD_FIELDS:
        values = {config.name: getattr(config, field) for config in configs}
        if len(set(values.values())) > 1:
            raise WorkloadError(f"arms: {field} must be the same for all arms, not {values}")
