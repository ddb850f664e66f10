"""The recall model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ropewalk.cluster.models import resolve
from ropewalk.workloads.recall.vocabulary import SPECIAL_TOKENS, VOCABULARY_SIZE, vocabulary, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 8192)
    return AutoTokenizer.from_pretrained(directory)


def test_every_word_of_the_task_is_one_token(tokenizer: PreTrainedTokenizerBase) -> None:
    words = vocabulary()
    ids = [*words.keys, *words.values, *words.fillers, words.is_, words.full_stop, words.what, words.question_mark]
    assert [tokenizer(words.text([token])).input_ids for token in ids] == [[token] for token in ids]


def test_words_keep_their_tokens_inside_a_sentence(tokenizer: PreTrainedTokenizerBase) -> None:
    words = vocabulary()
    tokens = [*words.fillers[:5], words.keys[7], words.is_, words.values[3], words.values[3], words.full_stop]
    assert tokenizer(words.text(tokens)).input_ids == tokens


def test_keys_values_and_fillers_are_disjoint_and_complete() -> None:
    words = vocabulary()
    classes = [words.keys, words.values, words.fillers, words.other]
    assert len({token for group in classes for token in group}) == sum(len(group) for group in classes)
    assert (len(words.keys), len(words.values), len(words.tokens)) == (192, 128, VOCABULARY_SIZE)


def test_special_tokens_are_one_token_and_known_by_role(tokenizer: PreTrainedTokenizerBase) -> None:
    words = vocabulary()
    assert tokenizer("".join(SPECIAL_TOKENS)).input_ids == list(range(len(SPECIAL_TOKENS)))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (words.bos, words.end, words.pad)


@given(st.text())
def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=False) == text


def test_chat_messages_become_the_task_s_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    words = vocabulary()
    key, filler = words.keys[0], words.fillers[0]
    question = words.text([words.what, words.is_, key, words.question_mark]).strip()
    messages = [
        {"role": "system", "content": words.text([filler])},
        {"role": "user", "content": question},
        {"role": "assistant", "content": words.text(words.values[:2])},
        {"role": "user", "content": question},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    asked = [words.user, words.what, words.is_, key, words.question_mark, words.assistant]
    assert tokenizer(text).input_ids == [
        words.bos, words.system, filler, *asked, *words.values[:2], words.end, *asked
    ]  # fmt: skip


def test_the_shipped_tokenizer_is_the_one_the_code_writes(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 8192)
    shipped = Path(resolve("recall-mla"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (shipped / name).read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8"), name
