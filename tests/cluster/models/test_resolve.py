"""What a `model_source` stands for, and the messages for those that stand for nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ropewalk.cluster.models import EMBEDDED, ModelSourceError, resolve


def test_a_hub_id_passes_through() -> None:
    assert resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert resolve("gpt2") == "gpt2"


def test_a_directory_with_a_config_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for source in ("mine", "./mine", str(tmp_path / "mine")):
        assert resolve(source) == str(tmp_path / "mine")


def test_the_home_directory_may_be_abbreviated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~") == str(tmp_path)


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "~/no-such-model", "../nope"])
def test_a_missing_directory_is_named(source: str) -> None:
    with pytest.raises(ModelSourceError, match="there is no directory") as error:
        resolve(source)
    assert repr(source) in str(error.value)


def test_a_directory_without_config_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"holds no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("source", ["smollm2", "smolm2-135m", "recall_mla"])
def test_a_misspelt_embedded_name_gets_a_suggestion(source: str) -> None:
    with pytest.raises(ModelSourceError, match=r"did you mean the embedded '(smollm2-135m|recall-mla)'"):
        resolve(source)


@pytest.mark.parametrize("source", ["", "two words", "a/b/c", "https://example.org/model", "-x"])
def test_text_that_names_nothing_lists_what_would_be_right(source: str) -> None:
    with pytest.raises(ModelSourceError) as error:
        resolve(source)
    assert all(name in str(error.value) for name in EMBEDDED)


def test_the_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ropewalk.cluster.models.cache import cache_root

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ROPEWALK_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / "home" / ".cache" / "ropewalk"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "ropewalk"
    monkeypatch.setenv("ROPEWALK_CACHE", os.fspath(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
