"""What one request may ask of Ropewalk: the `ropewalk` body field and its headers, checked (docs/http_api.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from ropewalk.cluster.engine.request import Edits, Mode, RequestSettings

FIELD = "ropewalk"
SESSION_HEADER = "x-session-id"
AGENT_HEADER = "x-agent"

MAX_NAME_CHARS = 256
Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARS)]

RESERVED_FIELDS = ("kv_transfer_params", "cache_salt")
"""vLLM request fields that name KV directly: taken raw, they would let a client reach other people's KV."""


class RequestRefused(Exception):
    """The client's mistake: HTTP 400, with the request field it concerns."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def error(self) -> dict[str, Any]:
        """The error object of OpenAI's API, as vLLM fills it."""
        return {"message": self.message, "type": "BadRequestError", "param": self.param, "code": 400}


class RopewalkField(BaseModel):
    """The optional `ropewalk` field of a chat or completion request."""

    model_config = ConfigDict(extra="forbid")

    session: Name | None = None
    agent: Name | None = None
    reuse: Literal["exact", "reuse"] | None = None
    explain: bool = False
    edits: Edits | None = None
    directives: list[Any] = []
    scratch: list[Any] = []


def read_settings(
    extra: Mapping[str, Any],
    reserved: Mapping[str, Any],
    headers: Mapping[str, str],
    default_mode: Mode,
    default_edits: Edits | None = None,
) -> RequestSettings:
    """Turn what the client sent into settings for the engine, under a fresh key.

    `extra` holds the body fields that the OpenAI schema does not know, `reserved` the values of `RESERVED_FIELDS`.
    The body field wins over the headers. Raises `RequestRefused`.
    """
    for name in RESERVED_FIELDS:
        if reserved.get(name) is not None:
            raise RequestRefused(
                f"{name!r} is not accepted from clients: it names cached KV directly. "
                f"Use the {FIELD!r} field, whose 'session' and 'reuse' say what may be shared.",
                name,
            )
    field = _validated(extra.get(FIELD))
    return RequestSettings(
        mode=field.reuse or default_mode,
        session=field.session or _header(headers, SESSION_HEADER),
        agent=field.agent or _header(headers, AGENT_HEADER),
        explain=field.explain,
        edits=field.edits or default_edits,
    )


def peek_session(extra: Mapping[str, Any] | None, headers: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Session and agent as a router wants them: never raises, because a bad field is answered further down.

    What is too long is none: a router remembers names of requests that are refused, too.
    """
    field = (extra or {}).get(FIELD)
    field = field if isinstance(field, Mapping) else {}
    session, agent = field.get("session"), field.get("agent")
    names = (
        session if isinstance(session, str) and session else headers.get(SESSION_HEADER),
        agent if isinstance(agent, str) and agent else headers.get(AGENT_HEADER),
    )
    session, agent = (name if name and len(name) <= MAX_NAME_CHARS else None for name in names)
    return session, agent


def peek_mode(extra: Mapping[str, Any] | None) -> str | None:
    """The mode that a request asks for, as a router wants it: never raises."""
    field = (extra or {}).get(FIELD)
    mode = field.get("reuse") if isinstance(field, Mapping) else None
    return mode if isinstance(mode, str) else None


def _validated(value: Any) -> RopewalkField:
    if value is None:
        return RopewalkField()
    try:
        return RopewalkField.model_validate(value)
    except ValidationError as error:
        details = error.errors()[0]
        if details["type"] == "extra_forbidden":
            where = ".".join([FIELD, *(str(part) for part in details["loc"])])
            known = ", ".join(RopewalkField.model_fields)
            raise RequestRefused(f"'{where}' is unknown; '{FIELD}' knows {known}", where) from None
        raise refusal(error, FIELD) from None


def refusal(error: ValidationError, field: str) -> RequestRefused:
    """Say what pydantic found wrong inside `field` of a request: the first thing, its place and value.

    Of a value that could have had several forms, what is wrong with the form that it has.
    """
    errors = error.errors()
    details = next((e for e in errors if e["type"] not in ("missing", "extra_forbidden")), errors[0])
    forms = (part for part in details["loc"] if not (isinstance(part, str) and part[:1].isupper()))
    where = ".".join([field, *map(str, forms)])
    return RequestRefused(f"'{where}': {details['msg']}, got {details['input']!r}", where)


def _header(headers: Mapping[str, str], name: str) -> str | None:
    value = (headers.get(name) or "").strip()
    if len(value) > 256:
        raise RequestRefused(f"header {name!r} has {len(value)} characters; at most 256 are allowed", name)
    return value or None
