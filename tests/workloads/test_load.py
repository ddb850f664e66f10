import asyncio
import itertools
from dataclasses import replace

import pytest

from ropewalk.workloads.arms import run_arms
from ropewalk.workloads.config import ReplayConfig
from ropewalk.workloads.errors import WorkloadError
from ropewalk.workloads.load import run_replay


def config(endpoint, **settings):
    chosen = {"sessions": 3, "turns": 4, "concurrency": 2, "dataset": "sample", **settings}
    return ReplayConfig(endpoint=endpoint.url, **chosen)


def sent(endpoint):
    return [(request.headers["x-session-id"], request.headers["x-agent"]) for request in endpoint.requests]


async def test_every_turn_of_every_session_is_asked_once_and_in_order(endpoint):
    result = await run_replay(config(endpoint))
    assert len(endpoint.requests) == 12
    assert [(r.session, r.turn) for r in result.records] == [(s, t) for s in range(3) for t in range(4)]
    for session in range(3):
        records = [record for record in result.records if record.session == session]
        agents = [agent for name, agent in sent(endpoint) if name == f"gsm8k-0-{session}"]
        assert agents == [record.agent for record in records]
        for earlier, later in itertools.pairwise(records):
            assert later.intended == earlier.ended
            assert later.started >= earlier.ended
    summary = result.summary()
    assert (summary["requests"], summary["errors"], summary["source"]) == (12, 0, "bundled sample")
    assert (summary["prompt_tokens"], summary["cached_tokens"], summary["completion_tokens"]) == (1200, 480, 36)
    assert summary["cached_token_share"] == pytest.approx(0.4)
    assert summary["turns_per_s"] > 0
    assert not summary["aborted"]


async def test_a_body_is_plain_openai_unless_asked_for_more(endpoint):
    await run_replay(config(endpoint, sessions=1, turns=1))
    body = endpoint.requests[0].body
    assert set(body) == {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
    assert body["model"] == "stub-model"
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["temperature"]) == (16, 0)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"ropewalk": True}, {}),
        ({"reuse": "default"}, {}),
        ({"reuse": "exact"}, {"reuse": "exact"}),
        ({"reuse": "reuse"}, {"reuse": "reuse"}),
        ({"explain": True}, {"explain": True}),
    ],
)
async def test_the_ropewalk_field_carries_what_was_asked_for(endpoint, settings, field):
    await run_replay(config(endpoint, sessions=1, turns=1, **settings))
    assert endpoint.requests[0].body["ropewalk"] == {"session": "gsm8k-0-0", "agent": "planner", **field}


async def test_identifying_headers_can_be_left_out(endpoint):
    await run_replay(config(endpoint, sessions=1, turns=1, id_headers=False))
    assert not any(name.startswith("x-") for name in endpoint.requests[0].headers)


async def test_no_more_sessions_run_at_a_time_than_asked_for(endpoint, script):
    gate = asyncio.Event()
    endpoint.behave = lambda _: script(gate=gate)
    replay = asyncio.create_task(run_replay(config(endpoint, sessions=5, turns=2, concurrency=3)))
    await endpoint.until(lambda: endpoint.in_flight == 3)
    gate.set()
    await replay
    assert endpoint.most_in_flight == 3


async def test_an_open_loop_sends_new_sessions_though_none_has_been_answered(endpoint, script):
    gate = asyncio.Event()
    endpoint.behave = lambda _: script(gate=gate)
    replay = asyncio.create_task(run_replay(config(endpoint, sessions=6, turns=1, concurrency=1, rate=1000)))
    await endpoint.until(lambda: endpoint.in_flight == 6)
    gate.set()
    result = await replay
    starts = [record.intended for record in result.records]
    assert starts == sorted(starts)
    assert len(set(starts)) == 6
    # Latency counts from when a session was due, which is never after it was sent.
    assert all(record.started >= record.intended for record in result.records)
    assert all(record.ttft_ms >= (record.token_times[0] - record.started) * 1e3 for record in result.records)


async def test_the_same_seed_sends_the_same_bodies_at_any_concurrency(endpoint):
    base = config(endpoint, seed=7)
    first = await run_replay(base)
    bodies = [request.body for request in endpoint.requests]
    endpoint.requests.clear()
    second = await run_replay(replace(base, concurrency=3, reuse="reuse", name="other"))
    for request in endpoint.requests:
        del request.body["ropewalk"]
    key = str
    assert sorted(bodies, key=key) == sorted((request.body for request in endpoint.requests), key=key)
    assert first.summary()["body_sha256"] == second.summary()["body_sha256"]


@pytest.mark.parametrize(
    "change", [{"seed": 8}, {"headers": "none"}, {"turns": 5}, {"max_tokens": 17}, {"ignore_eos": True}]
)
async def test_other_work_has_another_hash(endpoint, change):
    base = config(endpoint, seed=7, sessions=1)
    first, second = await run_replay(base), await run_replay(replace(base, **change))
    assert first.summary()["body_sha256"] != second.summary()["body_sha256"]


async def test_what_the_endpoint_says_changes_bodies_only_in_live_mode(endpoint, script):
    async def bodies(said, live):
        endpoint.behave = lambda _: script(tokens=(said,))
        endpoint.requests.clear()
        await run_replay(config(endpoint, sessions=1, live=live))
        return [str(request.body["messages"]) for request in endpoint.requests]

    assert await bodies("one thing", live=False) == await bodies("another", live=False)
    live = await bodies("a live remark", live=True)
    assert "a live remark" not in live[0]
    assert all("a live remark" in body for body in live[1:])


