"""Rules of eviction: what each keeps, and what they learn."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.scheduler.foresight import (
    END,
    MAX_RENEWED,
    NEWCOMERS,
    SILENCE,
    STALE_AFTER,
    Foresight,
    Pauses,
    SessionEnds,
)
from ropewalk.scheduler.retention import MAX_AGENTS, Anchors, FirstOrder, Retention, TtlPin
from ropewalk.scheduler.rules import RULES

PIPELINE = ("plan", "search", "write", "check")


def play(rule: Retention, sessions: dict[str, list[str]], pause_s: float = 1.0) -> float:
    """One turn of each session after the other; return the time of the last one."""
    now_s = 0.0
    for turn in range(max(map(len, sessions.values()))):
        for session, agents in sessions.items():
            if turn < len(agents):
                now_s += pause_s / len(sessions)
                use(rule, session, agents[turn], now_s)
    return now_s


def use(rule: Retention, session: str, agent: str, now_s: float) -> None:
    rule.begin(session, agent, now_s)
    rule.used(session, agent, ["all", f"{agent}", f"{session}/{agent}"])


def test_plain_lru_gives_up_what_was_used_longest_ago_and_the_end_of_a_prompt_first():
    rule = Retention()
    use(rule, "s", "a", 0.0)
    use(rule, "s", "b", 1.0)
    assert rule.victims(["all", "a", "b", "s/a", "s/b", "unknown"], 6) == ["unknown", "s/a", "a", "s/b", "b", "all"]


def test_a_pin_lasts_for_its_time():
    rule = TtlPin(0.3)
    use(rule, "s", "a", 0.0)
    use(rule, "t", "b", 0.25)
    rule.begin("u", "c", 0.4)
    assert rule.victims(["s/a", "t/b"], 1) == ["s/a"]
    assert rule.rank("t/b")[0] == 1.0
    rule.begin("u", "c", 0.6)
    assert rule.rank("t/b")[0] == 0.0


@pytest.mark.parametrize("make", [Anchors, FirstOrder, Foresight])
def test_what_several_sessions_use_outlives_what_one_does(make):
    rule = make()
    play(rule, {f"s{n}": list(PIPELINE) * 3 for n in range(4)})
    for agent in PIPELINE:
        assert rule.rank(agent) > rule.rank(f"s0/{agent}")


def test_an_anchor_that_is_needed_soon_outlives_one_that_is_not():
    """The paper's rule and ours; protecting all anchors alike goes by the last use alone."""
    sessions = {f"s{n}": list(PIPELINE) * 5 for n in range(4)}
    for rule in (FirstOrder(), Foresight()):
        now_s = play(rule, sessions)
        for n in range(4):  # all stand at `plan`: `search` is next, `check` last
            use(rule, f"s{n}", "plan", now_s + 0.1 * n)
        assert rule.rank("search")[0] > rule.rank("write")[0] > rule.rank("check")[0]


def test_of_one_session_the_history_that_its_next_agent_will_read_outlives_the_others():
    rule = Foresight()
    now_s = play(rule, {f"s{n}": list(PIPELINE) * 5 for n in range(4)})
    use(rule, "s1", "plan", now_s + 0.1)
    ranks = [rule.rank(f"s1/{agent}") for agent in ("search", "write", "check", "plan")]
    assert ranks == sorted(ranks, reverse=True)


def test_what_would_be_used_behind_the_usual_end_of_a_session_is_worth_less():
    """Sessions of four turns: behind the third, nobody waits for the turn that would be the sixth."""
    rule = Foresight()
    for number in range(30):
        now_s = play(rule, {f"s{number}": list(PIPELINE)}) + number * 100.0
        rule.end(f"s{number}")
    for turn, agent in enumerate(PIPELINE[:3]):
        use(rule, "s", agent, now_s + turn)
    rule._sum_up()
    lasts = rule._lasts(3)
    assert lasts[0] == 1.0
    assert lasts[1] < 0.1
    assert lasts == sorted(lasts, reverse=True)


