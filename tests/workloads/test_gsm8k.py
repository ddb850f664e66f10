import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.workloads.datasets import load_questions
from ropewalk.workloads.errors import WorkloadError
from ropewalk.workloads.programs.base import estimate_text_tokens, estimate_tokens
from ropewalk.workloads.programs.gsm8k import Gsm8kProgram, load_team

SAMPLE = load_questions("sample")


def program(**settings):
    return Gsm8kProgram(SAMPLE, **settings)


def recorded(session):
    return [turn.reply for turn in session.turns]


def rendered(made, index=0):
    session = made.session(index)
    return [made.messages(session, turn.index, recorded(session)) for turn in session.turns]


def test_every_row_of_the_transition_table_sums_to_one():
    team = load_team()
    assert set(team.transitions) == set(team.agents)
    for agent, row in team.transitions.items():
        assert sum(row.values()) == pytest.approx(1.0), agent
        assert set(row) <= set(team.agents)
        assert all(probability > 0 for probability in row.values())


def test_speakers_follow_the_table():
    made = program(turns=4000, seed=11)
    speakers = [turn.agent for turn in made.session(0).turns]
    assert speakers[0] == load_team().start
    pairs = Counter(itertools.pairwise(speakers))
    for agent, row in load_team().transitions.items():
        count = sum(n for (first, _), n in pairs.items() if first == agent)
        assert {second for first, second in pairs if first == agent} <= set(row)
        for successor, probability in row.items():
            # Five standard errors of a binomial share: the seed is fixed, so this is no gamble.
            margin = 5 * (probability * (1 - probability) / count) ** 0.5
            assert pairs[agent, successor] / count == pytest.approx(probability, abs=margin), (agent, successor)


def test_anchors_are_long_and_have_role_tools_and_examples():
    anchors = program().anchors
    assert len(anchors) == 6
    for name, anchor in anchors.items():
        assert 600 <= estimate_text_tokens(anchor) <= 1200, name
        assert anchor.startswith(f"# Your role: {name}")
        assert "# Examples" in anchor
        schemas = [json.loads(line) for line in anchor.splitlines() if line.startswith('{"type": "function"')]
        assert schemas
        for schema in schemas:
            assert schema["function"]["parameters"]["type"] == "object"


def test_no_anchor_repeats_a_line():
    lines = [line for text in (program().preamble, *program().anchors.values()) for line in text.splitlines()]
    prose = [line for line in lines if len(line) > 40 and not line.startswith("#")]
    assert len(prose) == len(set(prose))


@pytest.mark.parametrize("target", [150, 400, 700, 1200, 2000])
def test_anchor_length_can_be_chosen(target):
    for name, anchor in program(anchor_tokens=target).anchors.items():
        # A part is dropped or added whole, and the first one always stays.
        assert target * 0.3 <= estimate_text_tokens(anchor) <= target + 250, name


def test_anchors_are_the_same_for_all_seeds_and_longer_than_the_questions_allow_is_refused():
    assert program(anchor_tokens=1500, seed=1).anchors == program(anchor_tokens=1500, seed=2).anchors
    with pytest.raises(WorkloadError, match=r"anchor_tokens=50000.*at most"):
        program(anchor_tokens=50_000)


def test_all_prompts_of_an_agent_share_team_text_and_anchor_behind_the_header():
    made = program(turns=30)
    session = made.session(0)
    for turn, messages in zip(session.turns, rendered(made), strict=True):
        assert messages[0]["role"] == "system"
        assert messages[0]["content"] == f"{turn.header}\n\n{made.preamble}\n\n{made.anchors[turn.agent]}"


def test_headers_vary_as_asked():
    def headers(mode):
        made = program(turns=10, headers=mode)
        return [[turn.header for turn in made.session(index).turns] for index in range(3)]

    assert len(set(itertools.chain(*headers("turn")))) == 30
    assert [len(set(session)) for session in headers("session")] == [1, 1, 1]
    assert len({session[0] for session in headers("session")}) == 3
    assert set(itertools.chain(*headers("none"))) == {""}


def test_a_header_has_time_request_id_and_50_to_200_tokens_of_other_questions():
    turns = program(turns=40, seed=3).session(0).turns
    texts = {question.text for question in SAMPLE.questions} - {turn.opening for turn in turns}
    times = []
    for turn in turns:
        time, request, title, *snippets = turn.header.splitlines()
        times.append(re.fullmatch(r"Current time: (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)", time)[1])
        assert re.fullmatch(r"Request: [0-9a-f-]{36}", request)
        assert title == "Retrieved context:"
        found = [snippet.split("] ", 1)[1] for snippet in snippets]
        assert all(any(text.startswith(snippet) for text in texts) for snippet in found)
        assert 40 <= estimate_text_tokens("\n".join(found)) <= 200
    assert times == sorted(times)


def test_speakers_and_content_do_not_depend_on_the_header_mode():
    def content(mode):
        return [(turn.agent, turn.opening, turn.reply) for turn in program(headers=mode, turns=40).session(3).turns]

    assert content("turn") == content("session") == content("none")


def test_the_chat_begins_with_the_question_and_grows():
    made = program(turns=8, max_prompt_tokens=100_000, headers="none")
    session = made.session(0)
    replies = recorded(session)
    assert session.turns[0].opening in {question.text for question in SAMPLE.questions}
    for turn in session.turns:
        chat = "\n".join(message["content"] for message in made.messages(session, turn.index, replies)[1:])
        assert chat.startswith(f"[user] {session.turns[0].opening}")
        assert chat.endswith(f"[moderator] {turn.agent}, you speak next.")
        for past in session.turns[: turn.index]:
            assert past.reply in chat
        assert not any(f"[{turn.agent}]" in line for line in chat.splitlines())


