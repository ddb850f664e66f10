"""The server of one replica: stock `LLMServer` plus the `ropewalk` field on the way in and out."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Literal

import ray
from pydantic import BaseModel, ConfigDict, ValidationError
from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorInfo, ErrorResponse
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
from vllm.exceptions import VLLMClientError

from ropewalk.agents.directives import DirectiveError, Span
from ropewalk.agents.lineage import NOWHERE
from ropewalk.agents.policies import load_policy
from ropewalk.cluster.engine.request import PARAMS_KEY, Edits, Mode, RequestReport, RequestSettings
from ropewalk.cluster.engine.settings import EngineSettings
from ropewalk.cluster.engine.turns import Turns
from ropewalk.cluster.serve.edits import RequestEditor, Tokenizing, TokenSpan, as_params, read_directives
from ropewalk.cluster.serve.engine import AgentEngine, PlainEngine
from ropewalk.cluster.serve.explain import explain_stream, explanation
from ropewalk.cluster.serve.observer import Observer
from ropewalk.cluster.serve.prewarm import Prewarmer
from ropewalk.cluster.serve.settings import FIELD, RESERVED_FIELDS, RequestRefused, read_settings
from ropewalk.cluster.store.node_store import Traces
from ropewalk.kernels.keys import as_tokens
from ropewalk.scheduler.anchors import MIN_ANCHOR_TOKENS
from ropewalk.scheduler.client import SchedulerUnavailableError
from ropewalk.scheduler.prewarm import PrewarmSettings
from ropewalk.scheduler.state import SchedulerSettings

ENGINE_STOP_S = 3.0
"""Time that the engine's processes get to end by themselves: less than Ray Serve gives the replica."""


DEFAULT_TENANT = RequestSettings().tenant

PIN_S, DECAY_S = 600.0, 600.0
"""Seconds of a pin and of a decay whose client does not say."""


class SessionCall(BaseModel):
    """A call about a session, on its way from the ingress to the replica that has it."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    session: str
    action: Literal["get", "apply", "pin", "decay", "share"]
    directives: list[Any] = []
    span: TokenSpan | None = None
    seconds: float | None = None


class AnchorCall(BaseModel):
    """An anchor to register, on its way from the ingress to a replica of the model. Rendered as a chat request without
    generation prompt, or a completion request."""

    model: str
    agent: str
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    prompt: str | list[int] | None = None
    add_generation_prompt: bool | None = None

    @property
    def field(self) -> str:
        """The field that holds the anchor's text."""
        return "messages" if self.messages is not None else "prompt"


ANCHORS_OFF = "anchors are not kept here: 'prewarm.enabled' or 'scheduler.enabled' is false in the cluster's settings"


def unavailable(message: str) -> dict[str, Any]:
    """OpenAI's error object for what may work later."""
    return {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}


def unknown_session(name: str) -> dict[str, Any]:
    """OpenAI's error object for a session that is not known."""
    return {
        "message": f"The session `{name}` does not exist.",
        "type": "NotFoundError",
        "param": "session",
        "code": 404,
    }


class PlainServer(LLMServer):
    """Stock vLLM as Ray Serve LLM runs it: the baseline. Only Ray's usage telemetry and the CPU worker's process go."""

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        await super().__init__(llm_config, engine_cls=PlainEngine)

    async def _start_engine(self) -> None:
        # Ray's own version also starts a detached telemetry actor, which costs a process that imports vLLM.
        await self.engine.start()

    async def __del__(self) -> None:
        await super().__del__()
        end_engine(self.engine)

    async def status(self) -> dict[str, Any]:
        """What `GET /v1/replicas` shows of this replica."""
        return {"pid": os.getpid()}


