"""Directories built once: complete or absent, rebuilt when damaged, one builder at a time."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropewalk.cluster.models.cache import MARKER, build_once, is_intact

RECIPE = "numbers 1"


class Builder:
    """Writes two files and counts how often it was asked to."""

    def __init__(self, content: bytes = b"weights") -> None:
        self.content = content
        self.num_builds = 0

    def __call__(self, directory: Path) -> None:
        self.num_builds += 1
        (directory / "config.json").write_text("{}")
        (directory / "model.bin").write_bytes(self.content)


def test_the_second_call_uses_the_first_build(tmp_path: Path) -> None:
    build = Builder()
    for _ in range(2):
        assert build_once(tmp_path / "sub" / "model", RECIPE, build) == tmp_path / "sub" / "model"
    assert build.num_builds == 1
    assert (tmp_path / "sub" / "model" / "model.bin").read_bytes() == b"weights"


def test_another_recipe_is_built_anew(tmp_path: Path) -> None:
    build_once(tmp_path / "model", RECIPE, Builder())
    build_once(tmp_path / "model", "numbers 2", Builder(b"newer"))
    assert (tmp_path / "model" / "model.bin").read_bytes() == b"newer"
    assert is_intact(tmp_path / "model", "numbers 2")
    assert not is_intact(tmp_path / "model", RECIPE)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.sampled_from(["flip", "truncate", "delete", "add", "no marker", "bad marker"]), data=st.data())
def test_a_damaged_build_is_noticed_and_redone(tmp_path: Path, damage: str, data: st.DataObject) -> None:
    content = data.draw(st.binary(min_size=1, max_size=64))
    target = build_once(tmp_path / "model", f"of {content!r}", Builder(content))
    weights = target / "model.bin"
    if damage == "flip":
        at = data.draw(st.integers(0, len(content) - 1))
        weights.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif damage == "truncate":
        weights.write_bytes(content[:-1])
    elif damage == "delete":
        weights.unlink()
    elif damage == "add":
        (target / "extra.bin").write_bytes(b"")
    elif damage == "no marker":
        (target / MARKER).unlink()
    else:
        (target / MARKER).write_text(data.draw(st.sampled_from(["", "[]", "null", '{"recipe": 1}', "{"])))
    assert not is_intact(target, f"of {content!r}")
    build_once(target, f"of {content!r}", Builder(content))
    assert is_intact(target, f"of {content!r}")
    assert weights.read_bytes() == content


def test_an_interrupted_build_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "model.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "model", RECIPE, fail)
    assert not (tmp_path / "model").exists()
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    build_once(tmp_path / "model", RECIPE, Builder())
    assert is_intact(tmp_path / "model", RECIPE)


def _build_in_process(target: Path, log: Path, barrier: object) -> None:
    def build(directory: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        Builder()(directory)

    barrier.wait()  # type: ignore[attr-defined]
    build_once(target, RECIPE, build)
    assert is_intact(target, RECIPE)


def test_of_racing_processes_one_builds_and_all_succeed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    racers = [
        context.Process(target=_build_in_process, args=(tmp_path / "model", tmp_path / "log", barrier))
        for _ in range(4)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(timeout=30)
    assert [racer.exitcode for racer in racers] == [0, 0, 0, 0]
    assert len((tmp_path / "log").read_text().splitlines()) == 1
