"""Recall of the embedded model in stock vLLM: `python -m ropewalk.workloads.recall.evaluate MODEL_DIR`.

Greedy decoding of fresh prompts, right when both answer words are exact. This is the one module here that uses vLLM,
and imports it only when it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .task import make_prompt

LENGTHS = (256, 512, 1024, 2048, 4096)
# Answers two tokens at a time: prompts (token ids) in, tokens out.
Generate = Callable[[Sequence[Sequence[int]]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Recall:
    """Share of prompts answered exactly: `right` of `num_prompts` of `num_tokens` tokens each."""

    num_tokens: int
    reassigned: bool
    num_prompts: int
    right: int

    @property
    def share(self) -> float:
        return self.right / self.num_prompts


def measure(generate: Generate, num_tokens: int, num_prompts: int, *, reassigned: bool, seed: int) -> Recall:
    """Asks `num_prompts` fresh prompts; `seed` decides which."""
    rng = random.Random(f"evaluate/{seed}/{num_tokens}/{reassigned}")
    prompts = [make_prompt(rng, num_tokens, reassigned=reassigned) for _ in range(num_prompts)]
    outputs = generate([prompt.tokens for prompt in prompts])
    right = sum(tuple(output) == prompt.answer for prompt, output in zip(prompts, outputs, strict=True))
    return Recall(num_tokens, reassigned, num_prompts, right)


def vllm_generator(model_dir: Path, dtype: str) -> Generate:
    """Greedy two-token decoding in an offline vLLM engine."""
    # Sized for one batch of the longest prompts; set the variable yourself to change it.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(model=str(model_dir), dtype=dtype, enforce_eager=True, max_model_len=6144, max_num_seqs=16)
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)

    def generate(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in engine.generate(requests, sampling, use_tqdm=False)]

    return generate


def table(results: Sequence[Recall]) -> str:
    """Markdown: a row per kind of fact, a column per length, each share with its number of prompts."""
    lengths = sorted({result.num_tokens for result in results})
    lines = ["| fact | " + " | ".join(f"{length:,}" for length in lengths) + " |", "| --- " * (len(lengths) + 1) + "|"]
    for reassigned, name in ((False, "stated once"), (True, "re-assigned")):
        cells = []
        for length in lengths:
            found = [r for r in results if r.num_tokens == length and r.reassigned == reassigned]
            cells.append(f"{found[0].share:.3f} ({found[0].num_prompts})" if found else "–")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure recall through stock vLLM.")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="TOKENS")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--num-longest", type=int, default=60, help="prompts at 4,096 tokens and more")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args(argv)
    if not (arguments.model_dir / "config.json").exists():
        print(f"model_dir = {str(arguments.model_dir)!r} has no config.json: give a model directory", file=sys.stderr)
        return 2
    generate = vllm_generator(arguments.model_dir, arguments.dtype)
    results: list[Recall] = []
    for num_tokens in arguments.lengths:
        for reassigned in (False, True):
            num_prompts = arguments.num_longest if num_tokens >= 4096 else arguments.num_prompts
            result = measure(generate, num_tokens, num_prompts, reassigned=reassigned, seed=arguments.seed)
            results.append(result)
            print(f"{num_tokens} tokens, reassigned={reassigned}: {result.right}/{result.num_prompts}", flush=True)
    print(table(results))
    if arguments.json:
        import vllm

        report = {
            "vllm": vllm.__version__,
            "dtype": arguments.dtype,
            "seed": arguments.seed,
            "decoding": "greedy, both answer tokens exact",
            "results": [{**asdict(result), "recall": round(result.share, 4)} for result in results],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
