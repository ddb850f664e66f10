import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ropewalk.workloads.arms import run_arms
from ropewalk.workloads.charts import curves, format_ms, nice_ticks
from ropewalk.workloads.compare import comparison_dict, comparison_html, comparison_rows, comparison_table
from ropewalk.workloads.config import ReplayConfig
from ropewalk.workloads.load import run_replay
from ropewalk.workloads.progress import ConsoleProgress
from ropewalk.workloads.report import report_dict, report_html

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(HTMLParser):
    """Collects what a page would load, and checks that tags nest."""

    def __init__(self):
        super().__init__()
        self.open, self.loads = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "srcset")]
        assert tag not in ("script", "link", "iframe", "img", "object", "embed"), tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.loads == []
    assert not re.search(r"@import|url\(", page)
    assert "NaN" not in page
    assert "nan" not in re.sub(r"[a-z]*nan[a-z]+", "", page)


def config(endpoint, **settings):
    chosen = {"sessions": 2, "turns": 6, "dataset": "sample", "api_key": "secret-key", **settings}
    return ReplayConfig(endpoint=endpoint.url, **chosen)


async def test_the_page_needs_nothing_else_and_shows_the_figures(endpoint):
    result = await run_replay(config(endpoint))
    page = report_html(result)
    check(page)
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    for text in (*result.by_agent(), "40.0 %", result.summary()["body_sha256"], "12 / 12", "bundled sample"):
        assert text in page
    assert "secret-key" not in page


async def test_the_page_of_a_replay_in_which_everything_failed_can_be_made(endpoint, script):
    endpoint.behave = lambda _: script(status=500, error_body="<script>alert(1)</script>")
    page = report_html(await run_replay(config(endpoint)))
    check(page)
    assert "&lt;script&gt;" in page
    assert "No complete reply" in page


async def test_the_page_says_so_if_cached_tokens_were_not_reported(endpoint, script):
    endpoint.behave = lambda _: script(cached_tokens=None)
    assert "reported no cached tokens" in report_html(await run_replay(config(endpoint)))


async def test_the_json_report_has_settings_summary_and_every_turn(endpoint):
    result = await run_replay(config(endpoint, warmup_turns=2))
    report = json.loads(json.dumps(report_dict(result)))
    assert report["summary"] == json.loads(json.dumps(result.summary()))
    assert report["settings"]["seed"] == 0
    assert len(report["turns"]) == 12
    assert sum(turn["warmup"] for turn in report["turns"]) == 2
    assert sum(figures["requests"] for figures in report["agents"].values()) == 10
    assert "secret-key" not in json.dumps(report)


@pytest.mark.parametrize("names", [["vllm", "ropewalk"], ["a", "b", "c"]])
async def test_arms_are_compared_with_the_first(endpoint, script, names):
    endpoint.behave = lambda r: script(cached_tokens=0 if r.body["model"] == names[0] else 60)
    results = await run_arms([config(endpoint, name=name, model=name) for name in names])
    compared = comparison_dict(results)
    assert compared["same_bodies"]
    assert list(compared["arms"]) == names
    arm = compared["arms"][names[0]]
    assert {"requests", "errors", "cached_token_share", "ttft_ms", "turn_ms", "turns_per_s"} <= set(arm)
    assert {"mean", "p50", "p95", "p99"} <= set(arm["ttft_ms"])
    rows = {row[0]: row[1:] for row in comparison_rows(compared["arms"])}
    others = len(names) - 1
    assert rows["cached share"] == ["0.0 %", *["60.0 %"] * others, *["+60.0 points"] * others]
    first, second = (compared["arms"][name]["ttft_ms"]["mean"] for name in names[:2])
    assert rows["TTFT mean"][len(names)] == f"{second / first:.2f}"
    page = comparison_html(results, "A & B")
    check(page)
    assert "A &amp; B" in page
    console = Console(record=True, width=120)
    console.print(comparison_table(compared["arms"]))
    text = console.export_text()
    assert all(name in text for name in names)


async def test_arms_that_all_failed_are_compared_without_ratios(endpoint, script):
    endpoint.behave = lambda _: script(status=503)
    results = await run_arms([config(endpoint, name=name) for name in "ab"])
    check(comparison_html(results))
    rows = {row[0]: row[1:] for row in comparison_rows(comparison_dict(results)["arms"])}
    assert rows["TTFT mean"] == ["–", "–", "–"]
    assert rows["errors"] == ["12", "12", ""]


async def test_without_a_terminal_progress_is_plain_lines(endpoint, tmp_path):
    path = tmp_path / "log"
    with path.open("w") as file:
        await run_replay(config(endpoint), progress=ConsoleProgress(Console(file=file), "replay"))
    lines = path.read_text().splitlines()
    assert lines[0] == "replay: 12 turns"
    assert re.fullmatch(r"replay: 12/12 turns, TTFT p50 \d+ ms, 0 errors", lines[-1])


async def test_on_a_terminal_progress_is_a_bar(endpoint, tmp_path):
    path = tmp_path / "log"
    with path.open("w") as file:
        await run_replay(config(endpoint), progress=ConsoleProgress(Console(file=file, force_terminal=True), "replay"))
    assert "12/12" in path.read_text()


@given(st.floats(0, 1e9))
def test_ticks_begin_at_zero_and_reach_the_largest_value(largest):
    ticks = nice_ticks(largest)
    assert ticks[0] == 0
    assert ticks[-1] >= largest * (1 - 1e-9)
    assert ticks[-1] > 0
    assert 2 <= len(ticks) <= 7
    assert ticks == sorted(ticks)


def test_ticks_of_counts_are_whole():
    assert nice_ticks(3, whole=True) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (3.21, "3.2 ms"), (99.96, "100.0 ms"), (840.4, "840 ms"), (12_400, "12.4 s")]
)
def test_durations_are_written_for_people(value, text):
    assert format_ms(value) == text


def test_curves_are_drawn_to_scale_beside_their_reference():
    drawn = curves({"a": [(0, 0), (4, 1)], "b": [(2, 0.5)]}, [0, 4], [0, 1], ("x", "y"), "label", reference=[(0, 0.5)])
    assert 'points="0.00,100.00 100.00,0.00"' in drawn
    assert 'points="50.00,50.00"' in drawn
    assert 'class="mark" fill="none" points="0.00,50.00"' in drawn
