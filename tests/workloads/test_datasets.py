import gzip
import json
import sys
from types import SimpleNamespace

import pytest

from ropewalk.workloads import datasets
from ropewalk.workloads.datasets import load_questions, parse_question
from ropewalk.workloads.errors import WorkloadError

RECORD = {
    "question": "A box holds 48 pens.\nHalf are blue, and 4 of them are dry. How many blue pens write?",
    "answer": "Blue pens: 48/2=<<48/2=24>>24.\nOf them 24-4=<<24-4=20>>20 write.\n#### 20",
}


def test_a_record_is_split_into_sentences_calculations_and_result():
    question = parse_question(RECORD, "here")
    assert question.text.startswith("A box holds 48 pens. Half")
    assert [step.sentence for step in question.steps] == ["Blue pens: 48/2=24.", "Of them 24-4=20 write."]
    assert [step.calculations for step in question.steps] == [(("48/2", "24"),), (("24-4", "20"),)]
    assert question.final == "20"


def test_every_calculation_of_the_bundled_sample_is_right():
    sample = load_questions("sample")
    assert len(sample.questions) == 24
    for question in sample.questions:
        calculations = [pair for step in question.steps for pair in step.calculations]
        assert calculations, question.text
        for expression, result in calculations:
            assert eval(expression) == pytest.approx(float(result)), question.text
        assert float(calculations[-1][1]) == float(question.final), question.text


@pytest.mark.parametrize("name", ["set.jsonl", "set.jsonl.gz", "set.json"])
def test_local_files_of_every_kind_are_read(tmp_path, name):
    lines = json.dumps(RECORD) + "\n\n" + json.dumps(RECORD) + "\n"
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(json.dumps([RECORD, RECORD]) if name.endswith(".json") else lines)
    loaded = load_questions(str(path))
    assert len(loaded.questions) == 2
    assert loaded.source == str(path)


def test_a_folder_gives_its_test_split_first(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(RECORD) + "\n" + json.dumps(RECORD))
    (tmp_path / "test.jsonl").write_text(json.dumps(RECORD))
    assert len(load_questions(str(tmp_path)).questions) == 1


def test_without_a_choice_the_shared_data_come_before_the_bundled_sample(tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "pyproject.toml").touch()
    monkeypatch.setattr(datasets, "_REPOSITORY", repository)
    assert load_questions().source == "bundled sample"
    shared = tmp_path / "shared/data/gsm8k"
    shared.mkdir(parents=True)
    (shared / "test.jsonl.gz").write_bytes(gzip.compress(json.dumps(RECORD).encode()))
    assert load_questions().source == "../shared/data/gsm8k/test.jsonl.gz"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "holds no questions"),
        ("{", "line 1: not JSON"),
        ('{"question": "How many?"}', "record 1: a record must be an object"),
        ('{"question": "How many?", "answer": "Three."}', "must end with a line '#### <number>'"),
    ],
)
def test_a_bad_file_is_a_clear_error(tmp_path, content, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(WorkloadError, match=r"bad\.jsonl") as caught:
        load_questions(str(path))
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"not gzip at all", gzip.compress(bytes(range(256)) * 9)[:100]], ids=["text", "cut"]
)
def test_a_broken_archive_is_a_clear_error(tmp_path, content):
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(WorkloadError, match="cannot be read"):
        load_questions(str(path))


def test_a_missing_path_is_a_clear_error(tmp_path):
    with pytest.raises(WorkloadError, match="no such file"):
        load_questions(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(WorkloadError, match=r"holds none of test\.jsonl"):
        load_questions(str(tmp_path))


def test_the_public_set_goes_through_the_datasets_library(monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return [RECORD]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    loaded = load_questions("openai/gsm8k:train")
    assert loaded.source == "openai/gsm8k (train, Hugging Face)"
    assert asked == [(("openai/gsm8k", "main"), {"split": "train"})]


def test_without_the_datasets_library_the_public_set_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(WorkloadError, match="pip install datasets"):
        load_questions("openai/gsm8k")
