"""`PlannedEngine`: vLLM's engine client with a plan made before each request.

It sits below the OpenAI serving layer, so prompts are token ids already and chat templates, tools and streaming stay
vLLM's. For each request it looks into the node's store, runs the plan's stages, then the request itself, and reports
what was computed and what was not, by vLLM's own accounting.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from ropewalk.agents.directives import DirectiveError, Span
from ropewalk.agents.lineage import REUSE
from ropewalk.cluster.engine.facts import EngineFacts, engine_facts
from ropewalk.cluster.engine.pending import PendingSaves, heads_of
from ropewalk.cluster.engine.probe import PROBE_LENGTH, objection, turn_errors
from ropewalk.cluster.engine.request import PARAMS_KEY, Mode, RequestReport, RequestSettings, describe
from ropewalk.cluster.engine.rotary import find_rotary
from ropewalk.cluster.engine.sessions import Sessions, Turn, directive_set
from ropewalk.cluster.engine.settings import EngineSettings
from ropewalk.cluster.engine.stores import OpenStores
from ropewalk.cluster.engine.verbs import Verbs
from ropewalk.cluster.store.chunk import ChunkCorrupt
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.cluster.store.scan import BackgroundScan
from ropewalk.cluster.store.sessions import SessionFiles
from ropewalk.kernels.keys import Tokens, as_tokens
from ropewalk.scheduler.costs import LEAST_RUN, StageCost
from ropewalk.scheduler.planner import Plan, make_plan

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REPORTS = 4096
"""Reports kept for requests whose HTTP side never asks for them."""

SAVE_WAIT_SHARE = 0.25
"""Of the time that a prompt's prefill would take, so much is waited for what may spare it. On CPUs a save takes some
15 % of that: a tenth would make a client's second request miss what its first one left."""

MAX_SAVE_WAIT = 0.1
"""Seconds waited for that at most: a save takes some milliseconds, unless it waits behind many others."""

SPLICE_WAIT_SHARE, MAX_SPLICE_WAIT = 1.0, 1.0
"""The same for the rows of a session's own history, and seconds at most: what is waited for is known by name, was
computed by the turn before, and comes for certain unless it was dropped."""

CALIBRATION = (32, 416)
"""Tokens of the prefills timed at start: a short one for what each costs, a long one for what a token costs."""


