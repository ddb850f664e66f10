"""Sessions that edit their history, asked of a cluster of two replicas through the OpenAI client and plain HTTP.

Edits are splices by the model's setting here, and an operator's policy drops tool results that say they are stale.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ropewalk.cluster.config import parse_config
from ropewalk.cluster.serve.local import LocalCluster, free_port
from ropewalk.kernels.keys import as_tokens

from .waiting import eventually

pytestmark = pytest.mark.engine

MODEL = "smollm2-135m"
STALE = "STALE: "
POLICY = f"""
class DropStale:
    def transform(self, messages, turn):
        is_stale = lambda m: m["role"] == "tool" and m["content"].startswith("{STALE}")
        return [{{**m, "content": "[stale]"}} if is_stale(m) else m for m in messages]
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    modules = tmp_path_factory.mktemp("modules")
    (modules / "somebodys_policies.py").write_text(textwrap.dedent(POLICY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(modules))
        model = {
            "name": MODEL,
            "source": MODEL,
            "replicas": 2,
            "reuse": "reuse",
            "edits": "amortize",
            "policies": ["somebodys_policies:DropStale"],
            "max_model_len": 2048,
            "kv_cache_gib": 0.5,
        }
        config = parse_config({"http": {"port": free_port()}, "models": [model]}, "test")
        with LocalCluster(config) as running:
            yield running


def agent_turns(seed: int, num_uses: int) -> list[Any]:
    """A conversation of a tool-calling agent, with long results that nobody else has."""
    messages: list[Any] = [
        {"role": "system", "content": f"You are agent {seed}, who counts crates and answers in few words."},
        {"role": "user", "content": "How many crates are there in all?"},
    ]
    for use in range(num_uses):
        function = {"name": "get_weather", "arguments": json.dumps({"city": f"Row {use}"})}
        call = {"id": f"call-{use}", "type": "function", "function": function}
        rows = " ".join(f"Row {n} of hall {use}.{seed} holds {n * use * seed % 89} crates." for n in range(20))
        messages += [
            {"role": "assistant", "content": f"I look at hall {use}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call-{use}", "content": rows},
        ]
    return messages


def ask_as(client: openai.OpenAI, session: str, messages: list[Any], body: Any = None, **field: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=4,
        temperature=0,
        extra_body={"ropewalk": {"session": session, "explain": True, "reuse": "exact", **field}, **(body or {})},
    )


def test_an_edited_history_costs_the_edit_and_is_explained(client: openai.OpenAI) -> None:
    messages = agent_turns(1, 3)
    ask_as(client, "splice-1", messages, edits="amortize")
    edited = [dict(message) for message in messages]
    edited[3]["content"] = "[evicted]"
    answer = ask_as(client, "splice-1", [*edited, {"role": "user", "content": "Well?"}], edits="amortize")
    told = answer.model_extra["ropewalk"]
    assert told["fallbacks"] == []
    assert told["tokens"]["spliced"] > 400
    assert told["lineage"]
    assert answer.usage.prompt_tokens_details.cached_tokens >= told["tokens"]["spliced"]
    stranger = ask_as(client, "splice-1b", [*edited, {"role": "user", "content": "Well, well?"}])
    assert stranger.model_extra["ropewalk"]["tokens"]["spliced"] == 0


@pytest.mark.parametrize(
    "directive",
    [
        {"span": {"tool_call_id": "call-0"}, "replacement": "[evicted]"},
        {"span": {"message": 3}, "replacement": "[evicted]"},
        {"span": {"messages": [2, 4]}, "replacement": "[evicted: 1 older tool turn]"},
        {"span": {"start": 150, "end": 300}, "replacement": "[evicted]"},
    ],
    ids=["tool call", "message", "messages", "tokens"],
)
def test_a_directive_may_name_tokens_messages_or_a_tool_call(client: openai.OpenAI, directive: Any) -> None:
    session = f"splice-2-{directive['span']}"
    messages = agent_turns(10 + len(session), 3)
    ask_as(client, session, messages)
    asked = [*messages, {"role": "user", "content": "Well?"}]
    told = ask_as(client, session, asked, directives=[directive]).model_extra["ropewalk"]
    assert told["fallbacks"] == []
    assert told["tokens"]["spliced"] > 400


def test_directives_applied_in_idle_time_hold_for_the_prompts_that_follow(cluster: Any, client: openai.OpenAI) -> None:
    messages = agent_turns(3, 3)
    ask_as(client, "splice-3", messages)
    url = f"{cluster.endpoint}/sessions/splice-3"
    held = httpx.get(url).json()["branches"][0]["num_tokens"]
    directive = {"span": {"start": 150, "end": 300}, "replacement": "[evicted]"}
    applied = httpx.post(f"{url}/directives", json={"directives": [directive]}, timeout=60)
    assert applied.status_code == 200, applied.text
    assert applied.json()["tokens"]["spliced"] > 400
    assert httpx.get(url).json()["edits"] == "amortize"
    following = ask_as(client, "splice-3", [*messages, {"role": "user", "content": "Well?"}])
    told = following.model_extra["ropewalk"]
    assert told["tokens"]["spliced"] > 400
    assert following.usage.prompt_tokens < held
    assert "splice-3" in httpx.get(f"{cluster.endpoint}/sessions").json()["models"][0]["sessions"]
    assert httpx.delete(url).json() == {"session": "splice-3", "deleted": True}
    assert httpx.get(url).status_code == 404


def test_wrong_directives_of_a_session_are_refused_and_change_nothing(cluster: Any, client: openai.OpenAI) -> None:
    ask_as(client, "splice-4", agent_turns(4, 1))
    url = f"{cluster.endpoint}/sessions/splice-4"
    before = httpx.get(url).json()
    for span, message in (({"start": 4, "end": 50}, "attention sink"), ({"start": 60, "end": 50_000}, "is no span of")):
        refused = httpx.post(f"{url}/directives", json={"directives": [{"span": span, "replacement": "x"}]})
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "directives[0].span"
    assert httpx.get(url).json() == before
    nobody = httpx.post(
        f"{cluster.endpoint}/sessions/nobody/directives", json={"directives": [{"span": {"start": 40, "end": 50}}]}
    )
    assert nobody.status_code == 404
    assert nobody.json()["error"]["type"] == "NotFoundError"


def test_a_history_is_pinned_aged_shared_and_purged(cluster: Any, client: openai.OpenAI) -> None:
    ask_as(client, "splice-6", agent_turns(6, 2))
    url = f"{cluster.endpoint}/sessions/splice-6"
    held = httpx.get(url).json()["branches"][0]["num_tokens"]
    assert eventually(lambda: httpx.post(f"{url}/pin", json={"ttl_s": 60}).json()["pinned_bytes"] > 0)
    assert httpx.post(f"{url}/decay", json={"span": {"start": 0, "end": 64}}).json()["decayed_bytes"] > 0
    assert httpx.post(f"{url}/share", json={}).json()["shared_chunks"] == 0, (
        "all of it is exact: others find it already"
    )
    refused = httpx.post(f"{url}/pin", json={"span": {"start": 5, "end": held + 1}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "span")
    span = {"span": {"start": 100, "end": 200}}
    assert httpx.post(f"{url}/purge", json={"span": {"start": 5, "end": held + 1}}).json()["error"]["param"] == "span"
    purged = httpx.post(f"{url}/purge", json=span).json()
    assert purged["purged_chunks"] > 0
    assert purged.keys() == {"session", "purged_chunks"}
    assert httpx.get(url).status_code == 404
    for session in ("splice-6", "splice-6b", "splice-6c"):  # whichever replica they come to, its cache is empty
        again = ask_as(client, session, agent_turns(6, 2), edits="forget")
        assert again.usage.prompt_tokens_details.cached_tokens <= 128
        assert httpx.post(f"{cluster.endpoint}/sessions/{session}/purge", json=span).status_code == 200


def test_old_tool_results_are_cleared_by_anthropics_rule(client: openai.OpenAI) -> None:
    rule = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 2},
        "keep": {"type": "tool_uses", "value": 2},
    }
    body = {"context_management": {"edits": [rule]}}
    first = ask_as(client, "splice-5", agent_turns(5, 2), body, edits="amortize")
    assert first.model_extra["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 0
    second = ask_as(client, "splice-5", agent_turns(5, 3), body, edits="amortize")
    assert second.model_extra["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 1
    assert second.model_extra["ropewalk"]["tokens"]["spliced"] > 200


def test_the_models_setting_makes_edits_splices_and_a_request_may_say_otherwise(client: openai.OpenAI) -> None:
    for session, field, spliced in (("setting-1", {}, True), ("setting-2", {"edits": "forget"}, False)):
        messages = agent_turns(20 + spliced, 3)
        ask_as(client, session, messages)
        messages[3]["content"] = "[evicted]"
        told = ask_as(client, session, [*messages, {"role": "user", "content": "Well?"}], **field).model_extra
        assert (told["ropewalk"]["tokens"]["spliced"] > 400) == spliced


def test_an_operators_policy_edits_what_clients_send_and_the_rest_is_spliced(client: openai.OpenAI) -> None:
    messages = agent_turns(30, 3)
    whole = ask_as(client, "policy-1", messages).usage.prompt_tokens
    messages[3]["content"] = STALE + messages[3]["content"]  # now the tool says so
    answer = ask_as(client, "policy-1", [*messages, {"role": "user", "content": "Well?"}])
    assert answer.usage.prompt_tokens < whole - 200
    assert answer.model_extra["ropewalk"]["tokens"]["spliced"] > 400
    assert answer.model_extra["ropewalk"]["fallbacks"] == []


def test_scratch_is_seen_once_and_is_nowhere_afterwards(cluster: LocalCluster, client: openai.OpenAI) -> None:
    messages = agent_turns(40, 2)
    ask_as(client, "scratch-1", messages)
    secret = " ".join(f"Crate {n} has the seal {n * 7919 % 10007}." for n in range(12))
    note = {"role": "user", "content": secret}
    question = {"role": "user", "content": "Say how many crates there are. " + "Think about each hall first. " * 12}
    asked = [*messages, note, question]
    answer = ask_as(client, "scratch-1", asked, scratch=[{"message": len(messages)}])
    told = answer.model_extra["ropewalk"]
    assert told["fallbacks"] == []
    assert told["lineage"].startswith("scratch/")
    url = f"{cluster.endpoint}/sessions/scratch-1"

    def is_noted() -> bool:
        held = httpx.get(url).json()["branches"][0]["num_tokens"]
        return bool(held < answer.usage.prompt_tokens - 100)

    assert eventually(is_noted), "the history is the one without the scratch"
    ids = httpx.post(
        f"{cluster.endpoint.removesuffix('/v1')}/tokenize", json={"prompt": secret, "add_special_tokens": False}
    ).json()["tokens"]
    needle = as_tokens(ids[20:28]).tobytes()
    files = [path for path in Path(cluster.store_root).rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not any(needle in path.read_bytes() for path in files)
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    following = ask_as(client, "scratch-1", [*messages, question, said, {"role": "user", "content": "Sure?"}])
    assert following.model_extra["ropewalk"]["tokens"]["spliced"] > 40
    assert following.model_extra["ropewalk"]["fallbacks"] == []
    # Kept, it is a text like any other, which nobody has computed yet.
    kept = ask_as(client, "scratch-2", asked, edits="forget").usage.prompt_tokens_details.cached_tokens
    assert kept <= told["tokens"]["exact"] + 64


@pytest.mark.parametrize(
    ("scratch", "param"),
    [
        ([{"message": 9}], "ropewalk.scratch[0]"),
        ([{"start": 5, "end": 90_000}], "ropewalk.scratch[0]"),
        ([{"start": 40, "end": 60}, {"start": 50, "end": 70}], "ropewalk.scratch[1]"),
        ([{"start": 40}], "ropewalk.scratch[0].end"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_scratch_that_is_not_there_is_a_400(client: openai.OpenAI, scratch: Any, param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask_as(client, "scratch-3", agent_turns(41, 1), {"stream": stream}, scratch=scratch)
    assert refused.value.param == param


def test_spans_of_another_prompt_than_the_one_that_is_served_are_refused(client: openai.OpenAI) -> None:
    """vLLM cuts this prompt on the left, so that every span would name other tokens."""
    for field in ({"scratch": [{"message": 3}]}, {"directives": [{"span": {"start": 60, "end": 80}}]}):
        with pytest.raises(openai.BadRequestError, match="rendered otherwise"):
            ask_as(client, "scratch-4", agent_turns(42, 1), {"truncate_prompt_tokens": 100}, **field)


def test_a_batch_of_prompts_has_no_spans(client: openai.OpenAI) -> None:
    for field in ({"scratch": [{"start": 1, "end": 2}]}, {"directives": [{"span": {"start": 40, "end": 41}}]}):
        with pytest.raises(openai.BadRequestError, match="single prompt"):
            client.completions.create(
                model=MODEL, prompt=["One. " * 40, "Two. " * 40], max_tokens=1, extra_body={"ropewalk": field}
            )


def test_a_session_that_nobody_knows_cannot_be_deleted_or_purged(cluster: LocalCluster) -> None:
    url = f"{cluster.endpoint}/sessions/nobody"
    for answer in (httpx.delete(url), httpx.post(f"{url}/purge", json={"span": {"start": 0, "end": 5}})):
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "NotFoundError"
    missing = httpx.delete(f"{url}?model=nothing")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
