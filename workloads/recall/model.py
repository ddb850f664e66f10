"""A small DeepSeek-V2 in plain torch: multi-head latent attention with its cache rows in the open.

What a serving engine caches for a token is one row per layer: the latent `c_kv` (512 numbers, no position) and the
rotary band `k_pe` (64 numbers, turned by the token's position). This model takes such rows and returns them, so that a
test can move, turn or remove them and see what the model makes of it (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).
Parameter names are those of Hugging Face's `DeepseekV2ForCausalLM`; the rotary pairing is DeepSeek's (interleaved).

Shapes: `B` sequences, `T` new tokens, `S` all tokens (cached and new), `H` heads, `L` layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vocabulary import VOCABULARY_SIZE, vocabulary


@dataclass(frozen=True, slots=True)
class RecallConfig:
    """Sizes of the model, named as in Hugging Face's `config.json`."""

    vocab_size: int = VOCABULARY_SIZE
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 64
    v_head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192

    def to_hugging_face(self) -> dict[str, Any]:
        """`config.json` of a `DeepseekV2ForCausalLM` with these sizes, all layers dense.

        The rotary embedding is plain, but written as YaRN with factor 1: vLLM's CPU build turns MLA keys wrongly for
        the type `default` (its C++ operator takes the wrong stride for the 3-D view of `k_pe`; seen in 0.29.0).
        """
        words = vocabulary()
        sizes = asdict(self)
        theta = sizes.pop("rope_theta")
        rope = {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": self.max_position_embeddings,
        }
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            **sizes,
            "rope_theta": theta,
            "rope_scaling": rope,
            "num_key_value_heads": self.num_attention_heads,
            "q_lora_rank": None,
            "first_k_dense_replace": self.num_hidden_layers,
            # No layer has experts; the numbers only have to be there.
            "moe_layer_freq": 1,
            "n_routed_experts": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "torch_dtype": "bfloat16",
            "pad_token_id": words.pad,
            "bos_token_id": words.bos,
            "eos_token_id": words.end,
        }

    @classmethod
    def from_hugging_face(cls, config: dict[str, Any]) -> RecallConfig:
        """The sizes in a `config.json`."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class LatentRows:
    """Cache rows of `S` tokens: `latent` [L, B, S, kv_lora_rank] and `rotary` [L, B, S, qk_rope_head_dim], turned."""

    latent: Tensor
    rotary: Tensor

    def __len__(self) -> int:
        return self.latent.shape[2]

    def __getitem__(self, tokens: slice) -> LatentRows:
        return LatentRows(self.latent[:, :, tokens], self.rotary[:, :, tokens])

    @staticmethod
    def concatenate(parts: Sequence[LatentRows]) -> LatentRows:
        """The rows of all parts, one part after the other."""
        return LatentRows(torch.cat([part.latent for part in parts], 2), torch.cat([part.rotary for part in parts], 2))

    def turned(self, delta: int, config: RecallConfig) -> LatentRows:
        """The rows as if every token stood `delta` positions later (earlier when negative)."""
        shift = torch.full((1, 1, 1), delta, device=self.rotary.device)
        cos, sin = rotary_tables(shift, config)
        return LatentRows(self.latent, rotate_interleaved(self.rotary, cos, sin))


def rotary_tables(positions: Tensor, config: RecallConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., qk_rope_head_dim / 2] in float32 for integer `positions` [...]."""
    exponents = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32, device=positions.device)
    inverse_frequencies = config.rope_theta ** (-exponents / config.qk_rope_head_dim)
    angles = positions.to(torch.float32)[..., None] * inverse_frequencies
    return angles.cos(), angles.sin()


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns neighbouring pairs (0, 1), (2, 3), … of `x` [..., D] by the angles of `cos`, `sin` [..., D / 2]."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class RootMeanSquareNorm(nn.Module):
    """x / rms(x) · weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class LatentAttention(nn.Module):
    """Multi-head latent attention in its expanded form (keys and values rebuilt from the latent)."""

    def __init__(self, config: RecallConfig) -> None:
        super().__init__()
        self.config = config
        heads, hidden = config.num_attention_heads, config.hidden_size
        query_size = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.q_proj = nn.Linear(hidden, heads * query_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RootMeanSquareNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output [B, T, hidden] and the new tokens' `c_kv` [B, T, 512] and turned `k_pe` [B, T, 64]."""
        config = self.config
        batch, length, _ = x.shape
        heads = config.num_attention_heads
        query = self.q_proj(x).view(batch, length, heads, -1)
        query_nope, query_pe = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        query_pe = rotate_interleaved(query_pe, cos[:, :, None], sin[:, :, None])
        latent, rotary = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
        latent = self.kv_a_layernorm(latent)
        rotary = rotate_interleaved(rotary, cos, sin)
        all_latent, all_rotary = latent, rotary
        if past is not None:
            all_latent = torch.cat((past[0].to(latent.dtype), latent), 1)
            all_rotary = torch.cat((past[1].to(rotary.dtype), rotary), 1)
        total = all_latent.shape[1]
        key_nope, value = (
            self.kv_b_proj(all_latent)
            .view(batch, total, heads, -1)
            .split([config.qk_nope_head_dim, config.v_head_dim], -1)
        )
        key = torch.cat((key_nope, all_rotary[:, :, None].expand(-1, -1, heads, -1)), -1).transpose(1, 2)
        query = torch.cat((query_nope, query_pe), -1).transpose(1, 2)
        # Values are padded to the keys' width, because torch's fused CPU kernel wants both equal.
        value = F.pad(value, (0, key.shape[-1] - config.v_head_dim)).transpose(1, 2)
        mask = None
        if past is not None:
            mask = torch.ones(length, total, dtype=torch.bool, device=x.device).tril(total - length)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=past is None)
        output = output[..., : config.v_head_dim].transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(output), latent, rotary


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: RecallConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    """One decoder layer, normalised before attention and before the MLP."""

    def __init__(self, config: RecallConfig) -> None:
        super().__init__()
        self.input_layernorm = RootMeanSquareNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = RootMeanSquareNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)


