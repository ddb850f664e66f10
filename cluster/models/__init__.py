"""Embedded models, and what a `model_source` in serve.yaml stands for."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from ropewalk.cluster.models import smollm2

RECALL_MLA = "recall-mla"
EMBEDDED = (RECALL_MLA, smollm2.NAME)
"""Names that need no download: `recall-mla` ships with the package, `smollm2-135m` is converted once."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ModelSourceError(ValueError):
    """A `model_source` that names no model; the message says what would be right."""


def resolve(source: str) -> str:
    """Return what vLLM should load for `source`: an absolute directory, or a Hugging Face id as it is.

    Call it on the machine that loads the model. `smollm2-135m` is converted in some seconds the first time, and is
    read from the cache directory afterwards (`ropewalk.cluster.models.cache.cache_root`).

    Raises:
        ModelSourceError: for a path without a `config.json`, and for text that can be neither path nor id.
    """
    if source == RECALL_MLA:
        return str(_model_directory(Path(__file__).parent / "recall_mla", source))
    if source == smollm2.NAME:
        try:
            return str(smollm2.ensure())
        except smollm2.SourceMissingError as error:
            raise ModelSourceError(f"model_source {source!r}: {error}") from error
    path = Path(source).expanduser()
    if source.startswith(("/", "./", "../", "~")) or (source and path.exists()):
        return str(_model_directory(path, source))
    if not _HUB_ID.fullmatch(source):
        raise ModelSourceError(
            f"model_source {source!r} is neither an embedded model ({', '.join(EMBEDDED)}), "
            "nor a directory, nor a Hugging Face id such as 'Qwen/Qwen3-0.6B'"
        )
    similar = difflib.get_close_matches(source, EMBEDDED, n=1, cutoff=0.7)
    if similar and "/" not in source:
        raise ModelSourceError(f"model_source {source!r} is unknown; did you mean the embedded {similar[0]!r}?")
    return source


def _model_directory(path: Path, source: str) -> Path:
    if not path.is_dir():
        raise ModelSourceError(f"model_source {source!r}: there is no directory {path.absolute()}")
    if not (path / "config.json").is_file():
        raise ModelSourceError(
            f"model_source {source!r}: {path.absolute()} holds no config.json; "
            "give a directory in Hugging Face layout (config.json, *.safetensors, tokenizer files)"
        )
    return path.absolute()
