"""What a simulated cluster is asked: names of blocks instead of tokens."""

from __future__ import annotations

from typing import NamedTuple


class Request(NamedTuple):
    """One request.

    `time_s`: when it is sent. `blocks`: names of the full blocks of the prompt and, as far as the trace knows them, of
    the answer but for its last token; equal names mean equal tokens from the beginning to the block's end.
    `num_anchor`: tokens that all prompts of the agent begin with. `is_last`: the session ends with it.
    """

    time_s: float
    session: str | None
    agent: str
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...]
    num_anchor: int = 0
    is_last: bool = False