class Decoder(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, config: RecallConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RootMeanSquareNorm(config.hidden_size, config.rms_norm_eps)


class RecallModel(nn.Module):
    """The whole model, with the parameter names of `DeepseekV2ForCausalLM`."""

    def __init__(self, config: RecallConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def hidden(self, tokens: Tensor, positions: Tensor, past: LatentRows | None = None) -> tuple[Tensor, LatentRows]:
        """Runs `tokens` [B, T] at `positions` [B, T] behind the rows of `past`.

        Returns the normalised last hidden states [B, T, hidden] and the rows of the new tokens alone.
        """
        cos, sin = rotary_tables(positions, self.config)
        x = self.model.embed_tokens(tokens)
        latents: list[Tensor] = []
        rotaries: list[Tensor] = []
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            rows = None if past is None else (past.latent[index], past.rotary[index])
            output, latent, rotary = layer.self_attn(layer.input_layernorm(x), cos, sin, rows)
            x = x + output
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            latents.append(latent)
            rotaries.append(rotary)
        return self.model.norm(x), LatentRows(torch.stack(latents), torch.stack(rotaries))

    def forward(self, tokens: Tensor, positions: Tensor, past: LatentRows | None = None) -> tuple[Tensor, LatentRows]:
        """As `hidden`, but returns logits [B, T, vocabulary]."""
        hidden, rows = self.hidden(tokens, positions, past)
        return self.lm_head(hidden), rows

    @torch.inference_mode()
    def prefill(
        self, tokens: Sequence[int], *, start: int = 0, past: LatentRows | None = None
    ) -> tuple[Tensor, LatentRows]:
        """Runs one sequence at positions `start`, `start` + 1, …

        Returns the last token's logits [vocabulary] and the rows of the new tokens alone, with a batch axis of 1.
        """
        ids = torch.tensor([list(tokens)])
        positions = torch.arange(start, start + ids.shape[1])[None]
        hidden, rows = self.hidden(ids, positions, past)
        return self.lm_head(hidden[0, -1]), rows

    @torch.inference_mode()
    def generate(
        self, tokens: Sequence[int], num_new: int, *, start: int = 0, past: LatentRows | None = None
    ) -> list[int]:
        """The `num_new` likeliest tokens after `tokens`, one at a time."""
        logits, rows = self.prefill(tokens, start=start, past=past)
        rows = rows if past is None else LatentRows.concatenate([past, rows])
        position = start + len(tokens)
        chosen = [int(logits.argmax())]
        while len(chosen) < num_new:
            logits, new_rows = self.prefill(chosen[-1:], start=position, past=rows)
            rows = LatentRows.concatenate([rows, new_rows])
            position += 1
            chosen.append(int(logits.argmax()))
        return chosen


def save_model(model: RecallModel, directory: Path) -> None:
    """Writes `config.json`, `generation_config.json` and `model.safetensors` (bfloat16) into `directory`."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = model.config.to_hugging_face()
    generation = {name: config[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    for name, content in {"config.json": config, "generation_config.json": generation}.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def load_model(directory: Path, dtype: torch.dtype = torch.float32) -> RecallModel:
    """Reads what `save_model` wrote."""
    from safetensors.torch import load_file

    config = RecallConfig.from_hugging_face(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    model = RecallModel(config)
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model.to(dtype).eval()
