"""One cluster of two replicas, asked through the official OpenAI client and plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import runpy
import signal
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ropewalk.cluster.cli import main
from ropewalk.cluster.config import parse_config
from ropewalk.cluster.serve.local import LocalCluster, free_port
from ropewalk.workloads.config import ReplayConfig
from ropewalk.workloads.load import run_replay

from .waiting import eventually

pytestmark = pytest.mark.engine

MODEL = "smollm2-135m"
HELLO: Any = [{"role": "user", "content": "Say hello."}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
BODY = " ".join(
    f"Note {number}: the warehouse in row {number * 7 % 31} holds {number * 13 % 97} crates." for number in range(40)
)
ERROR_CASES = runpy.run_path(str(Path(__file__).with_name("error_cases.py")))
STOCK_ERRORS = json.loads((Path(__file__).parent / "vllm_errors.json").read_text())
ENGINE_ARGS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    shared = {"source": MODEL, "max_model_len": 2048, "kv_cache_gib": 0.5, "engine_args": ENGINE_ARGS}
    config = parse_config(
        {
            "http": {"port": free_port()},
            "models": [{"name": MODEL, "replicas": 2, "reuse": "reuse", **shared}],
            "prewarm": {"enabled": True},
        },
        "test",
    )
    with LocalCluster(config) as running:
        yield running


@pytest.fixture
def http(cluster: LocalCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.endpoint.removesuffix("/v1"), timeout=120) as made:
        yield made


def test_chat_answers_with_usage_and_cached_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_completions_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert "Paris" in answer.choices[0].text


def test_a_stream_says_what_an_answer_in_one_piece_says(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    asked["extra_body"] = {"ropewalk": {"reuse": "exact"}}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert len(chunks) > 3


def test_a_stream_ends_with_usage_when_asked(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


def test_a_completion_streams(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_forced_tool_call_has_its_name_and_json_arguments(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=48,
        temperature=0,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_tools_and_their_results_may_be_part_of_the_conversation(client: openai.OpenAI) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "What is the weather in Paris?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "Sunny, 21 degrees."},
        ],
        tools=TOOLS,
        max_tokens=8,
    )
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_logprobs_come_with_each_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [2, 2, 2]


def test_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, n=3, max_tokens=4, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    batch = client.completions.create(model=MODEL, prompt=["One,", "Two,"], max_tokens=2)
    assert len(batch.choices) == 2


def test_an_answer_ends_before_a_stop_word(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4, 5, 6,", max_tokens=32, stop=["9"], temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "9" not in answer.choices[0].text


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize("name", ERROR_CASES["CASES"])
def test_errors_are_those_of_stock_vllm(http: httpx.Client, name: str) -> None:
    answer, stock = ERROR_CASES["ask"](http, name), STOCK_ERRORS[name]
    assert answer["status"] == stock["status"]
    assert answer["body"] == stock["body"]


def test_the_client_raises_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=MODEL, prompt="word " * 4000)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"ropewalk": {"sesion": "s"}}, "ropewalk.sesion"),
        ({"ropewalk": {"directives": [{"span": {"start": 40, "end": 50}}]}}, "ropewalk.directives[0].span"),
        ({"ropewalk": {"directives": [{"span": {"message": 3}}]}}, "ropewalk.directives[0].span"),
        ({"ropewalk": {"edits": "sometimes"}}, "ropewalk.edits"),
        ({"context_management": {"edits": [{"type": "unheard of"}]}}, "context_management.edits.0"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"cache_salt": "x"}, "cache_salt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_ropewalk_refuses_is_a_bad_request(client: openai.OpenAI, field: Any, param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2, stream=stream, extra_body=field)
    assert raised.value.param == param
    assert raised.value.type == "BadRequestError"


def test_explain_accounts_for_every_prompt_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": BODY}, *HELLO],
        max_tokens=2,
        extra_body={"ropewalk": {"session": "explained", "agent": "clerk", "explain": True}},
    )
    told = answer.model_extra["ropewalk"]  # type: ignore[index]
    assert (told["session"], told["agent"]) == ("explained", "clerk")
    assert answer.usage is not None
    assert sum(told["tokens"].values()) == answer.usage.prompt_tokens
    assert told["plan"]


def test_explain_comes_on_the_last_chunk_of_a_stream(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "stream": True, "ropewalk": {"explain": True}}
    events = http.post("/v1/chat/completions", json=body).text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    payloads = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "tokens" in payloads[-1]["ropewalk"]
    assert all("ropewalk" not in payload for payload in payloads[:-1])


def test_a_body_behind_a_changed_header_is_reused(client: openai.OpenAI, http: httpx.Client) -> None:
    def ask_with(header: str) -> Any:
        return client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": header + BODY}, *HELLO],
            max_tokens=2,
            temperature=0,
            extra_body={"ropewalk": {"session": f"reuse {header}", "explain": True}},
        )

    def everything_is_stored() -> bool:
        [model] = http.get("/v1/replicas").json()["models"]
        return all(replica["saves_waiting"] == 0 for replica in model["replicas"])

    ask_with("It is Monday morning, half past eight, and the sky is grey. " * 3)
    assert eventually(everything_is_stored)
    answer = ask_with("Today is the second of May; nothing else of note has happened so far. " * 2)
    told = answer.model_extra["ropewalk"]
    assert told["tokens"]["reused"] > 0.5 * answer.usage.prompt_tokens, told
    assert answer.usage.prompt_tokens_details.cached_tokens >= told["tokens"]["reused"]


def test_requests_of_a_session_stay_on_one_replica_and_sessions_are_spread(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    def served() -> dict[str, int]:
        [model] = http.get("/v1/replicas").json()["models"]
        return {replica["replica"]: replica["counters"].get("requests", 0) for replica in model["replicas"]}

    def turn(session: str) -> None:
        client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=1, extra_headers={"x-session-id": session}
        )

    before = served()
    for _ in range(3):
        turn("affine")
    moved = {replica: count - before[replica] for replica, count in served().items()}
    assert sorted(moved.values()) == [0, 3]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(turn, [f"spread-{number}" for number in range(8)]))
    assert min(count - before[replica] for replica, count in served().items()) > 0


def test_agents_are_learned_from_hand_overs(client: openai.OpenAI, http: httpx.Client) -> None:
    for agent in ("planner", "coder", "planner"):
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=1,
            extra_headers={"x-session-id": "handed over", "x-agent": agent},
        )

    def learned() -> bool:
        graph = http.get("/v1/agents").json()
        edges = {(edge["source"], edge["target"]) for edge in graph["transitions"]}
        return {("planner", "coder"), ("coder", "planner")} <= edges

    assert eventually(learned)


def test_the_store_and_health_routes_answer(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    [model] = http.get("/v1/store").json()["models"]
    assert len(model["replicas"]) == 2
    assert all(replica["store"]["budget_bytes"] > 0 for replica in model["replicas"])


def test_anchors_are_registered_listed_and_deleted(http: httpx.Client) -> None:
    system: Any = [{"role": "system", "content": f"You keep the ledger. {BODY}"}]
    asked = {"model": MODEL, "agent": "ledger keeper", "messages": system, "tools": TOOLS}
    answer = http.post("/v1/anchors", json=asked)
    assert answer.status_code == 200, answer.text
    anchor = answer.json()
    assert (anchor["agent"], anchor["model"], anchor["origin"]) == ("ledger keeper", MODEL, "registered")
    tokenized = {"model": MODEL, "messages": [*system, *HELLO], "tools": TOOLS}
    whole = http.post("/tokenize", json=tokenized).json()["count"]
    assert 100 < anchor["tokens"] < whole
    listed = [a for a in http.get("/v1/anchors").json()["anchors"] if a["agent"] == "ledger keeper"]
    assert [(a["tokens"], a["warm"]) for a in listed] == [(anchor["tokens"], [])]
    assert http.delete("/v1/anchors/ledger keeper").json()["models"] == [MODEL]
    gone = http.delete("/v1/anchors/ledger keeper")
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "agent")


def test_a_wrong_anchor_is_refused_by_field(http: httpx.Client) -> None:
    def refused(**fields: Any) -> tuple[int, str]:
        answer = http.post("/v1/anchors", json={"model": MODEL, "agent": "a", **fields})
        return answer.status_code, answer.json()["error"]["param"]

    assert refused(prompt="too short") == (400, "prompt")
    assert refused() == (400, "messages")
    assert refused(messages=HELLO, prompt=BODY) == (400, "messages")
    assert refused(prompt=BODY, tools=TOOLS) == (400, "tools")
    assert refused(model="nobody", prompt=BODY) == (404, "model")
    assert refused(agent="", prompt=BODY)[0] == 400


def test_metrics_are_served_for_prometheus(http: httpx.Client) -> None:
    asked = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 1}
    assert http.post("/v1/completions", json=asked).status_code == 200
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [s for family in text_string_to_metric_families(answer.text) for s in family.samples]
    errors = {s.labels["replica"]: s.value for s in samples if s.name == "ropewalk_turn_error"}
    assert len(errors) == 2
    assert all(0 < error < 1.5e-2 for error in errors.values())
    assert sum(s.value for s in samples if s.name == "ropewalk_prompt_tokens_total") > 0


def test_status_shows_models_replicas_store_and_agents(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--endpoint", cluster.endpoint]) == 0
    table = capsys.readouterr().out
    assert MODEL in table
    assert "running" in table
    assert "chunks" in table
    assert "Agents" in table
    assert main(["status", "--endpoint", cluster.endpoint, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["ready"] == 2


def test_texts_and_chats_are_tokenized_and_back(cluster: Any) -> None:
    base = cluster.endpoint.removesuffix("/v1")
    ids = httpx.post(f"{base}/tokenize", json={"model": MODEL, "prompt": "Three crates."}).json()
    assert ids["count"] == len(ids["tokens"]) > 0
    chat = httpx.post(f"{base}/tokenize", json={"model": MODEL, "messages": HELLO}).json()
    assert chat["count"] > 5
    text = httpx.post(f"{base}/detokenize", json={"model": MODEL, "tokens": ids["tokens"]}).json()
    assert text["prompt"] == "Three crates."


def test_the_quickstart_of_the_readme_runs(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    code = found[1].replace("http://127.0.0.1:8000/v1", cluster.endpoint)
    assert cluster.endpoint in code

    def second_call_is_cached() -> bool:
        """There are two replicas here, and one stores what it computed just after it has answered."""
        exec(compile(code, "README.md", "exec"), {})
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cached")]
        return int(lines[1].split()[-1]) > 400

    assert eventually(second_call_is_cached)


@pytest.mark.parametrize("explain", [True, False])
def test_a_streaming_request_that_is_refused_is_refused_as_any_other(cluster: LocalCluster, explain: bool) -> None:
    client = openai.OpenAI(base_url=cluster.endpoint, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "word " * 4000}],
            stream=True,
            extra_body={"ropewalk": {"explain": explain}},
        )


def reachable_ports(cluster: LocalCluster) -> list[int]:
    """Ports that listen on more than loopback."""
    listeners = [
        connection.laddr
        for process in (psutil.Process(cluster.pid), *psutil.Process(cluster.pid).children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listeners
    addresses = [(ipaddress.ip_address(listener.ip), listener.port) for listener in listeners]
    return [p for address, p in addresses if not (getattr(address, "ipv4_mapped", None) or address).is_loopback]


def first_answer(port: int, context: ssl.SSLContext | None) -> bytes:
    """What an HTTP/2 server says to a client's preface; nothing if it closes the connection."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
            connection = context.wrap_socket(plain) if context else plain
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
            return connection.recv(64)
    except OSError:  # SSLError is one
        return b""


