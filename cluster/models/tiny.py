"""Tiny models with random weights, one for each family of architectures: what tests and benchmarks run through vLLM.

Every model has its family's configuration class, position encoding and attention, with few layers of little width. The
weights are drawn so that outputs vary and attention is selective: with a usual initialisation, positions hardly matter.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
SEED = 7

PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}

MLA: dict[str, Any] = SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # the only size that vLLM's AMX kernel takes, with a band of 64
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "q_lora_rank": 96,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    **EXPERTS,
}


V3: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Experts chosen as DeepSeek-V3 does, which transformers takes for granted and vLLM wants to be told."""


def _yarn(factor: float, theta: float = 10_000.0, **more: float) -> dict[str, Any]:
    original = {"original_max_position_embeddings": int(SIZES["max_position_embeddings"] / factor)}
    return {"rope_type": "yarn", "rope_theta": theta, "factor": factor, **original, **more}


@dataclass(frozen=True, slots=True)
class Family:
    """A family's name, model type in transformers, settings of its configuration, and what is written over them.

    `engine_args` are engine arguments that the family needs beyond its files.
    """

    name: str
    model_type: str
    settings: dict[str, Any]
    written: dict[str, Any] = field(default_factory=dict)
    engine_args: dict[str, Any] = field(default_factory=dict)


def _mla(name: str, model_type: str, rope: dict[str, Any], **more: Any) -> Family:
    written = more.pop("written", {})
    engine_args = more.pop("engine_args", {})
    return Family(name, model_type, MLA | {"rope_parameters": rope} | more, written, engine_args)


def _gqa(name: str, model_type: str, rope: dict[str, Any], **more: Any) -> Family:
    return Family(name, model_type, SIZES | {"rope_parameters": rope} | more)


FACTOR_ONE = {"hf_overrides": {"rope_parameters": _yarn(1.0, 50_000.0)}}
"""Plain RoPE, written as YaRN: vLLM's CPU build turns MLA keys of plain RoPE wrongly (docs/architectures.md)."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}

SERVED: tuple[Family, ...] = (
    _mla("DeepSeek-V2-Lite", "deepseek_v2", _yarn(4.0, mscale=0.707, mscale_all_dim=0.707), q_lora_rank=None),
    _mla("DeepSeek-V2", "deepseek_v2", _yarn(4.0, mscale=1.0, mscale_all_dim=1.0)),
    _mla("DeepSeek-V3", "deepseek_v3", _yarn(4.0, mscale=1.0, mscale_all_dim=1.0), **V3),
    _mla(
        "Kimi-K2",
        "deepseek_v3",
        _yarn(4.0, 50_000.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0),
        **V3,
        written={"model_type": "kimi_k2"},
    ),
    _mla(
        "Mistral Large 3",
        "deepseek_v3",
        _yarn(4.0, apply_yarn_scaling=False),
        **V3,
        written={"architectures": ["MistralLarge3ForCausalLM"]},
    ),
    _mla("Moonlight", "deepseek_v3", PLAIN | {"rope_theta": 50_000.0}, q_lora_rank=None, **V3),
    _mla(
        "Moonlight, RoPE written as YaRN of factor 1",
        "deepseek_v3",
        PLAIN | {"rope_theta": 50_000.0},
        q_lora_rank=None,
        **V3,
        engine_args=FACTOR_ONE,
    ),
    _mla("GLM-4.7-Flash", "glm4_moe_lite", PLAIN | {"rope_theta": 50_000.0}, **V3),
    _mla(
        "GLM-4.7-Flash, RoPE written as YaRN of factor 1",
        "glm4_moe_lite",
        PLAIN | {"rope_theta": 50_000.0},
        **V3,
        engine_args=FACTOR_ONE,
    ),
    _gqa("Llama 3.1", "llama", LLAMA3),
    _gqa("Llama 2, linear scaling", "llama", PLAIN | {"rope_type": "linear", "factor": 4.0}, num_key_value_heads=4),
    _gqa("Qwen2.5", "qwen2", PLAIN | {"rope_theta": 1e6}),
    _gqa("Qwen2.5, YaRN", "qwen2", _yarn(4.0, 1e6)),
    _gqa("Qwen3", "qwen3", PLAIN | {"rope_theta": 1e6}, head_dim=64),
    _gqa("Qwen3-MoE", "qwen3_moe", PLAIN | {"rope_theta": 1e6}, head_dim=64, num_experts=4, **EXPERTS),
    _gqa("Mistral", "mistral", PLAIN | {"rope_theta": 1e6}, sliding_window=None, head_dim=32),
    _gqa("Phi-2", "phi", PLAIN | {"partial_rotary_factor": 0.5}, num_key_value_heads=4, intermediate_size=512),
    # Wide heads: vLLM's CPU kernel turns pairs by eights, and writes past the end of 12.
    _gqa("Phi-4", "phi3", PLAIN | {"partial_rotary_factor": 0.75}, hidden_size=256),
    _gqa("GLM-4", "glm4", PLAIN | {"partial_rotary_factor": 0.5}, head_dim=32),
    _gqa("Command R", "cohere", PLAIN | {"rope_theta": 4e6}),
)
"""Families that keep KV for every token, with RoPE."""


DEEP_MLA = _mla(
    "deep MLA, random weights",
    "deepseek_v2",
    _yarn(4.0, mscale=0.707, mscale_all_dim=0.707),
    q_lora_rank=None,
    num_hidden_layers=27,
    first_k_dense_replace=27,  # experts chosen by near-ties would hide what attention does
)
"""As deep as DeepSeek-V2-Lite: what its layers note of a text outlives the text's own rows."""

