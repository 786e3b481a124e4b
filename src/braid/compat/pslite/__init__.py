"""PS-Lite's API: `from braid.compat import pslite as ps`; programs read as in C++.

    ps.Start()
    if ps.IsServer():
        server = ps.KVServer(0)
        server.set_request_handle(ps.KVServerDefaultHandle())
    if ps.IsWorker():
        kv = ps.KVWorker(0, 0)
        kv.Wait(kv.Push(keys, vals))
    ps.Finalize()

Start it with `braid run --servers 2 --workers 4 program.py`, or by hand with PS-Lite's environment.
"""

from braid.compat.pslite.apps import KVServer, KVWorker, SimpleApp
from braid.compat.pslite.postoffice import (
    Finalize,
    IsScheduler,
    IsServer,
    IsWorker,
    MyRank,
    NumServers,
    NumWorkers,
    Postoffice,
    Range,
    RegisterExitCallback,
    Start,
    StartAsync,
    kAll,
    kMaxKey,
    kScheduler,
    kServerGroup,
    kWorkerGroup,
)
from braid.ps.kv import KVMeta, KVPairs, KVServerDefaultHandle, SimpleData

__all__ = [
    "Finalize",
    "IsScheduler",
    "IsServer",
    "IsWorker",
    "KVMeta",
    "KVPairs",
    "KVServer",
    "KVServerDefaultHandle",
    "KVWorker",
    "MyRank",
    "NumServers",
    "NumWorkers",
    "Postoffice",
    "Range",
    "RegisterExitCallback",
    "SimpleApp",
    "SimpleData",
    "Start",
    "StartAsync",
    "kAll",
    "kMaxKey",
    "kScheduler",
    "kServerGroup",
    "kWorkerGroup",
]
