"""What routing and learning read from a request before it is tokenised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropewalk.agents.sketch import anchor_sketch
from ropewalk.cluster.engine.request import Mode
from ropewalk.cluster.serve.settings import peek_mode, peek_session
from ropewalk.scheduler.routing import CHARS_PER_TOKEN, RequestHints


def anchor_body(request: Any) -> dict[str, Any]:
    """The parts of a vLLM request object that may hold an anchor, as the JSON that the client sent."""
    tools = getattr(request, "tools", None) or []
    return {
        "messages": getattr(request, "messages", None),
        "prompt": getattr(request, "prompt", None),
        "tools": [tool.model_dump() if hasattr(tool, "model_dump") else tool for tool in tools],
    }


def request_hints(request: Any, headers: Mapping[str, str], default_mode: Mode = "exact") -> RequestHints:
    """Session, agent, anchor sketch, size and mode of a vLLM request object. Reads only."""
    body = anchor_body(request)
    extra = getattr(request, "model_extra", None)
    session, agent = peek_session(extra, headers)
    reuse = (peek_mode(extra) or default_mode) == "reuse"
    return RequestHints(session, agent, anchor_sketch(body), _num_chars(body), reuse)


def _num_chars(body: Mapping[str, Any]) -> int:
    prompt = body["prompt"]
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list) and prompt:
        first = prompt[0]  # of several prompts, or the first token of one
        if isinstance(first, str):
            return len(first)
        return CHARS_PER_TOKEN * len(first if isinstance(first, list) else prompt)
    return sum(
        _content_chars(message.get("content")) for message in body["messages"] or () if isinstance(message, Mapping)
    )


def _content_chars(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    texts = (part.get("text") for part in content if isinstance(part, Mapping)) if isinstance(content, list) else ()
    return sum(len(text) for text in texts if isinstance(text, str))
