"""The HTTP front: OpenAI's API with `vllm serve`'s errors, plus Ropewalk's own routes (docs/http_api.md)."""

from __future__ import annotations

import asyncio
import functools
import operator
import pickle
import time
import uuid
from argparse import Namespace
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import ray
from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorResponse,
    TokenizeRequest,
)
from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress, make_fastapi_ingress
from ray.llm._internal.serve.core.ingress.middleware import SetRequestIdMiddleware
from ray.llm._internal.serve.core.ingress.utils import _openai_json_wrapper, _peek_at_generator
from ray.serve._private.common import RequestMetadata
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.context import _get_global_client
from starlette.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from ropewalk.agents.sketch import clean_agent_name
from ropewalk.cluster.serve import metrics
from ropewalk.cluster.serve.edits import TokenSpan
from ropewalk.cluster.serve.reasons import reasons_of
from ropewalk.cluster.serve.server import ANCHORS_OFF, AnchorCall, SessionCall, unavailable, unknown_session
from ropewalk.cluster.serve.settings import RequestRefused
from ropewalk.cluster.store.node_store import Traces
from ropewalk.scheduler.client import SchedulerClient, SchedulerUnavailableError
from ropewalk.scheduler.graph import graph_payload
from ropewalk.scheduler.snapshot import EMPTY_SNAPSHOT
from ropewalk.scheduler.state import SchedulerSettings

STATUS_DEADLINE_S = 5.0
"""How long `GET /v1/replicas` waits for one busy replica before it is shown without details."""


CHANGE_DEADLINE_S = 60.0
"""How long a change waits for a replica that has to make it, too."""


class DirectivesBody(BaseModel):
    """Body of `POST /v1/sessions/{id}/directives`; `model` may be left out where one is served."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    directives: list[Any] = Field(min_length=1)


class VerbBody(BaseModel):
    """Body of `POST /v1/sessions/{id}/pin`, `decay`, `share`, `purge`. Without a span, the whole history is meant."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    span: TokenSpan | None = None
    ttl_s: float | None = Field(None, gt=0, le=86_400)
    age_s: float | None = Field(None, gt=0, le=86_400)


