"""Mistakes that `ropewalk serve` and `ropewalk status` report before they start anything."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ropewalk.cluster.cli import main
from ropewalk.cluster.serve.local import remove_stale_stores
from ropewalk.cluster.serve.processes import shared_memory_of


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command, expect exit code 2 and one line on stderr, and return the line."""
    before = set(psutil.Process().children(recursive=True))
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert set(psutil.Process().children(recursive=True)) <= before
    return lines[0]


def test_a_model_path_that_does_not_exist(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refused(capsys, "serve", "--model", str(tmp_path / "absent"), "--port", str(free_port()))
    assert "models[0].source" in line
    assert "absent" in line


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(capsys, "serve", "--model", "recall-mla", "--port", str(port))
    assert f"127.0.0.1:{port}" in line
    assert "--port" in line


def test_settings_that_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "cannot read it" in refused(capsys, "serve", str(tmp_path / "absent.yaml"))


def test_settings_with_a_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = tmp_path / "serve.yaml"
    settings.write_text("models:\n  - {source: smollm2-135m, replicas: none}\n")
    line = refused(capsys, "serve", str(settings))
    assert "models[0].replicas" in line
    assert "'none'" in line


def test_nothing_to_serve(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--model smollm2-135m" in refused(capsys, "serve")


def test_replicas_for_several_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = tmp_path / "serve.yaml"
    settings.write_text("models:\n  - {source: smollm2-135m}\n  - {source: recall-mla}\n")
    assert "--replicas 3" in refused(capsys, "serve", str(settings), "--replicas", "3")


def test_detaching_from_a_cluster_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--detach needs --address" in refused(capsys, "serve", "--model", "recall-mla", "--detach")


def test_an_address_at_which_there_is_no_ray(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    line = refused(capsys, "serve", "--model", "recall-mla", "--address", address)
    assert f"--address {address}: no Ray cluster" in line


def test_status_of_an_endpoint_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "status", "--endpoint", f"http://127.0.0.1:{free_port()}/v1")
    assert "no answer" in line


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_stores_of_processes_that_were_killed_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale, ours, other = (
        tmp_path / f"ropewalk-store-{owner}" for owner in (f"{gone.pid}-abc", f"{os.getpid()}-abc", "mine-of-old")
    )
    for directory in (stale, ours, other):
        directory.mkdir()
    remove_stale_stores(tmp_path)
    assert [directory.exists() for directory in (stale, ours, other)] == [False, True, True]


def test_shared_memory_of_a_process_is_found() -> None:
    code = (
        "import sys; from multiprocessing.shared_memory import SharedMemory as S; "
        "s = S(create=True, size=64); print(s.name, flush=True); sys.stdin.read(); s.close(); s.unlink()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        name = holder.stdout.readline().strip()
        assert shared_memory_of([psutil.Process(holder.pid)]) == {Path("/dev/shm") / name}
