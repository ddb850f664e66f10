"""Real vLLM engines on CPU, with and without Ropewalk, driven from plain test functions."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BLOCK_SIZE = 32


@dataclass(frozen=True)
class Answer:
    """One answer: token ids, vLLM's cached prompt tokens, log-probabilities of the first token, Ropewalk's report."""

    token_ids: tuple[int, ...]
    num_cached: int
    first_logprobs: dict[int, float]
    report: Any


class Engine:
    """An `AsyncLLM` in a thread with its own event loop; `settings` puts Ropewalk into and around it."""

    def __init__(self, model: str, *, store_root: Path | None, min_run: int | None = None, **engine_args: Any) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        # vLLM would bind every engine's threads to the same cores.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = "2"
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.num_preemptions = 0
        self.store_root = store_root
        self._run(self._start(model, store_root, min_run, engine_args))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=600)

    async def _start(
        self, model: str, store_root: Path | None, min_run: int | None, engine_args: dict[str, Any]
    ) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase

        from ropewalk.cluster.engine.planned import wrap_engine
        from ropewalk.cluster.engine.settings import WORKER_EXTENSION, EngineSettings, kv_transfer_config
        from ropewalk.cluster.models import resolve

        engine = self

        class CountPreemptions(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...
            def log_engine_initialized(self) -> None: ...
            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                if iteration_stats is not None:
                    engine.num_preemptions += iteration_stats.num_preempted_reqs

        arguments = {
            "model": resolve(model),
            "enforce_eager": True,
            "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            "max_model_len": 2048,
            "block_size": BLOCK_SIZE,
            "enable_prefix_caching": True,
            "max_logprobs": -1,
        } | engine_args
        if store_root is not None:
            settings = EngineSettings(store_root=store_root, store_budget_bytes=1 << 30, min_run=min_run)
            arguments.setdefault("worker_extension_cls", WORKER_EXTENSION)
            arguments["kv_transfer_config"] = kv_transfer_config(settings)
        config = AsyncEngineArgs(**arguments).create_engine_config()
        self.llm = AsyncLLM.from_vllm_config(config, stat_loggers=[CountPreemptions])
        self.client: Any = self.llm
        if store_root is not None:
            self.client = wrap_engine(self.llm, config, settings)
            await self.client.prepare()

    def ask(self, tokens: Sequence[int], **options: Any) -> Answer:
        return self._run(self._ask(tokens, **options))

    def ask_together(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
        async def gather() -> list[Answer]:
            return await asyncio.gather(*(self._ask(tokens, **options) for tokens in prompts))

        return self._run(gather())

    async def _ask(
        self,
        tokens: Sequence[int],
        *,
        mode: str = "exact",
        tenant: str = "default",
        rotate: bool = True,
        max_tokens: int = 8,
        ignore_eos: bool = False,
        logprobs: int | None = None,
    ) -> Answer:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        from ropewalk.cluster.engine.request import RequestSettings

        settings = RequestSettings(mode=mode, tenant=tenant, rotate=rotate)
        extra = {"kv_transfer_params": {"ropewalk": settings.to_params()}} if self.store_root is not None else None
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos, logprobs=logprobs, extra_args=extra
        )
        first: dict[int, float] = {}
        output: Any = None
        async for output in self.client.generate(tokens_input(list(tokens)), params, uuid.uuid4().hex):
            if logprobs is not None and not first:
                first = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
        reports = self.client.pop_reports(settings.key) if self.store_root is not None else [None]
        return Answer(tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0, first, reports[0])

    def forget_prefixes(self) -> None:
        """Empty vLLM's own prefix cache."""
        assert self._run(self.llm.reset_prefix_cache())

    def settle(self) -> None:
        """Wait until what was answered is stored."""
        self._run(self.client.wait_for_saves())

    def stop(self) -> None:
        self.llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)


StartEngines = Callable[..., list[Engine]]


@pytest.fixture(scope="module")
def start_engines() -> Iterator[StartEngines]:
    """Start engines together, one for each store given (None: plain vLLM); a later start ends the ones before.

    What shares a start shares the machine, so that only engines that are compared run side by side.
    """
    started: list[Engine] = []
    roots: set[Path] = set()

    def end() -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Engine.stop, started))
        started.clear()

    def start(model: str, *stores: Path | None, **engine_args: Any) -> list[Engine]:
        end()
        roots.update(store for store in stores if store is not None)
        with ThreadPoolExecutor() as pool:
            started.extend(pool.map(lambda store: Engine(model, store_root=store, **engine_args), stores))
        return list(started)

    yield start
    end()
    for root in roots:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def new_store() -> Callable[[], Path]:
    """Name a store root on tmpfs, where there is one."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
    return lambda: base / f"ropewalk-test-{uuid.uuid4().hex}"
