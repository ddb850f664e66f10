"""Prompts made of random sentences."""

from __future__ import annotations

import random
import string
from typing import Any


def sentences(rng: random.Random, count: int) -> list[str]:
    words = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(9 * count)]
    return [" ".join(words[9 * i : 9 * i + 9]) + "." for i in range(count)]


def chat(lines: list[str], tools: object = None) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "system", "content": "\n".join(lines)}]}
    return body if tools is None else {**body, "tools": tools}


def tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {key: {"type": "string", "description": text} for key, text in properties.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schema}}}
