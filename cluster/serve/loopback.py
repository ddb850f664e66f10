"""Keeps a replica's own server on 127.0.0.1.

Ray Serve opens an unauthenticated gRPC port in every replica and binds it to all interfaces, whatever address Ray
itself uses. On a cluster of one machine nobody else has any business there.
"""

from __future__ import annotations

import logging
import os
from typing import Any

LOOPBACK_VARIABLE = "ROPEWALK_LOOPBACK"
"""Set in the environment of a Ray that runs on this machine only; its workers inherit it."""

logger = logging.getLogger("ray.serve")


def keep_on_loopback() -> None:
    """Bind this replica's gRPC server to 127.0.0.1. Call it while the replica is constructed, before that starts."""
    if os.environ.get(LOOPBACK_VARIABLE) != "1":
        return
    from ray.serve._private import replica

    bind = getattr(replica, "add_port_to_grpc_server", None)
    if bind is None:
        logger.warning("This Ray version binds replicas in another way: their gRPC port may be reachable from outside")
        return

    def bind_to_loopback(server: Any, address: str) -> Any:
        return bind(server, address.replace("[::]", "127.0.0.1"))

    replica.add_port_to_grpc_server = bind_to_loopback
