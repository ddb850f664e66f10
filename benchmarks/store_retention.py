"""What is worth keeping in a store that several replicas share: last use against what replicas expect.

    python -m benchmarks.store_retention [--workloads W ...] [--budgets TOKENS ...] [--sessions N] [--replicas R]
                                         [--pool BLOCKS] [--data DIR] [--json]

Replays multi-agent sessions (`ropewalk.workloads.traces`), turn by turn, through a model of a store: a prompt finds the
chunks of its longest stored prefix, what it lacks is computed and stored, and what there is no room for goes. Sessions
stay on one of the replicas, which speak every two seconds (of the sessions' time), as engines do. Arms:

    lru         least recently used first: the store without a word of anybody
    ours        what replicas expect (`cluster/store/worth.py`), with Foresight as engines have it
    half        only the first replica speaks
    clairvoyant the chunk whose next use is furthest away goes first

Printed are hit rates (tokens found ÷ prompt tokens), and how much of the gap between `lru` and `clairvoyant` is closed.
Then two models share the store, of which one costs more to compute a byte: there seconds of prefill count, and the
clairvoyant one lets go what spares the fewest seconds a byte until its next use (a heuristic: it may be beaten).
`--pool` puts an engine's own cache of so many blocks in front of the store: only what it lacks counts as found. At last
the real store, with real files, replays one workload: how far is the model off?
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from ropewalk.cluster.engine.worth import PERIOD_S
from ropewalk.cluster.store.chunk import ChunkHeader
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.cluster.store.worth import FOLDER, MAX_CHUNKS, STALE_S, Claim, Worth, Worths, write_worth
from ropewalk.kernels.gear import ChunkSizes, chunk_limits
from ropewalk.kernels.keys import Domain, Tokens, as_tokens, chain_key, content_key, root_key
from ropewalk.scheduler.foresight import Foresight
from ropewalk.scheduler.retention import Use
from ropewalk.workloads.block_cache import BlockCache
from ropewalk.workloads.sequences import SHARED
from ropewalk.workloads.traces import PATTERNS, TRANSCRIPTS, TraceTurn, chat, transcripts

WORKLOADS = ("selector", "random", "magentic-one")
BUDGETS = (3_000, 6_000, 9_000, 12_000)
"""Tokens whose KV has room."""

TENANT, BLOCK_SIZE, BYTES_PER_TOKEN = "bench", 32, 1024


@dataclass(frozen=True, slots=True)
class Model:
    """What is served: bytes and seconds of prefill of a token."""

    name: str
    token_bytes: int = BYTES_PER_TOKEN
    token_s: float = 1e-4

    @property
    def cost(self) -> float:
        """Seconds that a byte takes to compute."""
        return self.token_s / self.token_bytes


ONE = Model("one-r0")
SMALL, LARGE = Model("small-r0", 24 * 1024, 1e-4), Model("large-r0", 48 * 1024, 6e-4)
"""A byte of the large one takes three times as long."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk by its model and name; equal names of two models are two chunks."""

    model: Model
    chain: str
    parent: str = field(compare=False)
    tokens: Tokens = field(compare=False, repr=False)
    depth: int = field(compare=False)

    @property
    def size(self) -> int:
        return len(self.tokens) * self.model.token_bytes


@dataclass(frozen=True, slots=True)
class Step:
    """A turn of a session: what it looks up and what it leaves behind, in whole chunks."""

    turn: TraceTurn
    model: Model
    wanted: Sequence[Chunk]
    left: Sequence[Chunk]


def whole_chunks(model: Model, tokens: Sequence[int], known: dict[str, Chunk]) -> list[Chunk]:
    """Cut tokens as the engine does. The last, unfinished chunk is left out: a longer one replaces it soon."""
    cut = as_tokens(tokens)
    parent, found = root_key(TENANT), []
    for start, end in pairwise([0, *chunk_limits(cut, ChunkSizes())[:-1]]):
        chain = chain_key(parent, cut[start:end], Domain.EXACT)
        found.append(known.setdefault(model.name + chain, Chunk(model, chain, parent, cut[start:end], len(found))))
        parent = chain
    return found


def steps_of(turns: Iterable[TraceTurn], model_of: Callable[[str], Model]) -> list[Step]:
    """Return what turns look up and leave behind."""
    known: dict[str, Chunk] = {}
    steps = []
    for turn in turns:
        model = model_of(turn.session)
        wanted = whole_chunks(model, turn.prompt, known)
        steps.append(Step(turn, model, wanted, whole_chunks(model, (*turn.prompt, *turn.output[:-1]), known)))
    return steps


