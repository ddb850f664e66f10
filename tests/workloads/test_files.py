"""A file that cannot be used is named, with the line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ropewalk.cluster.cli import main
from ropewalk.workloads.files import BrokenFileError, lines_of, records_of


def test_lines_of_plain_and_gzipped_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\ny\n")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x\ny\n"))
    assert lines_of(tmp_path / "a.txt") == lines_of(tmp_path / "a.txt.gz") == ["x", "y"]


@pytest.mark.parametrize("data", [gzip.compress(b"x" * 1000)[:-9], b"no gzip", gzip.compress(b"\xff\xfe")])
def test_a_broken_gzip_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(data)
    with pytest.raises(BrokenFileError, match=r"a\.gz"):
        lines_of(path)


@pytest.mark.parametrize("line", ['{"a": 1', '{"b": 1}', "[1]", "7"])
def test_a_record_of_another_form_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(BrokenFileError, match=r"a\.jsonl, line 2"):
        records_of(path, lambda record: record["a"])


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "predict"],
        ["bench", "retention", "--model-only", "--workloads", "magentic-one"],
        ["simulate", "--workload", "magentic-one"],
    ],
)
def test_public_runs_that_are_broken_end_a_command_with_one_line(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "whowhen").mkdir()
    (tmp_path / "whowhen" / "magentic_one_hand_crafted.jsonl.gz").write_bytes(gzip.compress(b'{"turns": []}\n{"x'))
    assert main([*command, "--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err.strip()
    assert "magentic_one_hand_crafted.jsonl.gz, line " in said
    assert "\n" not in said
