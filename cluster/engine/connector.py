"""vLLM's KV connector for Ropewalk: takes planned chunks into the paged cache, saves what was computed.

The scheduler half follows each request's plan; the worker half moves rows. A request without our parameters is not
touched. Nothing here decides what to reuse: the plan does (`ropewalk.scheduler.planner`).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
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

from ropewalk.cluster.engine.facts import engine_facts
from ropewalk.cluster.engine.layouts import KvLayout, StoredRows, UnsupportedLayout, find_layout
from ropewalk.cluster.engine.request import PARAMS_KEY
from ropewalk.cluster.engine.settings import settings_of
from ropewalk.cluster.store.chunk import ChunkCorrupt, ChunkHeader
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.kernels.keys import HEAD_LENGTH, Domain, Tokens, as_tokens, content_key
from ropewalk.kernels.rope import RotaryFacts
from ropewalk.scheduler.planner import Piece, Plan, pieces

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

DOMAIN_SALT = b"ropewalk/reuse"

MAX_TENANTS = 256
"""Models and tenants whose stores a process keeps open."""

GATHER_S = 0.1
"""Seconds that the first requests of a batched plan wait for the others, which were sent in the same moment."""

Slots = npt.NDArray[np.int64]

Place = tuple[str, str]
"""Model fingerprint and tenant: where chunks lie. The planning process names both, since vLLM's model classes change
their configuration while they load, so that an engine process would compute another fingerprint."""


@dataclass(slots=True)
class LoadPart:
    """Rows `[offset, offset + n)` of a chunk, `n = len(slots)`, turned by `turn`, go to `slots`."""

    chunk: str
    offset: int
    turn: int
    tokens: Tokens
    slots: Slots


@dataclass(slots=True)
class Load:
    """Parts of one request, ascending from position `start`. `block_ids` are all of its blocks."""

    request_id: str
    place: Place
    start: int
    parts: list[LoadPart]
    block_ids: list[int]


@dataclass(slots=True)
class SavePart:
    header: ChunkHeader
    slots: Slots


@dataclass(slots=True)
class Save:
    """Chunks of one request. `finished`: its blocks are held until the worker reports that they are saved."""

    request_id: str
    place: Place
    parts: list[SavePart]
    finished: bool


@dataclass
class RopewalkMetadata(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass
class RopewalkWorkerMetadata(KVConnectorWorkerMetadata):
    """Failed loads by request: the reason, and the first position that has no KV."""

    failures: dict[str, tuple[str, int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RopewalkWorkerMetadata:
        assert isinstance(other, RopewalkWorkerMetadata)
        both = self.failures.keys() & other.failures.keys()
        first = {key: min(self.failures[key], other.failures[key], key=lambda failure: failure[1]) for key in both}
        return RopewalkWorkerMetadata({**self.failures, **other.failures, **first})


@dataclass(slots=True)
class _Tracked:
    """What the scheduler half knows of a live request."""

    request: Request
    plan: Plan
    place: Place
    is_stage: bool
    num_local: int = 0
    num_external: int = 0
    num_failed: int = 0
    """Planned tokens whose load failed: vLLM computes them, but goes on counting them as cached."""
    block_ids: list[int] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    group: str = ""
    member: int = 0


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
        self._budget = self._settings.budget()
        self._block_size: int = vllm_config.cache_config.block_size
        self._stores: OrderedDict[Place, NodeStore] = OrderedDict()
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
        self._saves: list[Save] = []
        self._block_pool: BlockPool | None = None
        # Worker half
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._layout: KvLayout | None = None
        self._rank = 0
        self._failed_blocks: set[int] = set()
        self._failures: dict[str, tuple[str, int]] = {}
        self._saved: set[str] = set()

    # Scheduler half

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        """Follow a request that carries a plan, and give reuse-domain blocks hashes of their own."""
        params = (request.kv_transfer_params or {}).get(PARAMS_KEY)
        if not params or "plan" not in params or self._refused:
            return
        plan = Plan.from_params(params["plan"])
        is_inexact = plan.first_inexact is not None and plan.first_inexact < request.num_prompt_tokens
        if is_inexact and not request.block_hashes:
            logger.error("Request %s is planned with reuse, but no full block can carry its domain", request.request_id)
            return
        tracked = _Tracked(request, plan, (params["fingerprint"], params["tenant"]), bool(params["is_stage"]))
        self._tracked[request.request_id] = tracked
        if plan.batched and plan.stages:
            tracked.group, tracked.member = params["group"], params["member"]
            group = self._groups.setdefault(tracked.group, _Group(len(plan.stages) + 1, time.monotonic() + GATHER_S))
            group.members[tracked.member] = request.request_id
        if is_inexact and plan.first_inexact is not None:
            enter_reuse_domain(request, plan.first_inexact, self._block_size)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how far the plan's chunks reach beyond the local hit, the last token left to compute.

        None: ask again in the next step, because what the request builds on is not scheduled yet.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:
            return 0, False
        if self._must_wait(tracked, num_computed_tokens):
            return None, False
        store = self._store(tracked.place)
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
                        tokens[first:last],
                        self._slots(tracked.block_ids, first, last),
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
                self._queue_save(tracked, num_prompt, tracked.block_ids, finished=False)
        metadata = RopewalkMetadata(self._loads, self._saves)
        self._loads, self._saves = [], []
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Note which loads failed, and keep what was computed from their blocks from being used by anybody.

        vLLM put the hashes of all blocks of the step into its prefix cache when it scheduled them, and leaves them for
        the requests to recompute: one that ends or is preempted before that would leave garbage behind. And of several
        requests that share a failed block it lets the first alone recompute it, which may end before it does.
        """
        self._loads_unseen = False
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
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, RopewalkWorkerMetadata):
            for request_id, (reason, _) in metadata.failures.items():
                if request_id in self._tracked:
                    self._tracked[request_id].fallbacks.append(reason)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Queue what the request computed for saving; its blocks are held until that is done."""
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
        saving = None
        if not tracked.is_stage:
            saving = self._queue_save(tracked, num_tokens, block_ids, finished=True)
        returned = {"fallbacks": tracked.fallbacks, "num_failed": tracked.num_failed, "saving": saving}
        return saving is not None, {PARAMS_KEY: returned}

    def _queue_save(self, tracked: _Tracked, num_tokens: int, block_ids: list[int], *, finished: bool) -> str | None:
        """Queue what is not stored yet; return the name of the chunk that will be stored last, or None."""
        if not self._settings.save or num_tokens <= 0:
            return None
        tokens = as_tokens(tracked.request.all_token_ids[:num_tokens])
        tenant = tracked.place[1]
        # A run that was not reached (the request was aborted, a chunk was missing) would leave false edges: only what
        # lies inside the computed range counts.
        runs = [(start, min(end, num_tokens)) for start, end in tracked.plan.runs if start < num_tokens]
        parts = [
            SavePart(_header(tenant, piece, tokens), self._slots(block_ids, piece.start, piece.end))
            for piece in pieces(tokens, tenant, self._settings.planner().chunks, runs)
            if not self._is_stored(tracked.place, piece, tokens, must=tracked.is_stage)
        ]
        if not parts:
            return None
        self._saves.append(Save(tracked.request.request_id, tracked.place, parts, finished))
        return parts[-1].header.chain

    def _is_stored(self, place: Place, piece: Piece, tokens: Tokens, *, must: bool) -> bool:
        """Tell whether saving a piece adds nothing. A stage's piece `must` be there under its own name."""
        store = self._store(place)
        if store.contains(piece.chain):
            return True
        if must:
            return False
        if piece.end - piece.start < HEAD_LENGTH:
            return True  # no look-up would ever find it
        if piece.domain == Domain.EXACT:
            return False
        return bool(store.by_content(content_key(place[1], tokens[piece.start : piece.end])))

    def _slots(self, block_ids: list[int], start: int, end: int) -> Slots:
        """Return the slots of positions `[start, end)`: `block * B + offset`, int64."""
        positions = np.arange(start, end)
        blocks = np.asarray(block_ids, dtype=np.int64)[positions // self._block_size]
        slots: Slots = blocks * self._block_size + positions % self._block_size
        return slots

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find out the caches' layout. An unknown one switches storing and reusing off, with the reason in the log."""
        self._rank = get_tensor_model_parallel_rank()
        self._kv_caches = kv_caches
        self._find_layout()

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers that keep KV."""
        return list(self._kv_caches)

    def turn_with(self, rotary: RotaryFacts) -> None:
        """Turn keys by `rotary`, confirmed by the loaded model, from now on."""
        self._facts = replace(self._facts, rotary=rotary)
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

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Take the planned chunks into the paged cache; what cannot be taken is reported and recomputed."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RopewalkMetadata)
        for load in metadata.loads:
            position, failure = load.start, None
            found: list[StoredRows] = []
            for part in load.parts:
                try:
                    found.append(self._read(load.place, part))
                except Exception as error:  # an engine that dies of one chunk loses everybody's requests
                    failure = error
                    break
                position += len(part.tokens)
            try:
                if found:
                    assert self._layout is not None
                    self._layout.scatter(found)
            except Exception as error:
                position, failure = load.start, error
            if failure is not None:
                self._failures[load.request_id] = (_reason(failure), position)
                # Blocks behind the failed ones are computed in this step, from garbage.
                self._failed_blocks.update(load.block_ids[position // self._block_size :])
                unforeseen = failure if _reason(failure) == "load_failed" else None
                logger.warning("Recomputing KV of request %s: %s", load.request_id, failure, exc_info=unforeseen)

    def _read(self, place: Place, part: LoadPart) -> StoredRows:
        if self._layout is None:
            raise UnsupportedLayout("the KV cache layout is not known")
        header, rows = self._store(place).read(part.chunk)
        end = part.offset + len(part.tokens)
        # A key is only a candidate: the token ids decide.
        if not np.array_equal(header.tokens[part.offset : end], part.tokens):
            raise _TokensDiffer(f"chunk {part.chunk} holds other tokens")
        return StoredRows(torch.from_numpy(part.slots), rows[:, part.offset : end], part.turn)

    def wait_for_save(self) -> None:
        """Save finished stages: their answers leave the engine after this step.

        Not if a load failed: the step computed on garbage. vLLM repeats it, and the saves come again.
        """
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RopewalkMetadata)
        if self._failed_blocks:
            metadata.saves = [save for save in metadata.saves if save.finished]
        self._run_saves(finished=False)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Save finished requests, and tell which blocks are no longer needed."""
        self._run_saves(finished=True)
        saved, self._saved = self._saved, set()
        return saved or None, None

    def _run_saves(self, *, finished: bool) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RopewalkMetadata)
        for save in metadata.saves:
            if save.finished != finished:
                continue
            store = self._store(save.place)
            missing = [part for part in save.parts if not store.contains(part.header.chain)]
            if self._layout is not None and missing:
                rows = self._layout.gather(torch.from_numpy(np.concatenate([part.slots for part in missing])))
                start = 0
                for part in missing:
                    end = start + len(part.slots)
                    store.put(part.header, rows[:, start:end])
                    start = end
            if finished:
                self._saved.add(save.request_id)
        metadata.saves = [save for save in metadata.saves if save.finished != finished]

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> RopewalkWorkerMetadata | None:
        failures, self._failures = self._failures, {}
        return RopewalkWorkerMetadata(failures) if failures else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are done before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: rows of all layers are saved together, after the forward pass."""

    # Both

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is a cache miss later on, no more: a preempted request may finish."""
        return False

    def _store(self, place: Place) -> NodeStore:
        if place in self._stores:
            self._stores.move_to_end(place)
        else:
            fingerprint, tenant = place
            self._stores[place] = NodeStore(
                self._settings.store_root, f"{fingerprint}-r{self._rank}", tenant, self._budget
            )
            if len(self._stores) > MAX_TENANTS:
                self._stores.popitem(last=False)
        return self._stores[place]


