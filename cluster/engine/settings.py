"""Settings of Ropewalk inside one engine, and how they reach vLLM."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ropewalk.cluster.store.node_store import DiskTier
from ropewalk.cluster.store.tier import Tier
from ropewalk.kernels.gear import ChunkSizes
from ropewalk.scheduler.planner import PlannerSettings
from ropewalk.scheduler.rules import RuleName

CONNECTOR = "RopewalkConnector"
CONNECTOR_MODULE = "ropewalk.cluster.engine.connector"
WORKER_EXTENSION = "ropewalk.cluster.engine.rotary.RotaryExtension"
"""vLLM's engine argument `worker_extension_cls`: reads the loaded model's rotary modules."""

EXTRA_CONFIG_KEY = "ropewalk"

MAX_DEFAULT_BUDGET = 8 << 30
"""Largest budget chosen without being asked, in bytes: RAM that a tmpfs takes is RAM that models do not have."""

MAX_DEFAULT_DISK_BUDGET = 64 << 30
"""The same for the disk."""


def default_store_root() -> Path:
    """Return the store's root on tmpfs, private to the user."""
    return Path("/dev/shm") / f"ropewalk-{os.getuid()}"


def default_store_budget(root: Path) -> int:
    """Return a budget in bytes: half of what is free where `root` lies, at most `MAX_DEFAULT_BUDGET`."""
    return max(min(_free_bytes(root) // 2, MAX_DEFAULT_BUDGET), 1 << 20)


def default_disk_budget(root: Path) -> int:
    """Return a budget in bytes: half of what is free on the disk or taken by the store itself.

    What earlier runs have left counts as room: the budget would halve with each restart.
    """
    num_held = Tier(root, 1, Counter()).usage().num_bytes
    return max(min((_free_bytes(root) + num_held) // 2, MAX_DEFAULT_DISK_BUDGET), 1 << 20)


def _free_bytes(root: Path) -> int:
    place = root
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


class EngineSettings(BaseModel):
    """How one engine finds, takes and saves KV. Lengths are in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store_root: Path = Field(default_factory=default_store_root)
    store_budget_bytes: int = Field(0, ge=0, description="0: half of what is free where the root lies")
    disk_root: Path | None = Field(None, description="None: what memory has no room for is dropped")
    disk_budget_bytes: int = Field(0, ge=0, description="0: half of the disk's free room")
    retention: RuleName = Field("foresight", description="the order in which cached blocks are let go")
    save: bool = True
    max_hold_s: float = Field(
        2.0, gt=0, description="seconds that a request's blocks are held to be saved: one more, and it is given up"
    )
    carve_out: int = Field(32, ge=0)
    min_run: int | None = Field(None, ge=1, description="None: learned from what stages cost")
    boundary: int | None = Field(None, ge=0, description="tokens; None: 0")
    second_pass: bool = True
    chunk_mean: int = 128
    chunk_min: int = 32
    chunk_max: int = 512
    markers: tuple[str, ...] = Field((), description="tokens before which a chunk ends, as text")
    marker_ids: tuple[int, ...] = Field((), description="their ids: see `resolve_markers`")

    @model_validator(mode="after")
    def _check(self) -> EngineSettings:
        self.planner()
        return self

    def planner(self) -> PlannerSettings:
        """Return the planner's share. Raises `ValueError` naming what does not fit."""
        chunks = ChunkSizes(self.chunk_mean, self.chunk_min, self.chunk_max, self.marker_ids)
        return PlannerSettings(
            chunks,
            self.carve_out,
            self.min_run or PlannerSettings.min_run,
            boundary=self.boundary or 0,
            second_pass=self.second_pass,
        )

    def budget(self) -> int:
        """Return the store's budget in bytes."""
        return self.store_budget_bytes or default_store_budget(self.store_root)

    def disk(self) -> DiskTier | None:
        """Return the store's disk tier, if it has one."""
        if self.disk_root is None:
            return None
        return DiskTier(self.disk_root, self.disk_budget_bytes or default_disk_budget(self.disk_root))


def flush_store(settings: EngineSettings, timeout_s: float) -> int:
    """Copy to the disk tier what only memory holds, as far as time allows; return how many chunks were copied.

    For whoever is about to delete the memory tier.
    """
    if (disk := settings.disk()) is None:
        return 0
    below = Tier(disk.root, disk.budget_bytes, Counter(), worth_root=settings.store_root)
    return Tier(settings.store_root, settings.budget(), Counter(), below=below).flush(timeout_s)


def kv_transfer_config(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` engine argument that puts our connector into the engine."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {EXTRA_CONFIG_KEY: settings.model_dump(mode="json")},
    }


def resolve_markers(settings: EngineSettings, vllm_config: Any) -> EngineSettings:
    """Look the markers up in the model's tokenizer, before the engine starts, and tell the connector too.

    Mutates `vllm_config`. Raises `ValueError` naming a marker that is not one token of the model.
    """
    if not settings.markers:
        return settings
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    vocabulary = tokenizer.get_vocab()
    for marker in settings.markers:
        if marker not in vocabulary:
            raise ValueError(f"chunking.markers: {marker!r} is not one token of {vllm_config.model_config.model}")
    resolved = settings.model_copy(update={"marker_ids": tuple(vocabulary[marker] for marker in settings.markers)})
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra[EXTRA_CONFIG_KEY] = resolved.model_dump(mode="json")
    return resolved


def settings_of(vllm_config: Any) -> EngineSettings:
    """Read the settings back out of a vLLM configuration."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    return EngineSettings.model_validate(extra.get(EXTRA_CONFIG_KEY, {}))
