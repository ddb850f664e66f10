"""`ropewalk bench scheduler`: what learning, foretelling and routing cost, and how large the state is, by agents.

Measured on generated programs: every agent has a system prompt of about 1,500 tokens of which 60 % is a preamble that
all share, behind a header that differs in every request; hand-overs follow a random table with three likely successors
an agent. Times are processor time on one core, medians with the quartiles beside them; sizes are of the JSON that is
written to disk.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import string
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ropewalk.agents.identity import AgentRegistry
from ropewalk.agents.sketch import AnchorSketch, anchor_sketch
from ropewalk.cluster.bench.output import check_writable
from ropewalk.scheduler.routing import LocalAffinity, ReplicaView, RequestHints, rank_replicas
from ropewalk.scheduler.state import Observation, SchedulerSettings, SchedulerState

NUM_AGENTS = (6, 24, 191, 1_000)
"""A group chat, the paper's largest program, the agents of one public set of runs, and an upper end."""

QUICK_AGENTS = (6, 24)

NUM_REPLICAS = 16
NUM_SESSIONS = 64
NUM_PROGRAMS = 4
"""Agents that sessions begin with."""

TURNS = 200
"""Turns an agent that a state has learned: enough to have met nearly all contexts that the program has."""

CALLS, QUICK_CALLS = 400, 80
BATCH = 10
"""Calls a timing, where they can be made one after the other."""

WORDS_A_SENTENCE = 12
SENTENCES = 90
"""Of 12 words of six letters and a full stop: about 1,100 words, or some 1,500 tokens of English."""

START_S = 1_796_000_000.0
"""Seconds since the epoch of the first turn: times of ten digits, as they are in use."""

