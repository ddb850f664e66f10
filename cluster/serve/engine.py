"""The vLLM engine of a replica, with the planned engine around its client.

This is the only seam between Ray Serve LLM and Ropewalk's engine: vLLM's OpenAI layer is built on whatever
`_start_async_llm_engine` returns.
"""

from __future__ import annotations

from typing import Any

from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from vllm.tokenizers.registry import cached_tokenizer_from_config

from ropewalk.cluster.engine.planned import PlannedEngine, wrap_engine
from ropewalk.cluster.engine.request import RequestReport
from ropewalk.cluster.engine.settings import EngineSettings, resolve_markers

UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""By its full name: on CPU vLLM takes the short name `uni` for `mp`, as it cannot set OpenMP's environment for a worker
that shares the engine's process. Ropewalk sets it when the replica starts (`application.py`)."""


class PlainEngine(VLLMEngine):
    """Stock `VLLMEngine`, its CPU worker in the engine's process.

    Ray Serve LLM gives every CPU engine a worker process of its own. With one worker that is a process more to start,
    and the two spin on shared memory while they wait for each other: on few cores they take them from the model.
    """

    _oai_serving_tokenization: Any

    async def start(self) -> None:
        """Start the engine, with the tokenization that Ray 2.60 looks for under a name that vLLM 0.29 gave up."""
        await super().start()
        if self._oai_serving_tokenization is None:
            self._oai_serving_tokenization = getattr(self._app_state, "serving_tokenization", None)

    def _start_async_llm_engine(self, vllm_engine_args: Any, vllm_engine_config: Any, placement_group: Any) -> Any:
        parallel = vllm_engine_config.parallel_config
        if vllm_engine_config.device_config.device_type == "cpu" and parallel.world_size == 1:
            parallel.distributed_executor_backend = UNIPROC
        return super()._start_async_llm_engine(vllm_engine_args, vllm_engine_config, placement_group)


class AgentEngine(PlainEngine):
    """`PlainEngine` whose engine client plans each request."""

    def __init__(self, llm_config: Any, *, settings: EngineSettings) -> None:
        super().__init__(llm_config)
        self._settings = settings
        self._tokenizer: Any = None
        self.planned: PlannedEngine | None = None

    def _start_async_llm_engine(self, vllm_engine_args: Any, vllm_engine_config: Any, placement_group: Any) -> Any:
        settings = resolve_markers(self._settings, vllm_engine_config)
        client = super()._start_async_llm_engine(vllm_engine_args, vllm_engine_config, placement_group)
        self._tokenizer = cached_tokenizer_from_config(vllm_engine_config.model_config)
        self.planned = wrap_engine(client, vllm_engine_config, settings)
        return self.planned

    async def start(self) -> None:
        """Start the engine and probe it, so that no request waits for the probe."""
        await super().start()
        if self.planned is not None:
            await self.planned.prepare()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def pop_reports(self, key: str) -> list[RequestReport]:
        """What happened to the request with this key, one report a prompt."""
        return self.planned.pop_reports(key) if self.planned else []

    def status(self) -> dict[str, Any]:
        """Turn probe, refusal and store statistics of this replica."""
        return self.planned.status() if self.planned else {}


class LocalModelCallback(CallbackBase):
    """Skips Ray's download step, which costs a process and its imports, for models that are files already."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False
