"""The converted SmolLM2-135M: its tokenizer splits as the original does, its weights know things."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ropewalk.cluster.models import resolve

SUN = (
    "The Sun is the star at the center of the Solar System. It is a massive, hot ball of plasma, heated by nuclear "
    "fusion reactions at its core. The Sun radiates this energy mainly as light, and it is the most important source "
    "of energy for life on Earth."
)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return Path(resolve("smollm2-135m"))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def test_the_directory_is_a_plain_llama(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100_000.0}
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert "quantization_config" not in config


def test_every_digit_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("It cost 12,345.67 in 1999").tokens == [
        *("It", "Ġcost", "Ġ", "1", "2", ",", "3", "4", "5", ".", "6", "7"),
        *("Ġin", "Ġ", "1", "9", "9", "9"),
    ]


# The original's vocabulary lacks the bytes that lead code points of high planes, hence the alphabet.
@given(st.text(alphabet=st.characters(min_codepoint=9, max_codepoint=0x24F, exclude_categories=["Cc", "Cn"])))
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_chat_markers_are_single_special_tokens_and_end_a_turn(model_dir: Path, tokenizer: Tokenizer) -> None:
    end_of_turn = tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.encode("hi<|im_end|>").ids[-1] == end_of_turn
    assert tokenizer.decode([end_of_turn], skip_special_tokens=True) == ""
    assert json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"] == end_of_turn


@pytest.mark.engine  # loads transformers and the weights: about 20 s
def test_the_converted_weights_complete_a_known_fact_in_float32(model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        prompt = tokenizer("The capital of France is", return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)
        text = tokenizer(SUN, return_tensors="pt")
        loss = model(**text, labels=text.input_ids).loss
    assert tokenizer.decode(answer[0]).startswith("The capital of France is Paris")
    assert loss.exp() < 20  # perplexity: 10.6 when right, 34 with the rotation's halves left interleaved


@pytest.mark.engine
def test_the_chat_template_renders_a_conversation(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