MIXES = ((60, 40, 10), (80, 20, 10), (90, 10, 8), (95, 5, 5), (50, 50, 40))
"""Sentences of the shared preamble, of the agent's own part, and of the header, for the table of recognition."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor microseconds for one call: median and quartiles."""

    name: str
    num_agents: int
    median_us: float
    lower_us: float
    upper_us: float


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the study."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "scheduler",
        help="what learning, foretelling and routing cost, and how large the state is",
        description=(
            "Measure the scheduler's pure parts on generated programs: processor time of each call and bytes of the "
            "state, against the number of agents."
        ),
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there; '-' prints them instead of the tables")
    parser.add_argument(
        "--quick", action="store_true", help="fewer calls and agents, and nothing about recognition: some seconds"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print. Raises `UserError` for a file that cannot be written."""
    to_stdout = args.json == "-"
    path = None if args.json is None or to_stdout else Path(args.json)
    check_writable("--json", path)
    counts, calls = (QUICK_AGENTS, QUICK_CALLS) if args.quick else (NUM_AGENTS, CALLS)
    report = {
        "num_replicas": NUM_REPLICAS,
        "num_sessions": NUM_SESSIONS,
        "scaling": [measure(num_agents, calls) for num_agents in counts],
        "recognition": [] if args.quick else [recognition(*mix) for mix in MIXES],
    }
    text = json.dumps(report, indent=1) + "\n"
    if path is not None:
        path.write_text(text, encoding="utf-8")
    if to_stdout:
        sys.stdout.write(text)
        return 0
    from ropewalk.cluster.bench.tables import print_scheduler

    print_scheduler(report)
    return 0


def sentences(rng: random.Random, count: int) -> list[str]:
    """Random words; no two sentences alike."""
    return [
        " ".join("".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(WORDS_A_SENTENCE)) + "."
        for _ in range(count)
    ]


class Program:
    """Agents behind one preamble (`shared`: its part of their prompts) and the order in which they speak, in sessions
    side by side."""

    def __init__(self, num_agents: int, seed: int = 0, shared: float = 0.6) -> None:
        self.rng = random.Random(seed)
        self.preamble = sentences(self.rng, round(shared * SENTENCES))
        self.own = [sentences(self.rng, SENTENCES - len(self.preamble)) for _ in range(num_agents)]
        ring = self.rng.sample(range(num_agents), num_agents)
        self.likely: list[list[int]] = [[] for _ in range(num_agents)]
        """Successors of each agent, likeliest first: the next on a ring, so that all come up, and two others."""
        for agent, following in zip(ring, [*ring[1:], ring[0]], strict=True):
            others = [other for other in self.rng.sample(range(num_agents), 4) if other not in (agent, following)]
            self.likely[agent] = [following, *others[:2]]
        self.sessions = [f"{self.rng.getrandbits(128):032x}" for _ in range(NUM_SESSIONS)]
        self.at = [session % NUM_PROGRAMS for session in range(NUM_SESSIONS)]
        self.time_s = START_S

    def body(self, agent: int) -> dict[str, Any]:
        """A chat request of this agent behind a new header of about 100 tokens."""
        system = "\n".join([*sentences(self.rng, 6), *self.preamble, *self.own[agent]])
        return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "Go on."}]}

    def turns(self, names: Sequence[str] | None) -> Iterator[Observation]:
        """Turns as replicas report them: with the agents' names, or with sketches alone."""
        while True:
            session = self.rng.randrange(NUM_SESSIONS)
            likely = self.likely[self.at[session]]
            agent = self.rng.choices(likely, [6, 3, 1])[0]
            self.at[session] = agent
            yield self.observation(session, agent, None if names is None else names[agent])

    def observation(self, session: int, agent: int, name: str | None) -> Observation:
        """One turn of an agent, three tenths of a second after the last."""
        self.time_s += 0.3
        sketch = anchor_sketch(self.body(agent)) if name is None else None
        replica = f"replica-{session % NUM_REPLICAS}"
        return Observation(
            self.sessions[session], name, sketch, "model", replica, "node-0", self.time_s, 2000, 1500, 300
        )


def learned_state(num_agents: int, program: Program | None = None) -> SchedulerState:
    """A state that has recognised all agents of a program by their anchors and learned who follows whom."""
    program = program or Program(num_agents)
    state = SchedulerState(SchedulerSettings(max_agents=max(num_agents, SchedulerSettings().max_agents)))
    found = []
    for agent in range(num_agents):
        for session in range(4):  # of their own, and over when the program begins
            sketch = anchor_sketch(program.body(agent))
            first = Observation(
                f"first-{agent}-{session}", None, sketch, "model", "replica-0", "node-0", START_S - 3_600, 2000
            )
            known = state.observe(first)
        found.append(str(known))
    for turn in itertools.islice(program.turns(found), TURNS * num_agents):
        state.observe(turn)
    return state


def state_bytes(state: SchedulerState) -> dict[str, int]:
    """Bytes as JSON: the whole state, and its parts."""
    data = state.to_dict()

    def size(*parts: str) -> int:
        return sum(len(json.dumps(data[part], separators=(",", ":")).encode()) for part in parts)

    return {
        "hand-overs": size("learner", "handovers"),
        "agents with anchors": size("registry"),
        "sessions": size("sessions"),
        "warm replicas and tokens": size("models", "replicas", "uses"),
        "whole state": len(json.dumps(data, separators=(",", ":")).encode()),
    }


def cost(name: str, num_agents: int, calls: Sequence[Callable[[], object]], batch: int = BATCH) -> Cost:
    """Processor time of batches of calls, each call once, with the garbage collector off.

    Processor time, not the clock: other programs on the machine then hardly matter.
    """
    times = []
    gc.collect()
    gc.disable()
    for i in range(0, len(calls) - batch + 1, batch):
        start = time.thread_time_ns()
        for call in calls[i : i + batch]:
            call()
        times.append((time.thread_time_ns() - start) / batch / 1_000)
    gc.enable()
    lower, median, upper = statistics.quantiles(times, n=4)
    return Cost(name, num_agents, median, lower, upper)


def cost_after_a_turn(
    name: str,
    num_agents: int,
    state: SchedulerState,
    turns: Iterator[Observation],
    call: Callable[[], object],
    calls: int,
) -> Cost:
    """Processor time of a call, each after one more turn was learned, so that nothing is merely remembered."""
    times = []
    gc.collect()
    gc.disable()
    for turn in itertools.islice(turns, calls):
        state.observe(turn)
        start = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - start) / 1_000)
    gc.enable()
    lower, median, upper = statistics.quantiles(times, n=4)
    return Cost(name, num_agents, median, lower, upper)


def measure(num_agents: int, calls: int = CALLS) -> dict[str, Any]:
    """All costs and sizes with so many agents."""
    by_name = costs_by_name(num_agents, calls)
    program = Program(num_agents)
    state = learned_state(num_agents, program)
    sizes = state_bytes(state)
    recognised, contexts = len(state.registry), state.learner.num_contexts
    return {
        "num_agents": num_agents,
        "costs": [asdict(found) for found in (*by_name, *costs_by_sketch(state, program, num_agents, calls))],
        "bytes": sizes,
        "agents_recognised": recognised,
        "contexts": contexts,
    }


