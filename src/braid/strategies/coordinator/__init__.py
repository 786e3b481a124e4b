"""A coordinator: one process hands out closures, and workers run them."""

from __future__ import annotations

from braid.strategies.coordinator.coordinator import (
    ClosureCancelledError,
    ClusterCoordinator,
    RemoteValue,
)

__all__ = ["ClosureCancelledError", "ClusterCoordinator", "RemoteValue"]
