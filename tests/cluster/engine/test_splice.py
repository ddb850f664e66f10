"""Splices on real engines: an edited history is served from the session's rows, turned, and from nobody else's."""

import asyncio
import random
from itertools import count

import pytest

from ropewalk.agents.directives import Span
from ropewalk.cluster.bench.engine import Engine
from ropewalk.cluster.bench.statistics import divergence
from ropewalk.cluster.engine.request import PARAMS_KEY, RequestSettings
from ropewalk.kernels.keys import as_tokens
from ropewalk.workloads.recall.vocabulary import vocabulary

from .prompts import body_and_headers, english, prompt

pytestmark = pytest.mark.engine

MODELS = {
    "smollm2": ("smollm2-135m", {"dtype": "bfloat16"}),
    "recall-mla": ("recall-mla", {"dtype": "bfloat16"}),
    "recall-mla-reference": ("recall-mla", {"dtype": "bfloat16", "attention_backend": "CPU_MLA"}),
}
SINK = 32
SLACK = 40
"""Tokens of a run that may be computed: up to a block's end."""

_sessions = count()


@pytest.fixture(scope="module", params=MODELS)
def case(request, start_engines, new_store):
    model, arguments = MODELS[request.param]
    return model, *start_engines(model, new_store(), settings={"min_run": 48}, **arguments)


class Session:
    """Asks as one session, each time with whatever else is given."""

    def __init__(self, engine: Engine, **settings) -> None:
        self.engine, self.name, self.settings = engine, f"session {next(_sessions)}", settings

    def ask(self, tokens, **settings):
        answer = self.engine.ask(
            tokens, session=self.name, **{"max_tokens": 2, "ignore_eos": True, **self.settings, **settings}
        )
        self.engine.settle()
        return answer


def text(model: str, rng: random.Random, num_tokens: int) -> list[int]:
    """Exactly so many tokens, whatever they say."""
    return rng.choices(vocabulary().fillers, k=num_tokens) if model == "recall-mla" else english(rng, num_tokens)


def edited(tokens, *edits):
    """Tokens with `(start, end, replacement)` carried out."""
    for start, end, replacement in sorted(edits, reverse=True):
        tokens = [*tokens[:start], *replacement, *tokens[end:]]
    return tokens


def test_a_replaced_span_costs_itself_and_what_follows_is_turned(case):
    model, engine = case
    body, make_header, questions = body_and_headers(model, random.Random(1), 1200)
    session = Session(engine, edits="amortize")
    tokens = [*make_header(100), *body]
    session.ask([*tokens, *questions[0]])
    stub = text(model, random.Random(2), 12)
    answer = session.ask([*edited(tokens, (200, 500, stub)), *questions[1]])
    assert answer.report.fallbacks == []
    assert answer.report.tokens["spliced"] >= 800 - SLACK
    assert answer.report.tokens["exact"] >= 160
    assert {p.turn for p in answer.report.plan if p.source == "splice"} == {12 - 300}


@pytest.mark.parametrize(
    "edits",
    [
        [(32, 400, 0)],  # right behind the sink, nothing in its place
        [(300, 300, 90)],  # insertion
        [(301, 333, 64)],  # growth
        [(150, 250, 5), (500, 620, 200), (900, 901, 1)],
        [(1150, 1290, 3)],  # nearly at the end
    ],
)
def test_edits_of_every_kind_leave_what_they_do_not_touch(case, edits):
    model, engine = case
    rng = random.Random(3)
    tokens = prompt(model, rng, 1300)
    session = Session(engine, edits="amortize")
    session.ask(tokens)
    changes = [(start, end, text(model, rng, length)) for start, end, length in edits]
    asked = [*edited(tokens, *changes), *text(model, rng, 20)]
    answer = session.ask(asked)
    behind = [b - a for (_, a, _), (b, _, _) in zip(edits, [*edits[1:], (1300, 0, 0)], strict=True)]
    expected = sum(length - SLACK for length in behind if length >= 96)
    assert answer.report.tokens["spliced"] >= expected
    assert sum(answer.report.tokens.values()) == len(asked)


