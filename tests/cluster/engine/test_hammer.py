"""Bits flip in stored chunks between requests: answers stay right, and each damaged chunk that was planned is named."""

import random
from pathlib import Path

import pytest
import xxhash

from ropewalk.cluster.bench.statistics import divergence
from ropewalk.cluster.store.chunk import ChunkCorrupt, read_chunk

from .prompts import body_and_headers

pytestmark = pytest.mark.engine

NUM_ROUNDS = 40
FLIPS_PER_ROUND = 6


def flip(path: Path, rng: random.Random) -> bytes:
    """Flip one bit, with one in three among the header and the token ids; return what the file holds then."""
    data = bytearray(path.read_bytes())
    position = rng.randrange(1200 if rng.random() < 1 / 3 else len(data))
    data[position] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return bytes(data)


def test_answers_stay_right_while_bits_flip_in_the_store(start_engines, new_store, record_property):
    root, rng = new_store(), random.Random(70)
    (engine,) = start_engines("recall-mla", root, dtype="bfloat16", max_model_len=1024)
    body, make_header, questions = body_and_headers("recall-mla", rng, 500)
    prompts = [
        [*make_header(length), *body, *question] for length, question in zip((64, 90, 150), questions, strict=False)
    ]
    options = {"max_tokens": 1, "logprobs": True}
    truths = [engine.ask(tokens, tenant=f"undamaged-{n}", **options) for n, tokens in enumerate(prompts)]
    engine.ask(prompts[0])
    engine.settle()
    (base,) = root.glob(f"*/{xxhash.xxh3_64_hexdigest(b'default')}")
    damaged: dict[str, bytes] = {}
    num_planned, num_fallbacks, divergences = 0, 0, []
    for number in range(NUM_ROUNDS):
        files = sorted(base.glob("objects/*/*"))
        for path in rng.choices(files, k=FLIPS_PER_ROUND):
            damaged[path.name] = flip(path, rng)
        engine.forget_prefixes()
        which, mode = rng.randrange(3), rng.choice(["exact", "reuse"])
        answer = engine.ask(prompts[which], mode=mode, **options)
        engine.settle()
        if mode == "exact":
            assert answer.token_ids == truths[which].token_ids, f"round {number}"
            assert divergence(truths[which].first_logprobs, answer.first_logprobs) < 0.02
            assert answer.report.tokens["reused"] == 0
        else:
            divergences.append(divergence(truths[which].first_logprobs, answer.first_logprobs))
        planned = [part.chunk for part in answer.report.plan if part.chunk in damaged]
        assert set(answer.report.fallbacks) == ({"chunk_corrupt"} if planned else set()), f"round {number}"
        num_fallbacks += bool(answer.report.fallbacks)
        if planned:  # a load ends at the first damaged chunk: the others are met by later requests
            num_planned += 1
            assert (base / "quarantine" / planned[0]).exists()
        for chain in list(damaged):
            path = base / "objects" / chain[:2] / chain
            if not path.exists() or path.read_bytes() != damaged[chain]:
                del damaged[chain]
    record_property("num_fallbacks", num_fallbacks)
    assert num_fallbacks == num_planned > NUM_ROUNDS / 4
    assert sum(divergences) / len(divergences) < 0.1
    for path in (base / "quarantine").iterdir():
        with pytest.raises(ChunkCorrupt):
            read_chunk(path)
    for tokens, truth in zip(prompts, truths, strict=True):
        assert engine.ask(tokens, **options).token_ids == truth.token_ids
