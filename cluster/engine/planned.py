"""`PlannedEngine`: vLLM's engine client with a plan made before each request.

It sits below the OpenAI serving layer, so prompts are token ids already and chat templates, tools and streaming stay
vLLM's. For each request it looks into the node's store, runs the plan's stages, then the request itself, and reports
what was computed and what was not, by vLLM's own accounting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from ropewalk.cluster.engine.facts import EngineFacts, engine_facts
from ropewalk.cluster.engine.planning import Planning
from ropewalk.cluster.engine.probe import PROBE_LENGTH, objection, turn_errors
from ropewalk.cluster.engine.reports import Reports
from ropewalk.cluster.engine.request import PARAMS_KEY, Mode, RequestReport, RequestSettings, digest
from ropewalk.cluster.engine.rotary import find_rotary
from ropewalk.cluster.engine.sessions import Turn, directive_set
from ropewalk.cluster.engine.settings import EngineSettings
from ropewalk.cluster.engine.stores import OpenStores
from ropewalk.cluster.engine.turns import Turns
from ropewalk.cluster.store.chunk import ChunkCorrupt
from ropewalk.cluster.store.node_store import NodeStore, Traces
from ropewalk.cluster.store.scan import BackgroundScan
from ropewalk.kernels.keys import Tokens, as_tokens
from ropewalk.scheduler.plan import Plan, empty_plan
from ropewalk.scheduler.planner import make_plan

logger = logging.getLogger(__name__)

MAX_ENDED = 1024
"""Ended sessions that wait to be told to the engine; those that nobody told of end by their silence."""

EMPTYING_S = 20.0
"""Seconds that a purge waits for a moment in which no request holds blocks."""

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
        planner = replace(
            settings.planner(), block_size=vllm_config.cache_config.block_size if has_prefix_cache else None
        )
        self._facts: EngineFacts = engine_facts(vllm_config)
        self._num_ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        self._block_size: int = vllm_config.cache_config.block_size
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._budget, self._disk = settings.budget(), settings.disk()
        self._disk_scan = BackgroundScan(self._disk.root) if self._disk is not None else None
        self._stores = OpenStores(settings, self._budget, self._disk, rank=0)
        self._reports = Reports()
        self.turns = Turns(self._store, planner.chunks)
        self._planning = Planning(
            planner, self._block_size, self._store, self.turns.sessions, settings.min_run, settings.max_hold_s
        )
        self.on_prompt: Callable[[str, Tokens], None] | None = None
        """Called with the key and token ids of each prompt of the default tenant that may be remembered."""
        self._num_running = 0
        self._num_started = 0
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)
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

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self._max_model_len

    @property
    def block_size(self) -> int:
        """Tokens of one block of vLLM's prefix cache."""
        return self._block_size

    @property
    def prewarm_refused(self) -> str | None:
        """Why nothing can be prewarmed here; None when it can."""
        if self._facts.refused is not None:
            return self._facts.refused
        return None if self._planning.is_batched else "vLLM has no prefix cache for this model here"

    # What the serving layer asks

    def pop_reports(self, key: str) -> list[RequestReport]:
        """Return, once, the reports of the request whose settings carry `key`, one per prompt."""
        return self._reports.pop(key)

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
            "batched": self._planning.is_batched,
            "min_run": self._planning.min_run,
            "prefill_ms": round(1e3 * self._planning.cost.overhead_s, 2),
            "prefill_us_per_token": round(1e6 * self._planning.cost.per_token_s, 2),
            "stage_ms": round(1e3 * self._planning.cost.per_stage_s, 2),
            "counters": self._all_counters(),
            "saves_waiting": len(self._planning.pending),
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

    def end_session(self, tenant: str, session: str) -> None:
        """Note that a session will not go on: the engine need not keep what only it would use."""
        self._ended.append(f"{tenant}/{session}")

    async def settle(self) -> None:
        """Wait until what was answered is stored and noted."""
        await self.wait_for_saves()
        await self.turns.call(lambda: None)

    async def discard(self, tenant: str, traces: Traces) -> int:
        """Remove from this node what bears the traces of a purge; return the number of chunks."""

        def purge() -> int:
            names = self.turns.verbs(tenant).purge(traces)
            for rank in range(1, self._num_ranks):
                self._open_store(tenant, rank).remove(names)
            return len(names)

        return await self.turns.call(purge)

    async def empty_prefix_cache(self) -> bool:
        """Empty vLLM's own prefix cache; False when requests were running all the time, whose blocks it keeps."""
        until = time.monotonic() + EMPTYING_S
        while not await self._client.reset_prefix_cache():
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.1)  # another process runs them: there is no event
        return True

    async def prewarm(self, tokens: Tokens, agent: str) -> RequestReport:
        """Put an agent's anchor into vLLM's prefix cache: from the node's store what is there, computed what is not.

        An exact request of one token of the default tenant, which counts nowhere as a user's. Cancelled, it is aborted.
        """
        settings = RequestSettings(agent=agent, prewarm=True)
        params = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        params.extra_args = {"kv_transfer_params": {PARAMS_KEY: settings.to_params()}}
        prompt = tokens_input(tokens.tolist())
        async with contextlib.aclosing(self.generate(prompt, params, f"prewarm-{uuid.uuid4().hex}")) as outputs:
            async for _ in outputs:
                pass
        (report,) = self.pop_reports(settings.key)
        return report

    async def apply_directives(
        self, session: str, directives: Sequence[Sequence[Any]], mode: Mode = "exact"
    ) -> dict[str, Any]:
        """Edit what a session of the default tenant holds, now, so that its next turn finds that done.

        Spans are positions in the history that it used last. Returns a report, JSON-able. Raises `DirectiveError`, and
        `KeyError` for a session that is not known.
        """
        settings = RequestSettings(mode=mode, session=session, edits="amortize", directives=directives, apply=True)
        tokens = await self.turns.call(self.turns.sessions.tokens, settings.tenant, session)
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
        turn = None
        if tokens is not None:
            if settings.spans_of not in (None, digest(tokens)):
                raise VLLMValidationError(
                    "the prompt was rendered otherwise than the spans of tokens take it to be", parameter="ropewalk"
                )
            turn = await self.turns.begin(settings, tokens, can_turn=self._reuse_refused is None)
        if settings.scratch and (turn is None or not self._can_carry_scratch(turn)):
            settings = replace(settings, keep=False)  # nothing of this prompt is kept
        if (settings.tenant != "default" or not settings.keep) and isinstance(prompt, dict):
            # vLLM's own prefix cache must not be shared between tenants either.
            owner = settings.tenant if settings.keep else f"{settings.tenant}/{uuid.uuid4().hex}"
            prompt = {**prompt, "cache_salt": f"{owner}/{prompt.get('cache_salt') or ''}"}
        report = RequestReport(mode=settings.mode)
        if turn is None:
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
                        self._reports.finish(report, settings, output, empty_plan(num_tokens))
                    yield output
            return

        report.fallbacks += turn.fallbacks
        if not settings.keep:
            turn.scratch = None
        if turn.tokens is not tokens:
            prompt = {**prompt, "prompt_token_ids": turn.tokens.tolist()}
            prompt.pop("prompt", None)  # the text is no longer that of the tokens
        if self.on_prompt is not None and _may_be_remembered(settings):
            self.on_prompt(settings.key, turn.tokens)
        await self._planning.wait_for_saves(turn, settings, self._num_running)
        plan = self._planning.plan(turn, settings, report, reuse_refused=self._reuse_refused)
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
                        self.turns.end(settings, turn, plan, answer.computed)
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
                            self._planning.cost.observe(plan.num_tokens - num_cached, len(tasks), num_cached, seconds)
                    # Neither what a stage computed for this request nor what could not be loaded is a cache hit.
                    not_cached = num_computed_by_stages + returned.get("num_failed", 0)
                    output.num_cached_tokens = max((output.num_cached_tokens or 0) - not_cached, 0)
                    if output.finished:
                        self._reports.note(returned)
                        report.fallbacks.extend(returned.get("fallbacks", ()))
                        if returned.get("saving"):
                            self._planning.pending.add(self._store(settings.tenant), returned["saving"])
                        report.num_computed_by_stages = num_computed_by_stages
                        report.num_loaded = returned.get("num_loaded", 0)
                        self._reports.finish(report, settings, output, plan)
                    output.kv_transfer_params = None  # internal: not for clients
                    yield output
        finally:
            for task in tasks:
                task.cancel()

    async def wait_for_saves(self) -> None:
        """Wait until what was answered before is stored, or lost."""
        await self._planning.pending.wait()

    def _all_counters(self) -> dict[str, int]:
        self._reports.counters.update(self._stores.take_counters())
        totals = self._reports.totals()
        totals.update(self.turns.counters())
        return dict(totals)

    def _can_carry_scratch(self, turn: Turn) -> bool:
        """Tell whether blocks can be given names that nobody else has, from where the scratch begins on."""
        return self._reuse_refused is None and len(turn.tokens) >= self._block_size

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
            self._reports.note(returned)
        return computed, fallbacks

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
            "turn": None if is_stage else self._turn(settings),
            "rotate": settings.rotate,
            "group": group,
            "member": member,
        }
        return _set_params(sampling_params, {PARAMS_KEY: params})

    def _turn(self, settings: RequestSettings) -> dict[str, Any]:
        """What the engine has to know to keep what will be used again; ended sessions are told with whoever is next."""
        ended = list(self._ended)
        self._ended.clear()
        session = None if settings.session is None else f"{settings.tenant}/{settings.session}"
        agent = settings.agent or settings.recognised
        turn = {"session": session, "agent": agent, "at_s": settings.at_s, "ended": ended}
        return {**turn, "prewarm": settings.prewarm, "spared_s": self._planning.cost.spared_s}

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

    def _open_store(self, tenant: str, rank: int = 0) -> NodeStore:
        name = f"{self._facts.fingerprint}-r{rank}"
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
                await self._run_stage(prompt, length, empty_plan(length), settings, store.tenant, {})
                whole = make_plan(as_tokens([*tokens, 0]), store.tenant, store, self._planning.settings, reuse=False)
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
                self._planning.forget_costs()  # what came before was warming up
                for number, length in enumerate(CALIBRATION):
                    length = min(length, self._max_model_len - 2)
                    first = 2 * number + is_warm  # no prompt finds another one's KV
                    tokens = [token % self._vocabulary for token in (first, *range(length - 1))]
                    prompt = tokens_input(tokens, cache_salt=store.tenant)
                    plan, settings = empty_plan(length), RequestSettings(tenant=store.tenant)
                    start = time.perf_counter()
                    await self._run_stage(prompt, length, plan, settings, f"{store.tenant}-{first}", {})
                    self._planning.cost.observe(length, 0, 0, time.perf_counter() - start)
        logger.info(
            "A prefill costs %.1f ms and %.0f us a token: reused runs have %d tokens or more",
            1e3 * self._planning.cost.overhead_s,
            1e6 * self._planning.cost.per_token_s,
            self._planning.cost.min_run,
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


def _may_be_remembered(settings: RequestSettings) -> bool:
    is_users = bool(settings.key) and not settings.prewarm
    return is_users and settings.keep and not settings.scratch and settings.tenant == "default"


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
