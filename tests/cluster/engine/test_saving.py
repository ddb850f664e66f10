"""Saving beside a real engine: answers go first, what they computed is stored soon, and nothing is held for ever."""

from __future__ import annotations

import ast
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ropewalk.cluster.store.node_store import NodeStore

from .conftest import Engine
from .prompts import prompt, tokenizer

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]
MODEL = "smollm2-135m"
NUM_BLOCKS = 60


@pytest.fixture(scope="module")
def engine(start_engines, new_store) -> Engine:
    """Small enough that two prompts of 250 tokens may not wait to be saved together."""
    arguments = {"dtype": "bfloat16", "max_model_len": 1024, "num_gpu_blocks_override": NUM_BLOCKS}
    (engine,) = start_engines(MODEL, new_store(), **arguments)
    return engine


def poll(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def counters(engine: Engine) -> dict[str, int]:
    """What the engine has counted; it says so with an answer."""
    engine.ask(prompt(MODEL, random.Random(time.monotonic_ns()), 40), max_tokens=1)
    return engine.client.status()["counters"]


def num_files(root: Path, pattern: str = "*/*/objects/*/*") -> int:
    return len(list(root.glob(pattern)))


def test_the_second_call_of_the_readme_takes_the_manual_from_the_store(engine):
    """At once, as its client sends it, and with the very text: one chunk with the header before it."""
    (manual,) = re.findall(r"^manual = (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    answers = []
    for time_ in ("09:00", "09:05"):
        parts = re.split(r" \+ | \* ", manual)
        text = f"It is {time_}. {ast.literal_eval(parts[0])}{ast.literal_eval(parts[1]) * int(parts[2])}"
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "Is 17 + 25 = 42?"}]
        encoded = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        tokens = encoded["input_ids"] if hasattr(encoded, "keys") else encoded
        answers.append(engine.run(engine.ask_async(tokens, mode="reuse", tenant="readme", max_tokens=16)))
    assert answers[1].report.tokens["reused"] >= 0.8 * len(tokens)


def test_what_an_answer_computed_is_stored_soon_after_it(engine):
    before = counters(engine)
    engine.settle()
    tokens = prompt(MODEL, random.Random(1), 600)
    files = num_files(engine.store_root)
    engine.ask(tokens, max_tokens=1)
    poll(lambda: engine.client.status()["saves_waiting"] == 0)
    assert num_files(engine.store_root) > files
    engine.forget_prefixes()
    found = engine.ask(tokens, max_tokens=1)
    assert found.num_cached >= 600 - 32
    after = counters(engine)
    assert after["saved_chunks"] > before.get("saved_chunks", 0)
    assert after["saved_bytes"] > before.get("saved_bytes", 0)
    assert after["store_reads"] > before.get("store_reads", 0)


def test_a_burst_beyond_the_bound_loses_saves_but_no_answers(engine):
    before = counters(engine)
    prompts = [prompt(MODEL, random.Random(100 + n), 250) for n in range(6)]
    together = engine.ask_together(prompts, max_tokens=1)
    after = counters(engine)
    assert after["save_dropped_queue_full"] > before.get("save_dropped_queue_full", 0)
    assert after["saved_chunks"] > before["saved_chunks"]
    for tokens, answer in zip(prompts, together, strict=True):
        assert answer.report.fallbacks == []
        # In bf16, near-ties flip with what shares a step; what was lost is computed, and saved this time.
        assert engine.ask(tokens, max_tokens=1).report.fallbacks == []
    engine.settle()
    engine.forget_prefixes()
    for tokens in prompts:
        assert engine.ask(tokens, max_tokens=1).num_cached >= 250 - 32


def test_all_blocks_are_free_again_when_everything_is_saved(engine):
    for round_number in range(3):
        prompts = [prompt(MODEL, random.Random(200 + 10 * round_number + n), 300) for n in range(5)]
        engine.ask_together(prompts, max_tokens=4)
        engine.forget_prefixes()  # vLLM refuses while a single block is held
    assert not list(engine.store_root.rglob("*.tmp"))


def test_damage_is_counted_where_it_can_be_seen(engine):
    tokens = prompt(MODEL, random.Random(3), 500)
    known = set(engine.store_root.glob("*/*/objects/*/*"))
    engine.ask(tokens, max_tokens=1)
    engine.settle()
    before = engine.client.status()["counters"]
    for path in set(engine.store_root.glob("*/*/objects/*/*")) - known:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    engine.forget_prefixes()
    assert engine.ask(tokens, max_tokens=1).report.fallbacks == ["chunk_corrupt"]
    after = engine.client.status()["counters"]
    assert after["store_quarantined"] > before.get("store_quarantined", 0)
    assert after["fallback_chunk_corrupt"] == before.get("fallback_chunk_corrupt", 0) + 1


def test_an_engine_that_ends_leaves_whole_chunks_only(start_engines, new_store):
    root = new_store()
    (engine,) = start_engines(MODEL, root, dtype="bfloat16")
    engine.ask_together([prompt(MODEL, random.Random(400 + n), 400) for n in range(6)], max_tokens=1)
    engine.stop()
    assert not list(root.rglob("*.tmp"))
    for base in {path.parents[2] for path in root.glob("*/*/objects/*/*")}:
        store = NodeStore(root, base.parent.name, "default", 1 << 30)
        if store.base == base:
            assert not [line for line in store.check_integrity() if "marker without" not in line]
            assert list(base.glob("objects/*/*"))
