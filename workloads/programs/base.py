"""What every multi-agent program is made of: sessions of turns, and a way to render a turn's messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

CHARACTERS_PER_TOKEN = 4
MESSAGE_OVERHEAD_TOKENS = 4  # role marker and separators of a chat template


class ChatMessage(TypedDict):
    """One message of an OpenAI chat request."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: `agent` is asked to speak.

    `header` is what stands above the shared text of the system message ("" for nothing), `opening` a message of the
    user that comes in just before this turn, `reply` what the agent says in the recorded run.
    """

    index: int
    agent: str
    header: str
    opening: str | None
    reply: str


@dataclass(frozen=True, slots=True)
class Session:
    """One run of a program: its turns follow one another, each seeing what was said before."""

    id: str
    index: int
    turns: tuple[Turn, ...]


class Program(Protocol):
    """A multi-agent program. Pure: the same settings and seed give the same sessions, byte for byte."""

    @property
    def name(self) -> str:
        """Name on the command line."""

    @property
    def source(self) -> str:
        """Where its content comes from."""

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of all agents, in the order of their definition."""

    def session(self, index: int) -> Session:
        """Session number `index` (0, 1, …)."""

    def messages(self, session: Session, turn: int, replies: Sequence[str]) -> list[ChatMessage]:
        """The messages of a turn, given the replies to all turns before it (recorded or live)."""


def estimate_tokens(messages: Sequence[ChatMessage]) -> int:
    """Prompt length in tokens by rule of thumb: a token per four characters, four for each message."""
    return sum(estimate_text_tokens(message["content"]) + MESSAGE_OVERHEAD_TOKENS for message in messages)


def estimate_text_tokens(text: str) -> int:
    """Length of a text in tokens: a quarter of its characters, rounded up."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)
