"""A group chat of six agents that solves GSM8K questions.

The agents' instructions and the transition table are data (`gsm8k_agents.yaml`). Speakers are drawn from the table,
what they say in the recorded run comes from the worked solutions, and everything follows from the seed. A request
looks like this:

    system     header: time, request id, retrieved text      varies (per turn, per session, or absent)
               team preamble                                 the same for all agents
               anchor: role, tools, examples                 the same in all prompts of one agent
    user       question and former messages, "[speaker] …"   grows; other agents' messages
    assistant  the agent's own former messages
    user       …, "[moderator] solver, you speak next."
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import Any, Literal
from uuid import UUID

import yaml

from ropewalk.workloads.datasets import Question, QuestionSet, Step
from ropewalk.workloads.errors import WorkloadError
from ropewalk.workloads.programs.base import (
    CHARACTERS_PER_TOKEN,
    ChatMessage,
    Session,
    Turn,
    estimate_text_tokens,
    estimate_tokens,
)

HeaderMode = Literal["turn", "session", "none"]

USER = "user"
MODERATOR = "moderator"

# Room for the questions of one session, so that sessions don't share questions while the set is large enough.
QUESTIONS_PER_SESSION = 8
# Retrieved text in a header, in estimated tokens.
RETRIEVED_TOKENS = (50, 200)
SHORTEST_SNIPPET = 24  # characters
# Recorded clock times start here; each turn is some seconds after the one before.
EPOCH = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)

_VERBS = {"+": "Add", "-": "Subtract", "*": "Multiply", "/": "Divide"}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class AgentDefinition:
    """One agent's part of the data file: text sections, tool schemas, worked examples."""

    name: str
    sections: tuple[str, ...]
    tools: tuple[str, ...]
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Team:
    """The data file: shared preamble, agents, and who speaks after whom."""

    preamble: str
    agents: Mapping[str, AgentDefinition]
    start: str
    transitions: Mapping[str, Mapping[str, float]]


@cache
def load_team() -> Team:
    """Read `gsm8k_agents.yaml`."""
    data: dict[str, Any] = yaml.safe_load((files(__package__) / "gsm8k_agents.yaml").read_text("utf-8"))
    agents = {
        agent["name"]: AgentDefinition(
            name=agent["name"],
            sections=tuple(section.strip() for section in agent["sections"]),
            tools=tuple(json.dumps({"type": "function", "function": tool}) for tool in agent["tools"]),
            examples=tuple(example.strip() for example in agent["examples"]),
        )
        for agent in data["agents"]
    }
    return Team(data["team"].strip(), agents, data["start"], data["transitions"])


