"""Two replicas in threads of one process: the gradients of a loop, and a slower step than DDP.

braid run -n 2 examples/08_replicas.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

import braid
from braid.parallel.data_parallel import replicate, scatter

LOSS = functional.cross_entropy
LAYERS, WIDTH, CLASSES, BATCH, STEPS = 30, 128, 10, 257, 20


def new_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


def loop_over_shares() -> nn.Module:  # one replica after the other, without threads
    model, (x, y) = new_model(), batch()
    for share, target in scatter((x, y), ["cpu", "cpu"]):  # 129 and 128 samples
        LOSS(model(share), target, reduction="sum").div(BATCH).backward()
    return model


def fastest_ms(step: Callable[[], object]) -> float:
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return min(seconds) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    group = braid.init()
    x, y = batch()
    if group.rank == 0:
        wrapped = braid.DataParallel(new_model(), ["cpu", "cpu"], criterion=LOSS)
        wrapped(x, target=y).backward()
        expected = [p.grad for p in loop_over_shares().parameters()]
        found = [p.grad for p in wrapped.module.parameters()]
        assert all(map(torch.equal, found, expected))
        alone = new_model()
        times = {
            "one module": lambda: LOSS(alone(x), y).backward(),
            "two replicas in threads": lambda: wrapped(x, target=y).backward(),
            "part of it: making replicas": lambda: replicate(alone, ["cpu", "cpu"]),
        }
        print(f"ms of forward and backward, {BATCH} samples")
        for name, step in times.items():
            print(f"{fastest_ms(step):8.2f}  {name}")
    group.barrier()
    share, target = scatter((x, y), ["cpu", "cpu"])[group.rank % 2]
    ddp = braid.DistributedDataParallel(new_model(), process_group=group)
    ddp.set_loss_weight(len(target))  # shares differ by one sample
    spent = fastest_ms(lambda: LOSS(ddp(share), target).backward())
    if group.rank == 0:
        print(f"{spent:8.2f}  two processes (DistributedDataParallel)")
        print("two replicas have the gradients of a loop over their shares, bit by bit")


if __name__ == "__main__":
    main()
