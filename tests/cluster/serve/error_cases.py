"""Requests that `vllm serve` refuses, and how: `python error_cases.py URL` prints what the server at URL answers.

`vllm_errors.json` holds the answers of stock vLLM 0.29.0:
`python -m vllm.entrypoints.openai.api_server --model MODEL --served-model-name smollm2-135m --max-model-len 2048
--enable-auto-tool-choice --tool-call-parser hermes`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx

MODEL = "smollm2-135m"
HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = "application/json"


def _chat(**fields: Any) -> str:
    return json.dumps({"model": MODEL, "messages": HELLO, "max_tokens": 4, **fields})


def _completion(**fields: Any) -> str:
    return json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4, **fields})


# name: (path, body, content type)
CASES: dict[str, tuple[str, str, str]] = {
    "chat: unknown model": (CHAT, _chat(model="nobody"), JSON),
    "completion: unknown model": (COMPLETIONS, _completion(model="nobody"), JSON),
    "chat: unknown model, streaming": (CHAT, _chat(model="nobody", stream=True), JSON),
    "chat: context too long": (CHAT, _chat(messages=[{"role": "user", "content": "word " * 4000}]), JSON),
    "chat: context too long, streaming": (
        CHAT,
        _chat(messages=[{"role": "user", "content": "word " * 4000}], stream=True),
        JSON,
    ),
    "completion: context too long": (COMPLETIONS, _completion(prompt="word " * 4000), JSON),
    "chat: max_tokens beyond the context": (CHAT, _chat(max_tokens=100_000), JSON),
    "chat: bad JSON": (CHAT, '{"model": "smollm2-135m", "messages": [', JSON),
    "completion: bad JSON": (COMPLETIONS, "not json", JSON),
    "chat: body is a list": (CHAT, "[]", JSON),
    "chat: wrong content type": (CHAT, _chat(), "text/plain"),
    "chat: messages missing": (CHAT, json.dumps({"model": MODEL}), JSON),
    "chat: no messages": (CHAT, _chat(messages=[]), JSON),
    "chat: temperature is text": (CHAT, _chat(temperature="hot"), JSON),
    "chat: temperature negative": (CHAT, _chat(temperature=-1), JSON),
    "chat: top_p out of range": (CHAT, _chat(top_p=2), JSON),
    "chat: max_tokens zero": (CHAT, _chat(max_tokens=0), JSON),
    "chat: n zero": (CHAT, _chat(n=0), JSON),
    "chat: top_logprobs without logprobs": (CHAT, _chat(top_logprobs=3), JSON),
    "chat: too many logprobs": (CHAT, _chat(logprobs=True, top_logprobs=1000), JSON),
    "chat: unknown role shape": (CHAT, _chat(messages=["hello"]), JSON),
    "chat: tool_choice names no tool": (
        CHAT,
        _chat(tool_choice={"type": "function", "function": {"name": "absent"}}),
        JSON,
    ),
    "chat: stream_options without stream": (CHAT, _chat(stream_options={"include_usage": True}), JSON),
    "completion: prompt missing": (COMPLETIONS, json.dumps({"model": MODEL, "max_tokens": 4}), JSON),
    "completion: stop of the wrong type": (COMPLETIONS, _completion(stop=5), JSON),
    "tokenize: unknown model": ("/tokenize", json.dumps({"model": "nobody", "prompt": "hello"}), JSON),
    "unknown route": ("/v1/nothing", _chat(), JSON),
}


def ask(client: httpx.Client, name: str) -> dict[str, Any]:
    """Send one case; return status and body."""
    path, body, content_type = CASES[name]
    answer = client.post(path, content=body, headers={"content-type": content_type})
    try:
        content = answer.json()
    except json.JSONDecodeError:
        content = answer.text
    return {"status": answer.status_code, "body": content}


if __name__ == "__main__":
    with httpx.Client(base_url=sys.argv[1], timeout=60) as http:
        print(json.dumps({name: ask(http, name) for name in CASES}, indent=1))
