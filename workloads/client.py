"""One streaming chat request to any OpenAI endpoint, with the time of every chunk."""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from ropewalk.workloads.config import ReplayConfig
from ropewalk.workloads.errors import WorkloadError

CONNECT_TIMEOUT_S = 10.0
ERROR_TEXT_LIMIT = 300


@dataclass(slots=True)
class Reply:
    """What came back for one request. Times are `time.perf_counter()` seconds.

    `token_times` holds the arrival of every chunk with generated content. A reply whose only content is the end of
    the sequence counts its finishing chunk, so each complete reply has a first token. `error` says in one line
    what went wrong (`None`: a complete reply); what had arrived until then is kept.
    """

    started: float
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    status: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # None: the endpoint did not say
    completion_tokens: int | None = None
    ropewalk: dict[str, Any] | None = None  # Ropewalk's own report, if asked for with `explain`
    error: str | None = None


class SseDecoder:
    """Incremental decoder of server-sent events; the bytes may be cut anywhere, even inside a character.

    Follows the WHATWG event-stream format as far as OpenAI endpoints use it: `data` fields (several in one event
    are joined by newlines), comments, all three line endings. Other fields are skipped.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._rest = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Take more bytes; return the data of the events completed by them."""
        text = self._rest + self._decode(chunk)
        # A carriage return at the end may be half of a CRLF: wait for what follows.
        held = "\r" if text.endswith("\r") else ""
        text = text.removesuffix("\r").replace("\r\n", "\n").replace("\r", "\n")
        *lines, last = text.split("\n")
        self._rest = last + held
        events = []
        for line in lines:
            if line.startswith("data:"):
                self._data.append(line.removeprefix("data:").removeprefix(" "))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events


class ChatClient:
    """Sends chat requests of one arm. Never raises for what an endpoint does: errors are in the reply."""

    def __init__(self, config: ReplayConfig) -> None:
        self._base_url = config.base_url
        self._timeout_s = config.timeout_s
        url = urlsplit(config.endpoint)
        headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(config.timeout_s, connect=CONNECT_TIMEOUT_S),
            # Waiting for a free connection would be measured as the server's time. Idle connections are dropped before
            # the server does it (uvicorn: after 5 s), so that none is used while it is being closed.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            # A proxy from the environment is for the outside world.
            trust_env=url.hostname not in ("127.0.0.1", "::1", "localhost"),
            verify=url.scheme == "https",  # without TLS there is nothing to verify, and loading certificates is slow
        )

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def resolve_model(self, wanted: str | None) -> str:
        """Check that the endpoint answers, and return `wanted` or else the first model that it lists.

        Raises `WorkloadError` if it cannot be reached, refuses the key, or lists no model although none was given.
        """
        url = f"{self._base_url}/models"
        try:
            response = await self._http.get(url)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WorkloadError(f"endpoint {self._base_url!r}: cannot connect ({_describe(error)})") from error
        if response.status_code in (401, 403):
            raise WorkloadError(f"endpoint {self._base_url!r}: refused the API key (HTTP {response.status_code})")
        if wanted is not None:
            return wanted
        try:
            return str(response.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise WorkloadError(
                f"endpoint {self._base_url!r}: lists no models (HTTP {response.status_code}); name one with `model`"
            ) from error

    async def chat(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
        """Send one request and read its stream to the end."""
        reply = Reply(started=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, headers, reply)
        except TimeoutError:
            reply.error = f"timeout: no complete reply within {self._timeout_s:g} s"
        except asyncio.CancelledError:
            reply.error = "aborted"
            raise
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reply.error = f"connection: {_describe(error)}"
        except _BadReply as error:
            reply.error = str(error)
        finally:
            reply.ended = reply.ended or time.perf_counter()
        return reply

    async def _stream(self, body: Mapping[str, Any], headers: Mapping[str, str], reply: Reply) -> None:
        url = f"{self._base_url}/chat/completions"
        async with self._http.stream("POST", url, json=dict(body), headers=dict(headers)) as response:
            reply.status = response.status_code
            if response.status_code != 200:
                await response.aread()
                raise _BadReply(f"HTTP {response.status_code}: {_error_message(response.text)}")
            finished = False
            async for event in _events(response):
                now = time.perf_counter()
                if event == "[DONE]":
                    finished = True
                    reply.ended = now
                    continue  # read to the very end, or the connection could not be used again
                _read_chunk(event, now, reply)
            if not finished and reply.finish_reason is None:
                raise _BadReply("stream ended before the reply was complete")


class _BadReply(Exception):
    """The endpoint answered with something that is no complete reply."""


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    decoder = SseDecoder()
    async for chunk in response.aiter_bytes():
        for event in decoder.feed(chunk):
            yield event


def _read_chunk(event: str, now: float, reply: Reply) -> None:
    """Take one `chat.completion.chunk` into `reply`."""
    try:
        chunk = json.loads(event)
    except json.JSONDecodeError as error:
        raise _BadReply(f"bad JSON in stream: {_shorten(event)}") from error
    if not isinstance(chunk, dict):
        raise _BadReply(f"bad chunk in stream: {_shorten(event)}")
    if chunk.get("error"):
        raise _BadReply(f"error in stream: {_error_message(event)}")
    try:
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            content = delta.get("content")
            # Reasoning and tool calls are generated tokens, too, though not part of what is said in the chat.
            generated = content or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
            ends = choice.get("finish_reason")
            if generated or (ends and not reply.token_times):
                reply.token_times.append(now)
            reply.text += content or ""
            reply.finish_reason = ends or reply.finish_reason
        if usage := chunk.get("usage"):
            reply.prompt_tokens = usage.get("prompt_tokens")
            reply.completion_tokens = usage.get("completion_tokens")
            details = usage.get("prompt_tokens_details") or {}
            reply.cached_tokens = details.get("cached_tokens")
        if isinstance(chunk.get("ropewalk"), dict):
            reply.ropewalk = chunk["ropewalk"]
    except (AttributeError, TypeError) as error:
        raise _BadReply(f"bad chunk in stream: {_shorten(event)}") from error


def _error_message(text: str) -> str:
    """The message in an error body of OpenAI's or of FastAPI's form, else the body itself, shortened."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        return _shorten(
            str(error.get("message") or error.get("detail") or text) if isinstance(error, dict) else str(error)
        )
    except (json.JSONDecodeError, AttributeError):
        return _shorten(text)


def _describe(error: Exception) -> str:
    return _shorten(str(error)) or type(error).__name__


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= ERROR_TEXT_LIMIT else f"{line[:ERROR_TEXT_LIMIT]}..."
