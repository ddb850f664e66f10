import asyncio
import json
import signal
import sys

import pytest

from ropewalk.cluster.cli import main

COMMAND = (sys.executable, "-m", "ropewalk.cluster.cli", "replay", "gsm8k", "--dataset", "sample")


async def start(endpoint, *options):
    return await asyncio.create_subprocess_exec(
        *COMMAND, "--endpoint", endpoint.url, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def test_a_replay_prints_figures_and_writes_both_reports(endpoint, tmp_path):
    json_path, html_path = tmp_path / "new" / "figures.json", tmp_path / "page.html"
    process = await start(
        endpoint,
        *("--sessions", "2", "--turns", "3", "--seed", "5", "--reuse", "exact", "--max-tokens", "4"),
        *("--json", str(json_path), "--html", str(html_path)),
    )
    output, progress = (part.decode() for part in await process.communicate())
    assert process.returncode == 0, progress
    assert "6/6 turns" in progress
    summary = json.loads(json_path.read_text())["summary"]
    assert summary["requests"] == 6
    for text in ("turns 6, errors 0", "40.0 % from cache", "bundled sample", summary["body_sha256"], str(html_path)):
        assert text in output
    assert html_path.read_text().startswith("<!DOCTYPE html>")
    assert {request.body["max_tokens"] for request in endpoint.requests} == {4}
    assert {request.body["ropewalk"]["reuse"] for request in endpoint.requests} == {"exact"}


async def test_failed_turns_make_the_exit_code_1(endpoint, script):
    endpoint.behave = lambda _: script(status=500, error_body="boom")
    process = await start(endpoint, "--sessions", "1", "--turns", "2")
    output, _ = await process.communicate()
    assert process.returncode == 1
    assert "2 × HTTP 500: boom" in output.decode()


async def test_ctrl_c_ends_a_replay_with_its_report(endpoint, script, tmp_path):
    endpoint.behave = lambda _: script(gate=asyncio.Event()) if len(endpoint.requests) > 1 else script()
    path = tmp_path / "figures.json"
    process = await start(endpoint, "--sessions", "1", "--json", str(path))
    await endpoint.until(lambda: len(endpoint.requests) == 2)
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 1
    assert [turn["error"] for turn in json.loads(path.read_text())["turns"]] == [None, "aborted"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--endpoint", "127.0.0.1:8000"], "endpoint='127.0.0.1:8000': give an http:// or https:// URL"),
        (["--endpoint", "http://127.0.0.1:9"], "'http://127.0.0.1:9/v1': cannot connect"),
        (["--dataset", "/nowhere/at/all.jsonl"], "dataset '/nowhere/at/all.jsonl': no such file"),
        (["--sessions", "0"], "sessions=0: must be at least 1"),
        (["--turns", "-1"], "turns=-1: must be at least 1"),
        (["--rate", "0"], "rate=0.0: must be a positive number"),
        (["--rate", "nan"], "rate=nan: must be a positive number"),
        (["--deadline", "-3"], "deadline_s=-3.0: must be a positive number"),
        (["--warmup", "96"], "warmup_turns=96: must be from 0 to 95"),
        (["--max-prompt-tokens", "100"], "max_prompt_tokens=100: header, instructions"),
        (["--json", "."], "--json '.': is a folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, options, complaint):
    assert main(["replay", "gsm8k", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ropewalk replay: ")
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        ["nothing"],
        ["gsm8k", "--headers", "sometimes"],
        ["gsm8k", "--concurrency", "2", "--rate", "1"],
        ["gsm8k", "--turns", "x"],
    ],
)
def test_impossible_options_exit_with_code_2(capsys, options):
    with pytest.raises(SystemExit) as caught:
        main(["replay", *options])
    assert caught.value.code == 2
    assert "usage: " in capsys.readouterr().err