class AnchorBody(BaseModel):
    """Body of `POST /v1/anchors`: `messages` and `tools`, or a `prompt`; `model` may be left out if one is served."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    agent: str = Field(min_length=1, max_length=256)
    messages: list[Any] | None = Field(None, min_length=1)
    tools: list[Any] | None = None
    prompt: str | list[int] | None = Field(None, min_length=1)


class UnknownModelError(Exception):
    """A request for a model that is not served."""


class UnreachableError(Exception):
    """Replicas that have to do something and do not answer."""


async def _unreachable(request: Request, error: Exception) -> Response:
    message = f"Not every replica has done it ({error.args[0]}); ask again."
    answer = create_error_response(
        message, err_type="ServiceUnavailableError", status_code=HTTPStatus.SERVICE_UNAVAILABLE
    )
    return JSONResponse(answer.model_dump(), status_code=answer.error.code)


async def _unknown_model(request: Request, error: Exception) -> Response:
    message = f"The model `{error.args[0]}` does not exist."
    answer = create_error_response(message, err_type="NotFoundError", status_code=HTTPStatus.NOT_FOUND, param="model")
    return JSONResponse(answer.model_dump(), status_code=answer.error.code)


class AgentIngress(OpenAiIngress):
    """Routes of the endpoint. Requests go to the model's deployment unchanged; only errors are shaped here."""

    def __init__(
        self,
        *,
        models: list[dict[str, Any]],
        deployments: dict[str, str],
        app_name: str,
        scheduler: SchedulerSettings | None,
        prewarms: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._scheduler = SchedulerClient(scheduler) if scheduler is not None else None
        self._models: dict[str, dict[str, Any]] = {model["id"]: model for model in models}
        self._deployments = deployments
        self._app_name = app_name
        self._prewarms = prewarms
        self._created = int(time.time())

    async def _get_model_id(self, model: str | None) -> str:
        if model is None and len(self._models) == 1:
            return next(iter(self._models))
        if model is None or model not in self._models:
            raise UnknownModelError(model)
        return model

    async def _process_llm_request(self, body: Any, call_method: str, raw_request: Request | None = None) -> Response:
        answers = self._get_response(body=body, call_method=call_method, raw_request=raw_request)
        first, answers = await _peek_at_generator(answers)
        if isinstance(first, ErrorResponse) or hasattr(first, "error"):
            return JSONResponse(first.model_dump(), status_code=first.error.code)
        if hasattr(first, "model_dump"):
            return JSONResponse(first.model_dump())
        return StreamingResponse(_openai_json_wrapper(answers), media_type="text/event-stream")

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        return await self._process_llm_request(body, "chat", request)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        return await self._process_llm_request(body, "completions", request)

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        return await self._process_llm_request(body, "tokenize", request)

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        return await self._process_llm_request(body, "detokenize", request)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(model) for model in self._models.values()]})

    async def model_data(self, model: str) -> Response:
        if model not in self._models:
            raise UnknownModelError(model)
        return JSONResponse(self._card(self._models[model]))

    def _card(self, model: dict[str, Any]) -> dict[str, Any]:
        return {**model, "object": "model", "created": self._created, "owned_by": "vllm", "parent": None}

    async def health(self) -> Response:
        """200 while every model has a replica that answers requests, else 503 naming those that have none."""
        missing = [model["name"] for model in (await self._replicas())["models"] if model["ready"] == 0]
        if missing:
            return JSONResponse({"status": "unavailable", "models": missing}, status_code=503)
        return Response(status_code=200)

    async def replicas(self) -> Response:
        """Models, their replicas, and what each says of itself."""
        return JSONResponse(await self._replicas_with_details())

    async def agents(self) -> Response:
        """The graph that the scheduler has learned."""
        if self._scheduler is None:
            return JSONResponse({**graph_payload(EMPTY_SNAPSHOT), "reason": "scheduler-disabled"})
        return JSONResponse(await self._scheduler.graph())

    async def store(self) -> Response:
        """What each model's replicas say of the chunk store, which all of a node share."""
        report = await self._replicas_with_details()
        return JSONResponse(
            {
                "models": [
                    {
                        "name": model["name"],
                        "replicas": [
                            {"replica": replica["replica"], "node": replica["node"], "store": replica.get("store")}
                            for replica in model["replicas"]
                        ],
                    }
                    for model in report["models"]
                    if not model["plain"]
                ]
            }
        )

    async def sessions(self) -> Response:
        """Sessions of all models, by the replicas' nodes."""
        report = await self._replicas()
        models = [model for model in report["models"] if not model["plain"]]
        names: dict[str, list[str]] = {}
        for model in models:
            answers = await asyncio.gather(*(_ask(replica["actor"], "sessions") for replica in model["replicas"]))
            names[model["name"]] = list(dict.fromkeys(name for a in answers for name in a.get("sessions", ())))
        return JSONResponse({"models": [{"name": name, "sessions": known} for name, known in names.items()]})

    async def session(self, session_id: str, request: Request, model: str | None = None) -> Response:
        """What a session holds."""
        return await self._session_call(request, session_id, model, "get")

    async def delete_session(self, session_id: str, request: Request, model: str | None = None) -> Response:
        """Forget a session, on all nodes that know it."""
        nodes, replicas = await self._nodes_and_replicas(model)
        await _ask_all(replicas, "settle")  # a turn that is answered is noted before, not behind it
        await _ask_all(replicas, "end_session", session_id)
        answers = await _ask_all(nodes, "delete_session", session_id)
        if not any(answer["deleted"] for answer in answers):
            return _error(unknown_session(session_id))
        return JSONResponse({"session": session_id, "deleted": True})

    async def apply_directives(self, session_id: str, body: DirectivesBody, request: Request) -> Response:
        """Apply directives to what a session holds, now."""
        return await self._session_call(request, session_id, body.model, "apply", body.directives)

    async def pin(self, session_id: str, body: VerbBody, request: Request) -> Response:
        """Keep the KV of a span for longer than others."""
        return await self._session_call(request, session_id, body.model, "pin", span=body.span, seconds=body.ttl_s)

    async def decay(self, session_id: str, body: VerbBody, request: Request) -> Response:
        """Let the KV of a span go sooner than others."""
        return await self._session_call(request, session_id, body.model, "decay", span=body.span, seconds=body.age_s)

    async def share(self, session_id: str, body: VerbBody, request: Request) -> Response:
        """Offer the KV of a span to other sessions."""
        return await self._session_call(request, session_id, body.model, "share", span=body.span)

    async def purge(self, session_id: str, body: VerbBody, request: Request) -> Response:
        """Remove a span, and what was computed behind it, from every node's store and every replica's cache.

        The session goes last: what fails before can be asked for again.
        """
        nodes, replicas = await self._nodes_and_replicas(body.model)
        await _ask_all(replicas, "settle")
        span = (body.span.start, body.span.end) if body.span is not None else None
        found = await _ask_all(nodes, "traces", session_id, span)
        errors = [answer["error"] for answer in found if "error" in answer]
        if len(errors) == len(found):  # no node holds that span
            return _error(next((error for error in errors if error["code"] != 404), errors[0]))
        # What the session held on one node, other sessions may have computed on another.
        removed = await _ask_all(nodes, "discard", _union(found))
        emptied = await _ask_all(replicas, "empty_prefix_cache")
        if not all(answer["emptied"] for answer in emptied):
            raise UnreachableError("the store is purged, but requests run whose blocks are in the prefix cache")
        # What ran meanwhile may have stored something from there, and a turn of this session something new.
        await _ask_all(replicas, "settle")
        found += await _ask_all(nodes, "traces", session_id, span)
        removed += await _ask_all(nodes, "discard", _union(found))
        await _ask_all(nodes, "delete_session", session_id)
        return JSONResponse({"session": session_id, "purged_chunks": sum(a["purged_chunks"] for a in removed)})

    async def _nodes_and_replicas(self, model: str | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return one replica of each node, and all replicas of a model. Raises `UnknownModelError`."""
        name = await self._get_model_id(model)
        if self._models[name]["plain"]:
            raise UnknownModelError(name)
        (found,) = (entry for entry in (await self._replicas())["models"] if entry["name"] == name)
        replicas = [replica for replica in found["replicas"] if replica["state"] == "RUNNING"]
        return list({replica["node"]: replica for replica in replicas}.values()), replicas

    async def _session_call(
        self,
        request: Request,
        session_id: str,
        model: str | None,
        action: str,
        directives: Sequence[Any] = (),
        **values: Any,
    ) -> Response:
        if self._models[await self._get_model_id(model)]["plain"]:
            raise UnknownModelError(model)
        # The field is where routers look for the session.
        body = SessionCall.model_validate(
            {
                "model": model,
                "session": session_id,
                "action": action,
                "directives": directives,
                **values,
                "ropewalk": {"session": session_id},
            }
        )
        async for answer in self._get_response(body=body, call_method="session", raw_request=request):
            error = answer.get("error")
            return JSONResponse(answer, status_code=error["code"] if error else 200)
        raise UnknownModelError(model)

    async def anchors(self) -> Response:
        """The anchors that are known, and where each was used or warmed last."""
        if self._scheduler is None or not self._prewarms:
            return JSONResponse({"anchors": [], "reason": "prewarm-disabled"})
        try:
            found = await self._scheduler.call("anchors")
        except SchedulerUnavailableError as error:
            return _error(unavailable(f"The scheduler does not answer ({error}); ask again."))
        return JSONResponse({"anchors": found})

    async def register_anchor(self, body: AnchorBody, request: Request) -> Response:
        """Keep an anchor for all replicas of a model, rendered by one of them."""
        model = await self._get_model_id(body.model)
        if self._models[model]["plain"]:
            raise UnknownModelError(model)
        agent = clean_agent_name(body.agent)
        if agent is None:
            return _error(_refused(f"'agent' must be a name, got {body.agent!r}", "agent"))
        if (body.messages is None) == (body.prompt is None):
            return _error(_refused("give either 'messages' or 'prompt'", "messages"))
        if body.tools is not None and body.messages is None:
            return _error(_refused("'tools' go with 'messages', not with a 'prompt'", "tools"))
        values = {**body.model_dump(exclude_none=True), "model": model, "agent": agent}
        if body.messages is not None:
            values["add_generation_prompt"] = False
        call = AnchorCall.model_validate(values)
        async for answer in self._get_response(body=call, call_method="anchor", raw_request=request):
            error = answer.get("error")
            return JSONResponse(answer, status_code=error["code"] if error else 200)
        raise UnknownModelError(model)

    async def delete_anchor(self, agent: str, model: str | None = None) -> Response:
        """Forget an agent's anchors, of one model or of all."""
        if model is not None:
            await self._get_model_id(model)
        if self._scheduler is None or not self._prewarms:
            return _error(_refused(ANCHORS_OFF, None))
        try:
            models = await self._scheduler.call("delete_anchor", agent, model)
        except SchedulerUnavailableError as error:
            return _error(unavailable(f"The scheduler does not answer ({error}); ask again."))
        if not models:
            return _error(
                {
                    "message": f"The anchor of agent `{agent}` does not exist.",
                    "type": "NotFoundError",
                    "param": "agent",
                    "code": 404,
                }
            )
        return JSONResponse({"agent": agent, "models": models, "deleted": True})

    async def metrics(self) -> Response:
        """Ropewalk's counters and gauges of all replicas, for Prometheus."""
        report = await self._replicas_with_details()
        return Response(metrics.render(report["models"]), media_type=metrics.CONTENT_TYPE)

    async def _replicas_with_details(self) -> dict[str, Any]:
        report = await self._replicas()
        replicas = [replica for model in report["models"] for replica in model["replicas"]]
        details = await asyncio.gather(*(_ask(replica["actor"], "status") for replica in replicas))
        for replica, detail in zip(replicas, details, strict=True):
            replica.update(detail)
        return report

    async def _replicas(self) -> dict[str, Any]:
        # Reading from the controller is a blocking call of some milliseconds.
        details = await asyncio.to_thread(_get_global_client().get_serve_details)
        deployments = details["applications"][self._app_name]["deployments"]
        models = []
        for name, deployment in self._deployments.items():
            seen = deployments.get(deployment, {})
            replicas = [
                {
                    "replica": replica["replica_id"],
                    "state": replica["state"],
                    "actor": replica["actor_name"],
                    "node": replica["node_id"],
                }
                for replica in seen.get("replicas", [])
            ]
            models.append(
                {
                    "name": name,
                    "plain": self._models[name]["plain"],
                    "wanted": seen.get("target_num_replicas", 0),
                    "ready": sum(replica["state"] == "RUNNING" for replica in replicas),
                    "message": seen.get("message", ""),
                    "routing": dict(reasons_of(deployment)),
                    "replicas": replicas,
                }
            )
        return {"models": models}


async def _ask_all(replicas: Sequence[dict[str, Any]], method: str, *args: Any) -> list[dict[str, Any]]:
    """Call a method of several replicas. Raises `UnreachableError` when one does not answer: nothing is done by halves
    without a word."""
    calls = (_ask(replica["actor"], method, *args, deadline_s=CHANGE_DEADLINE_S) for replica in replicas)
    answers = await asyncio.gather(*calls)
    missing = [r["replica"] for r, answer in zip(replicas, answers, strict=True) if "unreachable" in answer]
    if missing or not replicas:
        raise UnreachableError(", ".join(missing) or "none is running")
    return answers


def _union(found: Sequence[dict[str, Any]]) -> Traces:
    union: Traces = functools.reduce(operator.or_, (answer["traces"] for answer in found if "traces" in answer))
    return union


def _refused(message: str, field: str | None) -> dict[str, Any]:
    return RequestRefused(message, field).error()


def _error(error: dict[str, Any]) -> Response:
    return JSONResponse({"error": error}, status_code=error["code"])


async def _ask(actor_name: str, method: str, *args: Any, deadline_s: float = STATUS_DEADLINE_S) -> dict[str, Any]:
    """Call a method of one certain replica, which a deployment handle cannot address."""
    try:
        actor = ray.get_actor(actor_name, namespace=SERVE_NAMESPACE)
        request_id = f"ropewalk-{uuid.uuid4()}"
        metadata = RequestMetadata(request_id=request_id, internal_request_id=request_id, call_method=method)
        async with asyncio.timeout(deadline_s):
            return dict(await actor.handle_request.remote(pickle.dumps(metadata), *args))
    except Exception as error:
        return {"unreachable": f"{type(error).__name__}: {error}"}


ENDPOINTS = {
    "chat": lambda app: app.post("/v1/chat/completions", dependencies=[Depends(validate_json_request)]),
    "completions": lambda app: app.post("/v1/completions", dependencies=[Depends(validate_json_request)]),
    "tokenize": lambda app: app.post("/tokenize", dependencies=[Depends(validate_json_request)]),
    "detokenize": lambda app: app.post("/detokenize", dependencies=[Depends(validate_json_request)]),
    "models": lambda app: app.get("/v1/models"),
    "model_data": lambda app: app.get("/v1/models/{model:path}"),
    "health": lambda app: app.get("/health"),
    "replicas": lambda app: app.get("/v1/replicas"),
    "agents": lambda app: app.get("/v1/agents"),
    "anchors": lambda app: app.get("/v1/anchors"),
    "register_anchor": lambda app: app.post("/v1/anchors"),
    "delete_anchor": lambda app: app.delete("/v1/anchors/{agent:path}"),
    "store": lambda app: app.get("/v1/store"),
    "sessions": lambda app: app.get("/v1/sessions"),
    "pin": lambda app: app.post("/v1/sessions/{session_id:path}/pin"),
    "decay": lambda app: app.post("/v1/sessions/{session_id:path}/decay"),
    "share": lambda app: app.post("/v1/sessions/{session_id:path}/share"),
    "purge": lambda app: app.post("/v1/sessions/{session_id:path}/purge"),
    "apply_directives": lambda app: app.post("/v1/sessions/{session_id:path}/directives"),
    "session": lambda app: app.get("/v1/sessions/{session_id:path}"),
    "delete_session": lambda app: app.delete("/v1/sessions/{session_id:path}"),
    "metrics": lambda app: app.get("/metrics"),
}


def build_app() -> FastAPI:
    """A FastAPI application that shapes errors as `vllm serve` does."""
    app = FastAPI(title="Ropewalk", docs_url=None, redoc_url=None)
    app.state.args = Namespace(log_error_stack=False)
    # Only read when an engine is dead; Ray Serve restarts its replica, so there is no server to stop here.
    app.state.server = Namespace()
    app.state.engine_client = Namespace(errored=False, is_running=True)
    init_exception_handler(app)
    app.add_exception_handler(UnknownModelError, _unknown_model)
    app.add_exception_handler(UnreachableError, _unreachable)
    app.add_middleware(SetRequestIdMiddleware)
    return app


def ingress_class() -> Any:
    """`AgentIngress` with its routes, ready for `serve.deployment`."""
    return make_fastapi_ingress(AgentIngress, endpoint_map=ENDPOINTS, app=build_app())
