"""Whole runs: every request is answered once, sessions have one turn at a time, and a seed gives one result."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from ropewalk.scheduler.rules import RULES
from ropewalk.workloads.simulate.cluster import Cluster, ClusterSettings
from ropewalk.workloads.simulate.replica import Service
from ropewalk.workloads.simulate.request import Request
from ropewalk.workloads.simulate.routers import ROUTERS, RoundRobin, RouterSettings
from ropewalk.workloads.simulate.sessions import session_requests
from ropewalk.workloads.traces import Sizes

BLOCK = 32
SIZES = Sizes(concurrency=24)


class Recording:
    """A router that notes what it is asked and told."""

    def __init__(self, inner):
        self.inner = inner
        self.chosen: Counter[Request] = Counter()
        self.done: Counter[Request] = Counter()
        self.live: Counter[str] = Counter()

    def choose(self, request, queues, now_s):
        self.chosen[request] += 1
        if request.session is not None:
            self.live[request.session] += 1
            assert self.live[request.session] == 1
        return self.inner.choose(request, queues, now_s)

    def answered(self, request, replica, now_s, num_cached):
        assert 0 <= num_cached < request.num_prompt
        self.done[request] += 1
        self.live[request.session] -= 1
        self.inner.answered(request, replica, now_s, num_cached)


def run(router, retention, count=400, seed=0, num_replicas=3, num_blocks=200, told=False, service=None):
    known = RouterSettings(num_replicas, num_blocks, BLOCK, seed=seed)
    recording = Recording(ROUTERS[router](known))
    settings = ClusterSettings(num_replicas, num_blocks, BLOCK, retention, service or Service(), told)
    cluster = Cluster(settings, recording)
    requests = list(islice(session_requests("selector", BLOCK, seed=seed, sizes=SIZES), count))
    cluster.run(requests)
    return cluster, recording, requests


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("retention", RULES)
def test_every_request_is_answered_once_and_all_blocks_are_free_in_the_end(router, retention):
    cluster, recording, requests = run(router, retention, told=retention == "foresight")
    assert recording.chosen == recording.done == Counter(requests)
    assert cluster.num_answered == len(requests)
    assert not any(cluster.queues.lengths)
    cluster.check_integrity()
    report = cluster.report()
    assert report["prompt_tokens"] == sum(request.num_prompt for request in requests)
    assert report["computed_tokens"] == sum(replica.num_computed for replica in cluster.replicas)
    assert 0 < report["hit_rate"] < 1
    assert report["ttft_s"]["p50"] <= report["ttft_s"]["p99"] <= report["turn_s"]["p99"] * 1.01


@pytest.mark.parametrize("router", ["p2c", "rank"])
def test_a_seed_gives_one_result(router):
    one, other, third = (run(router, "foresight", seed=seed)[0].report() for seed in (1, 1, 2))
    assert one == other
    assert one != third


def test_a_slow_cluster_answers_all_the_same_and_its_sessions_wait_for_themselves():
    service = Service(prefill_tokens_per_s=2000.0, decode_s=0.05, max_running=2)
    cluster, recording, requests = run("p2c", "lru", service=service)
    assert recording.done == Counter(requests)
    assert cluster.report()["ttft_s"]["mean"] > 1
    cluster.check_integrity()


def test_a_turn_that_comes_before_the_last_answer_is_sent_with_that_answer():
    service = Service(prefill_tokens_per_s=100.0, decode_s=1.0, decode_s_per_request=0.0)
    cluster = Cluster(ClusterSettings(1, 100, BLOCK, service=service), RoundRobin(1))
    cluster.run([Request(float(at), "s", "", 100, 1, ()) for at in range(3)])
    assert cluster.report()["turn_s"]["mean"] == pytest.approx(1.0)
    assert cluster.report()["simulated_s"] == pytest.approx(3.0)
    without = Cluster(ClusterSettings(1, 100, BLOCK, service=service), RoundRobin(1))
    without.run([Request(at / 10, None, "", 100, 1, ()) for at in range(3)])
    assert without.report()["turn_s"]["mean"] == pytest.approx((1.0 + 1.9 + 2.8) / 3)


def test_a_cluster_that_falls_behind_without_end_is_stopped_and_says_so():
    service = Service(prefill_tokens_per_s=1.0)
    cluster = Cluster(ClusterSettings(1, 100, BLOCK, service=service), RoundRobin(1))
    cluster.run(Request(float(at), None, "", 100, 1, ()) for at in range(1 << 40))
    assert cluster.report()["overloaded"]
    assert cluster.num_requests < 2000


@pytest.mark.parametrize(("prefill_tokens_per_s", "overloaded"), [(10.0, True), (200.0, False)])
def test_a_cluster_whose_answers_take_far_longer_than_requests_come_for_is_overloaded(prefill_tokens_per_s, overloaded):
    service = Service(prefill_tokens_per_s=prefill_tokens_per_s)
    cluster = Cluster(ClusterSettings(1, 100, BLOCK, service=service), RoundRobin(1))
    cluster.run(Request(float(at), None, "", 100, 1, ()) for at in range(10))
    assert cluster.num_answered == 10
    assert cluster.report()["overloaded"] is overloaded


def test_no_requests_are_no_error():
    cluster = Cluster(ClusterSettings(1, 10, BLOCK), RoundRobin(1))
    cluster.run([])
    assert cluster.report()["answered"] == 0


def test_affinity_finds_more_than_chance_does():
    rates = {name: run(name, "lru", count=2000, num_replicas=6)[0].report()["hit_rate"] for name in ROUTERS}
    by_chance = max(rates["p2c"], rates["random"], rates["round-robin"])
    assert rates["rank"] > by_chance + 0.05
    assert rates["prefix"] > by_chance + 0.02


@pytest.mark.parametrize("wrong", [{"num_replicas": 0}, {"num_blocks": 0}, {"retention": "best"}])
def test_settings_that_cannot_be_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ClusterSettings(**({"num_replicas": 1, "num_blocks": 1, "block_size": 1} | wrong))