def test_edits_of_edits_turn_each_row_once_from_where_it_was_computed(case):
    model, engine = case
    rng = random.Random(4)
    tokens = prompt(model, rng, 1300)
    session = Session(engine, edits="amortize")
    session.ask(tokens)
    for number in range(1, 6):
        tokens = edited(tokens, (200, 260, text(model, rng, 20)))
        answer = session.ask([*tokens, *text(model, rng, 8)])
        tail = max((p for p in answer.report.plan if p.source == "splice"), key=lambda p: p.end - p.start)
        assert tail.turn == -40 * number
        assert answer.report.tokens["spliced"] >= 1300 - 200 - 60 * number - SLACK


def test_directives_and_edited_tokens_say_the_same(case):
    model, engine = case
    rng = random.Random(5)
    tokens, stub, end = prompt(model, rng, 900), text(model, rng, 10), text(model, rng, 20)
    # Tenants of their own: what is exact would be found.
    by_client, by_server = Session(engine, edits="amortize", tenant="c"), Session(engine, tenant="s")
    for session in (by_client, by_server):
        session.ask(tokens)
    one = by_client.ask([*edited(tokens, (300, 420, stub)), *end])
    two = by_server.ask([*tokens, *end], directives=[[300, 420, stub, "amortize"]])
    assert one.token_ids == two.token_ids
    assert one.report.tokens == two.report.tokens
    assert two.report.tokens["spliced"] >= 480 - SLACK
    assert two.report.num_prompt_tokens == 900 - 110 + len(end)


def test_nobody_else_is_served_what_a_splice_left(case):
    model, engine = case
    rng = random.Random(6)
    tokens, end = prompt(model, rng, 900), text(model, rng, 20)
    session = Session(engine, edits="amortize")
    session.ask(tokens)
    asked = [*edited(tokens, (200, 500, text(model, rng, 9))), *end]
    spliced = session.ask(asked, max_tokens=40)
    assert spliced.report.tokens["spliced"] > 300
    following = [*asked, *spliced.token_ids, *end]
    for number, asks in enumerate(({}, {"edits": "amortize"}, {"edits": "forget"})):
        # Each goes on from the splice with another word, or it would find what the one before has computed.
        answer = Session(engine, **asks).ask([*asked, *spliced.token_ids, number, *end])
        assert answer.report.tokens["spliced"] == answer.report.tokens["reused"] == 0
        assert number or answer.num_cached <= 200 + 9 + SLACK
    alone = engine.ask(following, tenant="fresh", max_tokens=1, logprobs=True)
    answer = engine.ask(following, max_tokens=1, logprobs=True)
    assert divergence(alone.first_logprobs, answer.first_logprobs) < 0.02


def test_the_next_turn_goes_on_from_the_splice(case):
    model, engine = case
    rng = random.Random(7)
    tokens = prompt(model, rng, 900)
    session = Session(engine, edits="amortize")
    session.ask(tokens)
    asked = [*edited(tokens, (200, 500, text(model, rng, 9))), *text(model, rng, 20)]
    first = session.ask(asked, max_tokens=60)
    answer = session.ask([*asked, *first.token_ids, *text(model, rng, 20)])
    assert answer.report.fallbacks == []
    assert answer.num_cached >= len(asked) + 59 - SLACK
    # A retry of the turn before is there, too, and so is the history before the edit.
    assert session.ask([*asked, *text(model, rng, 20)]).num_cached >= len(asked) - SLACK
    assert session.ask([*tokens, *text(model, rng, 20)]).report.tokens["exact"] >= len(tokens) - SLACK


def test_a_forget_serves_nothing_that_was_computed_behind_the_removed_text(case):
    model, engine = case
    rng = random.Random(8)
    tokens, end = prompt(model, rng, 900), text(model, rng, 20)
    session = Session(engine, mode="reuse", edits="amortize")
    session.ask(tokens)
    answer = session.ask([*tokens, *end], edits=None, directives=[[200, 300, [], "forget"]])
    assert answer.report.tokens["spliced"] == answer.report.tokens["reused"] == 0
    assert answer.num_cached <= 200
    later = session.ask([*edited(tokens, (200, 300, [])), *end, *answer.token_ids, *end])
    assert later.report.tokens["spliced"] == later.report.tokens["reused"] == 0
    assert "forgotten" in later.report.fallbacks


