"""The hand-made start: a rough recall circuit written into the weights, everything trained afterwards.

From a random start the model does not find recall within a million tokens. This start has the parts in place, not well:

- Embeddings. All tokens share a constant direction; keys and values have random unit vectors in a subspace each.
- Layer 0 looks back by position alone: queries and keys are the constant, turned so that the rotary band scores
  highest 1, 2 or 3 tokens back. Slot A receives the key 2 back or the value 1 back, slot B the key 3 back. In
  `KEY is V1 V2` that marks V1 with (KEY, –) and V2 with (V1, KEY); in `KEY ? <assistant> V1` it marks `<assistant>`
  with (KEY, –) and the first answer word with (–, KEY).
- Layer 1 counts: a token attends to earlier tokens with the same slot and to the sequence start, and writes
  n / (n + 1), so that later facts about a key carry a larger number.
- Layer 2 matches (slot A or own value, slot B) against (slot A, slot B), prefers larger counts and nearer tokens, and
  copies the value found there to the output.

All other entries are small noise. The module holds weights only; it draws from a seeded `torch.Generator`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Layer, RecallModel
from .vocabulary import vocabulary

# The residual stream, 128 wide.
CONSTANT, COUNT, ASSISTANT_MARK, START_MARK = 0, 1, 2, 3
KEY = slice(4, 35)
VALUE = slice(35, 66)
SLOT_A = slice(66, 97)
SLOT_B = slice(97, 128)
IDENTITY_SIZE = 31

NOISE = 0.005
# Large against the identities (1), so that the norms treat all tokens about alike.
CONSTANT_SIZE = 4.0
# Weight of the constant in the latent, where its only work is to keep the norm from blowing up tokens without slots.
LATENT_CONSTANT = 1.5
# Rotary pairs that tell neighbouring positions apart, and those that tell near from far.
FAST_BANDS = range(10)
SLOW_BANDS = range(10, 32)
# Attention scores (after scaling) that the circuit aims at.
LOOK_BACK_SCORE = 50.0
MATCH_SCORE = 25.0
# The same for layer 1, lower so that uneven slots still count as one each, and the sequence start's share of it.
COUNTING_SCORE = 14.0
START_SHARE = 0.85
COUNT_SCORE = 20.0
NEARNESS_SCORE = 8.0
# How much more the copied value weighs in the last residual than the token's own identity.
OUTPUT_GAIN = 4.0
LOGIT_GAIN = 1.5


def _unit_rows(count: int, size: int, generator: torch.Generator) -> Tensor:
    rows = torch.randn(count, size, generator=generator)
    return F.normalize(rows, dim=-1)


def _sizes(num_identities: int) -> tuple[float, float]:
    """Size of an identity (1 in the residual) after the layer's norm and in the normalised latent.

    `num_identities`: how many identities and slots a typical token's residual and latent hold.
    """
    normalised = math.sqrt(128 / (CONSTANT_SIZE**2 + num_identities))
    return normalised, math.sqrt(512 / (LATENT_CONSTANT**2 + num_identities))


class _Heads:
    """Views into one layer's attention weights, by head and part."""

    def __init__(self, layer: Layer) -> None:
        attention = layer.self_attn
        config = attention.config
        heads, nope, band = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        query = attention.q_proj.weight.data.view(heads, nope + band, -1)
        expand = attention.kv_b_proj.weight.data.view(heads, nope + config.v_head_dim, -1)
        latent = attention.kv_a_proj_with_mqa.weight.data
        self.query_nope, self.query_band = query[:, :nope], query[:, nope:]
        self.latent, self.key_band = latent[: config.kv_lora_rank], latent[config.kv_lora_rank :]
        self.key_nope, self.value = expand[:, :nope], expand[:, nope:]
        # [H, v_head_dim, hidden], so that `output[h, i, j]` takes value number i to residual number j.
        self.output = attention.o_proj.weight.data.view(-1, heads, config.v_head_dim).permute(1, 2, 0)
        self.scale = math.sqrt(nope + band)


