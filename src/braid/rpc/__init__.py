"""Remote calls: functions that run in other processes, and values that stay there.

from braid import rpc
from braid.rpc import dist_autograd

rpc.init_rpc("worker0")
rref = rpc.remote("worker1", torch.nn.Linear, args=(4, 2))
y = rref.rpc_sync().forward(x)
rpc.shutdown()
"""

from __future__ import annotations

from braid.rpc import dist_autograd, functions
from braid.rpc.api import get_worker_info, is_cancelled, remote, rpc_async, rpc_sync
from braid.rpc.membership import init_rpc, shutdown
from braid.rpc.names import register
from braid.rpc.optimizer import DistributedOptimizer
from braid.rpc.options import RpcOptions
from braid.rpc.outcomes import RpcError
from braid.rpc.pending import idempotent
from braid.rpc.references import RRef
from braid.rpc.remote_module import RemoteModule
from braid.rpc.roles import Role, names_of, own_role
from braid.rpc.serving import batch, broadcast, serial
from braid.rpc.streams import Stream, stream
from braid.rpc.workers import WorkerInfo

__all__ = [
    "DistributedOptimizer",
    "RRef",
    "RemoteModule",
    "Role",
    "RpcError",
    "RpcOptions",
    "Stream",
    "WorkerInfo",
    "batch",
    "broadcast",
    "dist_autograd",
    "functions",
    "get_worker_info",
    "idempotent",
    "init_rpc",
    "is_cancelled",
    "names_of",
    "own_role",
    "register",
    "remote",
    "rpc_async",
    "rpc_sync",
    "serial",
    "shutdown",
    "stream",
]
