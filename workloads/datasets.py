"""Question sets in the GSM8K form: a local file, Hugging Face's `datasets`, or the bundled sample.

Every record has `question` and `answer`; the answer's lines are solution steps with calculator annotations
(`<<48/2=24>>`), and its last line is `#### ` and the final number (Cobbe et al. 2021, arXiv 2110.14168).
"""

from __future__ import annotations

import gzip
import importlib
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ropewalk.workloads.errors import WorkloadError

HUB_ID = "openai/gsm8k"
SPLITS = ("test", "train")
ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>]*)>>")

_REPOSITORY = Path(__file__).resolve().parents[1]
_SHARED = Path("../shared/data/gsm8k")


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a worked solution: its sentence without annotations, and the calculations made in it."""

    sentence: str
    calculations: tuple[tuple[str, str], ...]  # (expression, result)


@dataclass(frozen=True, slots=True)
class Question:
    """A word problem with its worked solution."""

    text: str
    steps: tuple[Step, ...]
    final: str


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions and, for the report, where they came from."""

    source: str
    questions: tuple[Question, ...]


def parse_question(record: Any, where: str) -> Question:
    """Read one GSM8K record; `where` names it in the error message."""
    if not isinstance(record, dict) or not all(isinstance(record.get(key), str) for key in ("question", "answer")):
        raise WorkloadError(f"{where}: a record must be an object with the text fields 'question' and 'answer'")
    lines = [line.strip() for line in record["answer"].splitlines() if line.strip()]
    if not lines or not lines[-1].startswith("####"):
        raise WorkloadError(f"{where}: 'answer' must end with a line '#### <number>'")
    steps = tuple(
        Step(
            sentence=ANNOTATION.sub("", line),
            calculations=tuple((left.strip(), right.strip()) for left, right in ANNOTATION.findall(line)),
        )
        for line in lines[:-1]
    )
    final = lines[-1].removeprefix("####").strip()
    return Question(" ".join(record["question"].split()), steps, final)


def load_questions(dataset: str | None = None) -> QuestionSet:
    """Load the questions that `dataset` names.

    `None` takes `../shared/data/gsm8k` next to the repository where it exists, else the bundled sample; it never
    uses the network. `"sample"` is the bundled sample; `"openai/gsm8k"` (or `"openai/gsm8k:train"`) goes through the
    `datasets` library, which downloads the set once; anything else is a path to a `.jsonl`, `.jsonl.gz` or `.json`
    file, or to a folder that holds `test.jsonl[.gz]` or `train.jsonl[.gz]`.

    Raises `WorkloadError` for a path that doesn't exist, an unreadable file and an empty set.
    """
    if dataset is None:
        shared = _find_in_folder(_REPOSITORY / _SHARED) if (_REPOSITORY / "pyproject.toml").is_file() else None
        return _load_file(shared, str(_SHARED / shared.name)) if shared else _load_sample()
    if dataset == "sample":
        return _load_sample()
    if dataset == HUB_ID or dataset.startswith(f"{HUB_ID}:"):
        return _load_hub(dataset.removeprefix(HUB_ID).removeprefix(":") or "test")
    path = Path(dataset).expanduser()
    if path.is_dir():
        found = _find_in_folder(path)
        if found is None:
            names = ", ".join(f"{split}.jsonl[.gz]" for split in SPLITS)
            raise WorkloadError(f"dataset {dataset!r}: the folder holds none of {names}")
        path = found
    if not path.is_file():
        raise WorkloadError(
            f"dataset {dataset!r}: no such file. Give a .jsonl, .jsonl.gz or .json file, a folder with "
            f"test.jsonl[.gz], '{HUB_ID}' (needs the `datasets` library) or 'sample'"
        )
    return _load_file(path, str(path))


def _find_in_folder(folder: Path) -> Path | None:
    candidates = (folder / f"{split}.jsonl{suffix}" for split in SPLITS for suffix in ("", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def _load_file(path: Path, source: str) -> QuestionSet:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise WorkloadError(f"dataset {source!r}: cannot be read ({error})") from error
    return _question_set(source, _records(path, text, source))


def _records(path: Path, text: str, source: str) -> Iterable[Any]:
    if path.suffix == ".json":
        try:
            records = json.loads(text)
        except json.JSONDecodeError as error:
            raise WorkloadError(f"dataset {source!r}: not JSON ({error})") from error
        if not isinstance(records, list):
            raise WorkloadError(f"dataset {source!r}: a .json file must hold a list of records")
        yield from records
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise WorkloadError(f"dataset {source!r}, line {number}: not JSON ({error})") from error


def _load_sample() -> QuestionSet:
    text = (files("ropewalk.workloads") / "gsm8k_sample.json").read_text("utf-8")
    return _question_set("bundled sample", json.loads(text))


def _load_hub(split: str) -> QuestionSet:
    source = f"{HUB_ID} ({split}, Hugging Face)"
    try:
        hub: Any = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise WorkloadError(
            f"dataset '{HUB_ID}': needs the `datasets` library (pip install datasets), or give a path to a local copy"
        ) from error
    try:
        records = list(hub.load_dataset(HUB_ID, "main", split=split))
    except Exception as error:  # the library raises many kinds: offline, unknown split, broken cache
        raise WorkloadError(f"dataset '{HUB_ID}:{split}': could not be loaded ({error})") from error
    return _question_set(source, records)


def _question_set(source: str, records: Iterable[Any]) -> QuestionSet:
    questions = tuple(
        parse_question(record, f"dataset {source!r}, record {number}") for number, record in enumerate(records, 1)
    )
    if not questions:
        raise WorkloadError(f"dataset {source!r}: holds no questions")
    return QuestionSet(source, questions)
