import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.workloads.client import ChatClient, SseDecoder
from ropewalk.workloads.config import ReplayConfig
from ropewalk.workloads.errors import WorkloadError


async def ask(endpoint, **settings):
    async with ChatClient(ReplayConfig(endpoint=endpoint.url, **settings)) as client:
        return await client.chat({"model": "m", "messages": []}, {"x-agent": "solver"})


@settings(max_examples=50, deadline=None)
@given(
    events=st.lists(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), min_size=1)),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(1, 7), min_size=1),
)
def test_events_are_decoded_wherever_the_bytes_are_cut(events, ending, cuts):
    raw = ": hello" + ending
    for lines in events:
        raw += "".join(f"data: {line}{ending}" for line in lines) + f"event: x{ending}" + ending
    data = (raw + ": bye" + ending).encode()
    decoder, decoded, place = SseDecoder(), [], 0
    while place < len(data):
        size = cuts[place % len(cuts)]
        decoded += decoder.feed(data[place : place + size])
        place += size
    assert decoded == ["\n".join(lines) for lines in events]


@pytest.mark.parametrize("cut", [None, 1, 3, 17, 100_000])
@pytest.mark.parametrize("line_ending", ["\n", "\r\n"])
async def test_a_streamed_reply_is_read_whatever_its_chunks(endpoint, script, cut, line_ending):
    tokens = ("Zwölf ", "eggs", " → ", "12 🥚")
    endpoint.behave = lambda _: script(tokens=tokens, cut=cut, line_ending=line_ending)
    reply = await ask(endpoint)
    assert reply.error is None
    assert reply.text == "".join(tokens)
    assert reply.finish_reason == "stop"
    assert (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens) == (100, 40, 4)
    assert len(reply.token_times) == 4
    times = [reply.started, *reply.token_times, reply.ended]
    assert times == sorted(times)


async def test_the_first_token_is_the_first_content_and_not_the_role_chunk(endpoint, script):
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    endpoint.behave = lambda _: script(events=[json.dumps(role), "[DONE]"])
    assert (await ask(endpoint)).token_times == []


@pytest.mark.parametrize("delta", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}])
async def test_reasoning_and_tool_calls_count_as_tokens_but_are_not_said(endpoint, script, delta):
    endpoint.behave = lambda _: script(events=[json.dumps({"choices": [{"delta": delta}]}), "[DONE]"])
    reply = await ask(endpoint)
    assert len(reply.token_times) == 1
    assert reply.text == ""


async def test_an_empty_reply_has_its_end_as_first_token(endpoint, script):
    endpoint.behave = lambda _: script(tokens=())
    reply = await ask(endpoint)
    assert reply.error is None
    assert len(reply.token_times) == 1


async def test_a_reply_without_done_is_complete_if_it_says_why_it_finished(endpoint, script):
    events = script().sse()[:-1]
    endpoint.behave = lambda _: script(events=events)
    assert (await ask(endpoint)).error is None


async def test_cached_tokens_are_unknown_if_the_endpoint_does_not_say(endpoint, script):
    endpoint.behave = lambda _: script(cached_tokens=None)
    assert (await ask(endpoint)).cached_tokens is None


async def test_ropewalks_own_report_is_kept(endpoint, script):
    report = {"tokens": {"computed": 10, "reused": 90}}
    events = script().sse()
    endpoint.behave = lambda _: script(events=[*events[:-1], json.dumps({"choices": [], "ropewalk": report}), "[DONE]"])
    assert (await ask(endpoint)).ropewalk == report


@pytest.mark.parametrize(
    ("behaviour", "complaint"),
    [
        ({"status": 500, "error_body": "boom"}, "HTTP 500: boom"),
        ({"status": 400}, "HTTP 400: scripted"),
        ({"status": 404, "error_body": '{"detail": "Not Found"}'}, "HTTP 404: Not Found"),
        ({"status": 422, "error_body": "[1]"}, "HTTP 422: [1]"),
        ({"drop_after": 2}, "connection: "),
        ({"drop_after": 0}, "connection: "),
        ({"events": ['{"choices": [{"del']}, 'bad JSON in stream: {"choices": [{"del'),
        ({"events": ['"text"']}, "bad chunk in stream"),
        ({"events": ['{"choices": [7]}']}, "bad chunk in stream"),
        ({"events": ['{"error": {"message": "engine died"}}']}, "error in stream: engine died"),
        ({"events": []}, "stream ended before the reply was complete"),
    ],
)
async def test_what_goes_wrong_is_said_in_the_reply(endpoint, script, behaviour, complaint):
    endpoint.behave = lambda _: script(**behaviour)
    reply = await ask(endpoint)
    assert reply.error is not None
    assert reply.error.startswith(complaint)
    assert reply.ended >= reply.started


async def test_what_arrived_before_a_dropped_connection_is_kept(endpoint, script):
    endpoint.behave = lambda _: script(drop_after=3)
    reply = await ask(endpoint)
    assert reply.text == "Step one"
    assert len(reply.token_times) == 2


async def test_a_reply_that_takes_too_long_is_given_up(endpoint, script):
    endpoint.behave = lambda _: script(gate=asyncio.Event())
    assert (await ask(endpoint, timeout_s=0.05)).error == "timeout: no complete reply within 0.05 s"


async def test_a_closed_port_is_an_error_in_the_reply():
    async with ChatClient(ReplayConfig(endpoint="http://127.0.0.1:9")) as client:
        reply = await client.chat({}, {})
    assert reply.error.startswith("connection: ")


async def test_the_api_key_is_sent_as_a_bearer_token(endpoint):
    await ask(endpoint, api_key="secret")
    await ask(endpoint)
    assert endpoint.requests[0].headers["authorization"] == "Bearer secret"
    assert "authorization" not in endpoint.requests[1].headers


async def test_the_model_is_the_first_one_listed_unless_named(endpoint):
    endpoint.models = ("first", "second")
    async with ChatClient(ReplayConfig(endpoint=endpoint.url)) as client:
        assert await client.resolve_model(None) == "first"
        assert await client.resolve_model("third") == "third"


@pytest.mark.parametrize(
    ("status", "models", "complaint"),
    [(401, ("m",), "refused the API key"), (404, ("m",), "name one"), (200, (), "lists no")],
)
async def test_an_endpoint_that_names_no_model_is_a_clear_error(endpoint, status, models, complaint):
    endpoint.models_status, endpoint.models = status, models
    async with ChatClient(ReplayConfig(endpoint=endpoint.url)) as client:
        with pytest.raises(WorkloadError, match=complaint):
            await client.resolve_model(None)


async def test_an_endpoint_that_cannot_be_reached_is_a_clear_error():
    async with ChatClient(ReplayConfig(endpoint="http://127.0.0.1:9")) as client:
        with pytest.raises(WorkloadError, match=r"'http://127.0.0.1:9/v1': cannot connect"):
            await client.resolve_model("m")