def test_an_edit_of_what_the_model_has_said_is_spliced_as_any_other(case):
    model, engine = case
    rng = random.Random(13)
    tokens = prompt(model, rng, 300)
    session = Session(engine, edits="amortize")
    said = session.ask(tokens, max_tokens=140).token_ids
    edit = [310, 330, text(model, rng, 5), "amortize"]  # a small model repeats itself: comparing would find too much
    answer = session.ask([*tokens, *said, *text(model, rng, 20)], directives=[edit])
    assert answer.report.tokens["spliced"] >= 109 - SLACK
    assert {part.turn for part in answer.report.plan if part.source == "splice"} == {-15}


def test_an_edit_beside_a_running_request_of_the_session_touches_neither(case):
    model, engine = case
    rng = random.Random(14)
    tokens, end, stub = prompt(model, rng, 700), text(model, rng, 20), text(model, rng, 9)
    session = Session(engine, edits="amortize")
    session.ask(tokens)
    running = [*tokens, *end]
    changed = [*edited(tokens, (100, 300, stub)), *end]
    alone = engine.ask(running, tenant="never", max_tokens=1, logprobs=True)
    options = {"session": session.name, "edits": "amortize", "ignore_eos": True, "logprobs": True}
    long, short, later = engine.gather(
        [
            engine.ask_async(running, max_tokens=50, **options),
            engine.ask_async(changed, max_tokens=4, **options),
            engine.ask_async([*running, *end], max_tokens=4, **options),
        ]
    )
    assert long.report.tokens["spliced"] == later.report.tokens["spliced"] == 0
    assert short.report.tokens["spliced"] >= 400 - SLACK
    assert divergence(alone.first_logprobs, long.first_logprobs) < 0.02
    engine.settle()
    # All three histories are there to go on from.
    for before, answer in ((running, long), (changed, short), ([*running, *end], later)):
        following = session.ask([*before, *answer.token_ids, *end])
        assert following.num_cached >= len(before) - SLACK
        assert (following.report.tokens["spliced"] > 0) == (before is changed)


def test_scratch_is_attended_to_now_and_neither_stored_nor_found_nor_part_of_the_history(case):
    model, engine = case
    rng = random.Random(10)
    tokens, behind, end = prompt(model, rng, 700), text(model, rng, 120), text(model, rng, 20)
    scratch = text(model, rng, 60) if model == "recall-mla" else rng.sample(range(3000, 40_000), 60)
    asked = [*tokens, *scratch, *behind]
    session = Session(engine, edits="amortize")
    session.ask(tokens)
    told = session.ask(asked, scratch=[[700, 760]], max_tokens=40, logprobs=True)
    assert told.report.fallbacks == []
    assert told.report.tokens["exact"] >= 700 - SLACK
    needle = as_tokens(scratch[5:25]).tobytes()
    files = [path for path in engine.store_root.rglob("*") if path.is_file()]
    assert any(as_tokens(behind[40:60]).tobytes() in path.read_bytes() for path in files)
    assert not any(needle in path.read_bytes() for path in files)
    # The next turn goes on without it: what was said behind it is turned.
    following = session.ask([*tokens, *behind, *told.token_ids, *end])
    assert following.report.fallbacks == []
    assert following.report.tokens["spliced"] >= 120 + 39 - SLACK
    assert {part.turn for part in following.report.plan if part.source == "splice"} == {-60}
    # Nobody finds it: not by reuse elsewhere, not as exact KV, not the session itself.
    elsewhere = engine.ask([*text(model, rng, 40), *scratch, *end], mode="reuse", max_tokens=1, keep=False)
    assert elsewhere.report.tokens["reused"] == 0
    for number, asks in enumerate(({}, {"mode": "reuse"}, {"edits": "amortize", "session": session.name})):
        # What the one before has computed, as text like any other, is found.
        again = engine.ask([*tokens, *scratch[: 20 * (number + 1)], *end], **{"max_tokens": 1, **asks})
        assert again.num_cached <= 700 + 20 * number
    alone = engine.ask(asked, tenant="never", max_tokens=1, logprobs=True)
    assert divergence(alone.first_logprobs, told.first_logprobs) < 0.02


