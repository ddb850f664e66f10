"""The `ropewalk` field and headers of a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.cluster.engine.request import RequestSettings
from ropewalk.cluster.serve.hints import request_hints
from ropewalk.cluster.serve.settings import RequestRefused, peek_session, read_settings


def settings_of(field: Any = None, headers: dict[str, str] | None = None, **extra: Any) -> RequestSettings:
    reserved = {name: extra.pop(name, None) for name in ("kv_transfer_params", "cache_salt")}
    return read_settings({"ropewalk": field, **extra}, reserved, headers or {}, "exact")


def refusal_of(field: Any = None, headers: dict[str, str] | None = None, **extra: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as raised:
        settings_of(field, headers, **extra)
    assert raised.value.error()["code"] == 400
    return raised.value


def test_a_request_without_the_field_gets_the_model_s_default_mode() -> None:
    settings = read_settings({}, {}, {}, "reuse")
    assert settings.mode == "reuse"
    assert (settings.session, settings.agent, settings.explain) == (None, None, False)


def test_the_field_says_session_agent_mode_and_explain() -> None:
    settings = settings_of({"session": "s-17", "agent": "coder", "reuse": "reuse", "explain": True})
    assert (settings.session, settings.agent, settings.mode, settings.explain) == ("s-17", "coder", "reuse", True)


def test_headers_serve_the_same_and_the_field_wins() -> None:
    headers = {"x-session-id": "from-header", "x-agent": "planner"}
    assert settings_of(headers=headers).session == "from-header"
    assert settings_of(headers=headers).agent == "planner"
    assert settings_of({"session": "from-field"}, headers).session == "from-field"


def test_each_request_has_a_key_of_its_own() -> None:
    assert settings_of().key != settings_of().key


@pytest.mark.parametrize("name", ["kv_transfer_params", "cache_salt"])
@pytest.mark.parametrize("value", [{"remote_block_ids": [1]}, {}, "salt", ""])
def test_fields_that_name_cached_kv_are_refused(name: str, value: Any) -> None:
    refused = refusal_of(**{name: value})
    assert refused.param == name
    assert name in refused.message


def test_an_unknown_key_is_refused_and_the_known_ones_are_listed() -> None:
    refused = refusal_of({"sesion": "s"})
    assert refused.param == "ropewalk.sesion"
    assert "session" in refused.message


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"reuse": "always"}, "ropewalk.reuse"),
        ({"session": ""}, "ropewalk.session"),
        ({"session": 5}, "ropewalk.session"),
        ({"agent": "x" * 257}, "ropewalk.agent"),
        ({"explain": "perhaps"}, "ropewalk.explain"),
        ({"edits": "drop"}, "ropewalk.edits"),
        ("s-17", "ropewalk"),
        ([], "ropewalk"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_field(field: Any, param: str) -> None:
    assert refusal_of(field).param == param


def test_edits_may_be_said_or_left_to_the_model() -> None:
    assert settings_of({"edits": "amortize"}).edits == "amortize"
    assert settings_of().edits is None
    assert read_settings({}, {}, {}, "exact", "amortize").edits == "amortize"
    assert read_settings({"ropewalk": {"edits": "forget"}}, {}, {}, "exact", "amortize").edits == "forget"


def test_a_header_that_is_too_long_is_refused() -> None:
    assert refusal_of(headers={"x-session-id": "x" * 257}).param == "x-session-id"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_routers_may_peek_at_any_field(field: Any) -> None:
    session, agent = peek_session({"ropewalk": field}, {})
    assert session is None or isinstance(session, str)
    assert agent is None or isinstance(agent, str)


def test_what_a_router_sees_is_what_the_server_reads() -> None:
    field, headers = {"session": "s", "reuse": "exact"}, {"x-agent": "planner"}
    settings = settings_of(field, headers)
    assert peek_session({"ropewalk": field}, headers) == (settings.session, settings.agent)


@pytest.mark.parametrize(
    ("fields", "num_chars"),
    [
        ({"messages": [{"content": "abc"}, {"content": None}, {"content": "de"}]}, 5),
        ({"messages": [{"content": [{"type": "text", "text": "abc"}, {"type": "image_url"}, "odd"]}]}, 3),
        ({"prompt": "abcd"}, 4),
        ({"prompt": ["abcd", "e"]}, 4),
        ({"prompt": [1, 2, 3]}, 12),
        ({"prompt": [[1, 2], [3]]}, 8),
        ({"prompt": []}, 0),
    ],
)
def test_how_long_a_prompt_is_about(fields: dict[str, Any], num_chars: int) -> None:
    assert request_hints(SimpleNamespace(**fields), {}).num_prompt_chars == num_chars
