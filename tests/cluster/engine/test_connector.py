"""The connector's two halves, driven step by step as vLLM's scheduler and worker drive them. Imports vLLM."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ropewalk.cluster.engine.settings import EngineSettings, kv_transfer_config
from ropewalk.cluster.store.chunk import ChunkHeader
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.kernels.keys import Domain, as_tokens, content_key
from ropewalk.scheduler.plan import Plan, pieces
from ropewalk.scheduler.planner import make_plan

from .test_facts import vllm_config

pytestmark = pytest.mark.engine

BLOCK_SIZE, GOOD, GARBAGE = 32, 1.0, 666.0


class Layout:
    """A paged cache that holds garbage until something is written to it."""

    def __init__(self) -> None:
        self.numbers = torch.full((1, 200 * BLOCK_SIZE, 1, 4), GARBAGE)

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        return self.numbers[:, slots]

    is_on_cpu = True

    def scatter(self, parts: Any, max_threads: int | None = None) -> None:
        for part in parts:
            self.numbers[:, part.slots] = part.rows

    def fence(self) -> Any:
        return nullcontext()


class Harness:
    """A connector with a store, and the calls of one scheduler step."""

    def __init__(self, folder: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from ropewalk.cluster.engine.connector import RopewalkConnector

        self.settings = EngineSettings(store_root=folder / "store", store_budget_bytes=1 << 26)
        config = vllm_config(folder)
        config.cache_config.block_size = BLOCK_SIZE
        transfer = kv_transfer_config(self.settings)
        config.kv_transfer_config = SimpleNamespace(
            kv_connector_extra_config=transfer["kv_connector_extra_config"], is_kv_producer=True
        )
        groups = SimpleNamespace(kv_cache_groups=[object()])
        self.connector = RopewalkConnector(config, KVConnectorRole.WORKER, groups)
        self.layout = self.connector._layout = Layout()
        self.store = NodeStore(self.settings.store_root, "model-r0", "t", 1 << 26)
        self.evicted: set[int] = set()
        pool = SimpleNamespace(evict_blocks=self.evicted.update, num_gpu_blocks=200, enable_caching=False)
        self.connector.bind_gpu_block_pool(pool)

    def fill(self, tokens: np.ndarray) -> None:
        """Store a prompt's chunks as an exact prefill would have left them."""
        for piece in pieces(tokens, "t", self.settings.planner().chunks, [], []):
            part = tokens[piece.start : piece.end]
            content = content_key("t", part)
            header = ChunkHeader(piece.chain, piece.parent, content, "t", piece.domain, piece.start, part)
            self.store.put(header, torch.full((1, len(part), 1, 4), GOOD))

    def plan(self, tokens: np.ndarray, *, reuse: bool, batched: bool = False) -> Plan:
        settings = replace(self.settings.planner(), block_size=BLOCK_SIZE if batched else None)
        return make_plan(tokens, "t", self.store, settings, reuse=reuse)

    def request(self, tokens: np.ndarray, plan: Plan, *, is_stage: bool, member: int = 0) -> Any:
        from vllm.v1.request import RequestStatus

        ids = tokens.tolist()
        params = {"plan": plan.to_params(), "fingerprint": "model", "tenant": "t", "is_stage": is_stage}
        params |= {"group": "g", "member": member}
        request = SimpleNamespace(
            request_id=f"r{member}" if member else "r",
            num_prompt_tokens=len(ids),
            num_tokens=len(ids) + 1,
            prompt_token_ids=ids,
            all_token_ids=[*ids, 7],
            block_hashes=[bytes([n % 256]) * 32 for n in range(len(ids) // BLOCK_SIZE)],
            update_block_hashes=lambda: None,
            skip_reading_prefix_cache=False,
            num_computed_tokens=len(ids),
            num_in_flight_tokens=0,
            status=RequestStatus.FINISHED_STOPPED,
            kv_transfer_params={"ropewalk": params},
        )
        self.connector.on_new_request(request)
        return request

    def schedule(self, request: Any) -> int:
        """Admit a request and schedule all of its prompt; return how many tokens are to be loaded."""
        external, _ = self.connector.get_num_new_matched_tokens(request, 0)
        num_blocks = len(request.prompt_token_ids) // BLOCK_SIZE + 1
        blocks = SimpleNamespace(get_block_ids=lambda: (list(range(1, num_blocks + 1)),))
        self.connector.update_state_after_alloc(request, blocks, external)
        output = SimpleNamespace(
            kv_connector_block_state=None,
            scheduled_new_reqs=[SimpleNamespace(req_id="r", num_computed_tokens=external)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={"r": request.num_prompt_tokens - external},
        )
        self.connector.bind_connector_metadata(self.connector.build_connector_meta(output))
        return external

    def forward(self) -> Any:
        """Run the worker's part of a step; return what vLLM hands back to the scheduler's half."""
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        finished, _ = self.connector.get_finished(set())
        return SimpleNamespace(
            finished_sending=finished,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )

    def save_finished(self) -> Any:
        """Run empty steps, as vLLM does while it holds blocks, until nothing is held and all is stored; return the last
        one's output.
        """
        deadline = time.monotonic() + 30
        while True:
            output = self._empty_step()
            self.connector.update_connector_output(output)
            if not self.connector._queue._held:
                if self.connector._saver is not None:
                    self.connector._saver.close()  # blocks go once they are read; the next save starts another thread
                return output
            assert time.monotonic() < deadline, "blocks are held for ever"

    def _empty_step(self) -> Any:
        output = SimpleNamespace(
            kv_connector_block_state=None,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={},
        )
        self.connector.bind_connector_metadata(self.connector.build_connector_meta(output))
        return self.forward()

    def lose(self, plan: Plan) -> None:
        for segment in plan.segments:
            for path in self.store.base.glob(f"objects/*/{segment.chunk}"):
                path.unlink()

    def stored_numbers(self) -> set[float]:
        names = [path.name for path in self.store.base.glob("objects/*/*")]
        return {number for name in names for number in self.store.read(name)[1].unique().tolist()}


@pytest.fixture
def harness(tmp_path):
    harness = Harness(tmp_path)
    yield harness
    harness.connector.shutdown()


def words(seed: int, count: int) -> np.ndarray:
    return as_tokens(np.random.default_rng(seed).integers(0, 30_000, count))


def staged_prompt(harness: Harness, *, batched: bool = False) -> tuple[np.ndarray, Plan]:
    """A prompt with an exact prefix, a gap that a stage computes, and a reused body."""
    exact, body = words(1, 300), words(2, 600)
    harness.fill(exact)
    harness.fill(as_tokens(np.concatenate([words(3, 57), body])))
    tokens = as_tokens(np.concatenate([exact, words(4, 100), body, [1, 2, 3]]))
    plan = harness.plan(tokens, reuse=True, batched=batched)
    gap_end = 416 if batched else 400  # where the header ends, or the block that it ends in
    assert (plan.exact_end, plan.stages, plan.num_reused) == (300, (gap_end,), 1000 - gap_end)
    return tokens, plan


def test_a_stage_is_stored_in_the_step_that_computes_it(harness):
    tokens, plan = staged_prompt(harness)
    stage = harness.request(tokens[: plan.stages[0]], plan, is_stage=True)
    assert harness.schedule(stage) == 300
    harness.layout.numbers[:] = GOOD  # the forward pass
    harness.forward()
    assert harness.connector.request_finished(stage, [])[1]["ropewalk"]["fallbacks"] == []
    assert all(harness.store.contains(segment.chunk) for segment in plan.segments)


def test_a_stage_shorter_than_a_block_is_stored_too(harness):
    body = words(2, 600)
    harness.fill(as_tokens(np.concatenate([words(3, 57), body])))
    tokens = as_tokens(np.concatenate([words(4, 20), words(5, 16), body, [1, 2, 3]]))
    plan = harness.plan(tokens, reuse=True)
    harness.connector._block_size = 128
    stage = harness.request(tokens[: plan.stages[0]], plan, is_stage=True)
    stage.block_hashes = []
    harness.schedule(stage)
    harness.layout.numbers[:] = GOOD
    harness.forward()
    assert plan.stages[0] < 128
    assert all(harness.store.contains(segment.chunk) for segment in plan.segments)


def test_a_step_whose_load_failed_stores_nothing_that_it_computed(harness):
    tokens, plan = staged_prompt(harness)
    stage = harness.request(tokens[: plan.stages[0]], plan, is_stage=True)
    harness.schedule(stage)
    harness.lose(plan)
    output = harness.forward()
    assert output.invalid_block_ids >= set(range(1, 11)), "every block from the first failed one on is invalid"
    assert GARBAGE not in harness.stored_numbers()


def test_blocks_whose_load_failed_leave_the_prefix_cache(harness):
    tokens, plan = staged_prompt(harness)
    harness.schedule(harness.request(tokens[: plan.stages[0]], plan, is_stage=True))
    harness.lose(plan)
    output = harness.forward()
    harness.connector.update_connector_output(output)
    assert harness.evicted >= output.invalid_block_ids != set()


def test_who_shares_a_block_whose_load_failed_does_not_count_on_another_to_recompute_it(harness):
    from vllm.v1.request import RequestStatus

    tokens, plan = staged_prompt(harness, batched=True)
    stage = harness.request(tokens[: plan.stages[0]], plan, is_stage=True)
    request = harness.request(tokens, plan, is_stage=False, member=1)
    harness.schedule(stage)
    # The request of the same step has the stage's blocks as its local hit.
    blocks = list(range(1, len(tokens) // BLOCK_SIZE + 2))
    harness.connector._tracked["r1"].block_ids = blocks
    harness.connector._tracked["r1"].num_local = plan.stages[0]
    harness.lose(plan)
    output = harness.forward()
    harness.connector.update_connector_output(output)
    assert request.num_computed_tokens == 0
    request.status = RequestStatus.FINISHED_ABORTED  # before anybody has recomputed anything
    assert harness.connector.request_finished(request, blocks)[0] is False
    harness.save_finished()
    assert GARBAGE not in harness.stored_numbers()
    harness.connector.request_finished(stage, blocks)
    assert harness.connector._groups == {}


def test_a_request_aborted_while_its_load_fails_leaves_nothing(harness):
    from vllm.v1.request import RequestStatus

    tokens = words(1, 300)
    harness.fill(tokens)
    plan = harness.plan(tokens, reuse=False)
    request = harness.request(tokens, plan, is_stage=False)
    harness.schedule(request)
    harness.lose(plan)
    output = harness.forward()
    request.status = RequestStatus.FINISHED_ABORTED  # before the scheduler's half hears of the failure
    assert harness.connector.request_finished(request, list(range(1, 11)))[0] is False
    harness.connector.update_connector_output(output)
    harness.save_finished()
    assert GARBAGE not in harness.stored_numbers()


def test_a_failed_load_is_reported_with_its_reason_and_size(harness):
    tokens = words(1, 300)
    harness.fill(tokens)
    plan = harness.plan(tokens, reuse=False)
    request = harness.request(tokens, plan, is_stage=False)
    assert harness.schedule(request) == 299
    harness.lose(plan)
    harness.connector.update_connector_output(harness.forward())
    _, returned = harness.connector.request_finished(request, list(range(1, 11)))
    assert returned["ropewalk"]["fallbacks"] == ["chunk_missing"]
    assert returned["ropewalk"]["num_failed"] == 299


def test_a_chunk_that_was_computed_elsewhere_than_planned_is_not_turned(harness):
    """The planner turns by what it read of a chunk; here it read another position than the file holds now."""
    body = words(2, 600)
    harness.fill(as_tokens(np.concatenate([words(3, 57), body])))
    tokens = as_tokens(np.concatenate([words(4, 128), body, [1, 2, 3]]))
    plan = harness.plan(tokens, reuse=True)
    assert {segment.turn for segment in plan.segments if segment.reused} == {128 - 57}
    wrong = replace(plan, segments=tuple(replace(s, turn=s.turn + s.reused) for s in plan.segments))
    stage = harness.request(tokens[: plan.stages[0]], wrong, is_stage=True)
    harness.schedule(stage)
    harness.layout.numbers[:] = GOOD
    harness.forward()
    request = harness.request(tokens, wrong, is_stage=False, member=1)
    request.request_id = "r"
    harness.connector._tracked["r"] = harness.connector._tracked.pop("r1")
    harness.layout.numbers[:] = GARBAGE
    assert harness.schedule(request) > 0
    output = harness.forward()
    assert output.kv_connector_worker_meta.failures == {"r": ("start_differs", 128)}
    assert output.invalid_block_ids >= set(range(1 + 128 // BLOCK_SIZE, len(tokens) // BLOCK_SIZE + 1))
    assert (harness.layout.numbers[:, (1 + 128 // BLOCK_SIZE) * BLOCK_SIZE :] == GARBAGE).all()


def test_a_batched_request_waits_for_its_stage_and_takes_over_its_blocks(harness):
    tokens, plan = staged_prompt(harness, batched=True)
    gap_end = plan.stages[0]
    assert gap_end % BLOCK_SIZE == 0
    stage = harness.request(tokens[:gap_end], plan, is_stage=True)
    matched = harness.connector.get_num_new_matched_tokens
    assert matched(stage, 0) == (None, False), "the stage waits for the request, to share its step"
    request = harness.request(tokens, plan, is_stage=False, member=1)
    assert matched(request, 0) == (None, False), "the stage is not scheduled yet"
    assert matched(stage, 0) == (plan.exact_end, False)
    assert matched(request, gap_end) == (len(tokens) - 1 - gap_end - 2, False)  # but for the question's last two


def test_a_batched_request_whose_stage_is_gone_computes_what_it_would_have_brought(harness):
    tokens, plan = staged_prompt(harness, batched=True)
    stage = harness.request(tokens[: plan.stages[0]], plan, is_stage=True)
    request = harness.request(tokens, plan, is_stage=False, member=1)
    harness.connector.request_finished(stage, [])
    for _ in range(2):  # without room for its blocks it is asked for again
        assert harness.connector.get_num_new_matched_tokens(request, 0) == (plan.exact_end, False)
    _, returned = harness.connector.request_finished(request, [])
    assert returned["ropewalk"]["fallbacks"] == ["stage_lost"]


def test_a_stage_does_not_wait_for_ever_for_a_request_that_never_comes(harness, monkeypatch):
    tokens, plan = staged_prompt(harness, batched=True)
    stage = harness.request(tokens[: plan.stages[0]], plan, is_stage=True)
    assert harness.connector.get_num_new_matched_tokens(stage, 0) == (None, False)
    monkeypatch.setattr("time.monotonic", lambda: float("inf"))
    assert harness.connector.get_num_new_matched_tokens(stage, 0) == (plan.exact_end, False)


def test_blocks_are_held_until_a_finished_request_is_stored(harness):
    tokens = words(1, 300)
    request = harness.request(tokens, Plan(300, 0, (), (), ()), is_stage=False)
    harness.schedule(request)
    harness.layout.numbers[:] = GOOD
    harness.forward()
    held, _ = harness.connector.request_finished(request, list(range(1, 11)))
    assert held
    assert harness.save_finished().finished_sending == {"r"}
    assert harness.plan(tokens, reuse=False).exact_end == 299
    assert harness.stored_numbers() == {GOOD}


def test_a_request_that_ends_before_it_is_scheduled_is_let_go(harness):
    tokens = words(1, 300)
    request = harness.request(tokens, Plan(300, 0, (), (), ()), is_stage=False)
    request.num_computed_tokens = 0
    assert harness.connector.request_finished(request, [])[0] is False


def test_a_request_without_our_parameters_is_not_touched(harness):
    tokens = words(1, 300)
    request = harness.request(tokens, Plan(300, 0, (), (), ()), is_stage=False)
    request.request_id, request.kv_transfer_params = "other", None
    harness.connector.on_new_request(request)
    assert harness.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert harness.connector.request_finished(request, [1, 2]) == (False, None)


@pytest.mark.parametrize("first_inexact", [40, 95, 96, 300])
def test_hashes_of_the_reuse_domain_are_nobody_elses_and_later_ones_inherit_it(first_inexact):
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from ropewalk.agents.lineage import REUSE, Mark
    from ropewalk.cluster.engine.connector import enter_domains

    init_none_hash(sha256)

    def request() -> Request:
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        return Request("r", list(range(310)), SamplingParams(max_tokens=50), None, block_hasher=hasher)

    exact, reused, again = request(), request(), request()
    for one in (reused, again):
        enter_domains(one, [Mark(first_inexact, REUSE)], BLOCK_SIZE)
    shared = min(first_inexact // BLOCK_SIZE, 310 // BLOCK_SIZE - 1)
    for one in (exact, reused, again):
        one.append_output_token_ids(list(range(40)))
    assert reused.block_hashes == again.block_hashes
    assert len(reused.block_hashes) == len(exact.block_hashes) == 350 // BLOCK_SIZE
    assert reused.block_hashes[:shared] == exact.block_hashes[:shared]
    assert not set(reused.block_hashes[shared:]) & set(exact.block_hashes)


def test_domains_name_their_chunks_apart(harness):
    """The same tokens, computed behind reused KV, are no exact chunk."""
    tokens, plan = staged_prompt(harness)
    domains = {p.start: p.domain for p in pieces(tokens, "t", harness.settings.planner().chunks, plan.runs, plan.marks)}
    assert {domain for start, domain in domains.items() if start < 400} == {Domain.EXACT}
    assert {domain for start, domain in domains.items() if start >= 1000} == {Domain.REUSE}


def test_what_was_saved_is_told_with_a_later_answer(harness):
    def finish(seed: int) -> dict[str, Any]:
        request = harness.request(words(seed, 300), Plan(300, 0, (), (), ()), is_stage=False)
        harness.schedule(request)
        harness.connector.update_connector_output(harness.forward())
        _, returned = harness.connector.request_finished(request, list(range(1, 11)))
        harness.save_finished()
        return returned["ropewalk"]

    first = finish(1)
    assert "saved_chunks" not in first["counters"]
    harness.connector._saver.close()  # the last chunk is stored behind the release of its blocks
    later = finish(2)
    assert later["engine"] == first["engine"]
    assert later["counters"]["saved_chunks"] == later["counters"]["store_puts"] > 0


def test_what_ranks_count_adds_up_and_the_earliest_failure_counts():
    from ropewalk.cluster.engine.connector import RopewalkWorkerMetadata

    one = RopewalkWorkerMetadata({"a": ("chunk_missing", 64)}, Counter(saved_chunks=2))
    other = RopewalkWorkerMetadata({"a": ("chunk_corrupt", 32), "b": ("load_failed", 0)}, Counter(saved_chunks=3))
    both = one.aggregate(other)
    assert both.counters == Counter(saved_chunks=5)
    assert both.failures == {"a": ("chunk_corrupt", 32), "b": ("load_failed", 0)}
    assert both.aggregate(RopewalkWorkerMetadata()).counters == both.counters


def test_a_turns_chunks_are_weighed_and_what_was_done_for_it_is_counted(harness):
    """Those that the plan takes and those that are saved; what a token spares comes with the turn."""
    tokens = words(1, 600)
    harness.fill(tokens[:300])
    plan = harness.plan(tokens, reuse=False)
    assert plan.segments
    request = harness.request(tokens, plan, is_stage=False)
    turn = {"session": "t/s", "agent": "coder", "spared_s": 0.002}
    request.kv_transfer_params["ropewalk"]["turn"] = turn
    harness.connector.on_new_request(request)
    harness.connector._order.num_kept = 3
    harness.schedule(request)
    harness.forward()
    _, returned = harness.connector.request_finished(request, list(range(1, 40)))
    assert returned["ropewalk"]["counters"]["blocks_kept"] == 3
    harness.save_finished()
    worth = harness.connector._worth
    assert worth.spared_s == 0.002
    noted = {chain: use for (_, chain), use in worth._uses.items()}
    assert {segment.chunk for segment in plan.segments} <= noted.keys()
    assert {path.name for path in harness.store.base.glob("objects/*/*")} & noted.keys() > {
        segment.chunk for segment in plan.segments
    }
    assert {(use.session, *use.agents) for use in noted.values()} == {("t/s", "coder")}


def test_turns_reach_the_order_of_eviction_and_stages_do_not(harness):
    said = []
    harness.connector._order = SimpleNamespace(
        begin=lambda name, turn: said.append((name, turn)), end=lambda request, n: said.append((request.request_id, n))
    )
    turn = {"session": "t/s", "agent": "coder"}
    for name, params in (("r", {"turn": turn}), ("stage", {"turn": None, "is_stage": True}), ("plain", None)):
        request = SimpleNamespace(request_id=name, kv_transfer_params=params and {"ropewalk": params})
        harness.connector.on_new_request(request)
    assert said == [("r", turn), ("plain", {})]
    said.clear()
    harness.connector.request_finished(SimpleNamespace(request_id="plain", num_computed_tokens=40), [1, 2])
    assert said == [("plain", 40)]
