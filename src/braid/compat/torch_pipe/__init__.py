"""The API of torch.distributed.pipeline.sync, which torch removed in 2.4.

    from braid.compat.torch_pipe import Pipe
    from braid.compat.torch_rpc import rpc

    rpc.init_rpc("worker", rank=0, world_size=1)
    model = Pipe(nn.Sequential(fc1.to("cuda:0"), fc2.to("cuda:1")), chunks=8)
    output = model(x).local_value()  # an RRef, as in torch
    output.sum().backward()

Scripts for torch's Pipe run after changing the imports. Stages run on threads, one per stage; GPUs
are not necessary.
"""

from braid.compat.torch_pipe.microbatch import NoChunk
from braid.compat.torch_pipe.pipe import Pipe, WithDevice

__all__ = ["NoChunk", "Pipe", "WithDevice"]