@torch.no_grad()
def write_start(model: RecallModel, seed: int) -> None:
    """Overwrites all weights of `model` with the hand-made start."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * NOISE)
    # The value identity takes another basis in slot A, so that keys and values there cannot be confused.
    value_basis = torch.linalg.qr(torch.randn(IDENTITY_SIZE, IDENTITY_SIZE, generator=generator))[0]
    _write_embeddings(model, generator)
    layers = [layer for layer in model.model.layers if isinstance(layer, Layer)]
    _write_look_back(_Heads(layers[0]), model.config.rope_theta, value_basis)
    _write_count(_Heads(layers[1]))
    _write_match(_Heads(layers[-1]), value_basis)


def _write_embeddings(model: RecallModel, generator: torch.Generator) -> None:
    words = vocabulary()
    embeddings = model.model.embed_tokens.weight.data
    embeddings.mul_(2.0)
    embeddings[:, CONSTANT] = CONSTANT_SIZE
    embeddings[:, SLOT_A] = 0
    embeddings[:, SLOT_B] = 0
    embeddings[:, [COUNT, ASSISTANT_MARK, START_MARK]] = 0
    embeddings[words.assistant, ASSISTANT_MARK] = 1
    embeddings[words.bos, START_MARK] = 1
    keys = _unit_rows(len(words.keys), IDENTITY_SIZE, generator)
    values = _unit_rows(len(words.values), IDENTITY_SIZE, generator)
    embeddings[list(words.keys), KEY] = keys
    embeddings[list(words.values), VALUE] = values
    model.lm_head.weight.data[list(words.values), VALUE] = LOGIT_GAIN * values


def _look_back(heads: _Heads, head: int, distance: int, theta: float) -> None:
    """Makes `head` score highest `distance` tokens back."""
    constant = CONSTANT_SIZE * _sizes(1)[0]
    size = math.sqrt(LOOK_BACK_SCORE * heads.scale / len(FAST_BANDS)) / constant
    for band in FAST_BANDS:
        angle = distance * theta ** (-2 * band / heads.key_band.shape[0])
        heads.key_band[2 * band, CONSTANT] = size
        heads.query_band[head, 2 * band, CONSTANT] = size * math.cos(angle)
        heads.query_band[head, 2 * band + 1, CONSTANT] = -size * math.sin(angle)


def _write_look_back(heads: _Heads, theta: float, value_basis: Tensor) -> None:
    eye = torch.eye(IDENTITY_SIZE)
    heads.latent[0:31, KEY] = eye
    heads.latent[31:62, VALUE] = eye
    heads.latent[62, CONSTANT] = LATENT_CONSTANT / CONSTANT_SIZE
    gain = 1 / math.sqrt(_sizes(1)[1])
    for head, distance, source, destination, basis in (
        (0, 2, slice(0, 31), SLOT_A, eye),
        (1, 3, slice(0, 31), SLOT_B, eye),
        (2, 1, slice(31, 62), SLOT_A, value_basis),
    ):
        _look_back(heads, head, distance, theta)
        heads.value[head, :IDENTITY_SIZE, source] = gain * basis
        heads.output[head, :IDENTITY_SIZE, destination] = gain * eye


def _write_count(heads: _Heads) -> None:
    eye = torch.eye(IDENTITY_SIZE)
    heads.latent[0:31, SLOT_A] = eye
    heads.latent[31:62, SLOT_B] = eye
    heads.latent[62, CONSTANT] = LATENT_CONSTANT / CONSTANT_SIZE
    heads.latent[63, START_MARK] = 1.0
    normalised, latent = _sizes(1)
    match = math.sqrt(COUNTING_SCORE * heads.scale / (normalised * latent))
    start = match * math.sqrt(START_SHARE / CONSTANT_SIZE)
    for head, slot, source in ((0, SLOT_A, slice(0, 31)), (1, SLOT_B, slice(31, 62))):
        heads.query_nope[head, :IDENTITY_SIZE, slot] = match * eye
        heads.key_nope[head, :IDENTITY_SIZE, source] = match * eye
        # The sequence start scores as high as one match, and its value is nothing.
        heads.query_nope[head, IDENTITY_SIZE, CONSTANT] = start
        heads.key_nope[head, IDENTITY_SIZE, 63] = start
        heads.value[head, 0, 62] = 1 / (LATENT_CONSTANT * latent)
        heads.value[head, 0, 63] = -1 / latent
        heads.output[head, 0, COUNT] = 1.0


def _write_match(heads: _Heads, value_basis: Tensor) -> None:
    eye = torch.eye(IDENTITY_SIZE)
    heads.latent[0:31, SLOT_A] = eye
    heads.latent[31:62, SLOT_B] = eye
    heads.latent[62:93, VALUE] = eye
    heads.latent[93, CONSTANT] = LATENT_CONSTANT / CONSTANT_SIZE
    heads.latent[94, COUNT] = 1.0
    heads.latent[95, ASSISTANT_MARK] = 1.0
    normalised, latent = _sizes(2)
    match = math.sqrt(MATCH_SCORE * heads.scale / (normalised * latent))
    count = math.sqrt(COUNT_SCORE * heads.scale / (CONSTANT_SIZE * normalised * latent))
    for head in (0, 1):
        heads.query_nope[head, 0:31, SLOT_A] = match * eye
        heads.query_nope[head, 0:31, VALUE] = match * value_basis
        heads.query_nope[head, 31:62, SLOT_B] = match * eye
        heads.key_nope[head, 0:62, 0:62] = match * torch.eye(62)
        heads.query_nope[head, 62, CONSTANT] = count
        heads.key_nope[head, 62, 94] = count
        heads.query_nope[head, 63, CONSTANT] = count
        heads.key_nope[head, 63, 95] = -2 * count
        gain = math.sqrt(OUTPUT_GAIN / (2 * latent))
        heads.value[head, 0:31, 62:93] = gain * eye
        heads.output[head, 0:31, VALUE] = gain * eye
        nearness = math.sqrt(NEARNESS_SCORE * heads.scale / len(SLOW_BANDS)) / (CONSTANT_SIZE * normalised)
        for band in SLOW_BANDS:
            heads.query_band[head, 2 * band, CONSTANT] = nearness
            heads.key_band[2 * band, CONSTANT] = nearness