class PlannedEngine:
    """An `EngineClient` that plans. Everything but `generate` is the wrapped client's."""

    def __init__(self, client: EngineClient, vllm_config: Any, settings: EngineSettings) -> None:
        self._client = client
        self._vllm_config = vllm_config
        self._settings = settings
        # Stages take over from each other through vLLM's prefix cache where it has one, else through the store.
        has_prefix_cache = bool(vllm_config.cache_config.enable_prefix_caching)
        self._planner = replace(
            settings.planner(), block_size=vllm_config.cache_config.block_size if has_prefix_cache else None
        )
        self._facts: EngineFacts = engine_facts(vllm_config)
        self._block_size: int = vllm_config.cache_config.block_size
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._budget, self._disk = settings.budget(), settings.disk()
        self._disk_scan = BackgroundScan(self._disk.root) if self._disk is not None else None
        self._stores = OpenStores(settings, self._budget, self._disk, rank=0)
        self._reports: OrderedDict[str, list[RequestReport]] = OrderedDict()
        self._counters: Counter[str] = Counter()
        self._engine_counters: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._pending = PendingSaves()
        self._session_files: dict[str, SessionFiles] = {}
        self._session_thread = ThreadPoolExecutor(1, "ropewalk-sessions")  # files, locks, long histories to compare
        self.sessions = Sessions(self._files, self._planner.chunks)
        self._cost = self._new_cost()
        self._num_running = 0
        self._num_started = 0
        self._preparing = asyncio.Lock()
        self._prepared = False
        self._rotary_summary: dict[str, Any] | None = None
        self._turn_errors: list[float] | None = None
        self._reuse_refused: str | None = self._facts.reuse_refused or "the turn probe has not run yet"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    @property
    def facts(self) -> EngineFacts:
        """What the engine's KV is; once prepared, as the loaded model confirms it."""
        return self._facts

    # What the serving layer asks

    def pop_reports(self, key: str) -> list[RequestReport]:
        """Return, once, the reports of the request whose settings carry `key`, one per prompt."""
        return self._reports.pop(key, [])

    def status(self) -> dict[str, Any]:
        """Return what this engine does and has done, JSON-able."""
        return {
            "fingerprint": self._facts.fingerprint,
            "refused": self._facts.refused,
            "reuse_refused": self._reuse_refused,
            "rotary": self._rotary_summary,
            "turn_error": self._turn_errors and self._turn_errors[0],
            "turn_error_of_layers": self._turn_errors and max(self._turn_errors),
            "block_size": self._block_size,
            "batched": self._planner.block_size is not None,
            "min_run": self._min_run(),
            "prefill_ms": round(1e3 * self._cost.overhead_s, 2),
            "prefill_us_per_token": round(1e6 * self._cost.per_token_s, 2),
            "stage_ms": round(1e3 * self._cost.per_stage_s, 2),
            "counters": self._all_counters(),
            "saves_waiting": len(self._pending),
            "store": self._store_status(),
        }

    async def prepare(self) -> None:
        """Read the model's rotary modules and run the turn probe, once. Reuse is refused, with the reason in `status`,
        when modules and configuration disagree, or keys do not turn right."""
        async with self._preparing:
            if self._prepared:
                return
            refused = (
                self._facts.refused or self._facts.reuse_refused or await self._find_rotary() or await self._probe()
            )
            if refused is None and self._settings.min_run is None:
                await self._calibrate()
            if refused is not None:
                logger.warning("Position-independent reuse is off: %s", refused)
            self._reuse_refused = refused
            self._prepared = True

    async def in_session_thread(self, call: Callable[..., T], *args: Any) -> T:
        """Call something that reads or writes sessions or many files, behind what was noted of turns before."""
        return await asyncio.get_running_loop().run_in_executor(self._session_thread, call, *args)

    def verbs(self, tenant: str) -> Verbs:
        """What may be done with the KV of a tenant's sessions."""
        return Verbs(self.sessions, self._store(tenant))

    async def purge(self, tenant: str, session: str, span: Span) -> dict[str, Any]:
        """Carry out `Verbs.purge`, and empty vLLM's prefix cache, where the rows lie too."""
        await self.wait_for_saves()
        purged = await self.in_session_thread(self.verbs(tenant).purge, session, span)
        return {**purged, "prefix_cache_emptied": bool(await self._client.reset_prefix_cache())}

    async def apply_directives(
        self, session: str, directives: Sequence[Sequence[Any]], mode: Mode = "exact"
    ) -> dict[str, Any]:
        """Edit what a session of the default tenant holds, now, so that its next turn finds that done.

        Spans are positions in the history that it used last. Returns a report, JSON-able. Raises `DirectiveError`, and
        `KeyError` for a session that is not known.
        """
        settings = RequestSettings(mode=mode, session=session, edits="amortize", directives=directives, apply=True)
        tokens = await self.in_session_thread(self.sessions.tokens, settings.tenant, session)
        directive_set(directives, len(tokens))
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        params.extra_args = {"kv_transfer_params": {PARAMS_KEY: settings.to_params()}}
        prompt = tokens_input(tokens.tolist())
        async for _ in self.generate(prompt, params, f"directives-{uuid.uuid4().hex}"):
            pass
        (report,) = self.pop_reports(settings.key)
        return {"session": session, **report.to_dict()}

    # The request path

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate as the wrapped client does, by plan where one can be made; arguments as `EngineClient.generate`."""
        if not self._prepared:
            await self.prepare()
        settings = self._take_settings(sampling_params)
        tokens, reason = self._plannable(prompt, sampling_params, kwargs)
        if (settings.tenant != "default" or not settings.keep) and isinstance(prompt, dict):
            # vLLM's own prefix cache must not be shared between tenants either.
            owner = settings.tenant if settings.keep else f"{settings.tenant}/{uuid.uuid4().hex}"
            prompt = {**prompt, "cache_salt": f"{owner}/{prompt.get('cache_salt') or ''}"}
        report = RequestReport(mode=settings.mode)
        if tokens is None:
            if settings.directives:
                raise VLLMValidationError(
                    f"directives cannot be applied to this request ({reason})", parameter="ropewalk.directives"
                )
            report.fallbacks.append(reason)
            params = _set_params(sampling_params, None)
            async with contextlib.aclosing(self._client.generate(prompt, params, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    if output.finished:
                        num_tokens = len(output.prompt_token_ids or ())
                        self._finish(report, settings, output, Plan(num_tokens, 0, (), (), ()))
                    yield output
            return

        turn = await self._begin_turn(tokens, settings)
        report.fallbacks += turn.fallbacks
        if turn.tokens is not tokens:
            prompt = {**prompt, "prompt_token_ids": turn.tokens.tolist()}
            prompt.pop("prompt", None)  # the text is no longer that of the tokens
        await self._wait_for_saves(turn, settings)
        plan = self._plan(turn, settings, report)
        self._num_started += 1
        self._num_running += 1
        answer = Answered(sampling_params)
        try:
            async with contextlib.aclosing(
                self._generate_by_plan(plan, report, settings, prompt, sampling_params, request_id, kwargs)
            ) as planned:
                async for output in planned:
                    answer.add(output)
                    if output.finished and settings.session is not None:
                        # Not waited for: the next turn's look-up stands behind it in the same thread.
                        self._session_thread.submit(self._end_turn, settings, turn, plan, answer.computed)
                    yield output
        finally:
            self._num_running -= 1

    async def _generate_by_plan(
        self,
        plan: Plan,
        report: RequestReport,
        settings: RequestSettings,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        kwargs: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        start, num_started, started_alone = time.perf_counter(), self._num_started, self._num_running == 1
        group = uuid.uuid4().hex
        tasks: list[asyncio.Task[tuple[int, list[str]]]] = []
        num_computed_by_stages: int | None = None
        try:
            for number, length in enumerate(plan.stages):
                stage = self._run_stage(
                    prompt, length, plan, settings, f"{request_id}-stage-{number}", kwargs, number, group
                )
                tasks.append(asyncio.create_task(stage))
                # Batched stages are sent ahead of the request, all in one moment: the engine takes them in one step.
                await (asyncio.sleep(0) if plan.batched else asyncio.wait(tasks))
            params = self._with_plan(sampling_params, plan, settings, len(tasks), group)
            # Closed at once when the client goes away: vLLM then aborts the request.
            async with contextlib.aclosing(self._client.generate(prompt, params, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    returned = (output.kv_transfer_params or {}).get(PARAMS_KEY) or {}
                    if num_computed_by_stages is None:
                        num_computed_by_stages = 0
                        for result in await asyncio.gather(*tasks, return_exceptions=True):
                            num_computed, fallbacks = (
                                (0, ["stage_failed"]) if isinstance(result, BaseException) else result
                            )
                            num_computed_by_stages += num_computed
                            report.fallbacks.extend(fallbacks)
                        is_first_token = sampling_params.output_kind != RequestOutputKind.FINAL_ONLY
                        # Others in the same steps would count as this request's cost.
                        if is_first_token and started_alone and num_started == self._num_started:
                            num_cached = (output.num_cached_tokens or 0) - num_computed_by_stages
                            seconds = time.perf_counter() - start
                            self._cost.observe(plan.num_tokens - num_cached, len(tasks), num_cached, seconds)
                    # Neither what a stage computed for this request nor what could not be loaded is a cache hit.
                    not_cached = num_computed_by_stages + returned.get("num_failed", 0)
                    output.num_cached_tokens = max((output.num_cached_tokens or 0) - not_cached, 0)
                    if output.finished:
                        self._note(returned)
                        report.fallbacks.extend(returned.get("fallbacks", ()))
                        if returned.get("saving"):
                            self._pending.add(self._store(settings.tenant), returned["saving"])
                        report.num_computed_by_stages = num_computed_by_stages
                        self._finish(report, settings, output, plan)
                    output.kv_transfer_params = None  # internal: not for clients
                    yield output
        finally:
            for task in tasks:
                task.cancel()

    async def wait_for_saves(self) -> None:
        """Wait until what was answered before is stored, or lost."""
        await self._pending.wait()

    async def _wait_for_saves(self, turn: Turn, settings: RequestSettings) -> None:
        """Wait a little for what is being stored, if this request may find it there.

        An exact request finds its prefix in vLLM's own cache, where there is one.
        """
        if not len(self._pending):
            return
        cost = self._cost.per_token_s * len(turn.tokens)
        if turn.held is not None:
            chains = {rows.chunk for rows in turn.held.rows if rows.end > turn.held.inexact_from}
            seconds = min(SPLICE_WAIT_SHARE * cost, MAX_SPLICE_WAIT)
            await self._pending.wait_for(self._store(settings.tenant), chains, seconds)
        elif settings.mode == "reuse" or self._planner.block_size is None:
            heads = heads_of(turn.tokens, settings.tenant, self._planner.chunks)
            await self._pending.wait(min(SAVE_WAIT_SHARE * cost, MAX_SAVE_WAIT), heads)

    async def _begin_turn(self, tokens: Tokens, settings: RequestSettings) -> Turn:
        begin = functools.partial(self.sessions.begin, settings, tokens, can_turn=self._reuse_refused is None)
        try:
            if settings.session is None:
                return begin()
            return await asyncio.get_running_loop().run_in_executor(self._session_thread, begin)
        except DirectiveError as error:
            raise VLLMValidationError(str(error), parameter=f"ropewalk.{error.field}") from error

    def _end_turn(self, settings: RequestSettings, turn: Turn, plan: Plan, answer: list[int]) -> None:
        try:
            self.sessions.end(settings, turn, plan, answer)
        except Exception:  # the answer is given; the session's next prompt is computed
            logger.exception("What session %r holds could not be noted", settings.session)
            self._counters["session_failed"] += 1

    def _files(self, tenant: str) -> SessionFiles:
        if tenant not in self._session_files:
            self._session_files[tenant] = SessionFiles(self._store(tenant).last_base)
        return self._session_files[tenant]

    def _note(self, returned: dict[str, Any]) -> None:
        """Take over an engine's totals: if one report has overtaken another, the later one counts."""
        if "engine" in returned:
            self._engine_counters[returned["engine"]] |= Counter(returned["counters"])

    def _all_counters(self) -> dict[str, int]:
        self._counters.update(self._stores.take_counters())
        counters = self._counters.copy()
        for files in list(self._session_files.values()):
            counters.update(files.counters)
        for engine in self._engine_counters.values():
            counters.update(engine)
        return dict(counters)

    def _plan(self, turn: Turn, settings: RequestSettings, report: RequestReport) -> Plan:
        tokens, reuse, held = turn.tokens, turn.reuse, turn.held
        if settings.mode == "reuse" and not reuse:
            report.fallbacks.append("forgotten")
        if reuse and self._reuse_refused is not None:
            report.fallbacks.append("reuse_refused")
            reuse = False
        if reuse and not settings.keep and self._planner.block_size is None:
            report.fallbacks.append("stages_need_the_store")
            reuse, held = False, None
        store = self._store(settings.tenant)
        boundary = self._planner.boundary if settings.boundary is None else settings.boundary
        per_position = self._cost.per_position if self._settings.min_run is None else 0.0
        planner = replace(self._planner, min_run=self._min_run(), per_position=per_position, boundary=boundary)
        try:
            plan = make_plan(tokens, settings.tenant, store, planner, reuse=reuse, held=held)
            if self.sessions.lost(turn, plan, store):
                report.fallbacks.append("lineage_lost")
            first = plan.first_inexact
            inexact = [n for n in (*plan.stages, plan.num_tokens) if first is not None and first < n]
            if inexact and min(inexact) < self._block_size:
                # No full block could carry the reuse domain's hash.
                report.fallbacks.append("shorter_than_a_block")
                plan = make_plan(tokens, settings.tenant, store, planner, reuse=False)
            if not settings.rotate:
                plan = replace(plan, segments=tuple(replace(segment, turn=0) for segment in plan.segments))
        except OSError as error:
            logger.warning("Planning without the store: %s", error)
            report.fallbacks.append("store_unreadable")
            plan = Plan(len(tokens), 0, (), (), ())
        return plan

    async def _run_stage(
        self,
        prompt: Any,
        length: int,
        plan: Plan,
        settings: RequestSettings,
        request_id: str,
        kwargs: dict[str, Any],
        number: int = 0,
        group: str = "",
    ) -> tuple[int, list[str]]:
        """Compute the gap that ends at `length`; return how many tokens were really prefilled, and fallbacks."""
        params = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        params = self._with_plan(params, plan, settings, number, group, is_stage=True)
        stage_prompt = tokens_input(prompt["prompt_token_ids"][:length], cache_salt=prompt.get("cache_salt"))
        passed = {name: kwargs[name] for name in ("priority", "data_parallel_rank") if name in kwargs}
        computed, fallbacks = length, []
        async for output in self._client.generate(stage_prompt, params, request_id, **passed):
            returned = (output.kv_transfer_params or {}).get(PARAMS_KEY) or {}
            computed = length - (output.num_cached_tokens or 0) + returned.get("num_failed", 0)
            fallbacks = returned.get("fallbacks", [])
            self._note(returned)
        return computed, fallbacks

    def _new_cost(self) -> StageCost:
        # A batched stage costs little more than being scheduled.
        return StageCost(LEAST_RUN if self._planner.block_size is not None else None)

    def _min_run(self) -> int:
        return self._settings.min_run or self._cost.min_run

    def _with_plan(
        self,
        sampling_params: SamplingParams,
        plan: Plan,
        settings: RequestSettings,
        member: int,
        group: str,
        *,
        is_stage: bool = False,
    ) -> SamplingParams:
        params = {
            "plan": plan.to_params(),
            "fingerprint": self._facts.fingerprint,
            "tenant": settings.tenant,
            "is_stage": is_stage,
            "keep": settings.keep,
            "rotate": settings.rotate,
            "group": group,
            "member": member,
        }
        return _set_params(sampling_params, {PARAMS_KEY: params})

    def _finish(self, report: RequestReport, settings: RequestSettings, output: RequestOutput, plan: Plan) -> None:
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
        for kind, count in report.tokens.items():
            self._counters[f"tokens_{kind}"] += count
        self._counters["requests"] += 1
        self._counters["stages"] += len(plan.stages)
        for reason in report.fallbacks:
            self._counters[f"fallback_{reason}"] += 1
        if settings.key:
            self._reports.setdefault(settings.key, []).append(report)
            if len(self._reports) > MAX_REPORTS:
                self._reports.popitem(last=False)

    def _take_settings(self, sampling_params: SamplingParams) -> RequestSettings:
        params = ((sampling_params.extra_args or {}).get("kv_transfer_params") or {}).get(PARAMS_KEY)
        if not params:
            # vLLM asks by itself, as for beam search: nobody said that approximate KV will do.
            return RequestSettings(key="", mode="exact")
        settings = RequestSettings.from_params(params)
        # Wrongly turned KV must not meet anybody's: unless it is dropped at once, it lives with a tenant of its own.
        if settings.rotate or not settings.keep:
            return settings
        return replace(settings, tenant=f"{settings.tenant}/unturned")

    def _plannable(self, prompt: Any, params: SamplingParams, kwargs: dict[str, Any]) -> tuple[Tokens | None, str]:
        """Return the prompt's token ids, or None and the reason why there can be no plan."""
        if self._facts.refused is not None:
            return None, "model_refused"
        if not isinstance(prompt, dict) or prompt.get("type", "token") != "token" or "prompt_token_ids" not in prompt:
            return None, "not_token_ids"
        if prompt.get("multi_modal_data") or prompt.get("prompt_embeds") is not None:
            return None, "not_token_ids"
        if kwargs.get("lora_request") is not None:
            return None, "lora"
        if prompt.get("cache_salt"):
            return None, "cache_salt"
        if params.prompt_logprobs is not None or params.skip_reading_prefix_cache:
            return None, "needs_every_prompt_token"
        if not prompt["prompt_token_ids"] or len(prompt["prompt_token_ids"]) >= self._max_model_len:
            return None, "length"  # vLLM answers with its own error
        return as_tokens(prompt["prompt_token_ids"]), ""

    def _store(self, tenant: str) -> NodeStore:
        # Chunks carry the rank; plans are made from rank 0's.
        return self._stores.get((self._facts.fingerprint, tenant))

    def _open_store(self, tenant: str) -> NodeStore:
        # Chunks carry the rank; plans are made from rank 0's.
        name = f"{self._facts.fingerprint}-r0"
        return NodeStore(self._settings.store_root, name, tenant, self._budget, self._disk)

    def _store_status(self) -> dict[str, Any]:
        store = self._store("default")
        usage, disk_usage = store.usage(), store.disk_usage()
        status: dict[str, Any] = {
            "root": str(self._settings.store_root),
            "budget_bytes": self._budget,
            "num_chunks": usage.num_chunks,
            "num_bytes": usage.num_bytes,
            "num_quarantined": usage.num_quarantined,
        }
        if self._disk is not None and disk_usage is not None and self._disk_scan is not None:
            status["disk"] = {
                "root": str(self._disk.root),
                "budget_bytes": self._disk.budget_bytes,
                **asdict(disk_usage),
                "scan": {"state": self._disk_scan.state, **self._disk_scan.counters},
            }
        return status

    async def _find_rotary(self) -> str | None:
        """Take what the loaded model's rotary modules say; return why reuse must be refused, or None."""
        assert self._facts.rotary is not None
        finding = await find_rotary(self._client, self._vllm_config, self._facts.rotary)
        self._rotary_summary = finding.summary
        self._facts = replace(self._facts, rotary=finding.facts)
        return finding.refused

    async def _probe(self) -> str | None:
        """Prefill one repeated token, compare turned with computed keys; return why reuse must be refused, or None."""
        assert self._facts.rotary is not None
        length = min(PROBE_LENGTH, self._max_model_len - 2)
        tokens = [self._vocabulary // 2] * length
        start = time.perf_counter()
        try:
            with self._scratch_store() as store:
                settings, prompt = RequestSettings(tenant=store.tenant), tokens_input(tokens, cache_salt=store.tenant)
                await self._run_stage(prompt, length, Plan(length, 0, (), (), ()), settings, store.tenant, {})
                whole = make_plan(as_tokens([*tokens, 0]), store.tenant, store, self._planner, reuse=False)
                parts = [store.read(segment.chunk)[1] for segment in whole.segments if segment.start < length]
        except (OSError, ChunkCorrupt) as error:
            return f"the turn probe's KV could not be read back ({error})"
        rows = torch.cat(parts, dim=1) if parts else torch.empty(0, 0, 1, 1)
        if rows.shape[1] < length or not len(rows):
            return "the engine saved no KV of the turn probe (its log says why)"
        errors = turn_errors(rows, self._facts.rotary, self._facts.is_mla)
        self._turn_errors = errors
        milliseconds = 1e3 * (time.perf_counter() - start)
        logger.info("Turn probe: relative error %.2e, %.0f ms", errors[0], milliseconds)
        return objection(errors, rows.dtype)

    async def _calibrate(self) -> None:
        """Time prefills of two lengths, so that the first plans know what a stage costs on this machine."""
        with self._scratch_store() as store:
            for is_warm in (False, True):
                self._cost = self._new_cost()  # what came before was warming up
                for number, length in enumerate(CALIBRATION):
                    length = min(length, self._max_model_len - 2)
                    first = 2 * number + is_warm  # no prompt finds another one's KV
                    tokens = [token % self._vocabulary for token in (first, *range(length - 1))]
                    prompt = tokens_input(tokens, cache_salt=store.tenant)
                    plan, settings = Plan(length, 0, (), (), ()), RequestSettings(tenant=store.tenant)
                    start = time.perf_counter()
                    await self._run_stage(prompt, length, plan, settings, f"{store.tenant}-{first}", {})
                    self._cost.observe(length, 0, 0, time.perf_counter() - start)
        logger.info(
            "A prefill costs %.1f ms and %.0f us a token: reused runs have %d tokens or more",
            1e3 * self._cost.overhead_s,
            1e6 * self._cost.per_token_s,
            self._cost.min_run,
        )

    @contextlib.contextmanager
    def _scratch_store(self) -> Iterator[NodeStore]:
        """The store of a tenant of its own, in which nothing is found and of which nothing is left."""
        tenant = f"probe-{uuid.uuid4().hex}"
        store = self._open_store(tenant)
        try:
            yield store
        finally:
            store.clear()


class Answered:
    """Collects an answer's token ids, however they are handed out."""

    def __init__(self, sampling_params: SamplingParams) -> None:
        self._is_delta = sampling_params.output_kind == RequestOutputKind.DELTA
        self._is_single = sampling_params.n == 1
        self._tokens: list[int] = []

    def add(self, output: RequestOutput) -> None:
        """Take in what the engine hands out. Of several answers to one prompt, none is kept."""
        if self._is_single and output.outputs:
            if not self._is_delta:
                self._tokens.clear()
            self._tokens.extend(output.outputs[0].token_ids)

    @property
    def computed(self) -> list[int]:
        """Those that have KV: the last one was sampled, and not fed back."""
        return self._tokens[:-1]


EngineClient.register(PlannedEngine)


def wrap_engine(client: EngineClient, vllm_config: Any, settings: EngineSettings) -> PlannedEngine:
    """Return `client` with planning. Await `prepare` before the first request to keep the probe off its path."""
    return PlannedEngine(client, vllm_config, settings)


def _set_params(sampling_params: SamplingParams, params: dict[str, Any] | None) -> SamplingParams:
    copy = sampling_params.clone()
    extra = dict(copy.extra_args or {})
    extra.pop("kv_transfer_params", None)
    if params is not None:
        extra["kv_transfer_params"] = params
    copy.extra_args = extra or None
    return copy
