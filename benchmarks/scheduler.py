"""Cost of the scheduler's pure parts and the size of its state, against the number of agents.

    python -m benchmarks.scheduler [--json]

Measured on generated programs: every agent has a system prompt of about 1,500 tokens of which 60 % is a preamble that
all share, behind a header that differs in every request; hand-overs follow a random table with three likely successors
an agent. Times are medians over batches with the quartiles beside them; sizes are of the JSON that is written to disk.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ropewalk.agents.identity import AgentRegistry
from ropewalk.agents.sketch import AnchorSketch, anchor_sketch
from ropewalk.scheduler.routing import LocalAffinity, ReplicaView, RequestHints, rank_replicas
from ropewalk.scheduler.state import Observation, SchedulerState

NUM_REPLICAS = 16
NUM_SESSIONS = 64
TURNS = 1_500
BATCHES, BATCH = 40, 20
WORDS_A_SENTENCE = 12
SENTENCES = 90
"""Of 12 words of six letters and a full stop: about 1,100 words, or some 1,500 tokens of English."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor microseconds for one call: median and quartiles over the batches."""

    name: str
    num_agents: int
    median_us: float
    lower_us: float
    upper_us: float


def sentences(rng: random.Random, count: int) -> list[str]:
    """Random words; no two sentences alike."""
    return [
        " ".join("".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(WORDS_A_SENTENCE)) + "."
        for _ in range(count)
    ]


