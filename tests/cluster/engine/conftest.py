"""Real vLLM engines on CPU, with and without Ropewalk, driven from plain test functions."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ropewalk.cluster.bench.engine import Engine

StartEngines = Callable[..., list[Engine]]


@pytest.fixture(scope="module")
def start_engines() -> Iterator[StartEngines]:
    """Start engines together, one for each store given (None: plain vLLM); a later start ends the ones before.

    What shares a start shares the machine, so that only engines that are compared run side by side.
    """
    started: list[Engine] = []
    roots: set[Path] = set()

    def end() -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Engine.stop, started))
        started.clear()

    def start(model: str, *stores: Path | None, **engine_args: Any) -> list[Engine]:
        end()
        roots.update(store for store in stores if store is not None)
        with ThreadPoolExecutor() as pool:
            started.extend(pool.map(lambda store: Engine(model, store_root=store, **engine_args), stores))
        return list(started)

    yield start
    end()
    for root in roots:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def new_store() -> Callable[[], Path]:
    """Name a store root on tmpfs, where there is one."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
    return lambda: base / f"ropewalk-test-{uuid.uuid4().hex}"
