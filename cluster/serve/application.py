"""Composes the Ray Serve application: one deployment a model, and the ingress in front of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.llm._internal.serve.core.server.builder import build_llm_deployment
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.llm.request_router import PrefixCacheAffinityRouter

from ropewalk.cluster.config import ClusterConfig, ModelConfig
from ropewalk.cluster.engine.settings import WORKER_EXTENSION, EngineSettings, kv_transfer_config
from ropewalk.cluster.serve.engine import LocalModelCallback
from ropewalk.cluster.serve.ingress import ingress_class
from ropewalk.cluster.serve.router import AgentRouter
from ropewalk.cluster.serve.server import AgentServer, PlainServer
from ropewalk.cluster.serve.shares import cpus_per_replica
from ropewalk.scheduler.prewarm import PrewarmSettings
from ropewalk.scheduler.state import SchedulerSettings

APP_NAME = "ropewalk"
INGRESS_NAME = "Ingress"

MAX_CONSTRUCTOR_RETRIES = 1
"""Engines fail for reasons that a second try rarely changes; Ray's default of 20 hides the reason for many minutes."""


def deployment_name(model: ModelConfig) -> str:
    """The name under which Ray Serve runs the model (it may not hold `/` or `.`)."""
    return f"{'vllm' if model.plain else 'ropewalk'}:{model.name.replace('/', '--').replace('.', '_')}"


