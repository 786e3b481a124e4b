"""braid: every classic way of training PyTorch models in parallel, on one communication core.

Names in the root package are imported on first use, so `import braid` is quick. All other names
are in packages: `braid.comm`, `braid.launch`, `braid.checkpoint`, ...
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from braid._version import __version__

if TYPE_CHECKING:
    from braid.comm import Group, Request, Work
    from braid.context import init, log, mesh, shutdown, world
    from braid.elasticity import elastic, elastic_mesh
    from braid.errors import (
        BraidError,
        CheckpointError,
        CommError,
        CommTimeout,
        ConfigError,
        InternalError,
        MismatchError,
        PeerLostError,
        RendezvousError,
        StaleError,
    )
    from braid.launch import spawn
    from braid.parallel.data_parallel import DataParallel, DistributedDataParallel, SyncBatchNorm
    from braid.parallel.graph import capture
    from braid.parallel.pipeline import Pipeline
    from braid.parallel.resume import load, save
    from braid.parallel.sharding import FullyShardedDataParallel
    from braid.parallel.tensor_parallel import parallelize
    from braid.plan.find import find_plan
    from braid.plan.plan_file import Plan
    from braid.programs.schedule import Program, simulate
    from braid.ps import ParameterServer
    from braid.strategies.fitting import fit
    from braid.strategies.placed import device

_ROOT_NAMES = {
    "BraidError": "errors",
    "CheckpointError": "errors",
    "CommError": "errors",
    "CommTimeout": "errors",
    "ConfigError": "errors",
    "DataParallel": "parallel.data_parallel",
    "DistributedDataParallel": "parallel.data_parallel",
    "FullyShardedDataParallel": "parallel.sharding",
    "Group": "comm",
    "InternalError": "errors",
    "MismatchError": "errors",
    "ParameterServer": "ps",
    "PeerLostError": "errors",
    "Pipeline": "parallel.pipeline",
    "Plan": "plan.plan_file",
    "Program": "programs.schedule",
    "RendezvousError": "errors",
    "Request": "comm",
    "StaleError": "errors",
    "SyncBatchNorm": "parallel.data_parallel",
    "Work": "comm",
    "capture": "parallel.graph",
    "device": "strategies.placed",
    "elastic": "elasticity",
    "elastic_mesh": "elasticity",
    "find_plan": "plan.find",
    "fit": "strategies.fitting",
    "init": "context",
    "load": "parallel.resume",
    "log": "context",
    "mesh": "context",
    "parallelize": "parallel.tensor_parallel",
    "save": "parallel.resume",
    "shutdown": "context",
    "simulate": "programs.schedule",
    "spawn": "launch",
    "world": "context",
}

__all__ = [
    "BraidError",
    "CheckpointError",
    "CommError",
    "CommTimeout",
    "ConfigError",
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "Group",
    "InternalError",
    "MismatchError",
    "ParameterServer",
    "PeerLostError",
    "Pipeline",
    "Plan",
    "Program",
    "RendezvousError",
    "Request",
    "StaleError",
    "SyncBatchNorm",
    "Work",
    "__version__",
    "capture",
    "device",
    "elastic",
    "elastic_mesh",
    "find_plan",
    "fit",
    "init",
    "load",
    "log",
    "mesh",
    "parallelize",
    "save",
    "shutdown",
    "simulate",
    "spawn",
    "world",
]


def __getattr__(name: str) -> Any:
    package = _ROOT_NAMES.get(name)
    if package is None:
        msg = f"module 'braid' has no attribute {name!r}"
        raise AttributeError(msg)
    is_collecting = gc.isenabled()
    gc.disable()  # modules stay, and looking for garbage among all of torch takes 0.1 s
    try:
        value = getattr(import_module(f"braid.{package}"), name)
    finally:
        if is_collecting:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