class Program:
    """Agents behind one preamble and the order in which they speak."""

    def __init__(self, num_agents: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.preamble = sentences(self.rng, SENTENCES * 6 // 10)
        self.own = [sentences(self.rng, SENTENCES * 4 // 10) for _ in range(num_agents)]
        self.likely = [self.rng.sample(range(num_agents), min(3, num_agents)) for _ in range(num_agents)]
        self.at = dict.fromkeys(range(NUM_SESSIONS), 0)

    def body(self, agent: int) -> dict[str, Any]:
        """A chat request of this agent behind a new header of about 100 tokens."""
        system = "\n".join([*sentences(self.rng, 6), *self.preamble, *self.own[agent]])
        return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "Go on."}]}

    def turn(self) -> tuple[int, int]:
        """Next (session, agent)."""
        session = self.rng.randrange(NUM_SESSIONS)
        agent = self.rng.choices(self.likely[self.at[session]], [6, 3, 1][: len(self.likely[0])])[0]
        self.at[session] = agent
        return session, agent


def observations(program: Program, count: int, *, named: bool) -> list[Observation]:
    """Turns of the program as replicas report them."""
    result = []
    for i in range(count):
        session, agent = program.turn()
        sketch = None if named else anchor_sketch(program.body(agent))
        name = f"agent{agent}" if named else None
        replica = f"replica{session % NUM_REPLICAS}"
        result.append(Observation(f"session{session}", name, sketch, "m", replica, "n0", float(i), 2000, 1500, 300))
    return result


def cost(name: str, num_agents: int, calls: Sequence[Callable[[], object]]) -> Cost:
    """Processor time of batches of calls, each call once, with the garbage collector off.

    Processor time, not the clock: other programs on the machine then hardly matter.
    """
    times = []
    size = max(1, len(calls) // BATCHES)
    gc.collect()
    gc.disable()
    for i in range(0, len(calls) - size + 1, size):
        start = time.thread_time_ns()
        for call in calls[i : i + size]:
            call()
        times.append((time.thread_time_ns() - start) / size / 1_000)
    gc.enable()
    lower, median, upper = statistics.quantiles(times, n=4)
    return Cost(name, num_agents, median, lower, upper)


def measure(num_agents: int) -> tuple[list[Cost], dict[str, int]]:
    """All costs and sizes with so many agents."""
    program = Program(num_agents)
    num_calls = BATCHES * BATCH
    named, unnamed = SchedulerState(), SchedulerState()
    for o in observations(program, TURNS, named=True):
        named.observe(o)
    for agent in range(num_agents):  # every agent once in four sessions, so that all are known
        for session in range(4):
            sketch = anchor_sketch(program.body(agent))
            unnamed.observe(Observation(f"w{session}", None, sketch, "m", "replica0", "n0", 0.0, 2000))
    for o in observations(program, min(TURNS, num_calls), named=False):
        unnamed.observe(o)

    bodies = [program.body(program.turn()[1]) for _ in range(BATCHES)]
    snapshot = unnamed.snapshot()
    snapshot.agent_of(None, anchor_sketch(bodies[0]))  # builds the index, once a snapshot
    sketches = [anchor_sketch(body) for body in bodies]
    local = LocalAffinity()
    views = [ReplicaView(f"replica{i}", program.rng.randrange(8), "n0", 64) for i in range(NUM_REPLICAS)]

    def route(session: str, agent: str | None, sketch: AnchorSketch | None) -> Callable[[], object]:
        return lambda: rank_replicas(RequestHints(session, agent, sketch, 8000), views, snapshot, local)

    next_named = observations(program, num_calls, named=True)
    next_unnamed = observations(program, num_calls // 4, named=False)
    agents = named.learner.agents
    costs = [
        cost("sketch of a request body", num_agents, [lambda b=b: anchor_sketch(b) for b in bodies]),
        cost("observe, agent named", num_agents, [lambda o=o: named.observe(o) for o in next_named]),
        cost("observe, agent recognised", num_agents, [lambda o=o: unnamed.observe(o) for o in next_unnamed]),
        cost(
            "predict", num_agents, [lambda i=i: named.learner.handover((agents[i % len(agents)],)) for i in range(800)]
        ),
        cost("survival of all anchors", num_agents, [named.survival] * 200),
        cost("snapshot", num_agents, [named.snapshot] * BATCHES),
        cost("match a sketch", num_agents, [lambda s=s: snapshot.agent_of(None, s) for s in sketches]),
        cost("route, agent named", num_agents, [route(f"session{i % 80}", "agent0", None) for i in range(400)]),
        cost("route, by sketch", num_agents, [route(f"session{i % 80}", None, s) for i, s in enumerate(sketches)]),
    ]

    def size(value: object) -> int:
        return len(json.dumps(value, separators=(",", ":")))

    sizes = {
        "hand-overs": size([named.learner.to_dict(), named.handovers.to_dict()]),
        "agents with anchors": size(unnamed.registry.to_dict()),
        "sessions": size(unnamed.sessions.to_dict()),
        "whole state": size(unnamed.to_dict()),
        "recognised agents": len(unnamed.registry),
    }
    return costs, sizes


def recognition(num_agents: int = 6, seeds: int = 3) -> list[tuple[int, int, int, float, int]]:
    """(preamble %, own %, header %, share of late turns given to the agent's usual id, agents known) by mix."""
    rows = []
    for preamble, own, header in ((60, 40, 10), (80, 20, 10), (90, 10, 8), (95, 5, 5), (50, 50, 40)):
        right = total = known = 0
        for seed in range(seeds):
            rng = random.Random(seed)
            shared, owns = sentences(rng, preamble), [sentences(rng, own) for _ in range(num_agents)]
            registry, seen = AgentRegistry(), []
            for turn in range(360):
                agent = rng.randrange(num_agents)
                text = "\n".join([*sentences(rng, header), *shared, *owns[agent]])
                sketch = anchor_sketch({"messages": [{"role": "system", "content": text}]})
                seen.append((agent, registry.resolve(None, sketch, f"s{turn // 12}").agent))
            late = seen[240:]
            claimed: set[str | None] = set()
            for agent in range(num_agents):
                ids = [found for a, found in late if a == agent]
                # An id that already stands for another agent is a confusion, however regular it is.
                usual = max(set(ids) - claimed, key=ids.count, default=None)
                claimed.add(usual)
                right += sum(found == usual for found in ids)
                total += len(ids)
            known += len(registry)
        rows.append((preamble, own, header, right / total, round(known / seeds)))
    return rows


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    results = [(n, *measure(n)) for n in (6, 24, 191)]
    mixes = recognition()
    if args.json:
        rows = [{"num_agents": n, "costs": [asdict(c) for c in costs], "bytes": sizes} for n, costs, sizes in results]
        print(json.dumps({"scaling": rows, "recognition": mixes}, indent=2))
        return 0
    print(f"{NUM_REPLICAS} replicas, {NUM_SESSIONS} sessions; processor microseconds a call: median (quartiles)\n")
    names = [c.name for c in results[0][1]]
    print(f"{'':28}" + "".join(f"{f'{n} agents':>24}" for n, _, _ in results))
    for i, name in enumerate(names):
        cells = [costs[i] for _, costs, _ in results]
        print(f"{name:28}" + "".join(f"{f'{c.median_us:.1f} ({c.lower_us:.1f}-{c.upper_us:.1f})':>24}" for c in cells))
    print("\nbytes as JSON")
    for key in results[0][2]:
        if key != "recognised agents":
            print(f"{key:28}" + "".join(f"{sizes[key]:>24,}" for _, _, sizes in results))
    print(f"{'agents recognised':28}" + "".join(f"{sizes['recognised agents']:>24}" for _, _, sizes in results))
    print(
        "\nsix unnamed agents, sentences shared / own / in a header that never repeats: right of the last third, known"
    )
    for preamble, own, header, share, known in mixes:
        print(f"{preamble:>4} / {own:>2} / {header:>2} {100 * share:>8.1f} % {known:>6}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
