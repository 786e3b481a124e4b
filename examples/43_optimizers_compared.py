"""Five distributed optimizers on one model, compared by the size of optimizer states.

braid run -n 2 examples/43_optimizers_compared.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import braid
import braid.compat.horovod.torch as hvd
from braid import rpc
from braid.parallel.data_parallel import accumulate
from braid.parallel.sharding import shard_optimizer
from braid.rpc import dist_autograd

STEPS, D, RANKS = 4, 64, range(2)


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, D))


def loss_of(model: nn.Module, step: int, *ranks: int) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
    x = torch.cat([torch.randn(4, D, generator=generator) for generator in generators])
    return nn.functional.mse_loss(model(x), -x)


def train(way: str, group: braid.Group) -> tuple[list[torch.Tensor], dict]:
    net, ranks = (model := new_model()), [group.rank]
    stepper = optimizer = torch.optim.Adam(model.parameters())
    if way == "DataParallel":
        net, ranks = braid.DataParallel(model, ["cpu", "cpu"]), RANKS
    elif way == "DDP":
        net = braid.DistributedDataParallel(model, process_group=group)
    elif way == "Horovod":
        stepper = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    elif way == "ZeRO":
        shard_optimizer(optimizer, model, stage=1, process_group=group)
    for step in range(STEPS):
        stepper.zero_grad()
        loss_of(net, step, *ranks).backward()
        stepper.step()
    return list(model.parameters()), optimizer.state


def train_by_calls() -> tuple[list[torch.Tensor], dict]:
    there = rpc.RemoteModule("node1", new_model)
    optimizer = rpc.DistributedOptimizer(torch.optim.Adam, params := there.remote_parameters())
    for step in range(STEPS):
        with dist_autograd.context() as context:
            loss = sum(loss_of(there, step, rank) for rank in RANKS) / len(RANKS)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
    return [param.to_here() for param in params], optimizer.state_dict()["node1"]["state"]


if __name__ == "__main__":
    group = braid.init()
    hvd.init()
    rpc.init_rpc(f"node{group.rank}")
    model = new_model()  # the reference: one process, on the samples of both ranks
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(STEPS):
        accumulate(model, [partial(loss_of, model, step, rank) for rank in RANKS])
        optimizer.step()
    for way in ("DDP", "Horovod", "ZeRO") + ("DataParallel", "calls") * (group.rank == 0):
        params, states = train_by_calls() if way == "calls" else train(way, group)
        assert all(map(torch.equal, params, model.parameters()))
        tensors = [x for state in states.values() for x in state.values()]
        kib = sum(x.nbytes for x in tensors if x.dim()) / 1024
        print(f"{way}: {kib:.0f} KiB of states {'in node 1' if way == 'calls' else 'here'}")
    print("all parameters equal one process bit by bit")
    rpc.shutdown()
