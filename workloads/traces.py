"""Turns of multi-agent sessions as token ids and times: what caches are judged with, on an engine or a model of one.

    prompt    preamble (all agents) · anchor (the agent) · question and all former messages of the session
    output    the agent's message

Messages are as long as recorded or drawn; their tokens are made up, the same for the same text. Each session has one
turn at a time; the pause from one to the next is log-normal. A session that ends makes room for the next one.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from ropewalk.workloads.files import records_of

PAUSE_S = 3.2
"""Median seconds from one turn of a session to the next: what a call of a coding agent's model took
(mini-swe-agent's runs on SWE-bench Lite)."""

SPREAD = 0.5
"""Standard deviation of a pause's logarithm: generation lengths vary, machines hardly. The coding agent's own calls
have 1.37 (90 % within 18.4 s)."""

CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One request: who asks, when (seconds), the prompt's and the answer's token ids; whether its session ends."""

    session: str
    agent: str
    time_s: float
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens, how many sessions are live at once, and how much pauses vary: see `SPREAD`."""

    preamble: int = 128
    anchor: int = 480
    shortest: int = 24
    longest: int = 64
    max_prompt: int = 2400
    concurrency: int = 8
    spread: float = SPREAD


@dataclass(frozen=True, slots=True)
class Message:
    """What is said once: by whom (no agent: the user), behind which anchor of how many tokens, named, and how long."""

    agent: str
    anchor: str
    num_anchor: int
    name: str
    length: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A turn whose tokens nobody has made up yet: in which session, when, what the user said since the turn before,
    the agent's message, and whether the session ends."""

    number: int
    time_s: float
    heard: tuple[Message, ...]
    message: Message
    is_last: bool


NextAgent = Callable[[random.Random, list[int]], int | None]
"""Who speaks after these agents of a session, by number; None: the session ends."""

NUM_AGENTS = 6


def _selector(rng: random.Random, said: list[int]) -> int | None:
    """A selector speaks every other turn. It mostly goes on to the next of five, at times asks the same one again;
    when the last one has spoken, it ends the session two times out of five."""
    if said[-1] != 0:
        return 0
    last = next((agent for agent in reversed(said) if agent), 0)
    if last == NUM_AGENTS - 1 and rng.random() < 0.4:
        return None
    weights = [0.0] + [0.05] * (NUM_AGENTS - 1)
    weights[1 + last % (NUM_AGENTS - 1)] = 0.6
    if last:
        weights[last] += 0.2
    return rng.choices(range(NUM_AGENTS), weights)[0]


def _pipeline(rng: random.Random, said: list[int]) -> int | None:
    """One after the other; every other time, the result goes through once more."""
    if said[-1] == NUM_AGENTS - 1 and rng.random() < 0.5:
        return None
    return (said[-1] + 1) % NUM_AGENTS


def _debate(rng: random.Random, said: list[int]) -> int | None:
    """A moderator, two pairs that argue, a judge."""
    order = (0, 1, 2, 1, 2, 3, 4, 3, 4, 5)
    place = len(said) % len(order)
    if place == 0 and rng.random() < 0.6:
        return None
    return order[place]


def _random(rng: random.Random, said: list[int]) -> int | None:
    """Anybody else, and an end at any time."""
    if rng.random() < 1 / 16:
        return None
    return rng.choice([agent for agent in range(NUM_AGENTS) if agent != said[-1]])


PATTERNS: dict[str, NextAgent] = {
    "selector": _selector,
    "pipeline": _pipeline,
    "debate": _debate,
    "random": _random,
}
"""Group chats of six agents."""

MAX_TURNS = 24


def chat(pattern: str, num_sessions: int, seed: int = 0, sizes: Sizes = Sizes()) -> list[TraceTurn]:
    """Return the turns of group chats of six agents, by time."""
    rng = random.Random(f"{seed}/{pattern}")
    sessions = [_chat_session(pattern, pattern, f"{seed}/{pattern}/{n}", rng, sizes) for n in range(num_sessions)]
    return list(_interleaved(pattern, sessions, rng, sizes))


def _chat_session(pattern: str, program: str, name: str, rng: random.Random, sizes: Sizes) -> list[Message]:
    said = [0]
    while len(said) < MAX_TURNS and (following := PATTERNS[pattern](rng, said)) is not None:
        said.append(following)
    return [
        Message(
            f"{program}-{agent}",
            f"{program}/{agent}",
            sizes.anchor,
            f"{name}/{turn}",
            rng.randrange(sizes.shortest, sizes.longest),
        )
        for turn, agent in enumerate(said)
    ]


def chats(pattern: str, seed: int = 0, sizes: Sizes = Sizes(), programs: int = 1) -> Iterator[Sequence[Message]]:
    """Yield sessions of group chats without end, of `programs` programs in turn, each with agents of its own."""
    rng = random.Random(f"{seed}/{pattern}/sessions")
    for number in itertools.count():
        program = pattern if programs == 1 else f"{pattern}-{number % programs}"
        yield _chat_session(pattern, program, str(number), rng, sizes)


TRANSCRIPTS = {
    "magentic-one": "magentic_one_hand_crafted.jsonl.gz",
    "captain-agent": "captainagent_algorithm_generated.jsonl.gz",
}
"""Files of Who&When's runs (`ropewalk.workloads.sequences`)."""

SCALE = 4
"""Recorded messages are shortened to a quarter, so that a session fits into a small model's context."""

MAX_MESSAGE = 200


def transcripts(
    name: str,
    folder: Path,
    seed: int = 0,
    sizes: Sizes = Sizes(),
    num_sessions: int | None = None,
) -> list[TraceTurn]:
    """Return the turns of recorded multi-agent runs, by time: agents, order and (shortened) lengths as recorded.

    Agents have the system prompts of the record, or stand-ins of `sizes.anchor` tokens where it has none. Runs go on
    until a prompt would be longer than `sizes.max_prompt`. Raises OSError.
    """
    rng = random.Random(f"{seed}/{name}")
    return list(_interleaved(name, transcript_sessions(name, folder, rng, sizes)[:num_sessions], rng, sizes))


def transcript_sessions(name: str, folder: Path, rng: random.Random, sizes: Sizes = Sizes()) -> list[list[Message]]:
    """Return what was said in each recorded run, in an order that `rng` draws. Raises OSError."""
    runs = records_of(folder / "whowhen" / TRANSCRIPTS[name], lambda run: _messages(name, run, sizes))
    rng.shuffle(runs)
    return runs


def _messages(name: str, run: dict[str, Any], sizes: Sizes) -> list[Message]:
    prompts = run.get("system_prompts") or {}
    messages = [Message("", "", 0, f"{run['id']}/question", _num_tokens(run["question"], SCALE))]
    length = messages[0].length
    for number, turn in enumerate(run["turns"]):
        agent = turn["agent"]
        is_human = agent == "human"
        system = prompts.get(agent)
        num_anchor = sizes.anchor if system is None else max(_num_tokens(system, 1), 64)
        num_output = max(4, min(_num_tokens(turn["content"], SCALE), MAX_MESSAGE))
        if sizes.preamble + num_anchor + length + num_output > sizes.max_prompt:
            break
        anchor = f"{name}/{agent}" if system is None else f"{name}/{xxhash.xxh3_64_hexdigest(system.encode())}"
        messages.append(Message("" if is_human else agent, anchor, num_anchor, f"{run['id']}/{number}", num_output))
        length += num_output
    return messages


def _num_tokens(text: str, scale: int) -> int:
    return len(text) // (CHARS_PER_TOKEN * scale) + 1


def schedule(sessions: Iterable[Sequence[Message]], rng: random.Random, sizes: Sizes) -> Iterator[Scheduled]:
    """Yield the sessions' turns by time; messages without an agent are the user's. Sessions are numbered as they come,
    and taken one by one when there is room for them: there may be any number of them.
    """
    waiting = ((number, session) for number, session in enumerate(sessions) if any(m.agent for m in session))
    queue: list[tuple[float, int, int]] = []
    live: dict[int, Sequence[Message]] = {}

    def begin(time_s: float) -> None:
        number, session = next(waiting, (-1, ()))
        if session:
            live[number] = session
            heapq.heappush(queue, (time_s, number, 0))

    for _ in range(sizes.concurrency):
        begin(rng.uniform(0, PAUSE_S))
    while queue:
        time_s, number, first = heapq.heappop(queue)
        session, place = live[number], first
        while not session[place].agent:
            place += 1
        is_last = not any(m.agent for m in session[place + 1 :])
        yield Scheduled(number, time_s, tuple(session[first:place]), session[place], is_last)
        pause = PAUSE_S * math.exp(rng.gauss(0, sizes.spread))
        if is_last:
            del live[number]
            begin(time_s + pause)
        else:
            heapq.heappush(queue, (time_s + pause, number, place + 1))


def _interleaved(
    name: str, sessions: Sequence[Sequence[Message]], rng: random.Random, sizes: Sizes
) -> Iterator[TraceTurn]:
    """Yield the sessions' turns by time, as tokens."""
    preamble = _tokens(f"{name}/preamble", sizes.preamble)
    histories: dict[int, list[int]] = {}
    for turn in schedule(sessions, rng, sizes):
        history = histories.setdefault(turn.number, [])
        for heard in turn.heard:
            history += _tokens(heard.name, heard.length)
        message = turn.message
        output = _tokens(message.name, message.length)
        anchor = _tokens(message.anchor, message.num_anchor)
        prompt = (*preamble, *anchor, *history)
        yield TraceTurn(f"{name}-{turn.number}", message.agent, turn.time_s, prompt, tuple(output), turn.is_last)
        history += output
        if turn.is_last:
            del histories[turn.number]


def in_waves(turns: Iterable[TraceTurn], most: int) -> list[TraceTurn]:
    """Let up to `most` turns in a row that are of different sessions come together, when the last of them does."""
    found: list[TraceTurn] = []
    wave: list[TraceTurn] = []
    for turn in turns:
        if len(wave) == most or turn.session in [other.session for other in wave]:
            found += [replace(other, time_s=wave[-1].time_s) for other in wave]
            wave.clear()
        wave.append(turn)
    return found + [replace(other, time_s=wave[-1].time_s) for other in wave]


FIRST_TOKEN, NUM_TOKENS = 16, 480
"""Made-up token ids: small enough for every model."""


def _tokens(name: str, length: int) -> list[int]:
    return random.Random(name).choices(range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS), k=length)
