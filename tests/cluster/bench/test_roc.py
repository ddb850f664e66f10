"""`ropewalk bench roc`: a small study on a real engine, its report, and what users get wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.cluster.bench.material import TooLittleText, make_material
from ropewalk.cluster.bench.roc import Study
from ropewalk.cluster.bench.roc_report import COLUMNS, page_of, table_rows
from ropewalk.cluster.bench.roc_study import kinds_of, measure
from ropewalk.cluster.cli import main
from ropewalk.kernels.rope import RotaryFacts
from ropewalk.kernels.splice import turned


@pytest.mark.engine
def test_a_small_study_of_the_recall_model_holds_what_must_hold(tmp_path: Path) -> None:
    study = Study(blocks=24, positions=(0, 64, 200), block_tokens=48)  # more than are computed at a time
    result = measure("recall-mla", study)
    assert result["attention"] == "MLA"
    assert result["num_layers"] == 3
    assert list(result["kinds"]) == ["c_kv", "k_pe raw", "k_pe turned"]
    for summary in result["kinds"].values():
        assert len(summary["layers"]) == 3
        for layer in summary["layers"]:
            assert layer["same"]["pairs"] == 24 * 3  # three pairs of positions
            assert layer["different"]["pairs"] == 3 * 6 * 6  # positions, groups, pairs in a group
            assert 0 <= layer["low"] <= layer["auc"] <= layer["high"] <= 1
        assert summary["roc"][0] == [0, 0]
        assert summary["roc"][-1] == [1, 1]
    raw, turned_band = result["kinds"]["k_pe raw"]["layers"], result["kinds"]["k_pe turned"]["layers"]
    assert all(after["auc"] >= before["auc"] for before, after in zip(raw, turned_band, strict=True))
    # In layer 0 a row depends on its token and position alone: only the stored dtype's rounding is left.
    assert turned_band[0]["same"]["mean"] > 0.999
    assert result["kinds"]["c_kv"]["layers"][0]["same"]["mean"] > 0.9999
    assert raw[0]["same"]["mean"] < 0.9
    assert_reported(result)


def assert_reported(result: dict[str, Any]) -> None:
    """The result survives JSON, and table and page show it."""
    assert json.loads(json.dumps(result)) == result
    assert [line[0] for line in table_rows(result)] == list(result["kinds"])
    assert all(len(line) == len(COLUMNS) for line in table_rows(result))
    page = page_of([result])
    assert page.count("<svg") == 2
    assert "http" not in page, "the page needs nothing from elsewhere"


@pytest.mark.parametrize("is_mla", [True, False])
def test_rows_of_one_token_agree_once_they_are_turned_to_a_common_position(is_mla: bool) -> None:
    rotary = RotaryFacts(tuple(100.0 ** (-i / 4) for i in range(4)), interleaved=is_mla)
    at_zero = torch.randn(2, 7, 3, 24, generator=torch.Generator().manual_seed(0))  # [L, n, H, C]
    positions = (0, 17, 300)
    start = 16 if is_mla else 0
    rows = torch.stack([turned(at_zero, position, rotary, start) for position in positions])[None]
    kinds = kinds_of(rows, positions, rotary, is_mla)
    common, raw = (kinds["k_pe turned"], kinds["k_pe raw"]) if is_mla else (kinds["K turned"], kinds["K raw"])
    free = kinds["c_kv"] if is_mla else kinds["V"]
    assert common.shape == raw.shape == (1, 3, 2, 7, 3 * (8 if is_mla else 12))
    assert free.shape == (1, 3, 2, 7, 3 * (16 if is_mla else 12))
    torch.testing.assert_close(common[:, 1:], common[:, :1].expand_as(common[:, 1:]), atol=1e-5, rtol=0)
    assert not torch.allclose(raw[:, 1:], raw[:, :1].expand_as(raw[:, 1:]), atol=1e-2)
    assert torch.equal(free[:, 1:], free[:, :1].expand_as(free[:, 1:]))


@pytest.mark.parametrize("model", ["recall-mla", "smollm2-135m"])
def test_material_has_the_lengths_asked_for_and_no_block_twice(model: str) -> None:
    shape = {"num_fillers": 3, "filler_tokens": 300, "num_blocks": 40, "block_tokens": 64}
    material = make_material(model, random.Random(0), **shape)
    assert [len(filler) for filler in material.fillers] == [300] * 3
    assert {len(block) for block in material.blocks} == {64}
    assert len(set(material.blocks)) == 40
    assert len(set(material.fillers)) == 3
    assert material == make_material(model, random.Random(0), **shape)


def test_too_many_blocks_for_the_text_are_refused() -> None:
    with pytest.raises(TooLittleText, match="are needed"):
        make_material(
            "smollm2-135m", random.Random(0), num_fillers=1, filler_tokens=9, num_blocks=9999, block_tokens=64
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--blocks", "10"], "--blocks must be a multiple of 4, at least 8, not 10"),
        (["--blocks", "0"], "--blocks must be a multiple of 4, at least 8, not 0"),
        (["--positions", "0"], "two or more different positions"),
        (["--positions", "0,-1"], "two or more different positions"),
        (["--positions", "5,5"], "two or more different positions"),
        (["--positions", "0,x"], "--positions must be numbers with commas between, not '0,x'"),
        (["--positions", "0,9000", "--model", "recall-mla"], "takes fewer than 8192"),
        (["--block-tokens", "0"], "--block-tokens must be positive, not 0"),
        (["--model", "recal-mla"], "did you mean the embedded 'recall-mla'?"),
        (["--model", "./no-such-model"], "there is no directory"),
        (["--blocks", "100000", "--model", "smollm2-135m"], "choose fewer --blocks"),
        (["--json", "/dev/null/x.json"], "--json '/dev/null/x.json' cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "roc", *options]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1
