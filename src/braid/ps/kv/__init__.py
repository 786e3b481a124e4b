"""Key-value programs as in PS-Lite, on braid's own post office; see README.md.

Workers push and pull values by keys, servers answer with handles of the program, and any node can
send a note to any other node.
"""

from __future__ import annotations

from braid.ps.kv.filters import Compression, Filter, FixedPoint, KeyCache, TopK
from braid.ps.kv.groups import ALL, SCHEDULER_GROUP, SERVER_GROUP, WORKER_GROUP
from braid.ps.kv.node import KVNode, join
from braid.ps.kv.pairs import KVPairs
from braid.ps.kv.server import KVMeta, KVServer, KVServerDefaultHandle
from braid.ps.kv.simple_app import SimpleApp, SimpleData
from braid.ps.kv.slicers import Slicer, by_hash, by_range
from braid.ps.kv.worker import KVWorker

__all__ = [
    "ALL",
    "SCHEDULER_GROUP",
    "SERVER_GROUP",
    "WORKER_GROUP",
    "Compression",
    "Filter",
    "FixedPoint",
    "KVMeta",
    "KVNode",
    "KVPairs",
    "KVServer",
    "KVServerDefaultHandle",
    "KVWorker",
    "KeyCache",
    "SimpleApp",
    "SimpleData",
    "Slicer",
    "TopK",
    "by_hash",
    "by_range",
    "join",
]