class Replica:
    """What an engine learns and says: as `cluster/engine/worth.py`, with the trace's clock."""

    def __init__(self, model: Model, pool: int, *, knows_costs: bool = True) -> None:
        self.name = uuid.uuid4().hex
        self.model = model
        self.rule = Foresight()
        self.pool = BlockCache(pool, BLOCK_SIZE, Foresight()) if pool else None
        self._uses: OrderedDict[Chunk, Use] = OrderedDict()
        self._cost = model.cost if knows_costs else 0.0
        self._said_s = -PERIOD_S

    def word(self, now_s: float) -> Worth | None:
        """Return what it says now; None when it has spoken just before, or has nothing to say."""
        if now_s < self._said_s + PERIOD_S or not self._uses:
            return None
        self._said_s = now_s
        claims = [
            Claim(bytes.fromhex(chunk.chain), self.rule.rate(use), use.time_s, use.depth)
            for chunk, use in self._uses.items()
        ]
        return Worth(self.model.name[:-3], now_s, self.rule.pauses.mean_s, self._cost, claims)

    def note(self, step: Step) -> None:
        """Note the chunks that a turn has used."""
        chunks = list(dict.fromkeys([*step.wanted, *step.left]))
        self.rule.note(self._uses, step.turn.session, step.turn.agent, chunks, MAX_CHUNKS)


