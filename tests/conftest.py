"""What holds for every test."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

CLIENT_CLOSES_S = 5.0
"""A client's thread ends within one call to the scheduler, which takes two seconds at most."""


@pytest.fixture(autouse=True)
def no_client_outlives_its_test() -> Iterator[None]:
    """A client that a test leaves open would make the next test's scheduler, with its own settings."""
    yield
    clients = [thread for thread in threading.enumerate() if thread.name == "scheduler-client"]
    for thread in clients:
        thread.join(CLIENT_CLOSES_S)
    assert not any(thread.is_alive() for thread in clients), "a SchedulerClient was left open"
