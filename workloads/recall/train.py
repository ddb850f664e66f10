"""Training of the recall model on two CPU cores: `python -m ropewalk.workloads.recall.train --out DIR`.

The schedule counts steps, never seconds, and every random draw is seeded, so that a run can be repeated; a run that was
interrupted continues from DIR/checkpoint.pt. Layer matrices are trained by Muon (Jordan 2024,
https://kellerjordan.github.io/posts/muon/), embeddings, output head and norms by AdamW. Sequences get longer whenever
the answers in recent steps were right often enough. DIR receives the model in Hugging Face's form and
`training_log.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .circuit import write_start
from .model import RecallConfig, RecallModel, save_model
from .task import TrainingSequence, make_training_sequence
from .vocabulary import write_tokenizer


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the curriculum: `num_sequences` sequences of `num_tokens` tokens and `num_questions` a step."""

    num_tokens: int
    num_sequences: int
    num_questions: int
    reassigned_share: float


STAGES = (
    Stage(64, 32, 3, 0.0),
    Stage(128, 20, 5, 0.0),
    Stage(256, 12, 10, 0.25),
    Stage(512, 7, 20, 0.25),
    Stage(1024, 4, 36, 0.25),
    Stage(2048, 2, 64, 0.25),
)
# The last stage visits earlier ones too, so that short prompts are not forgotten: chance of an earlier stage per step.
REVISIT_SHARE = 0.25
FIRST_REVISITED = 2


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a run does.

    Attributes:
        num_steps: steps in all; the rate falls linearly to 0 over the last `decay_share` of them.
        muon_rate, adam_rate: learning rates of layer matrices and of everything else. Low, because the hand-made start
            already works: at 0.005 Muon's equal steps in all directions bury it faster than training mends it.
        gate: share of right answer tokens over `gate_window` steps that unlocks the next stage.
        stage_step_limit: a stage ends after so many steps even if the gate was not reached.
        max_position: positions go up to here, whatever the length of the sequence.
    """

    num_steps: int = 200
    decay_share: float = 0.6
    muon_rate: float = 0.0015
    adam_rate: float = 5e-4
    gate: float = 0.9
    gate_window: int = 10
    stage_step_limit: int = 150
    max_position: int = 6144
    seed: int = 0

    def rate(self, step: int) -> float:
        """Factor on both learning rates: 1, then falling."""
        decay_steps = self.num_steps * self.decay_share
        return min(1.0, (self.num_steps - step) / decay_steps) if decay_steps else 1.0


def orthogonalised(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """About the nearest orthogonal matrix, by Muon's quintic Newton–Schulz iteration in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    x = x / (x.norm() + 1e-7)
    transposed = x.shape[0] > x.shape[1]
    if transposed:
        x = x.T
    for _ in range(num_iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.T if transposed else x
    return result


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalised: every direction of a matrix moves by the same amount (Jordan 2024)."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(state["momentum"], group["momentum"])
                scale = math.sqrt(max(1.0, parameter.shape[0] / parameter.shape[1]))
                parameter.add_(orthogonalised(update).to(parameter.dtype), alpha=-group["lr"] * scale)


def make_batch(sequences: list[TrainingSequence]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and positions [B, T], and row and column of every answer word, V1 and V2 in turn, then of every end."""
    tokens = torch.tensor([sequence.tokens for sequence in sequences])
    positions = torch.tensor([sequence.positions for sequence in sequences])
    answers = [(row, index) for row, sequence in enumerate(sequences) for index in sequence.answer_indices]
    ends = [(row, index) for row, sequence in enumerate(sequences) for index in sequence.end_indices]
    return tokens, positions, torch.tensor(answers), torch.tensor(ends)


def loss_and_accuracy(model: RecallModel, sequences: list[TrainingSequence]) -> tuple[Tensor, float]:
    """Mean loss over answers (end tokens weigh 0.1) and the share of questions with both words right."""
    tokens, positions, answers, ends = make_batch(sequences)
    targets = torch.cat((answers, ends))
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = model.hidden(tokens, positions)
        logits = model.lm_head(hidden[targets[:, 0], targets[:, 1] - 1]).float()
    wanted = tokens[targets[:, 0], targets[:, 1]]
    losses = F.cross_entropy(logits, wanted, reduction="none")
    num_answers = len(answers)
    loss = losses[:num_answers].mean() + 0.1 * losses[num_answers:].mean()
    right = (logits[:num_answers].argmax(-1) == wanted[:num_answers]).view(-1, 2).all(-1)
    return loss, float(right.float().mean())


def split_parameters(model: RecallModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Layer matrices, and the rest."""
    matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    rest = [p for name, p in model.named_parameters() if not (".layers." in name and p.ndim == 2)]
    return matrices, rest


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` so that an interruption leaves the old or the new checkpoint, whole."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def train(
    out: Path,
    schedule: Schedule,
    *,
    stages: Sequence[Stage] = STAGES,
    checkpoint_every: int = 50,
    initial: Path | None = None,
    stop_after: int | None = None,
) -> RecallModel:
    """Runs `schedule`, writing into `out`; continues from its checkpoint where there is one.

    Args:
        stages: the curriculum, shortest sequences first.
        initial: model directory to start from instead of the hand-made start.
        stop_after: stop, with a checkpoint, when this many steps of the schedule are done.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(schedule.seed)
    model = RecallModel(RecallConfig())
    if initial is None:
        write_start(model, schedule.seed)
    else:
        from .model import load_model

        model = load_model(initial)
    model.train()
    matrices, rest = split_parameters(model)
    muon = Muon(matrices, lr=schedule.muon_rate)
    adam = torch.optim.AdamW(rest, lr=schedule.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    step, stage, stage_start, num_tokens, seconds = 0, 0, 0, 0, 0.0
    recent: deque[float] = deque(maxlen=schedule.gate_window)
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(state["model"])
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
        step, stage, stage_start, num_tokens, seconds = state["progress"]
        recent.extend(state["recent"])
        print(f"continuing at step {step}", flush=True)
    log = (out / "training_log.jsonl").open("a" if step else "w", encoding="utf-8")
    log.write(json.dumps({"from_step": step, "schedule": asdict(schedule), "torch": torch.__version__}) + "\n")
    write_tokenizer(out, model.config.max_position_embeddings)

    last_step = schedule.num_steps if stop_after is None else min(stop_after, schedule.num_steps)
    while step < last_step:
        started = time.perf_counter()
        rng = random.Random(f"{schedule.seed}/{step}")
        index = stage
        if stage == len(stages) - 1 > FIRST_REVISITED and rng.random() < REVISIT_SHARE:
            index = rng.randrange(FIRST_REVISITED, stage)
        current = stages[index]
        sequences = [
            make_training_sequence(
                rng,
                current.num_tokens,
                current.num_questions,
                reassigned_share=current.reassigned_share,
                max_position=schedule.max_position,
            )
            for _ in range(current.num_sequences)
        ]
        for optimiser, rate in ((muon, schedule.muon_rate), (adam, schedule.adam_rate)):
            for group in optimiser.param_groups:
                group["lr"] = rate * schedule.rate(step)
        loss, accuracy = loss_and_accuracy(model, sequences)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adam.step()
        model.zero_grad(set_to_none=True)
        step += 1
        num_tokens += current.num_tokens * current.num_sequences
        seconds += time.perf_counter() - started
        if index == stage:
            recent.append(accuracy)
        if step % 5 == 0 or step == 1:
            record = {
                "step": step,
                "tokens": num_tokens,
                "length": current.num_tokens,
                "loss": round(float(loss.detach()), 4),
                "accuracy": round(accuracy, 4),
                "rate": round(schedule.rate(step - 1), 4),
                "norm": round(float(norm), 3),
                "seconds": round(seconds, 1),
            }
            log.write(json.dumps(record) + "\n")
            log.flush()
            print(" ".join(f"{name}={value}" for name, value in record.items()), flush=True)
        passed = len(recent) == schedule.gate_window and sum(recent) / len(recent) >= schedule.gate
        if stage < len(stages) - 1 and (passed or step - stage_start >= schedule.stage_step_limit):
            stage, stage_start = stage + 1, step
            recent.clear()
        if step % checkpoint_every == 0 or step == last_step:
            save_checkpoint(
                checkpoint,
                {
                    "model": model.state_dict(),
                    "muon": muon.state_dict(),
                    "adam": adam.state_dict(),
                    "progress": (step, stage, stage_start, num_tokens, seconds),
                    "recent": list(recent),
                },
            )
            save_model(model, out)
    log.close()
    return model.eval()


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    defaults = Schedule()
    parser = argparse.ArgumentParser(description="Train the recall model.")
    parser.add_argument("--out", type=Path, required=True, help="directory for the model, its log and checkpoints")
    parser.add_argument("--initial", type=Path, help="model directory to start from (default: the hand-made start)")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = parser.parse_args(argv)
    schedule = Schedule(**{name: getattr(arguments, name) for name in asdict(defaults)})
    train(arguments.out, schedule, checkpoint_every=arguments.checkpoint_every, initial=arguments.initial)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