@pytest.mark.parametrize("is_told", [False, True])
def test_what_only_an_ended_session_used_is_worth_nothing(is_told):
    rule = Foresight()
    now_s = play(rule, {f"s{n}": list(PIPELINE) * 5 for n in range(4)})
    if is_told:
        rule.end("s0")
        use(rule, "s1", "plan", now_s + 0.1)
    else:
        for turn in range(40):
            use(rule, "s1", PIPELINE[turn % 4], now_s + 1.0 + turn)
        assert now_s + 40 > SILENCE * rule.pauses.mean_s
    assert rule.rank("s0/search")[0] == 0.0
    assert rule.rank("s1/search")[0] > 0.0


def test_a_session_that_comes_back_behind_a_long_silence_is_one_again():
    rule = Foresight()
    now_s = play(rule, {"s": list(PIPELINE) * 5, "t": list(PIPELINE) * 5})
    for turn in range(60):
        use(rule, "t", PIPELINE[turn % 4], now_s + 1.0 + turn)
    use(rule, "s", "plan", now_s + 70.0)
    use(rule, "t", "plan", now_s + 70.5)
    assert rule.rank("s/search")[0] > 0.0


def test_where_nothing_is_foreseen_what_was_used_last_stays():
    rule, plain = Foresight(), Retention()
    blocks = []
    for turn in range(40):  # an agent for every turn
        for which in (rule, plain):
            use(which, f"s{turn % 4}", f"a{turn}", float(turn))
        blocks += [f"s{turn % 4}/a{turn}"]
    assert rule._surprise > 0.9
    assert rule.victims(blocks, 20) == plain.victims(blocks, 20)


def test_how_sessions_end_is_learned_from_their_agents_and_from_how_long_they_are():
    by_agents, by_length = Foresight(), Foresight()
    for n in range(60):
        for turn, agent in enumerate(["ask", "try"] * (2 + n % 3) + ["done"]):
            by_agents.begin(f"s{n}", agent, 10.0 * n + turn)
        by_agents.end(f"s{n}")
        for turn in range(5):
            by_length.begin(f"s{n}", random.Random(n + turn).choice("abc"), 10.0 * n + turn)
        by_length.end(f"s{n}")
    by_agents.begin("x", "ask", 700.0)
    for turn in range(5):
        by_length.begin("x", "a", 700.0 + turn)
        assert (by_length._live["x"].p_end > 0.8) == (turn == 4)
    assert by_agents._live["x"].p_end < 0.1
    by_agents.begin("x", "done", 701.0)
    assert by_agents._live["x"].p_end > 0.8


def test_the_share_of_longer_pauses_falls_and_the_rest_is_never_nothing():
    pauses = Pauses()
    rng = random.Random(1)
    drawn = [rng.expovariate(0.5) for _ in range(4000)]
    for pause in drawn:
        pauses.add(pause)
    assert pauses.mean_s == pytest.approx(sum(drawn) / len(drawn), rel=0.15)
    shares = [pauses.longer(seconds)[0] for seconds in (0.0, 1.0, 2.0, 5.0, 20.0, 1e6)]
    assert shares == sorted(shares, reverse=True)
    assert pauses.longer(2.0)[0] == pytest.approx(sum(pause > 2.0 for pause in drawn) / len(drawn), abs=0.1)
    assert all(pauses.longer(seconds)[1] > 0 for seconds in (0.0, 1.0, 20.0, 1e6))


def test_requests_without_a_session_say_nothing_of_how_sessions_go_on():
    rule = Foresight()
    now_s = play(rule, {"s": list(PIPELINE) * 5, "t": list(PIPELINE) * 5})
    for turn in range(60):
        rule.begin(None, "plan", now_s + 0.01 * turn)
    rule.begin("u", "plan", now_s + 1.0)
    assert rule._live["u"].p_end < 0.2
    assert FirstOrder().begin(None, "plan", 0.0) is None


@pytest.mark.parametrize("num_sessions", [3, 40])
def test_an_anchors_rate_is_the_sum_over_its_sessions(num_sessions):
    rule = Foresight()
    play(rule, {f"s{n}": list(PIPELINE)[: 2 + n % 3] * 3 for n in range(num_sessions)})
    rule._sum_up()
    elapsed = rule._began[-1] - rule._began[0]
    seen = rule._learner.counts(())
    for agent in PIPELINE:
        own = sum(rule._own_rates(session)[1].get(agent, 0.0) for session in rule._live)
        background = NEWCOMERS * (len(rule._began) - 1) / elapsed * seen[agent] / sum(seen.values())
        assert rule._rates[agent] == pytest.approx(own + background)


