"""Typed messages between named nodes; see README.md.

The vans: `SocketVan` (processes and hosts), `PipeVan` (streams that were handed over), `LocalVan` (one process), `SimulatedVan` (virtual time and faults). Tensors travel
as buffers: see `braid.message.tensors`, which alone imports torch.
"""

from __future__ import annotations

from braid.message.faults import Faults
from braid.message.local_van import LocalNetwork, LocalVan
from braid.message.pipe_van import PipeStream, PipeVan
from braid.message.schema import Failed, Message, PeerLost, Schema
from braid.message.services import Handler, Reply, Service
from braid.message.simulated_van import Network, SimulatedVan
from braid.message.socket_van import SocketVan
from braid.message.stream_van import Stream
from braid.message.van import (
    NUM_PRIORITIES,
    Allocate,
    Delivery,
    Sending,
    Van,
    VanConfig,
    VanStatistics,
    split_node,
)

__all__ = [
    "NUM_PRIORITIES",
    "Allocate",
    "Delivery",
    "Failed",
    "Faults",
    "Handler",
    "LocalNetwork",
    "LocalVan",
    "Message",
    "Network",
    "PeerLost",
    "PipeStream",
    "PipeVan",
    "Reply",
    "Schema",
    "Sending",
    "Service",
    "SimulatedVan",
    "SocketVan",
    "Stream",
    "Van",
    "VanConfig",
    "VanStatistics",
    "split_node",
]