class _TokensDiffer(Exception):
    """A chunk's token ids are not those of the prompt: a key collided, or a file lies under a wrong name."""


def _header(tenant: str, piece: Piece, tokens: Tokens) -> ChunkHeader:
    part = tokens[piece.start : piece.end]
    content = content_key(tenant, part)
    return ChunkHeader(piece.chain, piece.parent, content, tenant, piece.domain, piece.start, part)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return "chunk_missing"
    if isinstance(error, ChunkCorrupt):
        return "chunk_corrupt"
    if isinstance(error, _TokensDiffer):
        return "tokens_differ"
    if isinstance(error, UnsupportedLayout):
        return "layout_unknown"
    return "load_failed"


def enter_reuse_domain(request: Request, first_inexact: int, block_size: int) -> None:
    """Rewrite a request's block hashes from the block that holds `first_inexact` on.

    Blocks before it stay shared with exact requests. The salted hash becomes the parent of all later ones, those of
    generated tokens included, so no exact request can find them. A prompt whose full blocks all end before
    `first_inexact` gives up its last one: a hash added later would otherwise chain from an exact parent.
    """
    hashes = request.block_hashes
    assert hashes, "a prompt without a full block has no hash to salt"
    index = min(first_inexact // block_size, len(hashes) - 1)
    salted = hashlib.sha256(DOMAIN_SALT + hashes[index]).digest()
    del hashes[index:]
    hashes.append(BlockHash(salted))
    request.update_block_hashes()
