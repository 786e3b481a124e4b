"""The API of torch.distributed.rpc: programs for it run after changing their imports.

    from braid.compat.torch_rpc import DistributedOptimizer, RemoteModule, dist_autograd, rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", forward, args=(x,)).sum()
        dist_autograd.backward(context_id, [loss])
    rpc.shutdown()

Start it with `braid run -n 2`, torchrun, or `torch.multiprocessing.spawn` and MASTER_ADDR.
"""

from braid.compat.torch_rpc import dist_autograd, futures, rpc
from braid.rpc import DistributedOptimizer, RemoteModule

__all__ = ["DistributedOptimizer", "RemoteModule", "dist_autograd", "futures", "rpc"]