SMALL_HEADS = SIZES | {"head_dim": 32}

REFUSED: tuple[Family, ...] = (
    Family("Gemma 2", "gemma2", SMALL_HEADS),
    Family("Gemma 3", "gemma3_text", SMALL_HEADS | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
    Family("gpt-oss", "gpt_oss", SMALL_HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Mistral 7B v0.1", "mistral", SIZES | {"sliding_window": 1024}),
    Family("Jamba", "jamba", SIZES | {"num_experts": 2}),
    Family("Nemotron-H", "nemotron_h", SMALL_HEADS | {"layers_block_type": ["mamba", "mlp", "attention"]}),
    Family("Qwen3-Next", "qwen3_next", SMALL_HEADS | {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("BLOOM", "bloom", {"vocab_size": VOCABULARY, "hidden_size": 128, "n_layer": 2, "n_head": 4}),
    Family("GPT-2", "gpt2", {"vocab_size": VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4}),
    _gqa("Qwen2-VL, its text model", "qwen2", PLAIN | {"mrope_section": [4, 6, 6]}),
    _gqa("Llama, dynamic NTK", "llama", PLAIN | {"rope_type": "dynamic", "factor": 2.0}),
    _gqa(
        "Phi-4-mini (LongRoPE)",
        "phi3",
        {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            "original_max_position_embeddings": 1024,
        },
    ),
)
"""Families of which some part has no KV for every token, or whose keys cannot be turned: known by configuration."""


def write_config(family: Family, folder: Path) -> Path:
    """Write the configuration alone into `folder`; return it."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(family.model_type, **family.settings)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family.model_type)]
    config.save_pretrained(folder)
    _overwrite(folder, family.written)
    return folder


def build(family: Family) -> Any:
    """Return the model as transformers computes it, in float32, on the CPU, with weights that are exact in bfloat16.

    The same weights every time.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family.model_type, **family.settings)
    config.model_type = family.model_type  # vLLM renames the classes of configurations that it lends to other types
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter.shape, generator).bfloat16())
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_((0.1 * torch.randn(buffer.shape, generator=generator)).bfloat16())
    return model.eval()


def write(family: Family, folder: Path) -> Path:
    """Write the model that `build` returns into `folder`, in bfloat16; return the folder."""
    build(family).to(torch.bfloat16).save_pretrained(folder)
    _overwrite(folder, family.written)
    return folder


def _overwrite(folder: Path, written: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | written, indent=2))


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.3 * noise if name.endswith("bias") else 1 + 0.1 * noise
    if "embed_tokens" in name:
        return noise
    # Selective attention: logits of a head with a standard deviation of about three.
    selective = any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_a_proj", "qkv_proj"))
    gain = 1.7 if selective else 2.5 if "lm_head" in name else 1.0
    return noise * (gain / math.sqrt(shape[-1]))