def test_what_saw_a_scratch_is_shared_with_nobody_even_after_an_edit_before_it(case):
    model, engine = case
    rng = random.Random(15)
    tokens, behind, end = prompt(model, rng, 300), text(model, rng, 200), text(model, rng, 20)
    session = Session(engine, edits="amortize")
    session.ask(tokens)
    session.ask([*tokens, *text(model, rng, 60), *behind], scratch=[[300, 360]])
    answer = session.ask([*edited([*tokens, *behind], (100, 140, text(model, rng, 5))), *end])
    assert answer.report.tokens["spliced"] >= 160 + 200 - 2 * SLACK
    verbs = engine.client.turns.verbs("default")
    engine.run(engine.client.turns.call(verbs.share, session.name, None))
    asked = engine.ask([*text(model, rng, 50), *behind, *end], mode="reuse", max_tokens=1)
    assert asked.report.tokens["reused"] == 0


@pytest.mark.parametrize("settings", [{}, {"edits": "forget"}, {"edits": "amortize", "mode": "reuse"}])
def test_scratch_of_an_exact_session_costs_what_follows_it_alone(case, settings):
    model, engine = case
    rng = random.Random(11)
    tokens, scratch, behind = prompt(model, rng, 400), text(model, rng, 60), text(model, rng, 200)
    session = Session(engine, **settings)
    session.ask(tokens)
    session.ask([*tokens, *scratch, *behind], scratch=[[400, 450], [455, 460]])
    following = session.ask([*tokens, *scratch[50:55], *behind])
    expected = 200 - SLACK if settings.get("edits") == "amortize" else 0
    assert following.report.tokens["spliced"] >= expected
    assert following.report.tokens["spliced"] == 0 or expected
    assert following.report.tokens["exact"] >= 400 - SLACK


def test_a_short_prompt_with_scratch_leaves_nothing(case):
    model, engine = case
    tokens = text(model, random.Random(12), 14)
    answer = engine.ask(tokens, scratch=[[4, 9]], max_tokens=60, ignore_eos=True)
    assert engine.ask([*tokens, *answer.token_ids], max_tokens=1).num_cached == 0
    answer = engine.ask(tokens, max_tokens=60, ignore_eos=True)
    assert engine.ask([*tokens, *answer.token_ids], max_tokens=1).num_cached > 30, "without scratch, it is found"


def in_files(engine: Engine, tokens: list[int]) -> bool:
    """Whether any file of the store holds these token ids in a row."""
    engine.settle()
    files = [path for path in engine.store_root.rglob("*") if path.is_file()]
    return any(as_tokens(tokens).tobytes() in path.read_bytes() for path in files)


def test_scratch_is_not_stored_either_where_plans_are_made_without_the_store(case, monkeypatch):
    model, engine = case
    rng = random.Random(16)
    tokens, scratch, behind = (text(model, rng, length) for length in (200, 60, 100))

    def unreadable(*args, **kwargs):
        raise OSError("the file system is gone")

    with monkeypatch.context() as patch:
        patch.setattr("ropewalk.cluster.engine.planning.make_plan", unreadable)
        asked = [*tokens, *scratch, *behind]
        answer = engine.ask(asked, scratch=[[200, 260]], max_tokens=4)
        assert answer.report.fallbacks == ["store_unreadable"]
        assert in_files(engine, tokens[100:120]), "what stands before it is stored"
        assert not in_files(engine, scratch[5:25])
        again = engine.ask(asked, max_tokens=1)
        assert again.num_cached <= 200, "nor is it in the prefix cache"
    assert in_files(engine, scratch[5:25]), "asked without scratch, it is stored"


