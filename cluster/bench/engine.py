"""A vLLM engine in this process, with or without Ropewalk, driven by plain function calls."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ropewalk.cluster.config import is_cpu_build
from ropewalk.cluster.engine.request import PARAMS_KEY, Mode, RequestReport, RequestSettings
from ropewalk.cluster.engine.settings import WORKER_EXTENSION, EngineSettings, kv_transfer_config, resolve_markers
from ropewalk.cluster.models import resolve

BLOCK_SIZE = 32
TIMEOUT_S = 600

MAX_HOLD_S = 10.0
"""Patience with saves: on a machine that stalls for seconds, a study would else miss what it has just asked."""
FORCING = "ropewalk.cluster.bench.forcing:Forcing"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    `num_cached` is vLLM's count of cached prompt tokens, less what Ropewalk had to compute. `logprobs` is `[n, V]`
    float32, log-probabilities of the whole vocabulary for each of the `n` tokens, if they were asked for. `ttft_s` are
    seconds from the call to the first token. `report` is Ropewalk's.
    """

    token_ids: tuple[int, ...]
    num_cached: int
    logprobs: npt.NDArray[np.float32] | None
    ttft_s: float
    report: RequestReport | None

    @property
    def first_logprobs(self) -> npt.NDArray[np.float32]:
        """Log-probabilities of the first token, `[V]`."""
        assert self.logprobs is not None
        first: npt.NDArray[np.float32] = self.logprobs[0]
        return first


