"""Typed messages between named nodes; see README.md.

The vans are `SocketVan` (processes and hosts), `PipeVan` (streams that are already open) and
`LocalVan` (one process). Tests have another one, with faults and virtual time. Tensors are sent as
buffers: see `tensor_buffers`.
"""

from __future__ import annotations

from braid.runtime.message.protocol.schema import Failed, Message, PeerLost, Schema
from braid.runtime.message.protocol.send_queue import Sending
from braid.runtime.message.protocol.vocabulary import (
    NUM_PRIORITIES,
    Delivery,
    VanConfig,
    split_node,
)
from braid.runtime.message.services import Reply, Service
from braid.runtime.message.van import Van
from braid.runtime.message.vans.local_van import LocalNetwork, LocalVan
from braid.runtime.message.vans.pipe_van import PipeStream, PipeVan
from braid.runtime.message.vans.socket_van import SocketVan
from braid.runtime.message.vans.stream import FrameStream

__all__ = [
    "NUM_PRIORITIES",
    "Delivery",
    "Failed",
    "FrameStream",
    "LocalNetwork",
    "LocalVan",
    "Message",
    "PeerLost",
    "PipeStream",
    "PipeVan",
    "Reply",
    "Schema",
    "Sending",
    "Service",
    "SocketVan",
    "Van",
    "VanConfig",
    "split_node",
]
