"""What reuse and splices do to recall, in float32 torch: `python -m ropewalk.workloads.recall.reuse MODEL_DIR`.

Here no engine is involved: cache rows are moved by hand, header and question are always computed. This is the reference
that an engine's reuse is to be compared with. Each row of the table: share of prompts whose first answer word is right,
and the mean divergence KL(full prefill ‖ reuse) of its distribution.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .model import LatentRows, RecallModel, load_model
from .task import FACT_LENGTH, Prompt, make_document, make_header, make_prompt, make_question
from .vocabulary import vocabulary

CHUNK_LENGTH = 128
SHORT_HEADER, LONG_HEADER = 20, 120


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over all prompts of a case."""

    case: str
    recall: float
    divergence: float


def _answer(model: RecallModel, key: int, past: LatentRows) -> Tensor:
    """Log-probabilities [vocabulary] of the first answer word to a question about `key` behind `past`."""
    return model.prefill(make_question(key), start=len(past), past=past)[0].log_softmax(-1)


def moved_document(
    model: RecallModel, rng: random.Random, prompt: Prompt, source_header: int, target_header: int, *, turn: bool
) -> tuple[Tensor, Tensor]:
    """The document computed behind one header, used behind another; returns full prefill's answer and this one."""
    document = prompt.document.tokens
    header = make_header(rng, target_header)
    _, source = model.prefill([*make_header(rng, source_header), *document])
    _, full = model.prefill([*header, *document])
    rows = source[source_header:]
    if turn:
        rows = rows.turned(target_header - source_header, model.config)
    past = LatentRows.concatenate([full[:target_header], rows])
    return _answer(model, prompt.key, full), _answer(model, prompt.key, past)


def mixed_chunks(model: RecallModel, rng: random.Random, prompt: Prompt, *, turn: bool) -> tuple[Tensor, Tensor]:
    """Every chunk computed behind another text, as when the store knows it from other prompts."""
    document = prompt.document.tokens
    header = make_header(rng, SHORT_HEADER)
    _, full = model.prefill([*header, *document])
    parts = [full[:SHORT_HEADER]]
    for start in range(0, len(document), CHUNK_LENGTH):
        chunk = document[start : start + CHUNK_LENGTH]
        before = [*make_header(rng, SHORT_HEADER), *make_document(rng, rng.randint(50, 600)).tokens]
        _, source = model.prefill([*before, *chunk])
        rows = source[len(before) :]
        parts.append(rows.turned(SHORT_HEADER + start - len(before), model.config) if turn else rows)
    return _answer(model, prompt.key, full), _answer(model, prompt.key, LatentRows.concatenate(parts))


def spliced_fact(
    model: RecallModel, rng: random.Random, prompt: Prompt, *, turn: bool, ask_removed: bool
) -> tuple[Tensor, Tensor] | None:
    """A fact replaced by one filler; the text behind it keeps its rows. None where no fact stands before the asked one.

    Compared with the full prefill of the text before the splice.
    """
    asked = prompt.document.latest()[prompt.key]
    others = [fact for fact in prompt.document.facts if fact.start < asked.start and fact.key != prompt.key]
    if not others:
        return None
    removed = rng.choice(others)
    header = make_header(rng, SHORT_HEADER)
    _, full = model.prefill([*header, *prompt.document.tokens])
    cut = SHORT_HEADER + removed.start
    _, stub = model.prefill([vocabulary().fillers[0]], start=cut, past=full[:cut])
    after = full[cut + FACT_LENGTH :]
    if turn:
        after = after.turned(1 - FACT_LENGTH, model.config)
    past = LatentRows.concatenate([full[:cut], stub, after])
    key = removed.key if ask_removed else prompt.key
    return _answer(model, key, full), _answer(model, key, past)


def study(model: RecallModel, num_tokens: int, num_prompts: int, seed: int) -> Iterator[Outcome]:
    """All cases, one after the other, each on the same prompts."""

    def run(
        case: str,
        reassigned: bool,
        reuse: Callable[[random.Random, Prompt], tuple[Tensor, Tensor] | None],
        *,
        of_full: bool = False,
    ) -> Outcome:
        rng = random.Random(f"reuse/{seed}")
        right, divergence, count = 0, 0.0, 0
        for _ in range(num_prompts):
            prompt = make_prompt(rng, num_tokens, reassigned=reassigned, header_tokens=SHORT_HEADER)
            answers = reuse(random.Random(f"{seed}/{prompt.key}/{prompt.tokens[-20:]}"), prompt)
            if answers is None:
                continue
            full, reused = answers
            count += 1
            wanted = int(full.argmax()) if of_full else prompt.answer[0]
            right += int(reused.argmax()) == wanted
            divergence += float((full.exp() * (full - reused)).sum())
        return Outcome(case, right / count, divergence / count)

    for reassigned, label in ((False, ""), (True, "re-assigned: ")):

        def full(rng: random.Random, prompt: Prompt) -> tuple[Tensor, Tensor]:
            answer = moved_document(model, rng, prompt, SHORT_HEADER, SHORT_HEADER, turn=True)[0]
            return answer, answer

        yield run(label + "full prefill", reassigned, full)
        for turn, turned in ((True, "turned"), (False, "not turned")):
            for source, target, name in (
                (SHORT_HEADER, LONG_HEADER, "longer header"),
                (LONG_HEADER, SHORT_HEADER, "shorter header"),
            ):

                def moved(
                    rng: random.Random, prompt: Prompt, source: int = source, target: int = target, turn: bool = turn
                ) -> tuple[Tensor, Tensor]:
                    return moved_document(model, rng, prompt, source, target, turn=turn)

                yield run(f"{label}document moved behind a {name}, {turned}", reassigned, moved)

            def mixed(rng: random.Random, prompt: Prompt, turn: bool = turn) -> tuple[Tensor, Tensor]:
                return mixed_chunks(model, rng, prompt, turn=turn)

            yield run(f"{label}each chunk from another text, {turned}", reassigned, mixed)
    for ask_removed, asked in ((False, "a later fact"), (True, "the removed fact")):
        for turn, turned in ((True, "turned"), (False, "not turned")):

            def spliced(
                rng: random.Random, prompt: Prompt, turn: bool = turn, ask_removed: bool = ask_removed
            ) -> tuple[Tensor, Tensor] | None:
                return spliced_fact(model, rng, prompt, turn=turn, ask_removed=ask_removed)

            yield run(f"a fact spliced out, asked for {asked}, rest {turned}", False, spliced, of_full=ask_removed)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure what reuse and splices do to recall, in float32.")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--num-tokens", type=int, default=512)
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    if not (arguments.model_dir / "config.json").exists():
        print(f"model_dir = {str(arguments.model_dir)!r} has no config.json: give a model directory", file=sys.stderr)
        return 2
    model = load_model(arguments.model_dir, torch.float32)
    print(f"| {arguments.num_tokens} tokens, {arguments.num_prompts} prompts | recall | KL |\n| --- | --- | --- |")
    for outcome in study(model, arguments.num_tokens, arguments.num_prompts, arguments.seed):
        print(f"| {outcome.case} | {outcome.recall:.2f} | {max(outcome.divergence, 0.0):.2g} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
