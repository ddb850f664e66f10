"""How the machine's CPUs are shared among replicas."""

from __future__ import annotations

import os

from ropewalk.cluster.config import ClusterConfig, ModelConfig


def cpus_per_replica(config: ClusterConfig, model: ModelConfig) -> int:
    """CPUs and threads of one replica: as configured, else an equal share of this machine, at least one."""
    return model.cpus_per_replica or max(1, len(os.sched_getaffinity(0)) // config.num_replicas)
