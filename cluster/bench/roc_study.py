"""The feasibility study of position-independent reuse on a real engine (Irminsul, "Same-content AUC").

Blocks of text are put at several positions behind different filler texts; the engine computes them, and their rows are
read back from the chunk store:

    | filler[:position] | block | tail |      the tail makes the block's last chunk long enough to be stored

For each layer and each part of a row, same-content pairs (one block, two positions) are compared with different-content
pairs (two blocks, one position) by cosine.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ropewalk.cluster.bench.engine import Engine
from ropewalk.cluster.bench.material import Material, make_material
from ropewalk.cluster.bench.roc import GROUP, Study
from ropewalk.cluster.bench.similarity import Auc, Scores, auc, pair_scores, roc_curve
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.kernels.gear import ChunkSizes
from ropewalk.kernels.keys import HEAD_LENGTH, Tokens, as_tokens
from ropewalk.kernels.rope import RotaryFacts
from ropewalk.kernels.splice import turned
from ropewalk.scheduler.plan import Piece, pieces

NUM_FILLERS = 3
"""Texts before the blocks, so that "another context" is not one text."""

TOGETHER = 5 * GROUP
"""Blocks computed at a time: with their tails they fill a step of vLLM's, 2,048 tokens."""

STORE_BYTES = 1 << 29
"""Budget of the temporary store: rows are read as soon as they are stored."""

ATTEMPTS = 3
"""Times that a prompt is asked again, alone, when its KV was not stored."""


class NotMeasurable(Exception):
    """The engine's KV cannot be stored, turned or read back."""


