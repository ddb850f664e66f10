"""The recall model in plain torch, and the weights that ship with the product."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ropewalk.cluster.models import resolve
from ropewalk.workloads.recall.circuit import write_start
from ropewalk.workloads.recall.model import LatentRows, RecallConfig, RecallModel, load_model, save_model
from ropewalk.workloads.recall.task import make_header, make_prompt, make_question
from ropewalk.workloads.recall.train import Schedule, Stage, orthogonalised, train


@pytest.fixture(scope="module")
def shipped() -> RecallModel:
    torch.set_num_threads(1)
    return load_model(Path(resolve("recall-mla")))


def log_probabilities(
    model: RecallModel, tokens: list[int], *, start: int = 0, past: LatentRows | None = None
) -> torch.Tensor:
    return model.prefill(tokens, start=start, past=past)[0].log_softmax(-1)


def test_logits_equal_those_of_hugging_face(shipped: RecallModel) -> None:
    reference = AutoModelForCausalLM.from_pretrained(resolve("recall-mla"), dtype=torch.float32)
    tokens = torch.tensor([make_prompt(random.Random(7), 200).tokens])
    with torch.inference_mode():
        wanted = reference(tokens).logits
        found, _ = shipped(tokens, torch.arange(200)[None])
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("cuts", [(1,), (100, 101), (37, 90, 180)])
def test_a_prefill_in_pieces_equals_one_prefill(shipped: RecallModel, cuts: tuple[int, ...]) -> None:
    tokens = make_prompt(random.Random(1), 200).tokens
    whole, whole_rows = shipped.prefill(tokens)
    rows: LatentRows | None = None
    for start, end in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        logits, new_rows = shipped.prefill(tokens[start:end], start=start, past=rows)
        rows = new_rows if rows is None else LatentRows.concatenate([rows, new_rows])
    assert rows is not None
    torch.testing.assert_close(logits, whole, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(rows.latent, whole_rows.latent, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(rows.rotary, whole_rows.rotary, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("delta", [1, 64, 3000, -40])
def test_turned_rows_equal_rows_computed_at_the_shifted_position(shipped: RecallModel, delta: int) -> None:
    tokens = make_prompt(random.Random(2), 150).tokens
    start = 100
    _, rows = shipped.prefill(tokens, start=start)
    _, shifted = shipped.prefill(tokens, start=start + delta)
    turned = rows.turned(delta, shipped.config)
    torch.testing.assert_close(turned.rotary, shifted.rotary, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(turned.latent, shifted.latent, atol=2e-3, rtol=1e-3)
    unturned_error = (rows.rotary - shifted.rotary).norm() / shifted.rotary.norm()
    assert unturned_error > 0.1


def test_turns_add_up(shipped: RecallModel) -> None:
    _, rows = shipped.prefill(make_prompt(random.Random(3), 100).tokens)
    twice = rows.turned(700, shipped.config).turned(-650, shipped.config)
    torch.testing.assert_close(twice.rotary, rows.turned(50, shipped.config).rotary, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(("reassigned", "bar"), [(False, 0.95), (True, 0.8)])
def test_shipped_weights_recall_facts_of_256_token_prompts(shipped: RecallModel, reassigned: bool, bar: float) -> None:
    rng = random.Random(4)
    prompts = [make_prompt(rng, 256, reassigned=reassigned) for _ in range(40)]
    # Greedy decoding gives the answer exactly if each answer word is the likeliest behind the words before it.
    tokens = torch.tensor([[*prompt.tokens, prompt.answer[0]] for prompt in prompts])
    with torch.inference_mode():
        hidden, _ = shipped.hidden(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))
        predicted = shipped.lm_head(hidden[:, -2:]).argmax(-1)
    answers = torch.tensor([prompt.answer for prompt in prompts])
    assert (predicted == answers).all(-1).float().mean() >= bar


def test_a_document_moved_to_a_shorter_header_is_read_right_only_if_its_rows_are_turned(
    shipped: RecallModel,
) -> None:
    """Unturned, its tokens would stand where the question stands."""
    rng = random.Random(5)
    num_right = {True: 0, False: 0}
    divergence = {True: 0.0, False: 0.0}
    for _ in range(12):
        prompt = make_prompt(rng, 256, header_tokens=90)
        document_end = prompt.document_start + len(prompt.document.tokens)
        header, question = make_header(rng, 10), make_question(prompt.key)
        _, rows = shipped.prefill(prompt.tokens[:document_end])
        document_rows = rows[prompt.document_start : document_end]
        _, header_rows = shipped.prefill(header)
        wanted = log_probabilities(shipped, [*header, *prompt.document.tokens, *question])
        for turn in (True, False):
            moved = document_rows.turned(len(header) - prompt.document_start, shipped.config)
            past = LatentRows.concatenate([header_rows, moved if turn else document_rows])
            found = log_probabilities(shipped, question, start=len(past), past=past)
            num_right[turn] += int(found.argmax()) == prompt.answer[0]
            divergence[turn] += float((wanted.exp() * (wanted - found)).sum())
    assert num_right[True] >= 11
    assert num_right[True] > num_right[False]
    assert divergence[True] < 0.2 * divergence[False]


def test_saved_weights_load_as_they_were_up_to_bfloat16(tmp_path: Path) -> None:
    model = RecallModel(RecallConfig())
    write_start(model, seed=1)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(torch.bfloat16).float()), name
    assert (tmp_path / "model.safetensors").stat().st_size <= 5_000_000


def test_training_repeats_itself_and_continues_after_an_interruption(tmp_path: Path) -> None:
    schedule = Schedule(num_steps=2)
    stages = (Stage(64, 1, 3, 0.0),)
    whole = train(tmp_path / "whole", schedule, stages=stages)
    train(tmp_path / "parts", schedule, stages=stages, stop_after=1)
    continued = train(tmp_path / "parts", schedule, stages=stages)
    for (name, first), second in zip(whole.state_dict().items(), continued.state_dict().values(), strict=True):
        torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-5, msg=name)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalised(torch.randn(64, 128)).float())
    assert values.min() > 0.5
    assert values.max() < 1.5
