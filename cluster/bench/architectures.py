"""What is examined of a family on a real engine, beside a forward pass that knows nothing of caches."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ropewalk.cluster.bench.engine import Answer, Engine
from ropewalk.cluster.bench.reference import reference
from ropewalk.cluster.bench.statistics import divergence
from ropewalk.cluster.engine.facts import EngineFacts, engine_facts
from ropewalk.cluster.engine.settings import EngineSettings, kv_transfer_config
from ropewalk.cluster.models.tiny import VOCABULARY, Family, build

OLD_HEADER, NEW_HEADER, BODY, QUESTION = 150, 70, 512, 8
"""Tokens. The body moves towards the start, where unturned keys do the most harm."""

NUM_QUESTIONS = 4
"""One for the source, three for the target: where an expert's choice is a near-tie, bf16 takes another one at times."""

PROMPT, ANSWER = 384, 8


@dataclass(frozen=True)
class Findings:
    """`kl_*`: KL of the first token, in nats, from the float32 reference, the median of `each` question's.

    `first` and `reinjected` answer one prompt, before and after its KV went through the store.
    """

    status: dict[str, Any]
    first: Answer | None = None
    reinjected: Answer | None = None
    kl_prefill: float | None = None
    kl_turned: float | None = None
    kl_unturned: float | None = None
    reused: int = 0
    each: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def refused(self) -> str | None:
        reason: str | None = self.status["refused"] or self.status["reuse_refused"]
        return reason


def engine_arguments(family: Family) -> dict[str, Any]:
    """Arguments for `Engine`. A fixed `min_run` makes plans independent of how busy the machine is."""
    return {
        "skip_tokenizer_init": True,
        "settings": {"min_run": 32},
        "dtype": "bfloat16",
        "max_model_len": 1024,
    } | family.engine_args


def facts_by_configuration(folder: Path) -> tuple[Any, EngineFacts]:
    """vLLM's own configuration for the model in `folder`, and our facts of it. Starts nothing."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings = EngineSettings.model_validate({"store_root": folder / "store", "store_budget_bytes": 1 << 20})
    arguments = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True, "async_scheduling": False}
    transfer = kv_transfer_config(settings)
    config = AsyncEngineArgs(model=str(folder), kv_transfer_config=transfer, **arguments).create_engine_config()
    return config, engine_facts(config)


def examine(engine: Engine, family: Family) -> Findings:
    """Ask one prompt twice, and a body behind another header, turned and not."""
    status = engine.client.status()
    if status["refused"]:
        return Findings(status)
    rng = random.Random(40)
    tokens = _text(rng, PROMPT)
    first = engine.ask(tokens, max_tokens=ANSWER, ignore_eos=True)
    engine.settle()
    engine.forget_prefixes()
    reinjected = engine.ask(tokens, max_tokens=ANSWER, ignore_eos=True)
    model = build(family)
    if status["reuse_refused"]:
        alone = engine.ask(tokens, tenant="alone", max_tokens=1, logprobs=True)
        return Findings(
            status, first, reinjected, divergence(reference(model, tokens, tokens, [], 0), alone.first_logprobs)
        )

    old, body, new = (_text(rng, length) for length in (OLD_HEADER, BODY, NEW_HEADER))
    questions = [_text(rng, QUESTION) for _ in range(NUM_QUESTIONS)]
    source = [*old, *body, *questions[0]]
    for rotate in (True, False):
        engine.ask(source, mode="reuse", rotate=rotate, max_tokens=1)
    engine.settle()
    prefill, turned, unturned, reused = [], [], [], BODY
    for number, question in enumerate(questions[1:]):
        target = [*new, *body, *question]
        answer = engine.ask(target, mode="reuse", max_tokens=1, logprobs=True)
        other = engine.ask(target, mode="reuse", rotate=False, max_tokens=1, logprobs=True)
        alone = engine.ask(target, tenant=f"alone-{number}", max_tokens=1, logprobs=True)
        assert answer.report is not None
        taken = [run for run in answer.report.plan if run.source == "reuse"]
        assert all(run.turn == NEW_HEADER - OLD_HEADER for run in taken), "not all of it comes from the source"
        runs = [(run.start, run.end) for run in taken]
        truth = reference(model, source, target, runs, NEW_HEADER - OLD_HEADER)
        prefill.append(divergence(reference(model, source, target, [], 0), alone.first_logprobs))
        turned.append(divergence(truth, answer.first_logprobs))
        unturned.append(divergence(truth, other.first_logprobs))
        reused = min(reused, answer.report.tokens["reused"])
        new = _text(rng, NEW_HEADER)  # else the next question would find this one's KV
    return Findings(
        status,
        first,
        reinjected,
        median(prefill),
        median(turned),
        median(unturned),
        reused,
        {"prefill": prefill, "turned": turned, "not turned": unturned},
    )


def _text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]
