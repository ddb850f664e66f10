"""How long the queue of each replica is, sampled by a process of its own: Ray reads its environment when imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from ropewalk.cluster.serve.local import LocalCluster

INTERVAL_S = 0.2

TIMEOUT_S = 2.0
"""A sample is left out when a replica does not answer for so long."""

Sample = tuple[float, list[int]]
"""Seconds since the sampling began, and the requests running or waiting on each replica."""

UNEVEN = 1.5
"""Queue of a replica, in mean queues, from which on load counts as uneven."""


class QueueSampler:
    """Samples the queues of a cluster's model replicas while it is entered; `samples` has them afterwards."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._environment = {**os.environ, **cluster.ray_environment, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        self._address = cluster.ray_address
        self.samples: list[Sample] = []

    def __enter__(self) -> QueueSampler:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._address],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("the process that samples queues could not join the cluster")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        output, _ = self._process.communicate(input="\n", timeout=60)
        lines = [json.loads(line) for line in output.splitlines()]
        self.samples = [(time_s, lengths) for time_s, lengths in lines]


def longest_uneven_s(samples: Sequence[Sample], least_excess: int) -> float:
    """Return the longest time, in seconds, that some replica had more than `UNEVEN` mean queues without a pause.

    Queues that differ by less than `least_excess` requests do not count: of two, a difference of one cannot be
    balanced.
    """
    longest = 0.0
    begin: float | None = None
    for time_s, lengths in samples:
        is_uneven = max(lengths) > UNEVEN * sum(lengths) / len(lengths) and max(lengths) - min(lengths) >= least_excess
        if not is_uneven:
            begin = None
            continue
        begin = time_s if begin is None else begin
        longest = max(longest, time_s - begin)
    return longest


def _sample_forever(address: str) -> None:
    import selectors

    import ray
    from ray.serve._private.common import REPLICA_ID_FULL_ID_STR_PREFIX
    from ray.serve._private.constants import SERVE_NAMESPACE

    ray.init(address=address, namespace=SERVE_NAMESPACE, log_to_driver=False)
    names = [
        name for name in ray.util.list_named_actors() if name.startswith(REPLICA_ID_FULL_ID_STR_PREFIX) and ":" in name
    ]
    replicas = [ray.get_actor(name) for name in sorted(names) if "#Ingress#" not in name]
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin, selectors.EVENT_READ)
    print(len(replicas), flush=True)
    begin = time.monotonic()
    while not waiting.select(INTERVAL_S):
        with suppress(ray.exceptions.RayError):
            lengths = ray.get([replica.get_num_ongoing_requests.remote() for replica in replicas], timeout=TIMEOUT_S)
            print(json.dumps([time.monotonic() - begin, lengths]), flush=True)


if __name__ == "__main__":
    _sample_forever(sys.argv[1])
