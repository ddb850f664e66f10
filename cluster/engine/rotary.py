"""The rotary modules of the loaded model, read inside vLLM's workers and compared with its configuration.

vLLM's engine argument `worker_extension_cls` adds `RotaryExtension` to each worker, where `collective_rpc` reaches it
by name. The planning process decides what to turn with, and tells the workers' connectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.utils.import_utils import resolve_obj_by_qualname

from ropewalk.kernels.rope import RotaryFacts, UnsupportedRope, rope_kind
from ropewalk.kernels.rope_table import RotaryModule, RotaryTable, confirm, largest_difference, read_table

PACKAGE = "vllm.model_executor.layers.rotary_embedding"

KINDS = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "DeepseekScalingRotaryEmbedding",
)
"""Classes that turn the first `rotary_dim` numbers of a key by their table, at the token's one position."""


@dataclass(frozen=True, slots=True)
class RotaryFinding:
    """What is known of the turn: `facts` to turn with, or None and why reuse is `refused`; `summary` for `status`."""

    facts: RotaryFacts | None
    refused: str | None
    summary: dict[str, Any]


async def find_rotary(client: Any, vllm_config: Any, facts: RotaryFacts) -> RotaryFinding:
    """Compare the config's `facts` with the loaded model's modules, and have the workers turn with what was confirmed.

    Engines with a worker extension of somebody else's, not derived from ours, are taken by their configuration: the
    turn probe alone judges it then.
    """
    summary: dict[str, Any] = {"rope": rope_kind(vllm_config.model_config.hf_text_config.to_dict())}
    extension = vllm_config.parallel_config.worker_extension_cls
    if not (extension and issubclass(resolve_obj_by_qualname(extension), RotaryExtension)):
        return RotaryFinding(facts, None, _summary(summary, facts, "configuration"))
    try:
        ranks = await client.collective_rpc("ropewalk_rotary_modules")
    except Exception as error:  # a model of a make never seen is to be served all the same
        return RotaryFinding(None, f"the model's rotary modules could not be read: {error}", summary)
    modules = [_module_from(module) for _, found in ranks for module in found]
    summary["modules"] = sorted({module.kind for module in modules})
    try:
        facts = confirm(facts, modules, sum(num_layers for num_layers, _ in ranks))
    except UnsupportedRope as error:
        return RotaryFinding(None, f"{vllm_config.model_config.model}: {error}", summary)
    summary["difference"] = largest_difference(facts, modules[0])
    await client.collective_rpc("ropewalk_turn_with", args=(list(facts.inv_freq), facts.interleaved))
    return RotaryFinding(facts, None, _summary(summary, facts, "model"))


def _summary(known: dict[str, Any], facts: RotaryFacts, source: str) -> dict[str, Any]:
    return known | {"size": facts.rotary_size, "interleaved": facts.interleaved, "source": source}


class RotaryExtension:
    """Methods of each worker. A worker extension of your own keeps them by deriving from this class."""

    def ropewalk_rotary_modules(self: Any) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of layers that keep keys, and their rotary modules."""
        layers = get_kv_transfer_group().layer_names
        modules = rotary_modules(self.get_model(), layers)
        return len(layers), [_module_to(module) for module in modules]

    def ropewalk_turn_with(self: Any, inv_freq: list[float], interleaved: bool) -> None:
        """Have the worker's connector turn keys by these facts from now on."""
        get_kv_transfer_group().turn_with(RotaryFacts(tuple(inv_freq), interleaved))


def rotary_modules(model: torch.nn.Module, layers: Iterable[str]) -> list[RotaryModule]:
    """Return the distinct rotary modules that the attention `layers` (by name) have around them in the model.

    vLLM gives layers with the same parameters one module.
    """
    around: dict[str, list[torch.nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module).__module__.startswith(PACKAGE) and hasattr(module, "rotary_dim"):
            around.setdefault(name.rpartition(".")[0], []).append(module)
    users: dict[torch.nn.Module, list[str]] = {}
    for layer in layers:
        part = layer
        while part and part not in around:
            part = part.rpartition(".")[0]
        for module in around.get(part, ()):
            users.setdefault(module, []).append(layer)
    return [_read(module, tuple(names)) for module, names in users.items()]


def _read(module: Any, layers: tuple[str, ...]) -> RotaryModule:
    kind = type(module).__name__
    if kind not in KINDS:
        return RotaryModule(kind, layers, False, None, "a class whose keys cannot be turned, or that is not known")
    interleaved = not module.is_neox_style
    try:
        return RotaryModule(kind, layers, interleaved, read_table(module.cos_sin_cache.cpu()))
    except UnsupportedRope as error:
        return RotaryModule(kind, layers, interleaved, None, str(error))


def _module_to(module: RotaryModule) -> dict[str, Any]:
    table = module.table and {"inv_freq": list(module.table.inv_freq), "uncertainty": list(module.table.uncertainty)}
    fields = {name: getattr(module, name) for name in ("kind", "layers", "interleaved", "unreadable")}
    return fields | {"table": table}


def _module_from(fields: dict[str, Any]) -> RotaryModule:
    table = fields["table"]
    if table is not None:
        table = RotaryTable(tuple(table["inv_freq"]), tuple(table["uncertainty"]))
    return RotaryModule(fields["kind"], tuple(fields["layers"]), fields["interleaved"], table, fields["unreadable"])
