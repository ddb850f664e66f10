"""Where a token's KV lies in vLLM's paged cache, behind two operations: gather rows out of it, scatter rows into it.

Legend: `L` layers, `n` tokens, `N` blocks, `B` slots a block, `H` KV heads, `C` numbers a head and token.
vLLM 0.29 hands every layer's cache as `[N, H, B, C]`; for MLA `H` is 1 and `C` the latent and the rotary band side by
side, for the others `C` is K and V. Rows leave and enter here in that one canonical order, `[L, n, H, C]`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ropewalk.kernels.rope import RotaryFacts
from ropewalk.kernels.splice import Turns, dense_rows, move, paged_rows
from ropewalk.kernels.splice_cpu import move_packed


class UnsupportedLayout(ValueError):
    """The KV cache has a form that is not known here."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Rows `[L, n, H, C]` on the CPU that go to `slots` (`[n]` int64), their keys turned by `delta` positions."""

    slots: torch.Tensor
    rows: torch.Tensor
    delta: int


def turns_of(parts: Sequence[StoredRows], rotary: RotaryFacts | None, start: int) -> Turns | None:
    """Return how the parts' keys turn, in the band that begins at `start`; None when all stay where they were."""
    if not any(part.delta for part in parts):
        return None
    assert rotary is not None, "keys of this model cannot be turned"
    return Turns(torch.cat([torch.full((len(part.slots),), part.delta) for part in parts]), rotary, start)


class KvLayout(Protocol):
    """All layers' paged KV of one engine rank."""

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows at `slots` (`[n]` int64, `block * B + offset`) as a CPU tensor, `[L, n, H, C]`, contiguous.

        On one thread, for it runs beside the engine's own; Python's lock is free meanwhile.
        """

    def fence(self) -> AbstractContextManager[None]:
        """Mark, in the engine's thread, what is written by now; within it, another thread gathers no less."""

    def scatter(self, parts: Sequence[StoredRows]) -> None:
        """Write rows to their slots, keys turned. Mutates the engine's cache."""


class StandardLayout:
    """Caches that hold each token's numbers in order: MLA everywhere, attention on GPUs."""

    def __init__(self, caches: Sequence[torch.Tensor], block_size: int, rotary: RotaryFacts | None, is_mla: bool):
        self._caches = [cache if cache.dim() == 4 else cache.unsqueeze(1) for cache in caches]
        self._rotary = rotary
        self._stream: torch.cuda.Stream | None = None
        """Where fences let other threads gather."""
        self._band_start = self._caches[0].shape[3] - rotary.rotary_size if is_mla and rotary is not None else 0
        if self._caches[0].shape[2] != block_size:
            raise UnsupportedLayout(
                f"KV cache shape {tuple(caches[0].shape)} does not have {block_size} slots as its third dimension"
            )
        try:
            paged_rows(self._caches, torch.zeros(1, dtype=torch.int64))
        except ValueError as error:
            raise UnsupportedLayout(str(error)) from None

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        first = self._caches[0]
        shape = (len(self._caches), len(slots), first.shape[1], first.shape[3])
        rows = torch.empty(shape, dtype=first.dtype, device=first.device)
        move([paged_rows(self._caches, slots)], dense_rows(rows), max_threads=1)
        return rows.cpu()

    def fence(self) -> AbstractContextManager[None]:
        device = self._caches[0].device
        if device.type != "cuda":
            if device.type != "cpu":
                torch.accelerator.synchronize()
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
        return _behind(torch.cuda.current_stream(device).record_event(), self._stream)

    def scatter(self, parts: Sequence[StoredRows]) -> None:
        device = self._caches[0].device
        turns = turns_of(parts, self._rotary, self._band_start)
        sources = [dense_rows(part.rows.to(device)) for part in parts]
        move(sources, paged_rows(self._caches, torch.cat([part.slots for part in parts])), turns)


class CpuAttentionLayout:
    """vLLM's CPU attention packs keys and values inside a block for its instruction set (AMX tiles, AVX-512 columns).

    The packing is found out by writing known numbers through vLLM's own kernel, and must turn out to be a permutation.
    """

    def __init__(self, caches: Sequence[torch.Tensor], isa: str, rotary: RotaryFacts | None) -> None:
        _, self._heads, self._block_size, width = caches[0].shape
        if len({(cache.shape, cache.stride()) for cache in caches}) != 1:
            raise UnsupportedLayout("layers' KV caches differ in shape")
        if caches[0].stride()[2:] != (width, 1):
            raise UnsupportedLayout(f"KV cache blocks are not contiguous (strides {caches[0].stride()})")
        self._caches = list(caches)
        self._head_dim = width // 2
        self._isa = isa
        self._rotary = rotary
        self._places = self._find_places()

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        shape = (len(self._caches), len(slots), self._heads, 2 * self._head_dim)
        rows = torch.empty(shape, dtype=self._caches[0].dtype)
        move_packed(self._caches, slots, self._places, [dense_rows(rows)], None, to_packed=False, max_threads=1)
        return rows

    def fence(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # a step returns when everything is written

    def scatter(self, parts: Sequence[StoredRows]) -> None:
        slots = torch.cat([part.slots for part in parts])
        turns = turns_of(parts, self._rotary, 0)
        rows = [dense_rows(part.rows) for part in parts]
        move_packed(self._caches, slots, self._places, rows, turns, to_packed=True)

    def _find_places(self) -> torch.Tensor:
        """Return where in a packed block `[B * C]` each number of each slot lies, `[B, C]` int32."""
        from vllm import _custom_ops as ops

        size, dim, dtype = self._block_size, self._head_dim, self._caches[0].dtype
        if size > 256 or dim > 256:
            raise UnsupportedLayout(
                f"blocks of {size} slots by {dim} numbers: integers above 256 are not exact in bf16"
            )
        numbers = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(dim), indexing="ij"))
        packed = []
        for part in numbers:
            scratch = torch.zeros(1, 1, 2 * size, dim, dtype=dtype)
            rows = part.to(dtype).view(size, 1, dim).contiguous()
            ops.cpu_attn_reshape_and_cache(rows, rows, *scratch.chunk(2, dim=2), torch.arange(size), self._isa)
            packed.append(scratch.view(2, size * dim).long())
        found = packed[0] * dim + packed[1]
        for permutation in found:
            if not torch.equal(permutation.sort().values, torch.arange(size * dim)):
                raise UnsupportedLayout(f"vLLM's CPU attention ({self._isa}) does not pack blocks by a permutation")
        keys, values = (permutation.argsort().view(size, dim) for permutation in found)
        return torch.cat([keys, values + size * dim], dim=1).int()


@contextlib.contextmanager
def _behind(written: torch.cuda.Event, stream: torch.cuda.Stream) -> Iterator[None]:
    """Let the calling thread work on `stream`, after `written`: an engine's thread only queues its work on a GPU."""
    with torch.cuda.stream(stream):
        stream.wait_event(written)
        yield


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
