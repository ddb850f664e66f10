"""Where a token's KV lies in vLLM's paged cache, behind two operations: gather rows out of it, scatter rows into it.

Legend: `L` layers, `n` tokens, `N` blocks, `B` slots a block, `H` KV heads, `C` numbers a head and token.
vLLM 0.29 hands every layer's cache as `[N, H, B, C]`; for MLA `H` is 1 and `C` the latent and the rotary band side by
side, for the others `C` is K and V. Rows leave and enter here in that one canonical order, `[L, n, H, C]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ropewalk.kernels.rope import RotaryFacts, turn


class UnsupportedLayout(ValueError):
    """The KV cache has a form that is not known here."""


class KvLayout(Protocol):
    """All layers' paged KV of one engine rank."""

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows at `slots` (`[n]` int64, `block * B + offset`) as a CPU tensor, `[L, n, H, C]`."""

    def scatter(self, slots: torch.Tensor, rows: torch.Tensor, delta: int) -> None:
        """Write rows `[L, n, H, C]` to `slots`, keys turned by `delta` positions. Mutates the engine's cache."""


class StandardLayout:
    """Caches that hold each token's numbers in order: MLA everywhere, attention on GPUs."""

    def __init__(self, caches: Sequence[torch.Tensor], block_size: int, rotary: RotaryFacts | None, is_mla: bool):
        self._caches = [cache if cache.dim() == 4 else cache.unsqueeze(1) for cache in caches]
        self._block_size = block_size
        self._rotary = rotary
        self._is_mla = is_mla
        if len({tuple(cache.shape[1:]) for cache in self._caches}) != 1:
            raise UnsupportedLayout("layers' KV caches differ in shape")
        if self._caches[0].shape[2] != block_size:
            raise UnsupportedLayout(
                f"KV cache shape {tuple(caches[0].shape)} does not have {block_size} slots as its third dimension"
            )

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        slots = slots.to(self._caches[0].device)
        blocks, offsets = slots // self._block_size, slots % self._block_size
        return torch.stack([cache[blocks, :, offsets] for cache in self._caches]).cpu()

    def scatter(self, slots: torch.Tensor, rows: torch.Tensor, delta: int) -> None:
        device = self._caches[0].device
        slots = slots.to(device)
        blocks, offsets = slots // self._block_size, slots % self._block_size
        rows = turn_rows(rows.to(device), delta, self._rotary, self._is_mla)
        for cache, layer_rows in zip(self._caches, rows, strict=True):
            cache[blocks, :, offsets] = layer_rows


class CpuAttentionLayout:
    """vLLM's CPU attention packs keys and values inside a block for its instruction set (AMX tiles, AVX-512 columns).

    Writing goes through vLLM's own kernel. Reading needs the inverse: the packing is found out by writing known
    numbers through that kernel, and must turn out to be a permutation.
    """

    def __init__(self, caches: Sequence[torch.Tensor], isa: str, rotary: RotaryFacts | None) -> None:
        num_blocks, self._heads, self._block_size, width = caches[0].shape
        if len({tuple(cache.shape) for cache in caches}) != 1:
            raise UnsupportedLayout("layers' KV caches differ in shape")
        self._head_dim = width // 2
        self._isa = isa
        self._rotary = rotary
        self._dtype = caches[0].dtype
        self._keys_values = [
            cache.view(num_blocks, self._heads, 2 * self._block_size, self._head_dim).chunk(2, dim=2)
            for cache in caches
        ]
        self._places = self._find_places()

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        size, dim = self._block_size, self._head_dim
        blocks, block_index = torch.unique_consecutive(slots // size, return_inverse=True)
        offsets = slots % size
        rows = torch.empty(len(self._keys_values), len(slots), self._heads, 2 * dim, dtype=self._dtype)
        for layer, caches in enumerate(self._keys_values):
            for side, (cache, places) in enumerate(zip(caches, self._places, strict=True)):
                packed = cache[blocks].reshape(len(blocks), self._heads, size * dim)
                plain = packed[:, :, places].view(len(blocks), self._heads, size, dim)
                rows[layer, :, :, side * dim : (side + 1) * dim] = plain[block_index, :, offsets]
        return rows

    def scatter(self, slots: torch.Tensor, rows: torch.Tensor, delta: int) -> None:
        rows = turn_rows(rows, delta, self._rotary, is_mla=False)
        for caches, layer_rows in zip(self._keys_values, rows, strict=True):
            self._write(caches, slots, layer_rows)

    def _write(self, caches: Sequence[torch.Tensor], slots: torch.Tensor, rows: torch.Tensor) -> None:
        from vllm import _custom_ops as ops

        keys, values = rows[..., : self._head_dim].contiguous(), rows[..., self._head_dim :].contiguous()
        ops.cpu_attn_reshape_and_cache(keys, values, caches[0], caches[1], slots, self._isa)

    def _find_places(self) -> list[torch.Tensor]:
        """Return, for keys and for values, where in a packed block `[B * D]` each `(slot, dimension)` lies."""
        size, dim = self._block_size, self._head_dim
        if size > 256 or dim > 256:
            raise UnsupportedLayout(
                f"blocks of {size} slots by {dim} numbers: integers above 256 are not exact in bf16"
            )
        numbers = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(dim), indexing="ij"))
        packed = []
        for part in numbers:
            scratch = torch.zeros(1, 1, 2 * size, dim, dtype=self._dtype)
            rows = part.to(self._dtype).view(size, 1, dim).repeat(1, 1, 2)
            self._write(scratch.chunk(2, dim=2), torch.arange(size), rows)
            packed.append(scratch.view(2, size * dim).long())
        found = packed[0] * dim + packed[1]
        for permutation in found:
            if not torch.equal(permutation.sort().values, torch.arange(size * dim)):
                raise UnsupportedLayout(f"vLLM's CPU attention ({self._isa}) does not pack blocks by a permutation")
        return [permutation.argsort() for permutation in found]


def turn_rows(rows: torch.Tensor, delta: int, rotary: RotaryFacts | None, is_mla: bool) -> torch.Tensor:
    """Return rows `[L, n, H, C]` with their keys turned by `delta` positions; values and latents are as they were."""
    if delta == 0:
        return rows
    assert rotary is not None, "keys of this model cannot be turned"
    out = rows.clone()
    if is_mla:
        out[..., -rotary.rotary_size :] = turn(rows[..., -rotary.rotary_size :], delta, rotary)
    else:
        half = rows.shape[-1] // 2
        out[..., :half] = turn(rows[..., :half], delta, rotary)
    return out


def find_layout(
    caches: dict[str, torch.Tensor], layers: dict[str, Any], block_size: int, rotary: RotaryFacts | None, is_mla: bool
) -> KvLayout:
    """Choose the layout of an engine's caches. `layers` maps layer names to vLLM's attention layers.

    Raises `UnsupportedLayout` with the reason when the caches have no form that is known here.
    """
    if not caches:
        raise UnsupportedLayout("the engine has no KV caches")
    tensors = list(caches.values())
    if any(not isinstance(cache, torch.Tensor) or cache.dim() not in (3, 4) for cache in tensors):
        raise UnsupportedLayout("a KV cache is not one tensor of three or four dimensions")
    if not is_mla and tensors[0].device.type == "cpu":
        isas = {getattr(layers.get(name), "isa", None) for name in caches}
        if len(isas) != 1 or None in isas:
            raise UnsupportedLayout("a layer does not use vLLM's CPU attention")
        return CpuAttentionLayout(tensors, str(isas.pop()), rotary)
    return StandardLayout(tensors, block_size, rotary, is_mla)
