"""Memory that ranks share or mirror, and how they wait: what collectives are built from.

Public names: `MemoryTransport` (a rank's end), `Arena` and `Block` (tensors that peers can read),
`Wait`, `WaitAny`, `DeviceWait`, `Steps` and `Waiter` (how to wait), `Health` and `Loss` (who is
gone), `Fabric` (ranks as threads), `connect` (ranks as processes, of one or several hosts).
"""

from braid.transport.arena import Arena, Block
from braid.transport.base import MemoryTransport
from braid.transport.context import RankContext
from braid.transport.health import Health, Loss, Witness
from braid.transport.inproc import Fabric
from braid.transport.join import connect
from braid.transport.peer_connections import Network
from braid.transport.wait import DeviceWait, Steps, Wait, WaitAny, Waiter

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
    "Waiter",
    "Witness",
    "connect",
]
