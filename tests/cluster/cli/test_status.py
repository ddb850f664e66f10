"""What `ropewalk status` shows of a replica's position encoding."""

import argparse
import json

import pytest

from ropewalk.cluster.cli import status

ROTARY = {"rope": "llama3", "size": 64, "interleaved": False, "source": "model", "difference": 5e-7}


def report(**replica):
    counters = {"state": "RUNNING", "replica": "r1", "default_mode": "reuse"}
    models = [{"name": "m", "plain": False, "ready": 1, "wanted": 1, "message": "", "replicas": [counters | replica]}]
    return {"models": models, "agents": {}}


def shown(monkeypatch, capsys, answer, *, as_json=False):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(status, "fetch", lambda endpoint: answer)
    assert status.run(argparse.Namespace(endpoint="", json=as_json)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("replica", "text"),
    [
        ({"rotary": ROTARY, "turn_error": 0.00273}, "llama3, 64 halves, turn error 2.7e-03"),
        (
            {"rotary": ROTARY | {"interleaved": True, "source": "configuration"}, "turn_error": 0.5},
            "llama3, 64 neighbours, by configuration, turn error 5.0e-01",
        ),
        ({"rotary": {"rope": "default", "modules": ["MRotaryEmbedding"]}, "reuse_refused": "no"}, "default"),
    ],
)
def test_the_table_names_the_kind_of_rope_beside_the_turn_error(monkeypatch, capsys, replica, text):
    assert f"{text} " in shown(monkeypatch, capsys, report(**replica))


def test_json_holds_both(monkeypatch, capsys):
    text = shown(monkeypatch, capsys, report(rotary=ROTARY, turn_error=0.00273), as_json=True)
    (replica,) = json.loads(text)["models"][0]["replicas"]
    assert (replica["rotary"], replica["turn_error"]) == (ROTARY, 0.00273)


def test_a_replica_that_has_no_figures_yet_is_shown(monkeypatch, capsys):
    assert "running" in shown(monkeypatch, capsys, report())
