"""Server-side policies on conversations with tools."""

import json

import pytest

from ropewalk.agents.policies import CLEARED_RESULT, ClearToolUses, Policy, TruncateOlderThan, load_policy, turn_of


def conversation(num_uses, size=100):
    messages = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "Fix it."}]
    for number in range(num_uses):
        function = {"name": "read" if number % 2 else "search", "arguments": json.dumps({"n": number})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": str(number) * size})
    return messages


def cleared(messages):
    return [m["tool_call_id"] for m in messages if m["role"] == "tool" and m["content"] == CLEARED_RESULT]


def clear(messages, **settings):
    policy = ClearToolUses(**{"count": len, "num_prompt_tokens": 10_000, "trigger_tokens": 5000, **settings})
    return policy, policy.transform(messages, turn_of(messages))


def test_all_but_the_last_results_are_cleared_once_the_prompt_is_long():
    messages = conversation(6)
    policy, out = clear(messages, keep=2)
    assert cleared(out) == ["c0", "c1", "c2", "c3"]
    assert policy.cleared_uses == 4
    assert policy.cleared_tokens == 4 * (100 - len(CLEARED_RESULT))
    assert [m for m in out if m["role"] != "tool"] == [m for m in messages if m["role"] != "tool"]
    assert cleared(messages) == []


def test_nothing_happens_before_the_trigger():
    messages = conversation(6)
    assert clear(messages, num_prompt_tokens=5000)[1] == messages
    assert clear(messages, trigger_tokens=None, trigger_uses=6)[1] == messages
    assert cleared(clear(messages, trigger_tokens=None, trigger_uses=5, keep=5)[1]) == ["c0"]


def test_what_is_excluded_stays_and_too_little_is_not_worth_it():
    messages = conversation(6)
    assert cleared(clear(messages, keep=0, exclude_tools=("read",))[1]) == ["c0", "c2", "c4"]
    assert clear(messages, keep=5, clear_at_least=200)[1] == messages
    assert cleared(clear(messages, keep=4, clear_at_least=100)[1]) == ["c0", "c1"]


def test_inputs_of_cleared_calls_are_cleared_on_demand():
    out = clear(conversation(3), keep=1, clear_tool_inputs=True)[1]
    arguments = [m["tool_calls"][0]["function"]["arguments"] for m in out if m.get("tool_calls")]
    assert arguments == ["{}", "{}", '{"n": 2}']


def test_old_results_are_cut_and_young_ones_are_not():
    out = TruncateOlderThan(turns=2, max_chars=10).transform(conversation(4), 4)
    assert [len(m["content"]) for m in out if m["role"] == "tool"] == [10, 10, 100, 100]


def test_users_policies_are_loaded_by_import_path():
    policy = load_policy("tests.agents.test_policies:Shout")
    assert policy.transform([{"role": "user", "content": "a"}], 0) == [{"role": "user", "content": "A"}]
    assert isinstance(policy, Policy)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "module:name"),
        ("no_such_module:Policy", "cannot be imported"),
        ("tests.agents.test_policies:missing", "cannot be imported"),
        ("tests.agents.test_policies:CLEARED_RESULT", "no transform"),
    ],
)
def test_a_policy_that_is_none_is_refused(path, message):
    with pytest.raises(ValueError, match=message):
        load_policy(path)


class Shout:
    def transform(self, messages, turn):
        return [{**message, "content": message["content"].upper()} for message in messages]