class ModelStore:
    """A store's chunks with their times of last use, and the order in which they go."""

    def __init__(self, budget: int, arm: str, steps: Sequence[Step], *, by_seconds: bool) -> None:
        self._budget = budget
        self._arm = arm
        self._mtimes: dict[Chunk, float] = {}
        self._used = 0
        self._words: dict[str, Worth] = {}
        self._by_seconds = by_seconds
        self._next: defaultdict[Chunk, list[float]] = defaultdict(list)
        for step in reversed(steps):
            for chunk in step.wanted:
                self._next[chunk].append(step.turn.time_s)

    def has(self, chunk: Chunk) -> bool:
        return chunk in self._mtimes

    def read(self, chunk: Chunk, now_s: float) -> None:
        self._mtimes[chunk] = now_s

    def put(self, chunk: Chunk, now_s: float) -> None:
        if self._used + chunk.size > self._budget:
            self._evict(self._budget - self._budget // 50 - chunk.size, now_s)
        self._mtimes[chunk] = now_s
        self._used += chunk.size

    def hear(self, replica: str, word: Worth) -> None:
        self._words[replica] = word

    def _evict(self, target: int, now_s: float) -> None:
        worths = Worths(word for word in self._words.values() if word.time_s >= now_s - STALE_S)

        def key(chunk: Chunk) -> Any:
            mtime = self._mtimes[chunk]
            if self._arm == "clairvoyant":
                return self._soon(chunk, now_s), -chunk.depth  # what stands behind it is of no use without it
            return worths.rank(chunk.model.name, chunk.chain, mtime, now_s) if worths else mtime

        for chunk in sorted(self._mtimes, key=key):
            if self._used <= target:
                break
            del self._mtimes[chunk]
            self._used -= chunk.size

    def _soon(self, chunk: Chunk, now_s: float) -> float:
        """How soon a chunk is used next, weighed by what it costs."""
        uses = self._next[chunk]
        while uses and uses[-1] <= now_s:
            uses.pop()
        weight = chunk.model.cost if self._by_seconds else 1.0
        return weight / (uses[-1] - now_s) if uses else 0.0


class RealStore:
    """The same, of files. The clock is the trace's, which begins at `START_S`."""

    START_S = 1_000_000_000.123

    def __init__(self, root: Path, budget: int) -> None:
        self._stores: dict[str, NodeStore] = {}
        self._root, self._budget = root, budget

    @property
    def counters(self) -> Counter[str]:
        return sum((store.counters for store in self._stores.values()), Counter[str]())

    def has(self, chunk: Chunk) -> bool:
        return self._of(chunk).contains(chunk.chain)

    def read(self, chunk: Chunk, now_s: float) -> None:
        with self._clock(now_s):
            self._of(chunk).read(chunk.chain)
        self._touch(chunk, now_s)

    def put(self, chunk: Chunk, now_s: float) -> None:
        content = content_key(TENANT, chunk.tokens)
        header = ChunkHeader(chunk.chain, chunk.parent, content, TENANT, Domain.EXACT, 0, chunk.tokens)
        rows = torch.zeros(1, len(chunk.tokens), 1, chunk.model.token_bytes // 2, dtype=torch.bfloat16)
        with self._clock(now_s):
            assert self._of(chunk).put(header, rows)
        self._touch(chunk, now_s)

    def hear(self, replica: str, word: Worth) -> None:
        claims = [claim._replace(used_s=claim.used_s + self.START_S) for claim in word.claims]
        (self._root / FOLDER).mkdir(exist_ok=True)
        said = Worth(word.model, word.time_s + self.START_S, word.pause_s, word.cost, claims)
        write_worth(self._root / FOLDER, replica, said)

    def _of(self, chunk: Chunk) -> NodeStore:
        name = chunk.model.name
        if name not in self._stores:
            self._stores[name] = NodeStore(self._root, name, TENANT, self._budget)
        return self._stores[name]

    def _touch(self, chunk: Chunk, now_s: float) -> None:
        path = self._of(chunk).base / "objects" / chunk.chain[:2] / chunk.chain
        os.utime(path, (now_s + self.START_S,) * 2)

    def _clock(self, now_s: float) -> Any:
        return mock.patch("time.time", return_value=now_s + self.START_S)


def replay(
    steps: Sequence[Step],
    store: ModelStore | RealStore,
    arm: str,
    num_replicas: int,
    *,
    pool: int = 0,
    knows_costs: bool = True,
) -> dict[str, float]:
    """Return shares of prompt tokens and of seconds of prefill that the store has spared."""
    replicas: dict[tuple[str, int], Replica] = {}
    homes: dict[str, int] = {}
    num_homes: Counter[str] = Counter()
    tokens, seconds = [0, 0], [0.0, 0.0]
    for step in steps:
        turn, now_s = step.turn, step.turn.time_s
        if turn.session not in homes:
            homes[turn.session] = num_homes[step.model.name] % num_replicas
            num_homes[step.model.name] += 1
        home = homes[turn.session]
        replica = replicas.get((step.model.name, home))
        if replica is None:
            replica = replicas[step.model.name, home] = Replica(step.model, pool, knows_costs=knows_costs)
        replica.rule.begin(turn.session, turn.agent, now_s)
        local = replica.pool.serve(turn) if replica.pool is not None else 0
        found = 0
        for chunk in step.wanted:
            if not store.has(chunk):
                break
            found += len(chunk.tokens)
            if found > local:  # what the engine holds itself is not read
                store.read(chunk, now_s)
        for chunk in step.left:
            if not store.has(chunk):
                store.put(chunk, now_s)
        replica.note(step)
        if arm == "ours" or (arm == "half" and home == 0):
            word = replica.word(now_s)
            if word is not None:
                store.hear(replica.name, word)
        spared = max(found - local, 0)
        for total, weight in ((tokens, 1), (seconds, step.model.token_s)):
            total[0] += spared * weight
            total[1] += len(turn.prompt) * weight
    return {"tokens": tokens[0] / tokens[1], "seconds": seconds[0] / seconds[1]}


def load(name: str, num_sessions: int, data: Path) -> list[TraceTurn]:
    """Return a workload's turns. Raises `OSError`."""
    if name in PATTERNS:
        return chat(name, num_sessions)
    return transcripts(name, data, num_sessions=num_sessions)


def study(steps: Sequence[Step], budget: int, arms: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return hit rates of all arms at one budget."""
    rates = {
        arm: replay(
            steps,
            ModelStore(budget * ONE.token_bytes, arm, steps, by_seconds=False),
            arm,
            args.replicas,
            pool=args.pool,
        )["tokens"]
        for arm in arms
    }
    return {"budget_tokens": budget, "rates": rates, "closed": closed(rates)}


def closed(rates: Mapping[str, float]) -> dict[str, float | None]:
    """Return how much of the gap between `lru` and `clairvoyant` each arm closes."""
    gap = rates["clairvoyant"] - rates["lru"]
    return {arm: (rate - rates["lru"]) / gap if gap > 0 else None for arm, rate in rates.items()}


def study_two(turns: Sequence[TraceTurn], budget: int, args: argparse.Namespace) -> dict[str, Any]:
    """Two models share a store: every other session is served by the large one."""
    order = {session: number for number, session in enumerate(dict.fromkeys(turn.session for turn in turns))}
    steps = steps_of(turns, lambda session: LARGE if order[session] % 2 else SMALL)
    num_bytes = budget * (SMALL.token_bytes + LARGE.token_bytes) // 2
    found = {}
    for arm, knows_costs in (("lru", True), ("ours, costs unknown", False), ("ours", True), ("clairvoyant", True)):
        store = ModelStore(num_bytes, arm, steps, by_seconds=True)
        rates = replay(steps, store, arm.split(",")[0], args.replicas, pool=args.pool, knows_costs=knows_costs)
        found[arm] = rates
    seconds = {arm: rates["seconds"] for arm, rates in found.items()}
    return {"budget_tokens": budget, "found": found, "closed": closed(seconds)}


def check(steps: Sequence[Step], budget: int, args: argparse.Namespace) -> dict[str, Any]:
    """Replay on the real store; return its hit rates and the model's."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    report: dict[str, Any] = {"budget_tokens": budget, "real": {}, "model": {}, "counters": {}}
    for arm in ("lru", "ours"):
        model = ModelStore(budget * ONE.token_bytes, arm, steps, by_seconds=False)
        report["model"][arm] = replay(steps, model, arm, args.replicas)["tokens"]
        with tempfile.TemporaryDirectory(dir=base) as folder:
            store = RealStore(Path(folder), budget * ONE.token_bytes)
            begin = time.perf_counter()
            report["real"][arm] = replay(steps, store, arm, args.replicas)["tokens"]
            names = ("puts", "reads", "evicted", "evicted_known", "evicted_unknown", "worth_damaged", "put_failed")
            report["counters"][arm] = {name: store.counters[name] for name in names}
            report["counters"][arm]["seconds"] = round(time.perf_counter() - begin, 1)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workloads = (*PATTERNS, *TRANSCRIPTS)
    parser.add_argument("--workloads", nargs="+", choices=workloads, default=WORKLOADS, metavar="NAME")
    parser.add_argument("--budgets", nargs="+", type=int, default=BUDGETS, metavar="TOKENS")
    parser.add_argument("--sessions", type=int, default=60, help="a workload (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="of a model (default: %(default)s)")
    parser.add_argument("--pool", type=int, default=0, help="blocks of each engine's own cache (default: none)")
    parser.add_argument("--data", type=Path, default=SHARED, help="folder with public runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    arms = ("lru", "half", "ours", "clairvoyant") if args.replicas > 1 else ("lru", "ours", "clairvoyant")
    report: dict[str, Any] = {"replicas": args.replicas, "pool": args.pool, "workloads": {}, "two_models": {}}
    traces = {}
    for name in args.workloads:
        try:
            traces[name] = load(name, args.sessions, args.data)
        except OSError as error:
            print(f"no {name} ({error}): left out")
    for name, turns in traces.items():
        steps = steps_of(turns, lambda _: ONE)
        report["workloads"][name] = [study(steps, budget, arms, args) for budget in args.budgets]
        report["two_models"][name] = [study_two(turns, budget, args) for budget in args.budgets]
    first = next(iter(traces.values()))
    sizes = [len(chunk.tokens) for step in steps_of(first, lambda _: ONE) for chunk in step.wanted]
    report["mean_chunk_tokens"] = float(np.mean(sizes))
    report["check"] = check(steps_of(first[:400], lambda _: ONE), args.budgets[len(args.budgets) // 2], args)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        show(report, arms)


def show(report: Mapping[str, Any], arms: Sequence[str]) -> None:
    """Print what was found."""
    front = f"behind pools of {report['pool']} blocks" if report["pool"] else "no cache in front"
    print(f"{report['replicas']} replicas of a model, {front}; chunks of {report['mean_chunk_tokens']:.0f} tokens")
    print(f"\nhit rates, % of prompt tokens (of the gap closed)\n{'':14} {'tokens':>7}" + _heads(arms))
    for name, cells in report["workloads"].items():
        for cell in cells:
            line = "".join(_cell(cell["rates"][arm], cell["closed"][arm]) for arm in arms)
            print(f"{name:14} {cell['budget_tokens']:7}{line}")
    two = ("lru", "ours, costs unknown", "ours", "clairvoyant")
    print("\ntwo models share it: seconds of prefill spared, % (of the gap closed)")
    print(f"{'':14} {'tokens':>7}" + _heads(two))
    for name, cells in report["two_models"].items():
        for cell in cells:
            line = "".join(_cell(cell["found"][arm]["seconds"], cell["closed"][arm]) for arm in two)
            line += "   hit rates " + " ".join(f"{100 * cell['found'][arm]['tokens']:5.1f}" for arm in two)
            print(f"{name:14} {cell['budget_tokens']:7}{line}")
    check = report["check"]
    print(f"\nthe real store, {check['budget_tokens']} tokens, first 400 turns: hit rates of files and of the model, %")
    for arm, rate in check["real"].items():
        counted = json.dumps(check["counters"][arm])
        print(f"{arm:5} {100 * rate:5.1f} {100 * check['model'][arm]:5.1f}   {counted}")


def _heads(arms: Sequence[str]) -> str:
    return "".join(f"{arm:>20}" for arm in arms)


def _cell(rate: float, share: float | None) -> str:
    return f"{f'{100 * rate:.1f}' + ('' if share is None else f' ({100 * share:.0f} %)'):>20}"


if __name__ == "__main__":
    main()
