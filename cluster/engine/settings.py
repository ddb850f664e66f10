"""Settings of Ropewalk inside one engine, and how they reach vLLM."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ropewalk.kernels.gear import ChunkSizes
from ropewalk.scheduler.planner import PlannerSettings

CONNECTOR = "RopewalkConnector"
CONNECTOR_MODULE = "ropewalk.cluster.engine.connector"
WORKER_EXTENSION = "ropewalk.cluster.engine.rotary.RotaryExtension"
"""vLLM's engine argument `worker_extension_cls`: reads the loaded model's rotary modules."""

EXTRA_CONFIG_KEY = "ropewalk"

MAX_DEFAULT_BUDGET = 8 << 30
"""Largest budget chosen without being asked, in bytes: RAM that a tmpfs takes is RAM that models do not have."""


def default_store_root() -> Path:
    """Return the store's root on tmpfs, private to the user."""
    return Path("/dev/shm") / f"ropewalk-{os.getuid()}"


def default_store_budget(root: Path) -> int:
    """Return a budget in bytes: half of what is free where `root` lies, at most `MAX_DEFAULT_BUDGET`."""
    place = root
    while not place.exists():
        place = place.parent
    return max(min(shutil.disk_usage(place).free // 2, MAX_DEFAULT_BUDGET), 1 << 20)


class EngineSettings(BaseModel):
    """How one engine finds, takes and saves KV. Lengths are in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store_root: Path = Field(default_factory=default_store_root)
    store_budget_bytes: int = Field(0, ge=0, description="0: half of what is free where the root lies")
    save: bool = True
    carve_out: int = Field(32, ge=0)
    min_run: int | None = Field(None, ge=1, description="None: learned from what stages cost")
    chunk_mean: int = 128
    chunk_min: int = 32
    chunk_max: int = 512

    @model_validator(mode="after")
    def _check(self) -> EngineSettings:
        self.planner()
        return self

    def planner(self) -> PlannerSettings:
        """Return the planner's share. Raises `ValueError` naming what does not fit."""
        chunks = ChunkSizes(self.chunk_mean, self.chunk_min, self.chunk_max)
        return PlannerSettings(chunks, self.carve_out, self.min_run or PlannerSettings.min_run)

    def budget(self) -> int:
        """Return the store's budget in bytes."""
        return self.store_budget_bytes or default_store_budget(self.store_root)


def kv_transfer_config(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` engine argument that puts our connector into the engine."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {EXTRA_CONFIG_KEY: settings.model_dump(mode="json")},
    }


def settings_of(vllm_config: Any) -> EngineSettings:
    """Read the settings back out of a vLLM configuration."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    return EngineSettings.model_validate(extra.get(EXTRA_CONFIG_KEY, {}))
