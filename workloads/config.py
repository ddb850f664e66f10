"""What a replay is told: one checked value, built by the command line, the demo or a benchmark."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from ropewalk.workloads.datasets import load_questions
from ropewalk.workloads.errors import WorkloadError
from ropewalk.workloads.programs.base import Program
from ropewalk.workloads.programs.gsm8k import Gsm8kProgram, HeaderMode

ReuseMode = Literal["exact", "reuse", "default"]

PROGRAMS = ("gsm8k",)

# Fields that decide what is asked. Arms that are compared must agree on all of them.
WORKLOAD_FIELDS = (
    "program", "sessions", "turns", "seed", "headers", "anchor_tokens", "max_prompt_tokens", "max_tokens", "dataset",
    "ignore_eos", "live", "concurrency", "rate", "warmup_turns", "timeout_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """One replay of one program against one endpoint (one arm of a comparison).

    Exactly one of `concurrency` (closed loop: so many sessions at a time) and `rate` (open loop: so many new sessions
    a second, Poisson) is used; `rate` wins if both are given. The body field `ropewalk` is sent only if `ropewalk` is
    set or `reuse` is given, so that any OpenAI endpoint can be used.

    Raises `WorkloadError` naming the field, its value and what would be right.
    """

    endpoint: str
    name: str = "replay"
    program: str = "gsm8k"
    model: str | None = None  # None: the first model that the endpoint lists
    sessions: int = 8
    turns: int = 12
    concurrency: int = 4
    rate: float | None = None
    seed: int = 0
    dataset: str | None = None
    headers: HeaderMode = "turn"
    anchor_tokens: int | None = None
    max_prompt_tokens: int = 3000
    max_tokens: int = 16
    ignore_eos: bool = False  # vLLM only
    live: bool = False
    ropewalk: bool = False
    reuse: ReuseMode | None = None
    explain: bool = False
    id_headers: bool = True
    api_key: str | None = None
    timeout_s: float = 300.0
    deadline_s: float | None = None
    warmup_turns: int = 0

    def __post_init__(self) -> None:
        url = urlsplit(self.endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise WorkloadError(
                f"endpoint={self.endpoint!r}: give an http:// or https:// URL, such as http://127.0.0.1:8000"
            )
        if self.program not in PROGRAMS:
            raise WorkloadError(f"program={self.program!r}: choose from {', '.join(PROGRAMS)}")
        for field, choices in (("headers", get_args(HeaderMode)), ("reuse", (None, *get_args(ReuseMode)))):
            if getattr(self, field) not in choices:
                names = ", ".join(str(choice) for choice in choices if choice is not None)
                raise WorkloadError(f"{field}={getattr(self, field)!r}: choose from {names}")
        for field in ("sessions", "turns", "concurrency", "max_tokens", "max_prompt_tokens", "anchor_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise WorkloadError(f"{field}={value}: must be at least 1")
        for field in ("rate", "timeout_s", "deadline_s"):
            value = getattr(self, field)
            if value is not None and not 0 < value < float("inf"):
                raise WorkloadError(f"{field}={value}: must be a positive number")
        if not 0 <= self.warmup_turns < self.sessions * self.turns:
            total = self.sessions * self.turns
            raise WorkloadError(
                f"warmup_turns={self.warmup_turns}: must be from 0 to {total - 1}, because {total} turns are run in all"
            )

    @property
    def base_url(self) -> str:
        """The endpoint up to and including `/v1`."""
        url = self.endpoint.rstrip("/").removesuffix("/chat/completions")
        return url if url.endswith("/v1") else f"{url}/v1"

    @property
    def sends_ropewalk_field(self) -> bool:
        """Whether requests carry the body field `ropewalk`."""
        return self.ropewalk or self.reuse is not None or self.explain

    def build_program(self) -> Program:
        """Load the questions and make the program. Raises `WorkloadError`."""
        return Gsm8kProgram(
            load_questions(self.dataset),
            seed=self.seed,
            turns=self.turns,
            headers=self.headers,
            anchor_tokens=self.anchor_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        """All settings but the API key, for reports."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "api_key"}
