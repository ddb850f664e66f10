"""Tells the scheduler about each answered request, off the request's path."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ropewalk.agents.sketch import AnchorSketch, anchor_sketch
from ropewalk.cluster.engine.request import RequestReport, RequestSettings
from ropewalk.cluster.serve.hints import anchor_body
from ropewalk.scheduler.client import SchedulerClient
from ropewalk.scheduler.state import Observation, SchedulerSettings

logger = logging.getLogger("ray.serve")

MAX_SKETCHES = 1024
"""Sketches kept from a request until its answer: more than a replica runs at once."""


class Observer:
    """One per replica. `observe` never raises and never waits for the scheduler."""

    def __init__(self, model: str, replica: str, node: str, settings: SchedulerSettings) -> None:
        self._model = model
        self._replica = replica
        self._node = node
        self._client = SchedulerClient(settings)
        self._num_failures = 0
        self._sketches: OrderedDict[str, AnchorSketch | None] = OrderedDict()

    @property
    def client(self) -> SchedulerClient:
        """The replica's client of the scheduler."""
        return self._client

    def recognise(self, request: Any, settings: RequestSettings) -> RequestSettings:
        """Say which agent an unnamed one of a session is taken for, by what the scheduler has learned of anchors."""
        if settings.agent is not None or settings.session is None or settings.scratch:
            return settings
        try:
            sketch = anchor_sketch(anchor_body(request))
            agent = self._client.snapshot.agent_of(None, sketch)
            self._sketches[settings.key] = sketch
            if len(self._sketches) > MAX_SKETCHES:
                self._sketches.popitem(last=False)
        except Exception:  # a name is worth no request
            self._num_failures += 1
            logger.exception("An agent could not be recognised")
            return settings
        return replace(settings, recognised=agent)

    def observe(self, request: Any, settings: RequestSettings, reports: list[RequestReport]) -> None:
        """Hand over what `request` was and what the engine reported about it."""
        try:
            self._client.observe(
                Observation(
                    session=settings.session,
                    agent=settings.agent,
                    sketch=self._sketch(request, settings),
                    model=self._model,
                    replica=self._replica,
                    node=self._node,
                    time_s=time.time(),
                    prompt_tokens=sum(report.num_prompt_tokens for report in reports),
                    cached_tokens=sum(report.tokens.get("exact", 0) for report in reports),
                    reused_tokens=sum(report.tokens.get("reused", 0) for report in reports),
                )
            )
        except Exception:  # the answer has been sent: learning from it must not turn it into an error
            self._num_failures += 1
            logger.exception("An observation could not be made")

    def _sketch(self, request: Any, settings: RequestSettings) -> AnchorSketch | None:
        """What is sketched is remembered, if only as hashes: not what must leave nothing behind."""
        if settings.scratch:
            return None
        if settings.key in self._sketches:
            return self._sketches.pop(settings.key)
        return anchor_sketch(anchor_body(request))

    def status(self) -> Mapping[str, Any]:
        """Counts of the client, for `GET /v1/replicas`."""
        return {**self._client.status(), "observer_failures": self._num_failures}
