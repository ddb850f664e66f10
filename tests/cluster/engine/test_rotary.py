"""What the planning process makes of the workers' rotary modules, and what it tells them to turn with."""

from types import SimpleNamespace

import pytest
import torch

from ropewalk.cluster.engine.rotary import RotaryExtension, _module_to, _read, find_rotary
from ropewalk.cluster.engine.settings import WORKER_EXTENSION
from ropewalk.kernels.rope import RotaryFacts

FACTS = RotaryFacts((1.0, 0.1), interleaved=False)


class OwnExtension(RotaryExtension):
    """A user's worker extension that keeps Ropewalk's methods."""


class OtherExtension:
    """A user's worker extension that knows nothing of Ropewalk."""


class Client:
    """Two ranks of an engine, whose modules turn by `inv_freq`."""

    def __init__(self, inv_freq=(1.0, 0.1), *, interleaved=False, second_rank=None):
        self.ranks = [self.rank(inv_freq, interleaved), second_rank or self.rank(inv_freq, interleaved)]
        self.told = None

    @staticmethod
    def rank(inv_freq, interleaved):
        angles = torch.arange(512, dtype=torch.float64).unsqueeze(1) * torch.tensor(inv_freq, dtype=torch.float64)
        table = torch.cat([angles.cos(), angles.sin()], dim=1).to(torch.bfloat16)
        module = type("RotaryEmbedding", (), {"is_neox_style": not interleaved, "cos_sin_cache": table})()
        return 1, [_module_to(_read(module, ("layers.0.attn",)))]

    async def collective_rpc(self, method, args=()):
        if method == "ropewalk_turn_with":
            self.told = args
            return None
        assert method == "ropewalk_rotary_modules"
        if self.ranks is None:
            raise RuntimeError("no such thing")
        return self.ranks


def vllm_config(extension=WORKER_EXTENSION):
    config = SimpleNamespace(to_dict=lambda: {"rope_parameters": {"rope_type": "default"}})
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=config, model="some/model"),
        parallel_config=SimpleNamespace(worker_extension_cls=extension),
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("extension", [WORKER_EXTENSION, f"{__name__}.OwnExtension"])
async def test_workers_turn_with_the_configs_frequencies_and_the_models_pairing(monkeypatch, extension, interleaved):
    monkeypatch.setattr("ropewalk.cluster.engine.rotary.resolve_obj_by_qualname", lambda name: named(name))
    client = Client(interleaved=interleaved)
    finding = await find_rotary(client, vllm_config(extension), FACTS)
    assert finding.refused is None
    assert finding.facts == RotaryFacts(FACTS.inv_freq, interleaved)
    assert client.told == ([1.0, 0.1], interleaved)
    assert finding.summary["source"] == "model"
    assert (finding.summary["rope"], finding.summary["modules"]) == ("default", ["RotaryEmbedding"])
    assert 0 <= finding.summary["difference"] < 1e-4


async def test_a_model_that_turns_otherwise_is_refused_by_name_and_its_workers_are_told_nothing():
    client = Client((1.0, 0.11))
    finding = await find_rotary(client, vllm_config(), FACTS)
    assert finding.facts is None
    assert "some/model: the loaded model turns pair 1 by 0.1099" in finding.refused
    assert "its configuration says 0.1 " in finding.refused
    assert client.told is None


async def test_ranks_that_differ_are_refused():
    client = Client(second_rank=Client.rank((1.0, 0.1), True))
    finding = await find_rotary(client, vllm_config(), FACTS)
    assert "turn differently" in finding.refused


async def test_workers_that_cannot_read_their_model_leave_reuse_off():
    client = Client()
    client.ranks = None
    finding = await find_rotary(client, vllm_config(), FACTS)
    assert "could not be read: no such thing" in finding.refused


@pytest.mark.parametrize("extension", ["", f"{__name__}.OtherExtension"])
async def test_without_our_worker_extension_the_configuration_alone_is_taken_and_said_so(monkeypatch, extension):
    monkeypatch.setattr("ropewalk.cluster.engine.rotary.resolve_obj_by_qualname", lambda name: named(name))
    client = Client((1.0, 0.11))
    finding = await find_rotary(client, vllm_config(extension), FACTS)
    assert (finding.facts, finding.refused, client.told) == (FACTS, None, None)
    assert finding.summary["source"] == "configuration"


def named(name):
    return {"OwnExtension": OwnExtension, "OtherExtension": OtherExtension}.get(
        name.rpartition(".")[2], RotaryExtension
    )