class Engine:
    """An `AsyncLLM` in a thread with its own event loop. `store_root` puts Ropewalk into and around it."""

    def __init__(
        self,
        model: str,
        *,
        store_root: Path | None,
        disk_root: Path | None = None,
        settings: dict[str, Any] | None = None,
        forcing: bool = False,
        threads: int | None = None,
        **engine_args: Any,
    ) -> None:
        """Start it: some ten seconds. `disk_root` is the store's second tier; `settings` are `EngineSettings` beside
        the roots, the rest vLLM's arguments. On CPUs, `threads` compute; by default as many as there are cores.
        """
        if is_cpu_build():
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
            # vLLM would bind every engine's threads to the same cores.
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            os.environ["OMP_NUM_THREADS"] = str(threads or min(os.cpu_count() or 2, 16))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.num_preemptions = 0
        self._is_stopped = False
        self.store_root, self.disk_root = store_root, disk_root
        if forcing:
            engine_args["logits_processors"] = [FORCING]
        tiers = {"store_root": store_root, "store_budget_bytes": 1 << 30, "max_hold_s": MAX_HOLD_S}
        if disk_root is not None:
            tiers |= {"disk_root": disk_root, "disk_budget_bytes": 1 << 30}
        self.run(self._start(model, tiers | (settings or {}), engine_args))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the engine's event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=TIMEOUT_S)

    async def _start(self, model: str, settings: dict[str, Any], engine_args: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase

        from ropewalk.cluster.engine.planned import wrap_engine

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
            "max_model_len": 2048,
            "block_size": BLOCK_SIZE,
            "enable_prefix_caching": True,
            "max_logprobs": -1,
            "use_tqdm_on_load": False,
        }
        if is_cpu_build():
            arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        if self.store_root is not None:
            engine_settings = EngineSettings.model_validate(settings)
            arguments["worker_extension_cls"] = WORKER_EXTENSION
            arguments["kv_transfer_config"] = kv_transfer_config(engine_settings)
        config = AsyncEngineArgs(**(arguments | engine_args)).create_engine_config()
        if self.store_root is not None:
            engine_settings = resolve_markers(engine_settings, config)
        self.vocab_size = int(config.model_config.get_vocab_size())
        self.llm = AsyncLLM.from_vllm_config(config, stat_loggers=[CountPreemptions])
        self.client: Any = self.llm
        if self.store_root is not None:
            self.client = wrap_engine(self.llm, config, engine_settings)
            await self.client.prepare()

    def ask(self, tokens: Sequence[int], **options: Any) -> Answer:
        """Answer one prompt; options as `ask_async`. What was answered before is stored by then, so that what a request
        finds is no matter of luck.
        """
        self.settle()
        answer: Answer = self.run(self.ask_async(tokens, **options))
        return answer

    def ask_together(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
        """Answer several prompts, sent in one moment."""
        return self.gather([self.ask_async(tokens, **options) for tokens in prompts])

    def gather(self, work: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
        """Run several calls of `ask_async` at once."""
        self.settle()

        async def gathered() -> list[Answer]:
            return await asyncio.gather(*work)

        answers: list[Answer] = self.run(gathered())
        return answers

    async def ask_async(
        self,
        tokens: Sequence[int],
        *,
        mode: Mode = "exact",
        tenant: str = "default",
        max_tokens: int = 8,
        ignore_eos: bool = False,
        logprobs: bool = False,
        forced: Sequence[int] = (),
        times: list[float] | None = None,
        **settings: Any,
    ) -> Answer:
        """Answer one prompt greedily. `settings` are further fields of `RequestSettings`; plain vLLM ignores them.

        `logprobs` asks for log-probabilities of the whole vocabulary. `forced` tokens are said whatever the model would
        say (the engine must have been started with `forcing=True`). When tokens came is added to `times`, in seconds.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        from ropewalk.cluster.bench.forcing import KEY as FORCED_KEY

        asked = RequestSettings(mode=mode, tenant=tenant, **settings)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=ignore_eos,
            logprobs=-1 if logprobs else None,
            flat_logprobs=True,
            detokenize=False,
        )
        extra: dict[str, Any] = {FORCED_KEY: list(forced)} if forced else {}
        if self.store_root is not None:
            extra["kv_transfer_params"] = {PARAMS_KEY: asked.to_params()}
        params.extra_args = extra or None
        last: Any = None
        ttft_s = 0.0
        start = time.perf_counter()
        async for output in self.client.generate(tokens_input(list(tokens)), params, uuid.uuid4().hex):
            now = time.perf_counter()
            ttft_s = ttft_s or now - start
            if times is not None:
                times.append(now)
            last = output
        reports = self.client.pop_reports(asked.key) if self.store_root is not None else [None]
        completion = last.outputs[0]
        found = _matrix(completion.logprobs, self.vocab_size) if logprobs else None
        return Answer(tuple(completion.token_ids), last.num_cached_tokens or 0, found, ttft_s, reports[0])

    def forget_prefixes(self) -> None:
        """Empty vLLM's own prefix cache, once no request's blocks are held for saving."""
        deadline = time.monotonic() + 30
        while not self.run(self.llm.reset_prefix_cache()):
            assert time.monotonic() < deadline, "blocks are held for ever"

    def forget_everything(self) -> None:
        """Empty the prefix cache, and make the engine forget what it has learned of sessions and agents."""
        self.forget_prefixes()
        self.run(self.llm.reset_prefix_cache(reset_connector=True))

    def settle(self) -> None:
        """Wait until what was answered is stored."""
        if self.store_root is not None:
            self.run(self.client.wait_for_saves())

    def stop(self) -> None:
        """End the engine and its thread. Once more does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True

        async def end() -> None:
            self.llm.shutdown()  # here, or its own tasks would report the engine's death
            await asyncio.sleep(0.1)

        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)


def _matrix(flat: Any, vocab_size: int) -> npt.NDArray[np.float32]:
    """vLLM's flat log-probabilities as `[n, V]`."""
    rows = np.full((len(flat.start_indices), vocab_size), -np.inf, dtype=np.float32)
    for row, first, last in zip(rows, flat.start_indices, flat.end_indices, strict=True):
        row[np.asarray(flat.token_ids[first:last])] = flat.logprobs[first:last]
    return rows