def test_scratch_of_a_request_without_a_plan_leaves_nothing(case):
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    model, engine = case
    tokens = text(model, random.Random(17), 150)

    async def ask(**settings) -> int:
        """Every prompt token's probability is wanted: such a request gets no plan."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
        asked = RequestSettings(**settings)
        params.extra_args = {"kv_transfer_params": {PARAMS_KEY: asked.to_params()}}
        async for output in engine.client.generate(tokens_input(tokens), params, asked.key):
            last = output
        (report,) = engine.client.pop_reports(asked.key)
        assert report.fallbacks == ["needs_every_prompt_token"]
        return last.num_cached_tokens

    engine.run(ask(scratch=[[60, 120]]))
    assert not in_files(engine, tokens[70:90])
    assert engine.ask(tokens, max_tokens=1, keep=True).num_cached == 0


@pytest.mark.parametrize("mode", ["exact", "reuse"])
def test_a_purge_reaches_what_another_session_computed_behind_the_text(case, mode):
    model, engine = case
    rng = random.Random(f"{mode} 19")
    tokens, behind, end = prompt(model, rng, 300), text(model, rng, 200), text(model, rng, 20)
    one, other = Session(engine, mode=mode), Session(engine, mode=mode)
    one.ask(tokens)
    other.ask([*tokens, *behind])
    elsewhere = [*text(model, rng, 60), *behind, *end]
    assert engine.ask(elsewhere, mode="reuse", max_tokens=1, keep=False).report.tokens["reused"] > 100 or (
        model == "recall-mla" and not engine.client.status()["batched"]  # there such a request may not reuse
    )
    verbs = engine.client.turns.verbs("default")
    traces = engine.run(engine.client.turns.call(verbs.traces, one.name, Span(100, 150)))
    assert engine.run(engine.client.discard("default", traces)) >= 2
    assert engine.run(engine.client.empty_prefix_cache())
    assert engine.ask(elsewhere, mode="reuse", max_tokens=1).report.tokens["reused"] == 0
    assert engine.ask([*tokens, *behind], tenant="default", max_tokens=1).num_cached <= 100


def test_the_prefix_cache_is_emptied_once_nothing_runs(case, monkeypatch):
    model, engine = case
    tokens = text(model, random.Random(18), 300)

    async def beside_a_running_request(seconds: float) -> bool:
        monkeypatch.setattr("ropewalk.cluster.engine.planned.EMPTYING_S", seconds)
        running = asyncio.create_task(engine.ask_async(tokens, max_tokens=60, ignore_eos=True))
        while not engine.client._num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)  # it holds blocks by then
        is_empty = await engine.client.empty_prefix_cache()
        assert len((await running).token_ids) == 60, "nothing becomes of what runs"
        return is_empty

    assert engine.run(beside_a_running_request(20.0))
    assert not engine.run(beside_a_running_request(0.0))


def test_scratch_that_is_not_there_is_refused(case):
    from vllm.exceptions import VLLMValidationError

    _, engine = case
    tokens = prompt("recall-mla", random.Random(1), 100)
    for spans, name in (([[40, 101]], r"scratch[0]"), ([[10, 30], [20, 40]], "scratch[1]")):
        with pytest.raises(VLLMValidationError, match="scratch") as error:
            engine.ask(tokens, scratch=spans)
        assert error.value.parameter == f"ropewalk.{name}"


def test_a_lost_lineage_is_said_and_the_prompt_computed(case):
    model, engine = case
    rng = random.Random(9)
    tokens, end = prompt(model, rng, 700), text(model, rng, 20)
    answer = Session(engine).ask([*tokens, *end], directives=[[200, 300, [], "amortize"]])
    assert answer.report.fallbacks == ["lineage_lost"]
    assert answer.report.tokens["computed"] == 620


def test_directives_that_do_not_fit_are_refused_and_nothing_changes(case):
    from vllm.exceptions import VLLMValidationError

    _, engine = case
    session = Session(engine)
    with pytest.raises(VLLMValidationError, match=r"directives\[0\] \[10, 50\) begins inside") as error:
        session.ask(prompt("recall-mla", random.Random(1), 100), directives=[[10, 50, [], "amortize"]])
    assert error.value.parameter == "ropewalk.directives[0].span"