async def test_failed_turns_are_recorded_and_their_sessions_go_on(endpoint, script):
    def behave(received):
        number = len(endpoint.requests)
        return {
            2: script(status=500, error_body="boom"),
            4: script(drop_after=2),
            6: script(events=["{"]),
            8: script(status=400),
        }.get(number, script())

    endpoint.behave = behave
    result = await run_replay(config(endpoint, concurrency=1))
    summary = result.summary()
    assert len(endpoint.requests) == 12
    assert (summary["requests"], summary["errors"]) == (12, 4)
    assert sum(summary["error_kinds"].values()) == 4
    assert {"HTTP 500: boom", "HTTP 400: scripted"} <= set(summary["error_kinds"])
    assert summary["ttft_ms"]["count"] == 8
    assert summary["prompt_tokens"] == 800


async def test_warm_up_turns_are_sent_but_not_counted(endpoint, script):
    endpoint.behave = lambda _: script(status=500) if len(endpoint.requests) == 1 else script()
    result = await run_replay(config(endpoint, warmup_turns=5, concurrency=1))
    summary = result.summary()
    assert len(endpoint.requests) == 12
    assert (summary["requests"], summary["errors"]) == (7, 0)
    assert summary["warmup"] == {"requests": 5, "errors": 1}
    assert [record.warmup for record in result.records] == [True] * 5 + [False] * 7
    assert result.measured_s < result.wall_s


async def test_a_deadline_ends_a_replay_and_keeps_what_was_done(endpoint, script):
    endpoint.behave = lambda _: script(gate=asyncio.Event()) if len(endpoint.requests) > 2 else script()
    result = await run_replay(config(endpoint, concurrency=1, deadline_s=0.3))
    assert result.aborted
    assert [record.error for record in result.records] == [None, None, "aborted"]


async def test_a_replay_can_be_stopped(endpoint, script):
    endpoint.behave = lambda _: script(gate=asyncio.Event())
    stop = asyncio.Event()
    replay = asyncio.create_task(run_replay(config(endpoint), stop=stop))
    await endpoint.until(lambda: endpoint.in_flight == 2)
    stop.set()
    result = await replay
    assert result.aborted
    assert result.summary()["error_kinds"] == {"aborted": 2}


async def test_prompts_that_cannot_fit_are_refused_before_anything_is_sent(endpoint):
    with pytest.raises(WorkloadError, match="max_prompt_tokens=900"):
        await run_replay(config(endpoint, max_prompt_tokens=900))
    assert endpoint.requests == []


async def test_arms_take_turns_by_blocks_of_sessions_and_get_the_same_bodies(endpoint):
    arms = [config(endpoint, name="vllm", model="a"), config(endpoint, name="ropewalk", model="b", reuse="reuse")]
    arms = [replace(arm, concurrency=1) for arm in arms]
    results = await run_arms(arms)
    order = [(request.body["model"], request.headers["x-session-id"][-1]) for request in endpoint.requests]
    blocks = [place for number, place in enumerate(order) if number == 0 or order[number - 1] != place]
    assert blocks == [("a", "0"), ("b", "0"), ("b", "1"), ("a", "1"), ("a", "2"), ("b", "2")]
    assert list(results) == ["vllm", "ropewalk"]
    summaries = [result.summary() for result in results.values()]
    assert summaries[0]["body_sha256"] == summaries[1]["body_sha256"]
    assert [summary["requests"] for summary in summaries] == [12, 12]
    with_field = [request.body["model"] for request in endpoint.requests if "ropewalk" in request.body]
    assert set(with_field) == {"b"}


async def test_a_block_has_as_many_sessions_as_run_at_a_time_unless_told(endpoint):
    arms = [config(endpoint, name=name, model=name, concurrency=2, sessions=4, turns=1) for name in "ab"]
    for size, expected in ((None, "aabbbbaa"), (1, "abbaabba"), (4, "aaaabbbb")):
        endpoint.requests.clear()
        await run_arms(arms, block_sessions=size)
        assert "".join(request.body["model"] for request in endpoint.requests) == expected


async def test_arms_end_together_at_the_deadline(endpoint, script):
    endpoint.behave = lambda _: script(gate=asyncio.Event()) if len(endpoint.requests) > 3 else script()
    arms = [config(endpoint, name=name, concurrency=1, turns=2, deadline_s=0.3) for name in "ab"]
    results = await run_arms(arms)
    assert all(result.aborted for result in results.values())
    assert [[record.error for record in result.records] for result in results.values()] == [
        [None, None],
        [None, "aborted"],
    ]


async def test_arms_that_differ_in_the_work_are_refused(endpoint):
    base = config(endpoint, name="a")
    for others, complaint in (
        ([replace(base, name="b", seed=1)], "seed must be the same"),
        ([replace(base, name="b", turns=5)], "turns must be the same"),
        ([replace(base)], "must differ"),
    ):
        with pytest.raises(WorkloadError, match=complaint):
            await run_arms([base, *others])
    with pytest.raises(WorkloadError, match="at least one"):
        await run_arms([])
