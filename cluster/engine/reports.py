"""Reports of finished requests, kept until their HTTP side asks, and what all of them add up to."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

from vllm.outputs import RequestOutput

from ropewalk.agents.lineage import REUSE
from ropewalk.cluster.engine.request import RequestReport, RequestSettings, describe
from ropewalk.scheduler.plan import Plan

MAX_REPORTS = 4096
"""Reports kept for requests whose HTTP side never asks for them."""


class Reports:
    """`counters` are this process's; `totals` has those of the engine's processes, too."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._reports: OrderedDict[str, list[RequestReport]] = OrderedDict()
        self._engines: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pop(self, key: str) -> list[RequestReport]:
        """Return, once, the reports of the request whose settings carry `key`, one per prompt."""
        return self._reports.pop(key, [])

    def note(self, returned: dict[str, Any]) -> None:
        """Take over an engine's totals: if one report has overtaken another, the later one counts."""
        if "engine" in returned:
            self._engines[returned["engine"]] |= Counter(returned["counters"])

    def totals(self) -> Counter[str]:
        """Return all counters."""
        totals = self.counters.copy()
        for engine in self._engines.values():
            totals.update(engine)
        return totals

    def finish(self, report: RequestReport, settings: RequestSettings, output: RequestOutput, plan: Plan) -> None:
        """Complete and file the report of a finished request, by vLLM's own accounting."""
        num_tokens = len(output.prompt_token_ids or ())
        cached = output.num_cached_tokens or 0
        report.num_prompt_tokens = num_tokens
        report.num_cached_tokens = cached
        report.num_stages = len(plan.stages)
        # Cached positions are a prefix; of those, the runs are reused and the rest is this prompt's own prefill.
        prefix = cached + report.num_computed_by_stages
        served = Counter[bool]()
        for segment in plan.segments:
            if segment.reused:
                served[segment.spliced] += max(min(segment.end, prefix) - segment.start, 0)
        spliced = min(served[True], cached)
        reused = min(served[False], cached - spliced)
        exact = cached - spliced - reused
        report.tokens = {"computed": num_tokens - cached, "exact": exact, "reused": reused, "spliced": spliced}
        report.plan = describe(plan)
        report.lineage = next((mark.label for mark in reversed(plan.marks) if mark.label != REUSE), None)
        if not settings.prewarm:
            for kind, count in report.tokens.items():
                self.counters[f"tokens_{kind}"] += count
            self.counters["requests"] += 1
            self.counters["stages"] += len(plan.stages)
            for reason in report.fallbacks:
                self.counters[f"fallback_{reason}"] += 1
        if settings.key:
            self._reports.setdefault(settings.key, []).append(report)
            if len(self._reports) > MAX_REPORTS:
                self._reports.popitem(last=False)
