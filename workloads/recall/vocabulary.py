"""The recall model's vocabulary: words that are one token each, over a byte-level BPE that can spell anything.

Every word of the recall task (keys, values, fillers, structure words) is one token with its leading space. A BPE
tokenizer needs merges to get there; ours form a trie: each merge extends a prefix by one byte, and every prefix
starts with the space. Since no merge starts elsewhere, at most one is possible at a time within a word and the result
cannot depend on merge order. All other text falls back to bytes and to prefixes of known words.

Run `python -m ropewalk.workloads.recall.vocabulary DIR` to write the tokenizer's files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

VOCABULARY_SIZE = 960
NUM_KEYS = 192
NUM_VALUES = 128

PAD, BOS, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, END, SYSTEM, USER, ASSISTANT)

STRUCTURE_WORDS = ("is", ".", "what", "?", ",", ":", "note", "and")
_FILLER_TEXT = """
    the for that with this from was has had not but are all can her his our out day way new old two one see say get
    use man too any may how who boy did its let put run end ask try men air sun sea sky far near long time year work
    part hand high last life left line list main make many more most move much must name next open over page plan play
    read rest road same send show side some soon take talk tell them then they very wait walk want week well went were
    when will wind word
"""
FILLER_WORDS = tuple(_FILLER_TEXT.split())

# Pronounceable words for keys and values: 12 x 5 x 7 = 420, of which 320 are drawn.
_ONSETS, _VOWELS, _CODAS = "bdklmnprstvz", "aeiou", "bdlnrvz"
_WORD_SEED = 1

# Messages start with one space, so that their first word is a token like every other.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + (message['role'] if message['role'] in ['system', 'user', 'assistant'] else 'user') + '|>' }}"
    "{{ ' ' + (message['content'] or '') | trim }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids of the recall task's words.

    Attributes:
        tokens: token text by id, in the byte-level alphabet ("Ġ" stands for a space).
        merges: BPE merges, a prefix and the byte that extends it, in trie order.
        keys, values, fillers: ids of the words of each class.
        other: ids of all remaining ordinary tokens (bytes and prefixes): noise that real text may contain.
    """

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    fillers: tuple[int, ...]
    other: tuple[int, ...]
    pad: int
    bos: int
    end: int
    system: int
    user: int
    assistant: int
    is_: int
    full_stop: int
    what: int
    question_mark: int
    newline: int

    def text(self, token_ids: Iterable[int]) -> str:
        """The text these ordinary tokens stand for (special tokens appear under their names)."""
        to_byte = {character: byte for byte, character in byte_alphabet().items()}
        pieces: list[bytes] = []
        for token_id in token_ids:
            token = self.tokens[token_id]
            is_special = token_id < len(SPECIAL_TOKENS) or token.startswith("<|reserved")
            pieces.append(token.encode() if is_special else bytes(to_byte[character] for character in token))
        return b"".join(pieces).decode("utf-8", errors="replace")


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte (Radford et al. 2019): printable Latin-1 stays, the rest moves up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    alphabet: dict[int, str] = {}
    moved = 0
    for byte in range(256):
        if byte in printable:
            alphabet[byte] = chr(byte)
        else:
            alphabet[byte] = chr(256 + moved)
            moved += 1
    return alphabet


def _invented_words() -> tuple[list[str], list[str]]:
    """Key words and value words: disjoint, none of them an English word used elsewhere in the vocabulary."""
    taken = {*STRUCTURE_WORDS, *FILLER_WORDS}
    candidates = ["".join(letters) for letters in product(_ONSETS, _VOWELS, _CODAS)]
    candidates = [word for word in candidates if word not in taken]
    random.Random(_WORD_SEED).shuffle(candidates)
    return sorted(candidates[:NUM_KEYS]), sorted(candidates[NUM_KEYS : NUM_KEYS + NUM_VALUES])


@cache
def vocabulary() -> Vocabulary:
    """The one vocabulary; the same on every machine."""
    alphabet = byte_alphabet()
    space = alphabet[ord(" ")]
    keys, values = _invented_words()

    tokens = [*SPECIAL_TOKENS, *(alphabet[byte] for byte in range(256))]
    ids = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for word in [*STRUCTURE_WORDS, *keys, *values, *FILLER_WORDS]:
        prefix = space
        for character in word:
            if prefix + character not in ids:
                ids[prefix + character] = len(tokens)
                tokens.append(prefix + character)
                merges.append((prefix, character))
            prefix += character
    if len(tokens) > VOCABULARY_SIZE:
        raise ValueError(f"the words need {len(tokens)} tokens, but the vocabulary has {VOCABULARY_SIZE}")
    words = {space + word for word in [*STRUCTURE_WORDS, *keys, *values, *FILLER_WORDS]}
    other = tuple(i for i in range(len(SPECIAL_TOKENS), len(tokens)) if tokens[i] not in words)
    tokens += [f"<|reserved_{index}|>" for index in range(VOCABULARY_SIZE - len(tokens))]

    def word_id(word: str) -> int:
        return ids[space + word]

    return Vocabulary(
        tokens=tuple(tokens),
        merges=tuple(merges),
        keys=tuple(word_id(word) for word in keys),
        values=tuple(word_id(word) for word in values),
        fillers=tuple(word_id(word) for word in FILLER_WORDS),
        other=other,
        pad=ids[PAD],
        bos=ids[BOS],
        end=ids[END],
        system=ids[SYSTEM],
        user=ids[USER],
        assistant=ids[ASSISTANT],
        is_=word_id("is"),
        full_stop=word_id("."),
        what=word_id("what"),
        question_mark=word_id("?"),
        newline=ids[alphabet[ord("\n")]],
    )


def tokenizer_json() -> dict[str, Any]:
    """The tokenizer in the format of Hugging Face `tokenizers`."""
    words = vocabulary()
    special = [i for i, token in enumerate(words.tokens) if token in SPECIAL_TOKENS or token.startswith("<|reserved")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": words.tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index in special
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(words.tokens)},
            "merges": [list(merge) for merge in words.merges],
        },
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """`tokenizer_config.json`: special tokens and chat template, for prompts of at most `max_length` tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }


def write_tokenizer(directory: Path, max_length: int) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": tokenizer_config(max_length)}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the recall model's tokenizer.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--max-length", type=int, default=8192)
    arguments = parser.parse_args()
    write_tokenizer(arguments.directory, arguments.max_length)