def costs_by_name(num_agents: int, calls: int) -> list[Cost]:
    """Costs of learning and foretelling where clients name the agents."""
    program = Program(num_agents)
    turns = program.turns([f"agent-{agent:08x}" for agent in range(num_agents)])
    state = SchedulerState(SchedulerSettings(max_agents=max(num_agents, SchedulerSettings().max_agents)))
    for turn in itertools.islice(turns, TURNS * num_agents):
        state.observe(turn)

    def past() -> tuple[str, ...]:
        found = state.sessions.get(program.rng.choice(program.sessions))
        return found.past if found is not None else ()

    def anew(call: Callable[[], object]) -> Callable[[], object]:
        def work() -> None:
            state.forget_chain()
            call()

        return work

    few = max(8, calls // 10)
    more = list(itertools.islice(turns, calls * 2))
    pasts = [past() for _ in range(calls)]
    return [
        cost("observe, agent named", num_agents, [partial(state.observe, turn) for turn in more]),
        cost("predict, all agents", num_agents, [partial(state.learner.handover, p) for p in pasts]),
        cost_after_a_turn("outlook of a session", num_agents, state, turns, lambda: state.outlook(past()), calls),
        cost("outlook, worked out anew", num_agents, [anew(lambda: state.outlook(pasts[0]))] * few, 1),
        cost_after_a_turn("survival of all anchors", num_agents, state, turns, state.survival, calls),
        cost("survival, worked out anew", num_agents, [anew(state.survival)] * few, 1),
        cost_after_a_turn("snapshot", num_agents, state, turns, state.snapshot, few),
    ]


def costs_by_sketch(state: SchedulerState, program: Program, num_agents: int, calls: int) -> list[Cost]:
    """Costs of recognising agents by what they send, and of routing them. `state`: it knows them already."""
    unnamed = list(itertools.islice(program.turns(None), calls // 4))
    bodies = [program.body(program.rng.randrange(num_agents)) for _ in range(calls // 10)]
    sketches = [anchor_sketch(body) for body in bodies]
    snapshot = state.snapshot()
    known = str(snapshot.agent_of(None, sketches[0]))  # builds the index, once a snapshot
    local = LocalAffinity()
    views = [ReplicaView(f"replica-{i}", program.rng.randrange(8), "node-0", 64) for i in range(NUM_REPLICAS)]

    def route(session: str, agent: str | None, sketch: AnchorSketch | None) -> Callable[[], object]:
        return partial(rank_replicas, RequestHints(session, agent, sketch, 8000), views, snapshot, local)

    return [
        cost("route, agent named", num_agents, [route(session, known, None) for session in program.sessions * 4]),
        cost("sketch of a request body", num_agents, [partial(anchor_sketch, body) for body in bodies], 1),
        cost("match a new sketch", num_agents, [partial(snapshot.agent_of, None, s) for s in sketches], 1),
        cost("route, sketch matched", num_agents, [route(program.sessions[0], None, s) for s in sketches], 1),
        cost("observe, agent recognised", num_agents, [partial(state.observe, turn) for turn in unnamed], 5),
    ]


def recognition(preamble: int, own: int, header: int, num_agents: int = 6, seeds: int = 3) -> dict[str, Any]:
    """Share of late turns given to the agent's usual id, agents known, and the same share just after a restart."""
    right = total = known = right_restarted = 0
    for seed in range(seeds):
        rng = random.Random(seed)
        shared, owns = sentences(rng, preamble), [sentences(rng, own) for _ in range(num_agents)]
        registry = AgentRegistry()
        seen, restarted = [], []
        again: AgentRegistry | None = None
        for turn in range(360):
            agent = rng.randrange(num_agents)
            text = "\n".join([*sentences(rng, header), *shared, *owns[agent]])
            sketch = anchor_sketch({"messages": [{"role": "system", "content": text}]})
            if turn == 240:
                again = AgentRegistry.from_dict(json.loads(json.dumps(registry.to_dict())))
            seen.append((agent, registry.resolve(None, sketch, f"s{turn // 12}").agent))
            if again is not None:
                restarted.append((agent, again.resolve(None, sketch, f"s{turn // 12}").agent))
        right += usual(seen[240:], num_agents)
        right_restarted += usual(restarted, num_agents)
        total += len(seen) - 240
        known += len(registry)
    return {
        "preamble": preamble,
        "own": own,
        "header": header,
        "right": right / total,
        "right_restarted": right_restarted / total,
        "agents_known": round(known / seeds),
    }


def usual(seen: Sequence[tuple[int, str | None]], num_agents: int) -> int:
    """How many turns were given to the id that stands for their agent."""
    right = 0
    claimed: set[str | None] = set()
    for agent in range(num_agents):
        ids = [found for a, found in seen if a == agent]
        # An id that already stands for another agent is a confusion, however regular it is.
        best = max(set(ids) - claimed, key=ids.count, default=None)
        claimed.add(best)
        right += sum(found == best for found in ids)
    return right