def test_what_listens_on_all_interfaces_talks_to_the_cluster_only(cluster: LocalCluster) -> None:
    """Ray Serve binds a port of every replica to all interfaces; nobody without the cluster's certificate gets in."""
    ports = reachable_ports(cluster)
    stranger, member = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(2))
    for context in (stranger, member):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
    environment = cluster.ray_environment
    member.load_cert_chain(environment["RAY_TLS_SERVER_CERT"], environment["RAY_TLS_SERVER_KEY"])
    for port in ports:
        assert first_answer(port, member), "the test itself gets no answer"
        assert not first_answer(port, None)
        assert not first_answer(port, stranger)


def kill_scheduler(cluster: LocalCluster) -> None:
    [scheduler] = [
        process
        for process in psutil.Process(cluster.pid).children(recursive=True)
        if "SchedulerService" in " ".join(process.cmdline())
    ]
    scheduler.kill()


class Sabotage:
    """Progress of a replay that kills the scheduler once and empties the store again and again."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.num_turns = 0
        self.num_removed = 0

    def begin(self, total: int) -> None: ...

    def end(self) -> None: ...

    def turn_done(self, arm: str, record: Any) -> None:
        self.num_turns += 1
        if self.num_turns == 2:
            kill_scheduler(self.cluster)
        for path in self.cluster.store_root.glob("*/*/objects/*/*"):
            path.unlink(missing_ok=True)
            self.num_removed += 1


def test_a_replay_survives_a_killed_scheduler_and_an_emptied_store(cluster: LocalCluster) -> None:
    """One of the last: it kills the scheduler."""
    sabotage = Sabotage(cluster)
    replay = ReplayConfig(
        endpoint=cluster.endpoint,
        sessions=4,
        turns=3,
        concurrency=2,
        anchor_tokens=300,
        max_prompt_tokens=1000,
        max_tokens=4,
    )
    result = asyncio.run(run_replay(replay, progress=sabotage))
    assert (sabotage.num_turns, result.summary()["errors"]) == (12, 0)
    assert sabotage.num_removed > 0


def test_serving_goes_on_without_the_scheduler(cluster: LocalCluster, client: openai.OpenAI) -> None:
    """Stays next to last: the scheduler is dead, or comes back and is killed again."""
    with contextlib.suppress(ValueError):  # none to kill
        kill_scheduler(cluster)
    for number in range(4):
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=2, extra_headers={"x-session-id": f"orphan-{number}"}
        )
        assert answer.choices[0].finish_reason


def test_ctrl_c_leaves_no_process_and_no_files(cluster: LocalCluster) -> None:
    """Stays last: it ends the cluster that the tests above share."""
    serving = psutil.Process(cluster.pid)
    started = serving.children(recursive=True)
    store = cluster.store_root
    assert len(started) > 5
    assert store.exists()
    serving.send_signal(signal.SIGINT)
    assert eventually(lambda: not serving.is_running() or serving.status() == psutil.STATUS_ZOMBIE, seconds=60)
    assert [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    assert not store.exists()
