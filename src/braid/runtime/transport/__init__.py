"""Shared or mirrored memory of ranks, and how ranks wait: the basis of collectives.

Public names: `MemoryTransport` (a rank's end), `Arena`, `Block` and `adoptable` (tensors that peers
can read), `Wait`, `WaitAny`, `DeviceWait`, `Steps` and `Waiter` (how to wait), `Health` and `Loss`
(lost ranks), `Fabric` (ranks as threads), `connect` (ranks as processes, on one or several hosts).
"""

from braid.runtime.transport.arena import Arena, Block, adoptable
from braid.runtime.transport.base import MemoryTransport
from braid.runtime.transport.context import RankContext
from braid.runtime.transport.health import Health, Loss
from braid.runtime.transport.inproc import Fabric
from braid.runtime.transport.join import connect
from braid.runtime.transport.peer_connections import Network
from braid.runtime.transport.wait import DeviceWait, Steps, Wait, WaitAny

__all__ = [
    "Arena",
    "Block",
    "DeviceWait",
    "Fabric",
    "Health",
    "Loss",
    "MemoryTransport",
    "Network",
    "RankContext",
    "Steps",
    "Wait",
    "WaitAny",
    "adoptable",
    "connect",
]
