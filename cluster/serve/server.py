"""The server of one replica: stock `LLMServer` plus the `ropewalk` field on the way in and out."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from ropewalk.cluster.engine.request import PARAMS_KEY, Mode, RequestSettings
from ropewalk.cluster.serve.engine import AgentEngine
from ropewalk.cluster.serve.explain import explain_stream, explanation
from ropewalk.cluster.serve.settings import RESERVED_FIELDS, RequestRefused, read_settings


class PlainServer(LLMServer):
    """Stock vLLM as Ray Serve LLM runs it: the baseline. Nothing but Ray's usage telemetry is left out."""

    async def _start_engine(self) -> None:
        # Ray's own version also starts a detached telemetry actor, which costs a process that imports vLLM.
        await self.engine.start()

    async def status(self) -> dict[str, Any]:
        """What `GET /v1/replicas` shows of this replica."""
        return {"replica": replica_name(), "pid": os.getpid(), "plain": True}


class AgentServer(LLMServer):
    """Reads the `ropewalk` field and headers, gives them to the planned engine, and explains what happened."""

    async def __init__(self, llm_config: Any, *, engine_settings: Any, default_mode: Mode, scheduler: bool) -> None:
        self._default_mode = default_mode
        self._observer = None
        await super().__init__(llm_config, engine_cls=functools.partial(AgentEngine, settings=engine_settings))

    async def _start_engine(self) -> None:
        await self.engine.start()

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Answer a chat request; see `LLMServer.chat`."""
        return self._answer(request, "chat", raw_request_info)

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Answer a completion request; see `LLMServer.completions`."""
        return self._answer(request, "completions", raw_request_info)

    async def _answer(self, request: Any, method: str, raw_request_info: Any) -> AsyncIterator[Any]:
        try:
            settings = settings_of(request, raw_request_info, self._default_mode)
        except RequestRefused as refused:
            yield create_error_response(refused.message, param=refused.param)
            return
        request.kv_transfer_params = {PARAMS_KEY: settings.to_params()}
        answer = await self._run_request(request, engine_method=method, raw_request_info=raw_request_info)
        try:
            if not settings.explain:
                async for item in answer:
                    yield item
            elif request.stream:
                async for event in explain_stream(answer, lambda: self._explanation(settings)):
                    yield event
            else:
                async for response in answer:
                    if hasattr(response, "choices"):
                        response.ropewalk = self._explanation(settings)
                    yield response
        finally:
            self.engine.pop_reports(settings.key)

    def _explanation(self, settings: RequestSettings) -> dict[str, Any]:
        return explanation(settings, self.engine.pop_reports(settings.key))

    async def status(self) -> dict[str, Any]:
        """What `GET /v1/replicas` shows of this replica."""
        return {"replica": replica_name(), "pid": os.getpid(), "plain": False, **self.engine.status()}


def settings_of(request: Any, raw_request_info: Any, default_mode: Mode) -> RequestSettings:
    """Read a vLLM request object and its headers. Raises `RequestRefused`."""
    headers: Mapping[str, str] = raw_request_info.headers if raw_request_info is not None else {}
    reserved = {name: getattr(request, name, None) for name in RESERVED_FIELDS}
    return read_settings(request.model_extra or {}, reserved, headers, default_mode)


def replica_name() -> str:
    """The name by which routers and the scheduler know this replica."""
    return str(serve.get_replica_context().replica_id.unique_id)