def test_an_agents_next_prompt_extends_its_last_one_when_headers_do_not_vary():
    made = program(turns=12, max_prompt_tokens=100_000, headers="none")
    session = made.session(1)
    compared = 0
    for first, second in itertools.combinations(session.turns, 2):
        if first.agent == second.agent:
            shorter, longer = (
                "".join(f"<{message['role']}>{message['content']}" for message in messages)
                for messages in (made.messages(session, turn.index, recorded(session)) for turn in (first, second))
            )
            said = shorter.removesuffix(f"[moderator] {first.agent}, you speak next.")
            assert longer.startswith(said.removesuffix("\n\n").removesuffix("<user>"))
            compared += 1
    assert compared > 5


def test_a_new_question_comes_when_the_planner_follows_an_answer():
    made = program(turns=300)
    turns = made.session(0).turns
    answered = False
    questions = 0
    for turn in turns:
        new = turn.index == 0 or (turn.agent == "planner" and answered)
        assert (turn.opening is not None) == new
        questions += new
        answered = (answered and not new) or turn.agent == "answerer"
    assert questions > 5


def test_answers_and_calculations_come_from_the_worked_solution():
    by_text = {question.text: question for question in SAMPLE.questions}
    made = program(turns=100)
    current = None
    kinds = Counter()
    for turn in made.session(2).turns:
        current = by_text[turn.opening] if turn.opening else current
        calculations = dict(pair for step in current.steps for pair in step.calculations)
        if turn.agent == "answerer":
            assert turn.reply.endswith(f"#### {current.final}")
            kinds["answer"] += 1
        for expression, result in re.findall(r"<<([^=]+)=([^>]+)>>", turn.reply):
            assert calculations[expression] == result
            kinds["calculation"] += 1
        if turn.agent == "solver" and "All steps done, the" not in turn.reply:
            assert any(step.sentence in turn.reply for step in current.steps)
            kinds["step"] += 1
        if turn.agent == "executor" and "step_1 =" in turn.reply:
            code = turn.reply.split("```python\n")[1].split("\n```")[0]
            ran = {"print": lambda *_: None}
            exec(code, ran)
            computed = [value for name, value in ran.items() if name.startswith("step_")]
            shown = re.search(r"stdout: (.*)", turn.reply)[1].split()
            assert [float(value) for value in shown] == pytest.approx(computed)
            kinds["program"] += 1
    assert min(kinds.values()) > 3
    assert set(kinds) == {"answer", "calculation", "step", "program"}


def test_user_and_assistant_alternate_because_many_chat_templates_insist():
    for index in range(5):
        for messages in rendered(program(turns=40, max_prompt_tokens=1700), index):
            roles = [message["role"] for message in messages]
            assert roles[0] == "system"
            assert roles[1] == roles[-1] == "user"
            assert all(first != second for first, second in itertools.pairwise(roles))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), limit=st.integers(1650, 4000), mode=st.sampled_from(["turn", "session", "none"]))
def test_prompts_stay_under_the_limit_and_keep_the_question_and_the_latest_message(seed, limit, mode):
    made = program(seed=seed, turns=40, max_prompt_tokens=limit, headers=mode)
    session = made.session(0)
    replies = [f"reply-{turn.index}. {turn.reply}" for turn in session.turns]
    question = None
    for turn in session.turns:
        question = turn.opening or question
        messages = made.messages(session, turn.index, replies)
        assert estimate_tokens(messages) <= limit
        chat = "\n".join(message["content"] for message in messages[1:])
        assert question in chat
        kept = [past for past in range(turn.index) if f"reply-{past}. " in chat]
        assert kept == list(range(turn.index - len(kept), turn.index))
        whole = program(seed=seed, turns=40, max_prompt_tokens=10**6, headers=mode).messages(
            session, turn.index, replies
        )
        assert (messages == whole) == (estimate_tokens(whole) <= limit)


def test_a_limit_that_the_instructions_exceed_is_refused():
    made = program(max_prompt_tokens=500)
    with pytest.raises(WorkloadError, match=r"max_prompt_tokens=500: .*'planner' alone take about"):
        made.messages(made.session(0), 0, [])


def test_live_replies_take_the_place_of_recorded_ones():
    made = program(turns=4, headers="none")
    session = made.session(0)
    chat = json.dumps(made.messages(session, 3, ["first live", "second live", "third live"]))
    assert all(word in chat for word in ("first live", "second live", "third live"))
    assert session.turns[1].reply not in chat
    with pytest.raises(ValueError, match="needs 3 replies"):
        made.messages(session, 3, ["only one"])


def test_a_session_is_a_function_of_seed_and_index_and_more_turns_only_extend_it():
    random.seed(1)
    first = program(seed=4, turns=10).session(2)
    random.seed(2)
    assert program(seed=4, turns=10).session(2) == first
    assert program(seed=4, turns=25).session(2).turns[:10] == first.turns
    assert program(seed=5, turns=10).session(2).turns != first.turns
    assert program(seed=4, turns=10).session(3).turns != first.turns


def test_the_documented_transition_table_is_the_one_in_use():
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in page.splitlines() if "|" in line]
    columns = next(row for row in rows if row[1:2] == ["planner"])[1:]
    table = {
        row[0].strip("*"): {agent: float(cell) for agent, cell in zip(columns, row[1:], strict=True) if cell}
        for row in rows
        if row[0].startswith("**")
    }
    assert table == load_team().transitions