def test_old_outlooks_are_computed_anew_a_few_at_a_time(monkeypatch):
    rule, rng = Foresight(), random.Random(3)
    for turn in range(400):
        rule.begin(f"s{turn % 60}", rng.choice("abcde"), turn / 60)
    rule._sum_up()
    for turn in range(STALE_AFTER + 60):
        rule.begin(f"s{turn % 60}", rng.choice("abcde"), 7 + turn / 60)
    computed = []
    goes_on = rule._goes_on
    monkeypatch.setattr(rule, "_goes_on", lambda past: computed.append(past) or goes_on(past))
    known = {past: made for past, (made, _) in rule._outlooks.items()}
    rule._sum_up()
    renewed = [past for past, (made, _) in rule._outlooks.items() if known.get(past, made) != made]
    assert len(renewed) == MAX_RENEWED
    assert computed
    rule._sum_up()
    assert sum(known.get(past, made) != made for past, (made, _) in rule._outlooks.items()) > MAX_RENEWED


def test_a_predictor_of_ends_that_is_wrong_loses_its_say():
    ends = SessionEnds()
    for number in range(300):
        ends.observe(0.9, 1 + number % 9, ended=False)
    assert ends.probability(0.9, 3) < 0.1


def test_without_names_a_session_is_expected_to_go_on():
    rule = Foresight()
    for turn in range(10):
        for session in ("s", "t"):
            use(rule, session, "", turn + 0.5 * (session == "t"))
    assert rule.rank("s/")[0] > 0.0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(RULES)),
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from("abcd"), st.floats(0, 5), st.booleans()), min_size=1, max_size=80
    ),
)
def test_any_turns_leave_an_order_of_all_blocks(name, turns):
    rule = RULES[name](max_blocks=40)
    now_s, blocks = 0.0, set()
    for session, agent, pause_s, ends in turns:
        now_s += pause_s
        use(rule, f"s{session}", agent, now_s)
        blocks |= {"all", agent, f"s{session}/{agent}"}
        if ends:
            rule.end(f"s{session}")
    order = rule.victims(sorted(blocks), len(blocks))
    assert sorted(order) == sorted(blocks)
    assert [rule.rank(block) for block in order] == sorted(rule.rank(block) for block in blocks)
    assert len(rule._uses) <= 40


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=60))
def test_an_outlook_is_of_probabilities(agents):
    rule = Foresight()
    for turn, agent in enumerate(agents):
        rule.begin("s", agent, float(turn))
    outlook = rule._outlook(rule._live["s"].past)
    for times in outlook.values():
        assert [turns for turns, _ in times] == sorted({turns for turns, _ in times})
        assert all(p >= 0 for _, p in times)
        assert sum(p for _, p in times) <= 1 + 1e-9
    assert END not in outlook


@pytest.mark.parametrize("name", ["anchors", "first-order", "foresight"])
def test_a_prewarmed_anchor_is_worth_what_it_would_be_had_sessions_used_it_and_nothing_is_learned(name):
    rule, same = RULES[name](), RULES[name]()
    for each in (rule, same):
        play(each, {f"s{number}": list(PIPELINE) * 3 for number in range(4)})
    turns = rule.num_turns
    rule.used(None, "check", ["warm"])
    assert rule.num_turns == turns
    for session in ("x", "y"):
        same.used(session, "check", ["warm"])
    assert rule.worth(rule._uses["warm"]) == pytest.approx(same.worth(same._uses["warm"]))
    assert rule.worth(rule._uses["warm"]) > 0


@pytest.mark.parametrize("make", [Foresight, FirstOrder])
def test_agents_that_are_named_anew_for_each_task_are_forgotten(make: type[Foresight | FirstOrder]) -> None:
    rule = make()
    for number in range(2 * MAX_AGENTS):
        rule.begin(f"s{number}", f"worker-{number}", float(number))
        rule.used(f"s{number}", f"worker-{number}", ["shared"])
    assert len(rule._learner.agents) <= MAX_AGENTS + 1, "and the end of a session"
    assert len(rule._uses["shared"].agents) <= MAX_AGENTS
