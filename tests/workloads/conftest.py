"""A scripted OpenAI endpoint: real HTTP on loopback, and it remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Script:
    """What the endpoint answers to one request."""

    tokens: tuple[str, ...] = ("Step", " one", ".")
    status: int = 200
    error_body: str = '{"error": {"message": "scripted", "type": "BadRequestError", "code": 400}}'
    events: list[str] | None = None  # in place of the events made from `tokens`
    cut: int | None = None  # bytes in a network chunk; None: one event each
    drop_after: int | None = None  # close the connection after so many events
    prompt_tokens: int = 100
    cached_tokens: int | None = 40
    line_ending: str = "\n"
    gate: asyncio.Event | None = None  # the reply waits for it

    def sse(self) -> list[str]:
        if self.events is not None:
            return self.events
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *({"content": t} for t in self.tokens)]
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage: dict[str, Any] = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.tokens)}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        chunks.append({"choices": [], "usage": usage})
        return [json.dumps(chunk, ensure_ascii=False) for chunk in chunks] + ["[DONE]"]


@dataclass
class Received:
    """One chat request as it arrived."""

    body: dict[str, Any]
    headers: dict[str, str]


@dataclass
class StubEndpoint:
    """`behave` decides what a request gets; `requests` are all chat requests so far."""

    port: int = 0
    behave: Callable[[Received], Script] = lambda _: Script()
    models: tuple[str, ...] = ("stub-model",)
    models_status: int = 200
    requests: list[Received] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until requests that have arrived make `condition` true."""
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one_request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_line, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if request_line.split()[1].endswith("/models"):
            listing = json.dumps({"data": [{"id": name} for name in self.models]})
            self._plain(writer, self.models_status, listing)
            await writer.drain()
            return True
        received = Received(json.loads(body), headers)
        self.requests.append(received)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.changed.set()
        try:
            return await self._chat(writer, self.behave(received))
        finally:
            self.in_flight -= 1

    async def _chat(self, writer: asyncio.StreamWriter, script: Script) -> bool:
        if script.gate is not None:
            await script.gate.wait()
        if script.status != 200:
            self._plain(writer, script.status, script.error_body)
            await writer.drain()
            return True
        writer.write(CHUNKED)
        events = script.sse()
        dropped = script.drop_after is not None
        ending = script.line_ending * 2
        raw = [f"data: {event}{ending}".encode() for event in events[: script.drop_after]]
        if script.cut is not None:
            whole = b"".join(raw)
            raw = [whole[start : start + script.cut] for start in range(0, len(whole), script.cut)]
        for piece in raw:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        if dropped:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    @staticmethod
    def _plain(writer: asyncio.StreamWriter, status: int, body: str) -> None:
        payload = body.encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(payload)}\r\n\r\n".encode() + payload)


@pytest.fixture
def script() -> type[Script]:
    return Script


@pytest.fixture
async def endpoint() -> AsyncIterator[StubEndpoint]:
    stub = StubEndpoint()
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    stub.port = server.sockets[0].getsockname()[1]
    yield stub
    server.close()
