"""The names of torch's remote calls, from braid or, with RPC_FROM=torch, from torch itself."""

import os

if os.environ.get("RPC_FROM") == "torch":
    import torch.distributed.autograd as dist_autograd
    from torch.distributed import rpc
    from torch.distributed.nn import RemoteModule
    from torch.distributed.optim import DistributedOptimizer
else:
    from braid.compat.torch_rpc import DistributedOptimizer, RemoteModule, dist_autograd, rpc

__all__ = ["DistributedOptimizer", "RemoteModule", "dist_autograd", "rpc"]
