"""Ropewalk's router in a Ray Serve LLM application of your own: stock vLLM, stock servers and ingress.

    python own_llm_app.py MODEL [REPLICAS [PORT]]

Clients send the headers `x-session-id` and `x-agent`: a session goes back to the replica that has its history, agents
go where their prompts are warm, and nobody goes where the queue is too long.
"""

import sys

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMConfig, build_openai_app
from vllm.platforms import current_platform

from ropewalk.cluster.serve.router import AgentRouter

model, replicas, port = [*sys.argv[1:], "2", "8000"][:3] if len(sys.argv) == 2 else [*sys.argv[1:], "8000"][:3]
on_cpus = current_platform.is_cpu()

config = LLMConfig(
    model_loading_config={"model_id": "model", "model_source": model},
    deployment_config={
        "num_replicas": int(replicas),
        "ray_actor_options": {"num_cpus": 0},
        # There is neither a scheduler nor a store of Ropewalk's here: the router goes by what it has routed itself.
        "request_router_config": RequestRouterConfig(
            request_router_class=AgentRouter, request_router_kwargs={"scheduler": False, "store": False}
        ),
    },
    placement_group_config={"bundle_per_worker": {"CPU": 1} if on_cpus else {"GPU": 1}},
    engine_kwargs={"enable_prompt_tokens_details": True}
    | ({"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 2**28} if on_cpus else {}),
)

if __name__ == "__main__":
    serve.start(http_options={"port": int(port)})
    no_cpu = {"ray_actor_options": {"num_cpus": 0}}  # replicas may have reserved all
    serve.run(build_openai_app({"llm_configs": [config], "ingress_deployment_config": no_cpu}), blocking=True)
