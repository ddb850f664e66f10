"""Rotary position embeddings: a model's frequencies, and turning cached keys to another position.

Turning by `delta` positions is the rotation `R(delta)` of every pair of a key, and `R(a) R(b) = R(a + b)`: a key
computed at position `p` and turned by `delta` equals the key computed at `p + delta` (Leyline, section "AMORTIZE").
Only unit-magnitude frequencies enter: a model's attention scaling (YaRN's `mscale`) is in the stored key already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


class UnsupportedRope(ValueError):
    """The model's position encoding is not closed under rotation, or not known: its keys cannot be turned."""


@dataclass(frozen=True, slots=True)
class RotaryFacts:
    """What is needed to turn a model's keys.

    `inv_freq` holds the angle per position of each pair, `[rotary_size / 2]` radians. `interleaved` tells the pairing:
    neighbours `(0, 1), (2, 3)` (GPT-J, DeepSeek) or halves `(0, r/2), (1, r/2 + 1)` (NeoX, Llama).
    """

    inv_freq: tuple[float, ...]
    interleaved: bool

    @property
    def rotary_size(self) -> int:
        return 2 * len(self.inv_freq)


def turn(keys: torch.Tensor, delta: int, facts: RotaryFacts) -> torch.Tensor:
    """Return `keys` turned by `delta` positions, computed in float32, in the dtype of `keys`.

    `keys` is `[..., R]` or wider: only the first `facts.rotary_size` numbers of the last dimension are turned (partial
    rotary), the rest is copied. Angles are formed in float64, so a large `delta` loses nothing.
    """
    if delta == 0:
        return keys
    angles = delta * torch.tensor(facts.inv_freq, dtype=torch.float64)
    cos = angles.cos().to(device=keys.device, dtype=torch.float32)
    sin = angles.sin().to(device=keys.device, dtype=torch.float32)
    size = facts.rotary_size
    rotary = keys[..., :size].float()
    out = torch.empty_like(keys)
    out[..., size:] = keys[..., size:]
    if facts.interleaved:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
        out[..., 0:size:2] = (first * cos - second * sin).to(keys.dtype)
        out[..., 1:size:2] = (second * cos + first * sin).to(keys.dtype)
    else:
        first, second = rotary[..., : size // 2], rotary[..., size // 2 :]
        out[..., : size // 2] = (first * cos - second * sin).to(keys.dtype)
        out[..., size // 2 : size] = (second * cos + first * sin).to(keys.dtype)
    return out


def facts_from_config(config: Mapping[str, Any]) -> RotaryFacts:
    """Return the rotary facts of a Hugging Face text config (as a mapping, nested rope parameters included).

    Raises `UnsupportedRope`, naming the scaling, for position encodings that cannot be turned or are not known here.
    Configs do not tell the pairing. Here MLA models (those with `kv_lora_rank`) interleave and others split halves; the
    loaded model corrects that (`ropewalk.kernels.rope_table.confirm`).
    """
    is_mla = bool(config.get("kv_lora_rank"))
    rope: dict[str, Any] = dict(config.get("rope_scaling") or {})
    rope |= {k: v for k, v in (config.get("rope_parameters") or {}).items() if v is not None}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedRope("rope parameters differ by layer type")
    if _has_alibi(config):
        raise UnsupportedRope("ALiBi biases attention by distance; the model has no rotary position embedding")
    if not rope and config.get("rope_theta") is None:
        raise UnsupportedRope("the model has no rotary position embedding (its positions are learned, or it has none)")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if is_mla:
        size = int(config["qk_rope_head_dim"])
    else:
        head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        partial = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
        size = int(head_dim * partial)
    kind = _kind(rope)
    interleaved = is_mla and bool(config.get("rope_interleave", True))
    return RotaryFacts(tuple(_frequencies(kind, theta, size, rope, config).tolist()), interleaved)


def rope_kind(config: Mapping[str, Any]) -> str:
    """Return the rope type of a Hugging Face text config, such as `default`, `llama3` or `yarn`."""
    return _kind({**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})})


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _has_alibi(config: Mapping[str, Any]) -> bool:
    attention = config.get("attn_config") or {}
    nested = attention.get("alibi") if isinstance(attention, Mapping) else getattr(attention, "alibi", None)
    return bool(nested or config.get("alibi") or config.get("model_type") == "bloom")


def _frequencies(
    kind: str, theta: float, size: int, rope: Mapping[str, Any], config: Mapping[str, Any]
) -> torch.Tensor:
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    base = theta**-exponents
    if rope.get("mrope_section"):
        raise UnsupportedRope("M-RoPE positions have several components")
    match kind:
        case "default":
            return base
        case "linear":
            return base / float(rope["factor"])
        case "llama3":
            return _llama3(base, rope)
        case (
            "yarn" | "deepseek_yarn" | "deepseek_llama_scaling"
        ):  # the latter two: what vLLM's MLA classes rename it to
            return _yarn(base, theta, size, rope, config)
        case "dynamic" | "longrope" | "su":
            raise UnsupportedRope(f"rope type {kind!r} changes its frequencies with the sequence length")
        case _:
            raise UnsupportedRope(f"rope type {kind!r} is not known")


def _llama3(base: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1's frequencies: long wavelengths divided by `factor`, a smooth ramp between (Llama 3 reference code)."""
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / base
    ramp = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - ramp) * base / factor + ramp * base


def _yarn(
    base: torch.Tensor, theta: float, size: int, rope: Mapping[str, Any], config: Mapping[str, Any]
) -> torch.Tensor:
    """YaRN's frequencies: interpolated below, kept above, a linear ramp between (arXiv 2309.00071, section 3.2)."""
    factor = float(rope["factor"])
    original = float(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])

    def dimension(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low: float = dimension(float(rope.get("beta_fast") or 32))
    high: float = dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a ramp of width zero would divide by zero
    ramp = ((torch.arange(size // 2, dtype=torch.float64) - low) / (high - low)).clamp(0.0, 1.0)
    return base / factor * ramp + base * (1 - ramp)
