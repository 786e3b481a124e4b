"""One of two busy shards moves to another server; a snapshot is restored on fewer servers.

braid run --servers 3 --workers 1 examples/37_moves.py
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch

import braid
from braid import ps
from braid.ps.protocol.directory import virtual_shard

ADAM = partial(torch.optim.AdamW, lr=0.1)
STEPS = 10
NAMES = [f"table {number}" for number in range(12)]
HOT = [name for name in NAMES if virtual_shard(name, 0) % 3 == 0][:2]  # both start on server 0


def tables(node: ps.Node) -> list[ps.DenseTable]:
    return [node.dense(name, torch.zeros(1000), ADAM) for name in HOT]


def train(values: torch.Tensor, step: int) -> torch.Tensor:
    """Return the gradient of a step at these values."""
    return values - torch.randn(1000, generator=torch.Generator().manual_seed(step))


def work(node: ps.Node, tables: list[ps.DenseTable], folder: Path) -> None:
    def heads() -> list[int | None]:
        directory = node.postoffice.directory
        return [directory.head(virtual_shard(name, 0)) for name in HOT]

    for table in tables:
        table.pull()
    print(f"epoch {node.postoffice.epoch}: heads of {', '.join(HOT)} are {heads()}")
    before, step = heads(), 0
    while heads() == before or step < STEPS:
        for table in tables:
            table.push(train(table.pull(), step))
        step += 1
    print(f"epoch {node.postoffice.epoch}: heads of {', '.join(HOT)} are {heads()}")
    node.save(folder, step)


def main() -> None:
    group = braid.init()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(group.objects.broadcast(name)) / "snapshots"
        with ps.join(group, options=ps.Options(rebalance_s=0.1)) as node:
            trained = tables(node)
            work(node, trained, folder) if node.is_worker else node.serve()
        group.barrier()
        fewer = group.split(0 if group.rank in {0, 1, group.size - 1} else None)
        if fewer is not None:
            with ps.join(fewer, servers=1, options=ps.Options(restore=folder)) as node:
                again = tables(node)
                if not node.is_worker:
                    node.serve()
                else:
                    compare(again, trained[0].clock)
        group.barrier()


def compare(again: list[ps.DenseTable], steps: int) -> None:
    values = torch.nn.Parameter(torch.zeros(1000))
    optimizer = ADAM([values])
    for step in range(steps):
        values.grad = train(values.detach(), step)
        optimizer.step()
    assert all(torch.equal(table.pull(), values) for table in again)
    print(f"after {steps} steps and on one server values equal one process bit by bit")


if __name__ == "__main__":
    main()