def measure(model: str, study: Study, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Run the study on one model; `tell` hears of the progress. The result is JSON-able.

    Raises `NotMeasurable` with the reason when the engine's KV cannot be read back or turned, and `TooLittleText`.
    """
    start = time.monotonic()
    material = make_material(
        model,
        random.Random(study.seed),
        num_fillers=NUM_FILLERS,
        filler_tokens=study.filler_tokens,
        num_blocks=study.blocks,
        block_tokens=study.block_tokens,
    )
    # In memory, where there is room: on a disk, an engine that saves much at once gives some of it up.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ropewalk-bench-roc-", dir=memory) as root:
        engine = Engine(
            model,
            store_root=Path(root),
            settings={"store_budget_bytes": STORE_BYTES},
            max_model_len=study.longest_prompt + 1,
        )
        try:
            tell(f"{model}: computing the filler texts")
            reader = _Reader(engine)
            scores: dict[str, list[tuple[Scores, Scores]]] = {}
            for filler in material.fillers:
                engine.ask(filler, max_tokens=1)
            for number, rows in enumerate(_groups(engine, reader, material, study.positions), 1):
                for kind, part in kinds_of(rows, study.positions, reader.rotary, reader.is_mla).items():
                    scores.setdefault(kind, []).append(pair_scores(part))
                tell(f"{model}: {GROUP * number} of {study.blocks} blocks")
        finally:
            engine.stop()
    return {
        "model": model,
        "attention": "MLA" if reader.is_mla else "GQA",
        "dtype": str(rows.dtype).removeprefix("torch."),
        "num_layers": rows.shape[2],
        "blocks": study.blocks,
        "block_tokens": study.block_tokens,
        "positions": list(study.positions),
        "seconds": round(time.monotonic() - start),
        "kinds": {kind: _summary(groups) for kind, groups in scores.items()},
    }


def _summary(groups: Sequence[tuple[Scores, Scores]]) -> dict[str, Any]:
    """AUC for each layer and for the pairs of all layers in one ranking; the latter's ROC curve, thinned."""
    same = np.stack([pair[0] for pair in groups], axis=1)  # [L, G, pairs]
    different = np.stack([pair[1] for pair in groups], axis=1)
    layers = [
        _figures(auc(of_same, of_different), of_same, of_different)
        for of_same, of_different in zip(same, different, strict=True)
    ]
    all_same, all_different = (np.concatenate(list(scores), axis=1) for scores in (same, different))
    curve = roc_curve(all_same, all_different)
    kept = np.unique(np.linspace(0, len(curve) - 1, 201).round().astype(int))
    return {
        "layers": layers,
        "all_layers": _figures(auc(all_same, all_different), all_same, all_different),
        "roc": curve[kept].round(4).tolist(),
    }


def _figures(area: Auc, same: Scores, different: Scores) -> dict[str, Any]:
    return {
        "auc": area.value,
        "low": area.low,
        "high": area.high,
        "same": {"pairs": same.size, "mean": float(same.mean())},
        "different": {"pairs": different.size, "mean": float(different.mean())},
    }


def kinds_of(
    rows: torch.Tensor, positions: Sequence[int], rotary: RotaryFacts, is_mla: bool
) -> dict[str, torch.Tensor]:
    """Split rows `[B, P, L, n, H, C]` into what is compared, each `[B, P, L, n, H * …]`: a token's heads side by side.

    *turned* rows were moved to position 0, in the dtype that they are stored in, as reuse moves them.
    """
    split = rows.shape[-1] - rotary.rotary_size if is_mla else rows.shape[-1] // 2
    band_start = split if is_mla else 0
    common = torch.stack(
        [
            torch.stack(
                [turned(at, -position, rotary, band_start) for at, position in zip(block, positions, strict=True)]
            )
            for block in rows
        ]
    )
    first, second = rows[..., :split], rows[..., split:]
    if is_mla:
        kinds = {"c_kv": first, "k_pe raw": second, "k_pe turned": common[..., split:]}
    else:
        kinds = {"K raw": first, "K turned": common[..., :split], "V": second}
    return {kind: part.flatten(4) for kind, part in kinds.items()}


def _groups(engine: Engine, reader: _Reader, material: Material, positions: Sequence[int]) -> Iterator[torch.Tensor]:
    """Have the engine compute groups of blocks at all positions; yield rows `[B, P, L, n, H, C]` group by group."""
    for begin in range(0, len(material.blocks), TOGETHER):
        blocks = material.blocks[begin : begin + TOGETHER]
        at_positions = []
        # One position at a time: the store keeps no more than four versions of one content.
        for place, position in enumerate(positions):
            prompts = []
            for number, block in enumerate(blocks):
                filler = material.fillers[(number + place) % len(material.fillers)]
                prompts.append((*filler[:position], *block, *filler[:HEAD_LENGTH]))
            engine.ask_together(prompts, max_tokens=1)
            engine.settle()
            ends = position, position + len(blocks[0])
            at_positions.append([_rows(engine, reader, prompt, *ends) for prompt in prompts])
        for first in range(0, len(blocks), GROUP):
            yield torch.stack([torch.stack(rows[first : first + GROUP]) for rows in at_positions], dim=1)


def _rows(engine: Engine, reader: _Reader, prompt: tuple[int, ...], start: int, end: int) -> torch.Tensor:
    """Rows of positions `[start, end)` of a prompt that was answered, `[L, end - start, H, C]`."""
    tokens = as_tokens(prompt)
    for _ in range(ATTEMPTS):
        if reader.missing(tokens, start, end) is None:
            return reader.rows(tokens, start, end)
        # An engine drops what it has no time or room to save. Asked alone, it saves what is not stored yet.
        engine.ask(prompt, max_tokens=1)
        engine.settle()
    raise NotMeasurable(f"{reader.missing(tokens, start, end)} ({engine.client.status()['counters']})")


class _Reader:
    """Reads back from the store what an engine has computed."""

    def __init__(self, engine: Engine) -> None:
        assert engine.store_root is not None
        status = engine.client.status()
        facts = engine.client.facts
        if facts.rotary is None or status["refused"] or status["reuse_refused"]:
            raise NotMeasurable(status["refused"] or status["reuse_refused"])
        self.rotary: RotaryFacts = facts.rotary
        self.is_mla: bool = facts.is_mla
        self._store = NodeStore(engine.store_root, f"{status['fingerprint']}-r0", "default", STORE_BYTES)

    def missing(self, tokens: Tokens, start: int, end: int) -> str | None:
        """Say which of the positions `[start, end)` of a prompt are not stored; None if all are."""
        for piece in self._pieces(tokens, start, end):
            if not self._store.contains(piece.chain):
                return f"the engine stored no KV of positions {piece.start} to {piece.end}"
        return None

    def rows(self, tokens: Tokens, start: int, end: int) -> torch.Tensor:
        """Return the stored rows of positions `[start, end)` of a prompt, `[L, end - start, H, C]`."""
        parts = []
        for piece in self._pieces(tokens, start, end):
            header, rows = self._store.read(piece.chain)
            # A name is only a candidate: the token ids and the place decide.
            assert header.start == piece.start
            assert np.array_equal(header.tokens, tokens[piece.start : piece.end])
            parts.append(rows[:, max(start - piece.start, 0) : end - piece.start])
        return torch.cat(parts, dim=1)

    def _pieces(self, tokens: Tokens, start: int, end: int) -> list[Piece]:
        return [
            piece
            for piece in pieces(tokens, "default", ChunkSizes(), (), ())
            if max(piece.start, start) < min(piece.end, end)
        ]
