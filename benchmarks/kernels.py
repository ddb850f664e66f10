"""Bandwidth of moving rows between chunks and paged KV against torch's own copy, and speed of the chunker.

    python -m benchmarks.kernels [--device cpu|cuda] [--tokens N] [--repeats R] [--threads T] [--json]

*copy* is torch's indexed copy of the same rows into the same slots, layer by layer, nothing turned. *scatter* is
`ropewalk.kernels.splice.move` from eight chunks to shuffled slots, every key turned; *gather* is the way back. Timed in
turn, so that drift of the machine meets all alike; median and quartiles over the repeats. Bytes are those read plus
those written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ropewalk.kernels.gear import ChunkSizes, chunk_limits
from ropewalk.kernels.rope import RotaryFacts
from ropewalk.kernels.splice import Turns, dense_rows, move, paged_rows

NUM_SOURCES = 8
BLOCK = 128
SHAPES = {
    # name: layers, heads, numbers a head and token, rotary size, start of the band, interleaved
    "MLA, DeepSeek-V2-Lite": (27, 1, 576, 64, 512, True),
    "GQA, SmolLM2-135M": (30, 3, 128, 64, 0, False),
    "GQA, Llama-3.1-8B": (32, 8, 256, 128, 0, False),
}
CHUNKER_TOKENS = 4_000_000


def measure(actions: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Run the actions in turn, `repeats` times after one warm-up; seconds of each run."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        for name, action in actions.items():
            _wait(device)
            start = time.perf_counter()
            action()
            _wait(device)
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rows_case(
    shape: tuple[int, int, int, int, int, bool], num_tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Callable[[], None]], int]:
    """The actions for one model's rows, and the bytes that each moves."""
    layers, heads, width, rotary, start, interleaved = shape
    generator = torch.Generator().manual_seed(0)
    num_blocks = num_tokens // BLOCK + 8
    caches = [torch.zeros(num_blocks, heads, BLOCK, width, dtype=dtype, device=device) for _ in range(layers)]
    slots = torch.randperm(num_blocks * BLOCK, generator=generator)[:num_tokens]
    counts = [num_tokens // NUM_SOURCES] * NUM_SOURCES
    counts[-1] += num_tokens - sum(counts)
    chunks = [torch.randn(layers, n, heads, width, generator=generator).to(device, dtype) for n in counts]
    deltas = torch.cat([torch.full((n,), 97 * i - 300) for i, n in enumerate(counts)])
    facts = RotaryFacts(tuple(10_000.0 ** (-i / (rotary // 2)) for i in range(rotary // 2)), interleaved)
    turns = Turns(deltas, facts, start)
    rows = torch.cat(chunks, dim=1)
    blocks = slots // BLOCK
    index = (blocks[:, None] * heads + torch.arange(heads)) * BLOCK + (slots % BLOCK)[:, None]
    index = index.flatten().to(device)

    def copy() -> None:
        for cache, layer in zip(caches, rows, strict=True):
            cache.view(-1, width).index_copy_(0, index, layer.reshape(-1, width))

    def scatter() -> None:
        move([dense_rows(chunk) for chunk in chunks], paged_rows(caches, slots), turns)

    def gather() -> None:
        move([paged_rows(caches, slots)], dense_rows(rows))

    return {"copy": copy, "scatter": scatter, "gather": gather}, 2 * rows.numel() * rows.element_size()


def chunker_cases(device: torch.device) -> dict[str, Callable[[], object]]:
    """Cut four million random token ids: with NumPy on one core, and on a GPU if that is the device.

    *hashes* is the GPU's kernel alone; *limits* adds the way back of the candidates and the choice on the host.
    """
    tokens = np.random.default_rng(0).integers(0, 150_000, CHUNKER_TOKENS).astype(np.int32)
    sizes = ChunkSizes()
    cases: dict[str, Callable[[], object]] = {"one core": lambda: _consume(chunk_limits(tokens, sizes))}
    if device.type == "cuda":
        from ropewalk.kernels.gear_triton import chunk_limits_on_gpu, hash_on_gpu

        there = torch.from_numpy(tokens).to(device)
        assert chunk_limits_on_gpu(there, sizes) == chunk_limits(tokens, sizes)
        cases["GPU, hashes"] = lambda: hash_on_gpu(there, sizes)
        cases["GPU, limits"] = lambda: _consume(chunk_limits_on_gpu(there, sizes))
    return cases


def _consume(limits: Sequence[int]) -> None:
    assert limits[-1] == CHUNKER_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on CPU (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {args.threads} thread(s)"
    report: dict[str, Any] = {"device": name, "tokens": args.tokens, "repeats": args.repeats, "rows": []}
    for model, shape in SHAPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            actions, num_bytes = rows_case(shape, args.tokens, dtype, device)
            seconds = measure(actions, args.repeats, device)
            line: dict[str, Any] = {
                "model": model,
                "dtype": str(dtype).removeprefix("torch."),
                "mib": num_bytes / 2**20,
            }
            for action, runs in seconds.items():
                low, middle, high = (num_bytes / q / 1e9 for q in reversed(statistics.quantiles(runs, n=4)))
                line[action] = {"gb_s": middle, "from": low, "to": high}
                line[action]["of_copy"] = middle / line["copy"]["gb_s"]
            report["rows"].append(line)
    report["chunker"] = {}
    for where, runs in measure(chunker_cases(device), max(3, args.repeats // 3), device).items():
        low, middle, high = (CHUNKER_TOKENS / q / 1e6 for q in reversed(statistics.quantiles(runs, n=4)))
        report["chunker"][where] = {"mtokens_s": middle, "from": low, "to": high}
    if args.json:
        print(json.dumps(report, indent=1))
        return
    print(f"{name}; {args.tokens} tokens from {NUM_SOURCES} chunks; median (quartiles) of {args.repeats} runs, GB/s")
    print(f"{'rows':24} {'dtype':9} {'MiB':>6} " + " ".join(f"{a:>26}" for a in ("copy", "scatter, turned", "gather")))
    for line in report["rows"]:
        cells = [
            f"{c['gb_s']:7.2f} ({c['from']:.2f}-{c['to']:.2f}) {c['of_copy']:5.0%}"
            for c in (line["copy"], line["scatter"], line["gather"])
        ]
        print(f"{line['model']:24} {line['dtype']:9} {line['mib']:6.0f} " + " ".join(f"{cell:>26}" for cell in cells))
    for where, chunker in report["chunker"].items():
        print(
            f"chunker, {where}, {CHUNKER_TOKENS / 1e6:.0f} M token ids: {chunker['mtokens_s']:.0f} M tokens/s "
            f"({chunker['from']:.0f}-{chunker['to']:.0f})"
        )


if __name__ == "__main__":
    main()
