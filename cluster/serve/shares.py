"""How the machines' CPUs are shared among replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ropewalk.cluster.config import ClusterConfig, ModelConfig


def cpus_per_replica(config: ClusterConfig, model: ModelConfig, cpus_of_nodes: Sequence[int]) -> int:
    """CPUs and threads of one replica: as configured, else one beside a GPU, else an equal share of the smallest node.

    Replicas are taken to spread evenly over the nodes. At least one.
    """
    if model.cpus_per_replica or model.gpus_per_replica:
        return model.cpus_per_replica or 1
    replicas_a_node = math.ceil(config.num_replicas / len(cpus_of_nodes))
    return max(1, min(cpus_of_nodes) // replicas_a_node)
