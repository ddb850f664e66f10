"""`ropewalk bench scheduler`: what it prints and writes, and that costs are near what is promised."""

import json

import pytest

from ropewalk.cluster.bench.scheduler import Program, learned_state, recognition, state_bytes
from ropewalk.cluster.cli import main
from ropewalk.scheduler.state import CONTEXTS_PER_AGENT


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    assert main(["bench", "scheduler", "--quick", "--json", str(path)]) == 0
    return {part["num_agents"]: part for part in json.loads(path.read_text())["scaling"]}


@pytest.mark.parametrize(
    ("call", "target_us"),
    [
        ("observe, agent named", 5),
        ("outlook of a session", 200),
        ("survival of all anchors", 50),
        ("route, agent named", 100),
    ],
)
def test_costs_are_near_their_targets(found, call, target_us):
    """Processor time, not the clock, and four times the target: a slow or busy machine is no failure."""
    medians = {cost["name"]: cost["median_us"] for cost in found[24]["costs"]}
    assert medians[call] <= 4 * target_us


@pytest.mark.parametrize(("num_agents", "shared", "bound"), [(24, 0.6, 25_000), (1_000, 0.0, 2_000_000)])
def test_the_state_is_as_small_as_promised(num_agents, shared, bound):
    """How much of their prompts agents share makes the state no larger, but takes longer to get there."""
    state = learned_state(num_agents, Program(num_agents, shared=shared))
    state.check_integrity()
    assert len(state.registry) == num_agents
    assert len(state.sessions) == 64
    size = state_bytes(state)
    assert size["whole state"] <= bound, size
    assert state.learner.num_contexts <= CONTEXTS_PER_AGENT * state.settings.max_agents


def test_figures_say_how_many_agents_they_are_for(found):
    assert found.keys() == {6, 24}
    for num_agents, part in found.items():
        assert part["agents_recognised"] == num_agents
        assert {cost["num_agents"] for cost in part["costs"]} == {num_agents}
        assert all(0 < cost["lower_us"] <= cost["median_us"] <= cost["upper_us"] for cost in part["costs"])
        assert part["bytes"]["whole state"] > sum(part["bytes"].values()) / 2


def test_figures_can_be_printed_instead_of_tables(capsys):
    assert main(["bench", "scheduler", "--quick", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["num_replicas"] == 16


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert main(["bench", "scheduler", "--json", str(tmp_path / "file" / "x.json")]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert "--json" in error


def test_agents_are_recognised_after_a_restart_as_before():
    mix = recognition(90, 10, 8, seeds=1)
    assert (mix["right"], mix["right_restarted"], mix["agents_known"]) == (1.0, 1.0, 6)