def build_application(
    config: ClusterConfig, sources: Mapping[str, str], store_root: Path, *, cpus_of_nodes: Sequence[int], loopback: bool
) -> Application:
    """Describe everything that Ray Serve is to run. Ray must be connected.

    Args:
        config: checked settings.
        sources: what vLLM loads, by model name (`ropewalk.cluster.config.resolve_sources`).
        store_root: directory of the chunk store, the same on every node.
        cpus_of_nodes: CPUs of each machine that replicas may run on.
        loopback: keep vLLM's own sockets on 127.0.0.1 (a cluster of one machine).
    """
    llm_configs = {
        model.name: _llm_config(
            config, model, sources[model.name], store_root, cpus_per_replica(config, model, cpus_of_nodes), loopback
        )
        for model in config.models
    }
    deployments = {
        model.name: _model_deployment(config, model, llm_configs[model.name], store_root) for model in config.models
    }
    ingress = serve.deployment(
        ingress_class(),
        name=INGRESS_NAME,
        num_replicas=1,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(
        llm_deployments=deployments,
        model_cards={name: to_model_metadata(name, llm_config) for name, llm_config in llm_configs.items()},
        models=[
            {
                "id": model.name,
                "root": sources[model.name],
                "max_model_len": model.max_model_len,
                "plain": model.plain,
            }
            for model in config.models
        ],
        deployments={model.name: deployment_name(model) for model in config.models},
        app_name=APP_NAME,
        scheduler=scheduler_settings(config),
        prewarms=prewarm_settings(config) is not None,
    )


def scheduler_settings(config: ClusterConfig) -> SchedulerSettings | None:
    """Settings of the scheduler actor, `None` when it is switched off."""
    if not config.scheduler.enabled:
        return None
    path = config.scheduler.state_path
    return SchedulerSettings(state_path=str(path) if path is not None else None)


def prewarm_settings(config: ClusterConfig) -> PrewarmSettings | None:
    """Settings of the prewarmers, `None` when they, or the scheduler whose forecasts they follow, are switched off."""
    if not (config.prewarm.enabled and config.scheduler.enabled):
        return None
    return PrewarmSettings(**config.prewarm.model_dump(exclude={"enabled"}))


def engine_settings(config: ClusterConfig, model: ModelConfig, store_root: Path) -> EngineSettings:
    """What the planned engine and the connector of this model need to know."""
    return EngineSettings.model_validate(
        {
            "store_root": store_root,
            "store_budget_bytes": config.store.budget or 0,
            "disk_root": config.store.disk_root,
            "disk_budget_bytes": config.store.disk_budget or 0,
            "retention": model.retention,
            "carve_out": model.chunking.carve_out,
            "min_run": model.chunking.min_run,
            "boundary": model.chunking.boundary_recompute,
            "second_pass": model.chunking.second_pass,
            "markers": model.chunking.markers,
            "chunk_mean": model.chunking.mean,
            "chunk_min": model.chunking.minimum,
            "chunk_max": model.chunking.maximum,
        }
    )


CPU_KV_CACHE_GIB = 4.0
"""For each replica on CPUs, unless said otherwise: vLLM would take 92 % of the machine's memory, and refuse to start
where somebody else has a tenth of it."""


def engine_kwargs(model: ModelConfig, settings: EngineSettings | None) -> dict[str, Any]:
    """vLLM's engine arguments. Both arms of a comparison get the same ones, apart from the connector."""
    arguments: dict[str, Any] = {"dtype": model.dtype, "enable_prompt_tokens_details": True}
    if model.max_model_len is not None:
        arguments["max_model_len"] = model.max_model_len
    kv_cache_gib = model.kv_cache_gib
    if kv_cache_gib is None and model.gpus_per_replica == 0 and "gpu_memory_utilization" not in model.engine_args:
        kv_cache_gib = CPU_KV_CACHE_GIB
    if kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    if model.gpus_per_replica == 0:
        arguments["enforce_eager"] = True  # compiling takes a minute a replica and gains little on small CPU models
        # vLLM's 128 would cost plain prefix hits half of that each, and reuse as much for every gap.
        arguments["block_size"] = 32
    arguments.update(model.engine_args)
    if settings is not None:
        arguments.setdefault("worker_extension_cls", WORKER_EXTENSION)
        arguments["kv_transfer_config"] = kv_transfer_config(settings)
        arguments["async_scheduling"] = False  # see `ropewalk.cluster.engine.facts`
    return arguments


def _llm_config(
    config: ClusterConfig, model: ModelConfig, source: str, store_root: Path, num_cpus: int, loopback: bool
) -> LLMConfig:
    settings = None if model.plain else engine_settings(config, model, store_root)
    deployment: dict[str, Any] = {
        "num_replicas": model.replicas,
        "ray_actor_options": {"num_cpus": 0},
        "max_constructor_retry_count": MAX_CONSTRUCTOR_RETRIES,
        "graceful_shutdown_timeout_s": 5,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_timeout_s": 30,  # Ray's 10 s end replicas that merely wait for a busy CPU
    }
    if (router := request_router(config, model)) is not None:
        deployment["request_router_config"] = router
    bundle = worker_bundle(model, num_cpus)
    return LLMConfig(
        model_loading_config={"model_id": model.name, "model_source": source},
        engine_kwargs=engine_kwargs(model, settings),
        deployment_config=deployment,
        placement_group_config={"bundle_per_worker": bundle},
        runtime_env={"env_vars": _environment(model, source, num_cpus, loopback)},
        experimental_configs={"stream_batching_interval_ms": 0},
        callback_config={"callback_class": LocalModelCallback} if Path(source).is_dir() else {},
    )


def request_router(config: ClusterConfig, model: ModelConfig) -> RequestRouterConfig | None:
    """Which router sends requests to the replicas; None: Ray Serve's own, power of two choices."""
    router = model.router or ("power-of-two" if model.plain else "ropewalk")
    if router == "power-of-two":
        return None
    if router == "prefix-affinity":
        return RequestRouterConfig(
            request_router_class=PrefixCacheAffinityRouter,
            request_router_kwargs=model.router_args.model_dump(exclude_none=True),
        )
    # Replicas of plain vLLM tell the scheduler nothing, and share nothing.
    return RequestRouterConfig(
        request_router_class=AgentRouter,
        request_router_kwargs={
            "scheduler": config.scheduler.enabled and not model.plain,
            "store": not model.plain,
            "mode": model.reuse,
        },
    )


def worker_bundle(model: ModelConfig, num_cpus: int) -> dict[str, float]:
    """What one worker of a replica reserves; tensor and pipeline parallel replicas have several workers."""
    parallel = ("tensor_parallel_size", "pipeline_parallel_size")
    num_workers = math.prod(int(model.engine_args.get(name, 1)) for name in parallel)
    bundle = {"CPU": float(max(1, num_cpus // num_workers))}
    if model.gpus_per_replica:
        bundle["GPU"] = model.gpus_per_replica / num_workers
    return bundle


def _model_deployment(config: ClusterConfig, model: ModelConfig, llm_config: LLMConfig, store_root: Path) -> Any:
    bind_kwargs: dict[str, Any] = {}
    if not model.plain:
        bind_kwargs = {
            "engine_settings": engine_settings(config, model, store_root),
            "default_mode": model.reuse,
            "default_edits": model.edits,
            "policies": model.policies,
            "scheduler": scheduler_settings(config),
            "prewarm": prewarm_settings(config),
        }
    return build_llm_deployment(
        llm_config,
        deployment_cls=PlainServer if model.plain else AgentServer,
        bind_kwargs=bind_kwargs,
        override_serve_options={"name": deployment_name(model)},
    )


def _environment(model: ModelConfig, source: str, num_cpus: int, loopback: bool) -> dict[str, str]:
    environment = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1"}
    if loopback:
        environment["VLLM_HOST_IP"] = "127.0.0.1"
    if model.gpus_per_replica == 0:
        # vLLM would bind every replica to the same cores, and to fewer of them when a connector is configured.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        environment["OMP_NUM_THREADS"] = str(num_cpus)
    if Path(source).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    return environment
