"""Families of models on real engines: turned, stored and taken back, beside a float32 forward pass without a cache.

Engines take long to start: four families are run here, each of a kind of its own (MLA with compressed queries, Llama's
scaling, normed keys, partial rotary). `python -m benchmarks.architectures` runs all of them (docs/architectures.md).
"""

from pathlib import Path

import pytest

from ropewalk.cluster.bench.architectures import BODY, PROMPT, engine_arguments, examine, facts_by_configuration
from ropewalk.cluster.models.tiny import REFUSED, SERVED, write, write_config
from ropewalk.kernels.keys import HEAD_LENGTH

pytestmark = pytest.mark.engine

FAMILIES = {family.name: family for family in (*SERVED, *REFUSED)}


@pytest.fixture(scope="module", params=["DeepSeek-V3", "Llama 3.1", "Qwen3", "Phi-2"])
def findings(request, start_engines, new_store, tmp_path_factory):
    family = FAMILIES[request.param]
    folder = write(family, tmp_path_factory.mktemp("model"))
    (engine,) = start_engines(str(folder), new_store(), **engine_arguments(family))
    return examine(engine, family)


def test_the_loaded_model_confirms_its_configuration_and_every_layer_turns(findings):
    assert findings.refused is None
    assert findings.status["rotary"]["source"] == "model"
    assert 0 < findings.status["turn_error"] <= findings.status["turn_error_of_layers"] < 1.5e-2


def test_kv_that_was_stored_and_taken_back_gives_the_same_tokens(findings):
    assert findings.first.num_cached == 0
    assert findings.reinjected.num_cached >= PROMPT - HEAD_LENGTH
    assert findings.reinjected.token_ids == findings.first.token_ids
    assert len(set(findings.first.token_ids)) > 3, "a model that repeats itself shows nothing"


def test_reuse_at_another_position_is_what_a_pass_over_both_texts_gives(findings, record_property):
    """The reference turns nothing: it places the old text where the body is used, and hides its header by a mask."""
    for name in ("kl_prefill", "kl_turned", "kl_unturned"):
        record_property(name, getattr(findings, name))
    assert findings.reused >= 0.75 * BODY
    assert findings.kl_turned < 0.2 * findings.kl_unturned
    assert findings.kl_turned < 0.15


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Gemma 2", "sliding-window"),
        ("Gemma 3", "sliding-window"),
        ("gpt-oss", "sliding-window"),
        ("Mistral 7B v0.1", "sliding-window"),
        ("Jamba", "Mamba"),
        ("Nemotron-H", "Mamba"),
    ],
)
def test_families_without_kv_for_every_token_are_refused(name, reason, tmp_path):
    _, facts = facts_by_configuration(write_config(FAMILIES[name], tmp_path))
    assert reason in facts.refused


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("BLOOM", "ALiBi"),
        ("GPT-2", "learned"),
        ("Qwen2-VL, its text model", "M-RoPE"),
        ("Llama, dynamic NTK", "'dynamic' changes its frequencies"),
        ("Phi-4-mini (LongRoPE)", "'longrope' changes its frequencies"),
    ],
)
def test_families_whose_keys_cannot_be_turned_keep_the_exact_domain(name, reason, tmp_path):
    _, facts = facts_by_configuration(write_config(FAMILIES[name], tmp_path))
    assert facts.refused is None
    assert reason in facts.reuse_refused


def test_the_same_weights_are_written_every_time(tmp_path):
    first, second = (write(FAMILIES["Llama 3.1"], tmp_path / name) for name in ("a", "b"))
    files = [sorted(path.name for path in folder.iterdir()) for folder in (first, second)]
    assert files[0] == files[1]
    for name in files[0]:
        assert Path(first / name).read_bytes() == Path(second / name).read_bytes()
