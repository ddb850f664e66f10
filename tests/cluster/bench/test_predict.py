"""`ropewalk bench predict`: on files of one's own, on the public runs where they are, and on what is neither."""

import json
from pathlib import Path

import pytest

from ropewalk.cluster.bench.predict import PAPER, study
from ropewalk.cluster.cli import main
from ropewalk.workloads.sequences import SHARED, Sequences, SequencesError, handovers, public_sequences, read_sequences


def test_a_file_of_sequences_is_studied(tmp_path, capsys):
    path = tmp_path / "mine.txt"
    path.write_text("plan search plan write\n\n" * 10 + '["plan", "search", "plan", "write"]\n')
    assert main(["bench", "predict", str(path), "--json", str(tmp_path / "out.json")]) == 0
    (found,) = json.loads((tmp_path / "out.json").read_text())["sets"]
    assert (found["name"], found["sequences"], found["different"]) == ("mine.txt", 11, 3)
    assert {arm["predictions"] for arm in found["arms"].values()} == {33}
    assert found["arms"]["order 2"]["top_1"] > found["arms"]["order 1"]["top_1"], "what follows 'plan' is told by turns"
    assert "mine.txt" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "alone\n", '["a", 1]\n', "[1\n"])
def test_a_file_without_sequences_is_refused_in_one_line(tmp_path, capsys, text):
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(SequencesError):
        read_sequences(path)
    assert main(["bench", "predict", str(path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_runs_that_are_not_there_are_said_to_be_had_elsewhere(tmp_path, capsys):
    assert main(["bench", "predict", "--data", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert "https://github.com/" in error
    assert main(["bench", "predict", str(tmp_path / "none.txt")]) == 2


def test_a_hand_over_is_another_agents_turn():
    assert handovers(list("aabbbac")) == ("a", "b", "a", "c")


def test_majority_and_order_0_learn_as_they_go():
    found = study(Sequences("x", "elements", (tuple("aaab"), tuple("aaab"))))
    assert found["arms"]["majority"] == {"predictions": 6, "top_1": 4, "top_3": 5}
    assert found["arms"]["order 0"]["top_1"] == 4


@pytest.mark.skipif(not Path(SHARED).is_dir(), reason="the public runs are not beside the repository")
def test_the_public_runs_are_foretold_as_well_as_the_documents_say():
    """Order 3 is the default: docs/scheduler.md."""
    least = {"magentic-one": 0.94, "captain-agent": 0.41, "tau-bench": 0.545, "coding-agent": 0.42}
    for sequences in public_sequences():
        arms = study(sequences)["arms"]
        right = {name: arm["top_1"] / arm["predictions"] for name, arm in arms.items()}
        assert right["order 3"] >= least.pop(sequences.name)
        assert right["order 3"] >= right["order 1"]
        assert right["order 3"] >= right[PAPER]
    assert not least