class AgentServer(LLMServer):
    """Reads the `ropewalk` field and headers, gives them to the planned engine, and explains what happened."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        llm_config: Any,
        *,
        engine_settings: EngineSettings,
        default_mode: Mode,
        scheduler: SchedulerSettings | None,
        default_edits: Edits | None = None,
        policies: Sequence[str] = (),
        prewarm: PrewarmSettings | None = None,
    ) -> None:
        self._default_mode, self._default_edits = default_mode, default_edits
        self._editor = RequestEditor(
            Tokenizing(self._encode, self._prompt_tokens), [load_policy(path) for path in policies]
        )
        self._observer: Observer | None = None
        if scheduler is not None:
            node = ray.get_runtime_context().get_node_id()
            self._observer = Observer(llm_config.model_id, replica_name(), node, scheduler)
        self._prewarmer: Prewarmer | None = None
        if self._observer is not None and prewarm is not None:
            client = self._observer.client
            self._prewarmer = Prewarmer(
                llm_config.model_id, replica_name(), node, prewarm, client, reuse=default_mode == "reuse"
            )
        await super().__init__(llm_config, engine_cls=functools.partial(AgentEngine, settings=engine_settings))

    async def _start_engine(self) -> None:
        await self.engine.start()
        if self._prewarmer is not None and self.engine.planned is not None:
            self._prewarmer.start(self.engine.planned)

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Answer a chat request; see `LLMServer.chat`."""
        return self._answer(request, "chat", raw_request_info)

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Answer a completion request; see `LLMServer.completions`."""
        return self._answer(request, "completions", raw_request_info)

    async def _answer(self, request: Any, method: str, raw_request_info: Any) -> AsyncIterator[Any]:
        with self._busy():
            # Closed at once when the client goes away, and not when somebody collects what is left of it.
            async with contextlib.aclosing(self._answer_busy(request, method, raw_request_info)) as events:
                async for event in events:
                    yield event

    async def _answer_busy(self, request: Any, method: str, raw_request_info: Any) -> AsyncGenerator[Any, None]:
        try:
            settings = settings_of(request, raw_request_info, self._default_mode, self._default_edits)
            settings, applied = await self._editor.edit(request, settings)
        except RequestRefused as refused:
            yield ErrorResponse(error=ErrorInfo(**refused.error()))
            return
        if self._observer is not None:
            settings = self._observer.recognise(request, settings)
        request.kv_transfer_params = {PARAMS_KEY: settings.to_params()}
        reports: list[RequestReport] = []

        def field() -> dict[str, Any]:
            reports.extend(self.engine.pop_reports(settings.key))
            return explanation(settings, reports, applied)

        answer = await self._run_request(request, engine_method=method, raw_request_info=raw_request_info)
        answered = False
        try:
            if request.stream:
                async for event in explain_stream(answer, field) if settings.explain else answer:
                    yield event
                    answered = isinstance(event, str)
            else:
                async for response in answer:
                    answered = not isinstance(response, ErrorResponse)
                    if answered and settings.explain:
                        response.ropewalk = field()
                    if answered and applied.edits:
                        response.context_management = {"applied_edits": applied.edits}
                    yield response
        finally:
            reports.extend(self.engine.pop_reports(settings.key))
            if answered and self._observer is not None:
                self._observer.observe(request, settings, reports)
            if self._prewarmer is not None and answered:
                self._prewarmer.answered(settings, reports)
            elif self._prewarmer is not None:
                self._prewarmer.given_up(settings.key)

    async def session(self, request: SessionCall, raw_request_info: Any = None) -> AsyncIterator[dict[str, Any]]:
        """Look at a session (`get`), `apply` directives to what it holds, or do to the KV of a span what the action
        says (`_verb`); yields one answer.

        An answer with `error` is OpenAI's error object.
        """
        with self._busy():
            async with contextlib.aclosing(self._session(request)) as answers:
                async for answer in answers:
                    yield answer

    async def _session(self, request: SessionCall) -> AsyncGenerator[dict[str, Any], None]:
        planned, name = self.engine.planned, request.session
        try:
            if request.action == "apply":
                found = [self._editor.directive(one) for one in read_directives({FIELD: request.model_dump()})]
                yield await planned.apply_directives(name, [as_params(one) for one in found], self._default_mode)
                return
            if request.action != "get":
                yield {"session": name, **await self._verb(request)}
                return
            about = await planned.turns.call(planned.turns.sessions.describe, DEFAULT_TENANT, name)
            yield about if about is not None else {"error": unknown_session(name)}
        except KeyError:
            yield {"error": unknown_session(name)}
        except DirectiveError as error:
            yield {"error": RequestRefused(str(error), error.field).error()}
        except RequestRefused as refused:
            yield {"error": refused.error()}
        except (VLLMClientError, ValueError) as error:  # what vLLM refuses about the edited prompt
            yield {"error": RequestRefused(str(error), getattr(error, "parameter", None)).error()}

    async def _verb(self, request: SessionCall) -> dict[str, Any]:
        turns: Turns = self.engine.planned.turns
        name = request.session
        verbs = turns.verbs(DEFAULT_TENANT)
        span = Span(request.span.start, request.span.end) if request.span is not None else None
        if request.action == "pin":
            return await turns.call(verbs.pin, name, span, request.seconds or PIN_S)
        if request.action == "decay":
            return await turns.call(verbs.decay, name, span, request.seconds or DECAY_S)
        return await turns.call(verbs.share, name, span)

    async def delete_session(self, name: str) -> dict[str, Any]:
        """Forget a session on this node."""
        turns = self.engine.planned.turns
        return {"deleted": await turns.call(turns.sessions.delete, DEFAULT_TENANT, name)}

    async def settle(self) -> dict[str, Any]:
        """Wait until what this replica has answered is stored and noted."""
        await self.engine.planned.settle()
        return {}

    async def traces(self, name: str, span: tuple[int, int] | None) -> dict[str, Any]:
        """By what chunks are known that a purge of a span of a session has to remove, as far as this node knows it.
        None: of the whole history.

        With an `error` if this node's history has no such span; another node's may have.
        """
        turns: Turns = self.engine.planned.turns
        verbs, found = turns.verbs(DEFAULT_TENANT), dict[str, Any]()
        try:
            found["traces"] = await turns.call(verbs.traces, name, Span(*(span or (0, NOWHERE))))
            if span is not None:
                await turns.call(verbs.check, name, Span(*span))
        except KeyError:
            return {"error": unknown_session(name)}
        except DirectiveError as error:
            found["error"] = RequestRefused(str(error), error.field).error()
        return found

    async def discard(self, traces: Traces) -> dict[str, Any]:
        """Remove from this node what bears the traces of a purge."""
        return {"purged_chunks": await self.engine.planned.discard(DEFAULT_TENANT, traces)}

    async def empty_prefix_cache(self) -> dict[str, Any]:
        """Empty vLLM's own prefix cache, where rows lie too, and forget the anchors that prompts taught: they are text
        of prompts."""
        with self._busy():
            if self._prewarmer is not None:
                await self._prewarmer.forget_learned()
            return {"emptied": await self.engine.planned.empty_prefix_cache()}

    async def end_session(self, name: str) -> dict[str, Any]:
        """A session is over: its blocks on this replica need not be kept, nor its prompts, from which anchors are
        learned."""
        if self.engine.planned is not None:
            self.engine.planned.end_session(DEFAULT_TENANT, name)
        if self._prewarmer is not None:
            self._prewarmer.forget_session(name)
        return {}

    async def anchor(self, request: AnchorCall, raw_request_info: Any = None) -> AsyncIterator[dict[str, Any]]:
        """Render an anchor and keep it for all replicas of the model; yields one answer.

        An answer with `error` is OpenAI's error object.
        """
        try:
            yield await self._register(request)
        except RequestRefused as refused:
            yield {"error": refused.error()}
        except ValidationError as error:
            details = error.errors()[0]
            where = ".".join(str(part) for part in details["loc"])
            yield {"error": RequestRefused(f"'{where}': {details['msg']}, got {details['input']!r}", where).error()}
        except (VLLMClientError, ValueError) as error:  # what vLLM refuses about the prompt
            param = getattr(error, "parameter", None) or request.field
            yield {"error": RequestRefused(str(error), param).error()}
        except SchedulerUnavailableError as error:
            yield {"error": unavailable(f"The scheduler does not answer ({error}); ask again.")}

    async def _register(self, request: AnchorCall) -> dict[str, Any]:
        if self._prewarmer is None:
            raise RequestRefused(ANCHORS_OFF)
        tokens = as_tokens(await self._prompt_tokens(request))
        if isinstance(request.prompt, str):
            tokens = tokens[:-1]  # the last one may be another when text follows
        limit = self.engine.planned.max_model_len
        if not MIN_ANCHOR_TOKENS <= len(tokens) < limit - 1:
            raise RequestRefused(
                f"an anchor must have {MIN_ANCHOR_TOKENS} tokens or more, and fewer than {limit - 1} for "
                f"this model; '{request.field}' has {len(tokens)}",
                request.field,
            )
        anchor = await self._prewarmer.register(request.agent, tokens)
        return {"agent": anchor.agent, "model": request.model, "tokens": len(anchor.tokens), "origin": anchor.origin}

    def _busy(self) -> contextlib.AbstractContextManager[None]:
        """Around what somebody waits for: nothing is prewarmed beside it."""
        return self._prewarmer.busy() if self._prewarmer is not None else contextlib.nullcontext()

    async def sessions(self) -> dict[str, Any]:
        """The sessions that this replica's node knows."""
        turns = self.engine.planned.turns
        return {"sessions": await turns.call(turns.sessions.names, DEFAULT_TENANT)}

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.engine.encode(text)
        return ids

    async def _prompt_tokens(self, request: Any) -> Sequence[int]:
        """Token ids of the prompt as vLLM will render it. Raises `RequestRefused` for one that it would refuse."""
        prompt = getattr(request, "prompt", None)
        if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            return prompt
        if prompt is not None and not isinstance(prompt, str):
            raise RequestRefused("directives need a single prompt", "prompt")
        async for answer in self.engine.tokenize(tokenize_request(request)):
            if isinstance(answer, ErrorResponse):
                raise RequestRefused(answer.error.message, answer.error.param)
            return list(answer.tokens)
        raise RequestRefused("the prompt could not be rendered")

    async def __del__(self) -> None:
        if self._prewarmer is not None:
            self._prewarmer.stop()
        await super().__del__()
        end_engine(self.engine)

    async def status(self) -> dict[str, Any]:
        """What `GET /v1/replicas` shows of this replica."""
        scheduler = self._observer.status() if self._observer is not None else None
        prewarm = self._prewarmer.status() if self._prewarmer is not None else None
        own = {"pid": os.getpid(), "default_mode": self._default_mode, "scheduler": scheduler, "prewarm": prewarm}
        return {**own, **self.engine.status()}


def end_engine(engine: Any) -> None:
    """End vLLM's processes in order: killed along with the replica, they leave their shared memory behind."""
    client = getattr(engine, "_engine_client", None)
    if client is not None:
        client.shutdown(timeout=ENGINE_STOP_S)


def tokenize_request(request: Any) -> Any:
    """Return vLLM's request to render the prompt of a chat or completion request."""
    wanted = TokenizeChatRequest if getattr(request, "messages", None) is not None else TokenizeCompletionRequest
    names = wanted.model_fields.keys() & request.model_fields_set
    return wanted(**{name: getattr(request, name) for name in names})


def settings_of(
    request: Any, raw_request_info: Any, default_mode: Mode, default_edits: Edits | None = None
) -> RequestSettings:
    """Read a vLLM request object and its headers. Raises `RequestRefused`."""
    headers: Mapping[str, str] = raw_request_info.headers if raw_request_info is not None else {}
    reserved = {name: getattr(request, name, None) for name in RESERVED_FIELDS}
    return read_settings(request.model_extra or {}, reserved, headers, default_mode, default_edits)


def replica_name() -> str:
    """The name by which routers and the scheduler know this replica."""
    return str(serve.get_replica_context().replica_id.unique_id)
