"""What an engine's KV is, read from its configuration: can it be stored, can it be turned, what is it called."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ropewalk.cluster.store.chunk import FORMAT
from ropewalk.kernels.rope import RotaryFacts, UnsupportedRope, facts_from_config

HEAD_BYTES = 1 << 20
"""Bytes hashed at the beginning of a weight file: a safetensors file has all names, shapes and offsets there."""

SAMPLE_BYTES, SAMPLE_STRIDE, MAX_SAMPLES = 256, 1 << 16, 4096
"""Bytes hashed at each of many places of a weight file: every 64 KiB, or 4,096 of them in a large one."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """`refused` says why nothing is stored or taken, `reuse_refused` why keys cannot be turned; None: it can be done.

    `fingerprint` names the KV: chunks are shared between engines with the same one. `rotary` is None when
    `reuse_refused` is set.
    """

    fingerprint: str
    is_mla: bool
    rotary: RotaryFacts | None
    refused: str | None
    reuse_refused: str | None


def engine_facts(vllm_config: Any) -> EngineFacts:
    """Read the facts of a `VllmConfig`."""
    config = vllm_config.model_config.hf_text_config.to_dict()
    is_mla = bool(vllm_config.model_config.use_mla)
    rotary: RotaryFacts | None = None
    reuse_refused: str | None = None
    try:
        rotary = facts_from_config(config)
    except UnsupportedRope as error:
        reuse_refused = str(error)
    return EngineFacts(_fingerprint(vllm_config), is_mla, rotary, _refusal(vllm_config, config), reuse_refused)


def _refusal(vllm_config: Any, config: dict[str, Any]) -> str | None:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.runner_type != "generate":
        return f"runner type {model.runner_type!r} does not generate"
    if model.is_encoder_decoder:
        return "cross-attention KV does not depend on the prompt's tokens alone"
    if model.is_hybrid or model.is_attention_free:
        return "the model has no per-token KV in some layers (Mamba, linear attention)"
    if model.get_sliding_window() or any("sliding" in str(kind) for kind in config.get("layer_types") or ()):
        return "sliding-window layers do not keep KV for every token"
    if vllm_config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        return f"KV cache dtype {vllm_config.cache_config.cache_dtype!r} is not supported"
    if vllm_config.speculative_config is not None:
        return "the draft model of speculative decoding has a KV cache of its own"
    if vllm_config.scheduler_config.async_scheduling:
        # vLLM would decode on KV whose load has failed before it learns of the failure.
        return "asynchronous scheduling must be off (engine argument async_scheduling: false)"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported yet"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        return "decode context parallelism splits KV between ranks"
    return None


def _fingerprint(vllm_config: Any) -> str:
    """Hash what decides the KV's bytes: weights, architecture, dtypes, attention's form, parallel layout, file format.

    And the maximum length, for LongRoPE's choice of frequencies and Llama 4's attention scaling depend on it.
    """
    model = vllm_config.model_config
    config = {k: v for k, v in model.hf_text_config.to_dict().items() if k not in ("_name_or_path", "name_or_path")}
    text = json.dumps(config, sort_keys=True, default=str)
    parts = [
        FORMAT,
        text,
        str(model.dtype),
        str(vllm_config.cache_config.cache_dtype),
        str(model.quantization),
        f"tp{vllm_config.parallel_config.tensor_parallel_size}",
        f"mla{model.use_mla}",
        f"length{model.max_model_len}" if re.search("longrope|llama4", text) else "",
        f"weights{vllm_config.load_config.load_format}",  # `dummy` ones are random
        _weights_id(model.model, model.revision),
    ]
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def _weights_id(model: str, revision: str | None) -> str:
    """Identify weights without reading them all: each file's name and size, its head, and samples all over it.

    Fine-tunes of one model have files of the same shape; samples this dense hit every tensor larger than a few MB.
    """
    folder = _snapshot(model, revision)
    if folder is None:
        return f"{model}@{revision}"
    hasher = xxhash.xxh3_128()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".gguf")):
        size = path.stat().st_size
        hasher.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            hasher.update(file.read(HEAD_BYTES))
            for offset in range(0, size, max(SAMPLE_STRIDE, size // MAX_SAMPLES)):
                file.seek(offset)
                hasher.update(file.read(SAMPLE_BYTES))
            file.seek(max(size - SAMPLE_BYTES, 0))
            hasher.update(file.read(SAMPLE_BYTES))
    return hasher.hexdigest()


def _snapshot(model: str, revision: str | None) -> Path | None:
    """Return the folder that holds a model's files, or None when it has not been downloaded."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
