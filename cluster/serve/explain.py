"""The `ropewalk` field of an answer: what happened to the request, for a client that asked with `explain`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from ropewalk.cluster.engine.request import RequestReport, RequestSettings
from ropewalk.cluster.serve.edits import Applied

DONE = "data: [DONE]"


def explanation(settings: RequestSettings, reports: Sequence[RequestReport], applied: Applied) -> dict[str, Any]:
    """Build the field from the engine's reports, one a prompt.

    `tokens` sums over the prompts and `fallbacks` collects their reasons; `plan` is that of a single prompt, and a list
    of plans in the order of the prompts if there were several.
    """
    tokens = {"computed": 0, "exact": 0, "reused": 0, "spliced": 0}
    plans: list[Any] = []
    fallbacks = [*applied.fallbacks, *([] if reports else ["not_planned"])]
    for report in reports:
        values = report.to_dict()
        for name, count in values["tokens"].items():
            tokens[name] = tokens.get(name, 0) + count
        plans.append(values["plan"])
        fallbacks.extend(reason for reason in values["fallbacks"] if reason not in fallbacks)
    return {
        "session": settings.session,
        "lineage": next((report.lineage for report in reports if report.lineage), None),
        "agent": settings.agent,
        "mode": settings.mode,
        "plan": plans[0] if len(plans) == 1 else plans,
        "tokens": tokens,
        "fallbacks": fallbacks,
        **({"applied_edits": applied.edits} if applied.edits else {}),
    }


async def explain_stream(events: AsyncIterator[Any], field: Callable[[], dict[str, Any]]) -> AsyncIterator[Any]:
    """Pass server-sent events through and put `ropewalk` on the last chunk before `[DONE]`.

    Only chunks that may be the last one (no choices, or a finish reason) are held until the next event, so that tokens
    are never delayed. What is no event, such as the answer to a request that is refused, passes as it is.
    """
    held: str | None = None
    async for event in events:
        if not isinstance(event, str):
            yield event
            continue
        if held is not None:
            yield _with_field(held, field()) if event.startswith(DONE) else held
            held = None
        if _may_be_last(event):
            held = event
        else:
            yield event
    if held is not None:
        yield _with_field(held, field())


def _payload(event: str) -> dict[str, Any] | None:
    if not event.startswith("data: ") or event.startswith(DONE):
        return None
    try:
        value = json.loads(event.removeprefix("data: "))
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and "choices" in value else None


def _may_be_last(event: str) -> bool:
    payload = _payload(event)
    return payload is not None and (
        not payload["choices"] or any(choice.get("finish_reason") for choice in payload["choices"])
    )


def _with_field(event: str, field: dict[str, Any]) -> str:
    payload = _payload(event)
    return f"data: {json.dumps({**(payload or {}), 'ropewalk': field}, ensure_ascii=False)}\n\n"