class Gsm8kProgram:
    """The program `gsm8k`. See the module's text for the form of a request.

    Args:
        questions: what is asked, and where solutions and retrieved text come from.
        seed: decides speakers, questions and headers.
        turns: requests a session.
        headers: when the header changes; `"none"` leaves it out.
        anchor_tokens: about how long each agent's anchor is, in estimated tokens. Shorter than the written anchor:
            examples, tools and sections are dropped from its end. Longer: solved questions are added as examples.
        max_prompt_tokens: the oldest messages are left out until a prompt is at most this long (estimated).
    """

    name = "gsm8k"

    def __init__(
        self,
        questions: QuestionSet,
        *,
        seed: int = 0,
        turns: int = 12,
        headers: HeaderMode = "turn",
        anchor_tokens: int | None = None,
        max_prompt_tokens: int = 3000,
    ) -> None:
        self._team = load_team()
        self._questions = questions.questions
        self._source = questions.source
        self._seed = seed
        self._turns = turns
        self._headers = headers
        self._max_prompt_tokens = max_prompt_tokens
        self._order = list(range(len(self._questions)))
        random.Random(f"{seed}/questions").shuffle(self._order)
        self._anchors = {name: self._build_anchor(agent, anchor_tokens) for name, agent in self._team.agents.items()}

    @property
    def source(self) -> str:
        """Where the questions come from."""
        return self._source

    @property
    def agents(self) -> tuple[str, ...]:
        """The six agents."""
        return tuple(self._team.agents)

    @property
    def preamble(self) -> str:
        """The text all agents share."""
        return self._team.preamble

    @property
    def anchors(self) -> Mapping[str, str]:
        """Each agent's own fixed text, which follows the preamble."""
        return self._anchors

    def session(self, index: int) -> Session:
        """Draw session number `index`: speakers, headers, questions and the recorded replies."""
        speakers = self._speakers(random.Random(f"{self._seed}/{index}/speakers"))
        questions = self._session_questions(index)
        chat = _Recorded(next(questions))
        opening: str | None = chat.question.text
        turns = []
        for number, agent in enumerate(itertools.islice(speakers, self._turns)):
            if agent == "planner" and chat.answered:
                chat = _Recorded(next(questions))
                opening = chat.question.text
            turns.append(Turn(number, agent, self._header(index, number), opening, chat.reply(agent)))
            opening = None
        return Session(f"{self.name}-{self._seed}-{index}", index, tuple(turns))

    def messages(self, session: Session, turn: int, replies: Sequence[str]) -> list[ChatMessage]:
        """Render the messages of turn number `turn`, dropping the oldest ones of the chat if they don't fit.

        The current question always stays. Raises `WorkloadError` if the prompt is too long even without history.
        """
        if len(replies) < turn:
            raise ValueError(f"turn {turn} needs {turn} replies, not {len(replies)}")
        current = session.turns[turn]
        said: list[tuple[str, str]] = []
        question = 0
        for past in session.turns[: turn + 1]:
            if past.opening is not None:
                question = len(said)
                said.append((USER, past.opening))
            if past.index < turn:
                said.append((past.agent, replies[past.index]))
        while True:
            messages = self._render(current, said)
            if estimate_tokens(messages) <= self._max_prompt_tokens:
                return messages
            if len(said) == 1:
                raise WorkloadError(
                    f"max_prompt_tokens={self._max_prompt_tokens}: header, instructions and question of agent "
                    f"{current.agent!r} alone take about {estimate_tokens(messages)} tokens; allow more, or use "
                    "shorter anchors (anchor_tokens)"
                )
            # Drop the oldest message but the question; then the agent's own ones at the front, because many chat
            # templates insist on a user message after the system message.
            if question == 0:
                del said[1]
            else:
                del said[0]
                question -= 1
            while said[0][0] == current.agent:
                del said[0]
                question -= 1

    def _render(self, turn: Turn, said: Sequence[tuple[str, str]]) -> list[ChatMessage]:
        system = "\n\n".join(part for part in (turn.header, self._team.preamble, self._anchors[turn.agent]) if part)
        messages: list[ChatMessage] = [{"role": "system", "content": system}]
        cue = (MODERATOR, f"{turn.agent}, you speak next.")
        for role, group in itertools.groupby([*said, cue], key=lambda item: _role(item[0], turn.agent)):
            texts = (text if role == "assistant" else f"[{speaker}] {text}" for speaker, text in group)
            messages.append({"role": role, "content": "\n\n".join(texts)})
        return messages

    def _speakers(self, rng: random.Random) -> Iterator[str]:
        agent = self._team.start
        while True:
            yield agent
            row = self._team.transitions[agent]
            agent = rng.choices(list(row), weights=list(row.values()))[0]

    def _session_questions(self, index: int) -> Iterator[Question]:
        for number in itertools.count(index * QUESTIONS_PER_SESSION):
            yield self._questions[self._order[number % len(self._order)]]

    def _other_question(self, session: int, rng: random.Random) -> Question:
        """Any question but those of this session (any at all, if the set has no others)."""
        count = len(self._order)
        place = session * QUESTIONS_PER_SESSION + rng.randrange(min(QUESTIONS_PER_SESSION, count - 1), count)
        return self._questions[self._order[place % count]]

    def _header(self, session: int, turn: int) -> str:
        if self._headers == "none":
            return ""
        moment = turn if self._headers == "turn" else 0
        rng = random.Random(f"{self._seed}/{session}/{moment}/header")
        time = EPOCH + timedelta(seconds=session * 97 + moment * 11 + rng.randrange(11))
        request = UUID(int=rng.getrandbits(128), version=4)
        budget = rng.randint(*RETRIEVED_TOKENS) * CHARACTERS_PER_TOKEN
        snippets: list[str] = []
        while budget >= SHORTEST_SNIPPET:
            text = self._other_question(session, rng).text
            snippets.append(f"[{len(snippets) + 1}] {_cut(text, budget)}")
            budget -= len(snippets[-1]) + 1
        lines = [f"Current time: {time:%Y-%m-%dT%H:%M:%SZ}", f"Request: {request}", "Retrieved context:", *snippets]
        return "\n".join(lines)

    def _build_anchor(self, agent: AgentDefinition, target: int | None) -> str:
        """Compose an anchor of about `target` estimated tokens (`None`: as written)."""
        parts = [
            *agent.sections,
            *(f"# Tools\n{tool}" if number == 0 else tool for number, tool in enumerate(agent.tools)),
            *(f"# Examples\n{text}" if number == 0 else text for number, text in enumerate(agent.examples)),
        ]
        if target is None:
            return "\n\n".join(parts)
        while len(parts) > 1 and estimate_text_tokens("\n\n".join(parts)) > target:
            parts.pop()
        if estimate_text_tokens("\n\n".join(parts)) < target - RETRIEVED_TOKENS[0] and agent.examples[-1] in parts[-1]:
            # The same for every seed: an anchor belongs to its agent, not to a run.
            solved = random.Random(f"{agent.name}/anchor").sample(self._questions, len(self._questions))
            for question in solved:
                parts.append(
                    f"Question: {question.text}\n{' '.join(s.sentence for s in question.steps)}\n#### {question.final}"
                )
                if estimate_text_tokens("\n\n".join(parts)) >= target:
                    break
            else:
                most = estimate_text_tokens("\n\n".join(parts))
                raise WorkloadError(
                    f"anchor_tokens={target}: agent {agent.name!r} reaches at most {most} tokens with the "
                    f"{len(solved)} questions of {self._source!r}; use a larger question set or a smaller value"
                )
        return "\n\n".join(parts)


