"""vLLM's KV connector for Ropewalk: takes planned chunks into the paged cache, saves what was computed.

The scheduler half follows each request's plan; the worker half moves rows. A request without our parameters is not
touched. Nothing here decides what to reuse: the plan does (`ropewalk.scheduler.planner`). What is saved is decided in
`saves.py`, and written in `saver.py`.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import RequestStatus

from ropewalk.agents.lineage import Mark
from ropewalk.cluster.engine.facts import engine_facts
from ropewalk.cluster.engine.layouts import KvLayout, UnsupportedLayout, find_layout
from ropewalk.cluster.engine.loader import Load, Loader, LoadPart, reason_of
from ropewalk.cluster.engine.pool import PoolOrder
from ropewalk.cluster.engine.request import PARAMS_KEY
from ropewalk.cluster.engine.saver import Saver, save_part
from ropewalk.cluster.engine.saves import HELD_SHARE, Save, SaveQueue, slots_of
from ropewalk.cluster.engine.settings import settings_of
from ropewalk.cluster.engine.stores import OpenStores, Place
from ropewalk.cluster.engine.worth import ChunkWorth
from ropewalk.kernels.keys import as_tokens
from ropewalk.kernels.rope import RotaryFacts
from ropewalk.scheduler.plan import Piece, Plan
from ropewalk.scheduler.rules import RULES

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

DOMAIN_SALT = b"ropewalk/"

GATHER_S = 0.1
"""Seconds that the first requests of a batched plan wait for the others, which were sent in the same moment."""


@dataclass
class RopewalkMetadata(KVConnectorMetadata):
    """`stage_saves` are stored in the step that computes them; `saves` are those of finished requests."""

    loads: list[Load] = field(default_factory=list)
    stage_saves: list[Save] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass
class RopewalkWorkerMetadata(KVConnectorWorkerMetadata):
    """Failed loads by request: the reason, and the first position that has no KV. And what was counted since the
    last step.
    """

    failures: dict[str, tuple[str, int]] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RopewalkWorkerMetadata:
        assert isinstance(other, RopewalkWorkerMetadata)
        both = self.failures.keys() & other.failures.keys()
        first = {key: min(self.failures[key], other.failures[key], key=lambda failure: failure[1]) for key in both}
        return RopewalkWorkerMetadata({**self.failures, **other.failures, **first}, self.counters + other.counters)


@dataclass(slots=True)
class _Tracked:
    """What the scheduler half knows of a live request."""

    request: Request
    plan: Plan
    place: Place
    is_stage: bool
    rotate: bool
    num_local: int = 0
    num_external: int = 0
    num_failed: int = 0
    """Planned tokens whose load failed: vLLM computes them, but goes on counting them as cached."""
    block_ids: list[int] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    group: str = ""
    member: int = 0
    keep: bool = True


@dataclass(slots=True)
class _Group:
    """The stages of a batched plan and the request itself, in this order: they are to share a step."""

    num_members: int
    deadline: float
    members: dict[int, str] = field(default_factory=dict)


class RopewalkConnector(KVConnectorBase_V1):
    """See the module's docstring. One instance schedules, one instance per rank moves rows."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings_of(vllm_config)
        self._facts = engine_facts(vllm_config)
        self._refused = self._facts.refused
        self._budget, self._disk = self._settings.budget(), self._settings.disk()
        self._block_size: int = vllm_config.cache_config.block_size
        self._stores = OpenStores(self._settings, self._budget, self._disk, rank=0)
        if len(kv_cache_config.kv_cache_groups) != 1 and self._refused is None:
            self._refused = "layers have KV caches of several kinds"
        if self._refused:
            logger.warning("Ropewalk stores and reuses no KV of this model: %s", self._refused)
        # Scheduler half
        self._tracked: dict[str, _Tracked] = {}
        self._groups: dict[str, _Group] = {}
        self._loads_unseen = False
        """Whether loads were handed out in a step whose result has not been seen yet."""
        self._step_blocks: set[int] = set()
        """Blocks of the requests that the last step loaded for, began or went on with."""
        self._loads: list[Load] = []
        self._stage_saves: list[Save] = []
        self._saves: list[Save] = []
        self._queue = SaveQueue(self._settings.planner().chunks, self._block_size, self._stores)
        self._engine = uuid.uuid4().hex
        self._counters: Counter[str] = Counter()
        self._block_pool: BlockPool | None = None
        self._order: PoolOrder | None = None
        if self._settings.retention != "lru":
            self._order = PoolOrder(RULES[self._settings.retention], self._block_size)
        self._worth: ChunkWorth | None = None
        if self._settings.retention == "foresight":  # other rules' scores are no rates of use
            self._worth = ChunkWorth(self._settings, self._open_stores())
        # Worker half
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._layout: KvLayout | None = None
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._failed_blocks: set[int] = set()
        self._failures: dict[str, tuple[str, int]] = {}
        self._not_saved: set[str] = set()
        self._worker_counters: Counter[str] = Counter()

    # Scheduler half

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool
        self._queue.max_blocks = int(HELD_SHARE * gpu_block_pool.num_gpu_blocks)
        if self._order is not None and gpu_block_pool.enable_caching:
            self._order.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """Follow a request that carries a plan, and give blocks that are not exact hashes of their own domain."""
        params = (request.kv_transfer_params or {}).get(PARAMS_KEY)
        if self._order is not None and not (params and params.get("is_stage")):
            turn = (params or {}).get("turn") or {}
            self._order.begin(request.request_id, turn)
            if self._worth is not None:
                self._worth.spared_s = turn.get("spared_s") or self._worth.spared_s
        if not params or "plan" not in params or self._refused:
            return
        plan = Plan.from_params(params["plan"])
        is_inexact = plan.first_inexact is not None and plan.first_inexact < request.num_prompt_tokens
        if is_inexact and not request.block_hashes:
            logger.error("Request %s is planned with reuse, but no full block can carry its domain", request.request_id)
            return
        place = (params["fingerprint"], params["tenant"])
        tracked = _Tracked(request, plan, place, bool(params["is_stage"]), bool(params.get("rotate", True)))
        tracked.keep = params.get("keep", True)
        self._tracked[request.request_id] = tracked
        if plan.batched and plan.stages:
            tracked.group, tracked.member = params["group"], params["member"]
            group = self._groups.setdefault(tracked.group, _Group(len(plan.stages) + 1, time.monotonic() + GATHER_S))
            group.members[tracked.member] = request.request_id
        if is_inexact:
            enter_domains(request, plan.marks, self._block_size)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how far the plan's chunks reach beyond the local hit, the last token left to compute.

        None: ask again in the next step, because what the request builds on is not scheduled yet.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:
            self._make_room(request, num_computed_tokens)
            return 0, False
        if self._must_wait(tracked, num_computed_tokens):
            return None, False
        self._make_room(request, num_computed_tokens)
        store = self._stores.get(tracked.place)
        # What a stage is there to compute is not missing.
        expected = request.num_prompt_tokens - 1
        if tracked.is_stage:
            expected = max(start for start, _ in tracked.plan.gaps() if start < request.num_prompt_tokens)
        end = num_computed_tokens
        for segment in tracked.plan.segments:
            if segment.end <= end or segment.start >= request.num_prompt_tokens - 1:
                continue
            if segment.start > end:  # what a stage was to compute is gone: this request computes it, and all behind it
                if "stage_lost" not in tracked.fallbacks:  # a request without room is asked for again
                    tracked.fallbacks.append("stage_lost")
                break
            if not store.contains(segment.chunk):
                if segment.start < expected and "chunk_missing" not in tracked.fallbacks:
                    tracked.fallbacks.append("chunk_missing")
                break
            end = segment.end
        end = min(end, request.num_prompt_tokens - 1)
        tracked.num_local = num_computed_tokens
        return max(end - num_computed_tokens, 0), False

    def _make_room(self, request: Request, num_computed_tokens: int) -> None:
        if self._order is not None:
            self._order.make_room(request, num_computed_tokens)

    def _must_wait(self, tracked: _Tracked, num_computed_tokens: int) -> bool:
        """Tell whether the other requests of a batched plan have to come first."""
        group = self._groups.get(tracked.group)
        if group is None:
            return False
        if len(group.members) < group.num_members and time.monotonic() < group.deadline:
            return True
        # Scheduled in this step or an earlier one, the stage before has its blocks in the prefix cache.
        before = tracked.member - 1
        return (
            before >= 0
            and num_computed_tokens < tracked.plan.stages[before]
            and (group.members.get(before) in self._tracked)
        )

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Turn the planned range into slots of the blocks that it got."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.block_ids = list(blocks.get_block_ids()[0])
        tracked.num_external = num_external_tokens
        tracked.num_failed = 0
        if num_external_tokens == 0:
            return
        start, stop = tracked.num_local, tracked.num_local + num_external_tokens
        tokens = as_tokens(request.prompt_token_ids)
        parts = []
        for segment in tracked.plan.segments:
            first, last = max(segment.start, start), min(segment.end, stop)
            if first < last:
                parts.append(
                    LoadPart(
                        segment.chunk,
                        segment.offset + first - segment.start,
                        segment.turn,
                        segment.start - segment.offset - segment.turn if tracked.rotate else None,
                        tokens[first:last],
                        slots_of(tracked.block_ids, first, last, self._block_size),
                    )
                )
        self._loads.append(Load(request.request_id, tracked.place, start, parts, tracked.block_ids))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> RopewalkMetadata:
        """Hand the worker this step's loads and saves."""
        # Without asynchronous scheduling, the results of all earlier steps have been seen by now.
        self._loads_unseen = bool(self._loads)
        self._step_blocks = {block for load in self._loads for block in load.block_ids}
        state = scheduler_output.kv_connector_block_state
        for request_id, block_ids in (state.block_ids if state is not None else {}).items():
            self._step_blocks.update(block_ids[0])
            if request_id in self._tracked:
                self._tracked[request_id].block_ids = list(block_ids[0])
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, num_computed in computed.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            self._step_blocks.update(tracked.block_ids)
            if not tracked.is_stage:
                continue
            if tracked.plan.batched and tracked.plan.stages:
                continue  # the request that follows stores what its stages computed
            # A stage's rows are saved in the step that completes it: its answer must not overtake them.
            num_prompt = tracked.request.num_prompt_tokens
            if num_computed < num_prompt <= num_computed + scheduler_output.num_scheduled_tokens[request_id]:
                self._save_stage(request_id, tracked, num_prompt)
        metadata = RopewalkMetadata(self._loads, self._stage_saves, self._saves)
        self._loads, self._stage_saves, self._saves = [], [], []
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Note which loads failed, and keep what was computed from their blocks from being used by anybody.

        vLLM put the hashes of all blocks of the step into its prefix cache when it scheduled them, and leaves them for
        the requests to recompute: one that ends or is preempted before that would leave garbage behind. And of several
        requests that share a failed block it lets the first alone recompute it, which may end before it does.
        """
        self._loads_unseen = False
        self._queue.release(connector_output.finished_sending or ())
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, RopewalkWorkerMetadata):
            self._counters.update(metadata.counters)
        invalid = connector_output.invalid_block_ids
        if not invalid:
            return
        if self._block_pool is not None:
            self._block_pool.evict_blocks(invalid | self._step_blocks)
        for tracked in self._tracked.values():
            first = next((index for index, block in enumerate(tracked.block_ids) if block in invalid), None)
            if first is None:
                continue
            valid = first * self._block_size
            tracked.request.num_computed_tokens = min(tracked.request.num_computed_tokens, valid)
            tracked.num_failed = max(tracked.num_local + tracked.num_external - valid, 0)
        if isinstance(metadata, RopewalkWorkerMetadata):
            for request_id, (reason, _) in metadata.failures.items():
                if request_id in self._tracked:
                    self._tracked[request_id].fallbacks.append(reason)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Queue what the request computed for saving; its blocks are held until its rows are out of the cache."""
        turn = None
        if self._order is not None:
            turn = self._order.end(request, min(request.num_computed_tokens, len(block_ids) * self._block_size))
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        group = self._groups.get(tracked.group)
        if group is not None and not any(member in self._tracked for member in group.members.values()):
            del self._groups[tracked.group]  # a member that comes later waits for nobody, after a moment
        # The last sampled token has not been fed back, so it has no KV yet.
        num_tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)
        num_tokens = min(num_tokens, len(block_ids) * self._block_size)
        if self._loads_unseen and request.status == RequestStatus.FINISHED_ABORTED:
            num_tokens = 0  # a load of this step, its own or one whose blocks it shares, may have failed
        save = saving = None
        cut: list[Piece] = []
        if self._settings.save and tracked.keep and not tracked.is_stage and num_tokens > 0:
            tokens = as_tokens(request.all_token_ids[:num_tokens])
            cut = self._queue.pieces(tracked.place, tokens, tracked.plan)
            save, saving = self._queue.add(request.request_id, tracked.place, tokens, tracked.plan, block_ids, cut)
            if save is not None:
                self._saves.append(save)
        if self._order is not None:
            self._counters["blocks_kept"] = self._order.num_kept
            if self._worth is not None and turn is not None and tracked.keep:
                self._worth.note(self._order.rule, request.request_id, turn, tracked.place, tracked.plan, cut)
                self._counters.update(self._worth.take_counters())
        self._counters.update(self._stores.take_counters())
        returned = {
            "fallbacks": tracked.fallbacks,
            "num_failed": tracked.num_failed,
            "num_loaded": max(tracked.num_external - tracked.num_failed, 0),
            "saving": saving,
            "engine": self._engine,
            "counters": dict(self._counters + self._queue.counters),
        }
        return save is not None, {PARAMS_KEY: returned}

    def _save_stage(self, request_id: str, tracked: _Tracked, num_tokens: int) -> None:
        if self._settings.save:
            tokens = as_tokens(tracked.request.all_token_ids[:num_tokens])
            save = self._queue.stage(request_id, tracked.place, tokens, tracked.plan, tracked.block_ids)
            if save is not None:
                self._stage_saves.append(save)

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find out the caches' layout. An unknown one switches storing and reusing off, with the reason in the log."""
        self._stores.rank = get_tensor_model_parallel_rank()
        self._kv_caches = kv_caches
        self._find_layout()

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers that keep KV."""
        return list(self._kv_caches)

    def turn_with(self, rotary: RotaryFacts) -> None:
        """Turn keys by `rotary`, confirmed by the loaded model, from now on."""
        self._facts = replace(self._facts, rotary=rotary)
        self._loader = None  # it turns keys by the layout that it was made for
        self._find_layout()

    def _find_layout(self) -> None:
        if self._refused:
            return
        layers = self._vllm_config.compilation_config.static_forward_context
        try:
            self._layout = find_layout(
                self._kv_caches, layers, self._block_size, self._facts.rotary, self._facts.is_mla
            )
        except UnsupportedLayout as error:
            logger.warning("Ropewalk stores and reuses no KV of this model: %s", error)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: what earlier ones have finished is saved while this one computes."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, RopewalkMetadata)
        for save in connector_metadata.saves:
            if self._layout is None:
                self._not_saved.add(save.request_id)
                continue
            if self._saver is None:
                self._saver = Saver(self._layout, self._open_stores(), self._settings.max_hold_s)
            self._saver.submit(save)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Take the planned chunks into the paged cache; what cannot be taken is reported and recomputed."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RopewalkMetadata)
        for load in metadata.loads:
            position, failure = self._load(load)
            if failure is not None:
                reason = reason_of(failure)
                self._failures[load.request_id] = (reason, position)
                # Blocks behind the failed ones are computed in this step, from garbage.
                self._failed_blocks.update(load.block_ids[position // self._block_size :])
                unforeseen = failure if reason == "load_failed" else None
                logger.warning("Recomputing KV of request %s: %s", load.request_id, failure, exc_info=unforeseen)

    def _load(self, load: Load) -> tuple[int, Exception | None]:
        if self._layout is None:
            return load.start, UnsupportedLayout("the KV cache layout is not known")
        if self._loader is None:
            self._loader = Loader(self._layout, self._open_stores())
        return self._loader.load(load)

    def _open_stores(self) -> OpenStores:
        return OpenStores(self._settings, self._budget, self._disk, self._stores.rank)

    def wait_for_save(self) -> None:
        """Save finished stages: their answers leave the engine after this step.

        Not if a load failed: the step computed on garbage. vLLM repeats it, and the saves come again.
        """
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RopewalkMetadata)
        if self._layout is None or self._failed_blocks:
            return
        for save in metadata.stage_saves:
            for part in save.parts:
                try:
                    self._worker_counters.update(save_part(self._stores.get(save.place), self._layout, part))
                except Exception:  # a miss later on; the engine goes on
                    logger.exception("Not saving a chunk of request %s", save.request_id)
                    self._worker_counters["save_failed"] += 1

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Tell which finished requests' blocks are no longer needed."""
        released, self._not_saved = self._not_saved, set()
        if self._saver is not None:
            released |= self._saver.take_finished()
        return released or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> RopewalkWorkerMetadata | None:
        failures, self._failures = self._failures, {}
        counters, self._worker_counters = self._worker_counters, Counter()
        counters.update(self._stores.take_counters())
        if self._loader is not None:
            counters.update(self._loader.take_counters())
        if self._saver is not None:
            counters.update(self._saver.take_counters())
        return RopewalkWorkerMetadata(failures, counters) if failures or counters else None

    def shutdown(self) -> None:
        """Save what waits and say what chunks are worth, if that takes no longer than a moment."""
        if self._worth is not None:
            self._worth.close()
        if self._saver is not None:
            self._saver.close()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are done before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: rows of all layers are saved together, after the forward pass."""

    # Both

    def reset_cache(self) -> bool:
        """Forget who uses which block; say that the store was not emptied, which outlives an engine."""
        if self._order is not None:
            self._order.forget()
        if self._worth is not None:
            self._worth.forget()
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is a cache miss later on, no more: a preempted request may finish."""
        return False


def enter_domains(request: Request, marks: Sequence[Mark], block_size: int) -> None:
    """Rewrite a request's block hashes, for each mark inside the prompt from the block that holds it on.

    Blocks before the first mark stay shared with exact requests. A salted hash becomes the parent of all later ones,
    those of generated tokens included, so only a request that is in the same domains can find them. A prompt whose full
    blocks all end before a mark gives up its last one: a hash added later would otherwise chain from an exact parent.
    """
    hashes = request.block_hashes
    assert hashes, "a prompt without a full block has no hash to salt"
    for mark in marks:
        if mark.start >= request.num_prompt_tokens:
            continue
        index = min(mark.start // block_size, len(hashes) - 1)
        salted = hashlib.sha256(DOMAIN_SALT + mark.label.encode() + hashes[index]).digest()
        del hashes[index:]
        hashes.append(BlockHash(salted))
        request.update_block_hashes()