class _Recorded:
    """What the agents say about one question in the recorded run, from its worked solution."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.answered = False
        self._steps = question.steps or (Step(f"The result is {question.final}.", ()),)
        self._done = 0
        self._calculated: set[int] = set()

    def reply(self, agent: str) -> str:
        """The agent's next message; advances the solution."""
        return {
            "planner": self._plan,
            "solver": self._solve,
            "calculator": self._calculate,
            "executor": self._execute,
            "reviewer": self._review,
            "answerer": self._answer,
        }[agent]()

    def _plan(self) -> str:
        goal = re.split(r"(?<=[.!?])\s+", self.question.text)[-1]
        if self._done:
            return f"The plan stands. Steps 1 to {self._done} are done. @solver: go on with the next one."
        lines = [f"Goal: {goal}"]
        results: dict[str, int] = {}
        for number, step in enumerate(self._steps, 1):
            if not step.calculations:
                lines.append(f"{number}. Establish: {' '.join(step.sentence.split()[:8])} ...")
                continue
            expression, result = step.calculations[0]
            verb = next((verb for sign, verb in _VERBS.items() if sign in expression[1:]), "Take")
            needed = sorted({results[value] for value in _NUMBER.findall(expression) if value in results})
            needs = f" (needs step {', '.join(map(str, needed))})" if needed else ""
            lines.append(f"{number}. {verb}: {expression}{needs}")
            results[result] = number
        lines.append("@solver: start with step 1.")
        return "\n".join(lines)

    def _solve(self) -> str:
        if self._done == len(self._steps):
            return f"All steps done, the result is {self.question.final}. @reviewer: please check."
        step = self._steps[self._done]
        self._done += 1
        text = f"Step {self._done}: {step.sentence}"
        if self._done == len(self._steps):
            return f"{text} All steps done. @reviewer: please check."
        return f"{text} @calculator: {step.calculations[-1][0]}" if step.calculations else text

    def _calculate(self) -> str:
        number = max(0, self._done - 1)
        calculations = self._steps[number].calculations
        if not calculations:
            return f"Nothing to evaluate in step {number + 1}."
        if number in self._calculated:
            return f"Confirmed: {calculations[-1][0]} = {calculations[-1][1]}"
        self._calculated.add(number)
        return "\n".join(f"<<{left}={right}>> {left} = {right}" for left, right in calculations)

    def _execute(self) -> str:
        numbered = enumerate(self._steps[: max(1, self._done)], 1)
        computed = [(number, *step.calculations[-1]) for number, step in numbered if step.calculations]
        if not computed:
            return "```python\nprint('no calculation so far')\n```\nstdout: no calculation so far\nexit code: 0"
        program = [f"step_{number} = {left}" for number, left, _ in computed]
        labels = ", ".join(f"step_{number}" for number, _, _ in computed)
        output = " ".join(right for _, _, right in computed)
        return "\n".join(["```python", *program, f"print({labels})", "```", f"stdout: {output}", "exit code: 0"])

    def _review(self) -> str:
        count = len(self._steps)
        if self.answered:
            return f"APPROVED: {self.question.final}. The reply says what was asked for."
        if self._done == count:
            reason = f"All {count} steps use numbers of the question."
            return f"APPROVED: {self.question.final}. {reason} @answerer: please write the reply."
        reason = (
            f"Steps 1 to {self._done} agree with the question." if self._done else "Nothing has been worked out yet."
        )
        return f"OPEN: steps {self._done + 1} to {count}. {reason} @solver: step {self._done + 1}."

    def _answer(self) -> str:
        if self.answered:
            return f"#### {self.question.final}"
        self.answered = True
        self._done = len(self._steps)
        return f"{' '.join(step.sentence for step in self._steps)}\n#### {self.question.final}"


def _role(speaker: str, agent: str) -> str:
    return "assistant" if speaker == agent else "user"


def _cut(text: str, characters: int) -> str:
    """The first words of `text`, at most `characters` long unless the first word is longer."""
    if len(text) <= characters:
        return text
    return text[:characters].rsplit(" ", 1)[0]
