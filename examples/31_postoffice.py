"""The directory of a parameter server: members, epochs, barriers and heartbeats.

braid run --servers 3 --workers 2 examples/31_postoffice.py
"""

from __future__ import annotations

import torch

import braid
from braid import ps
from braid.ps.protocol.directory import Directory

NUMEL, STEPS = 1 << 20, 12  # of four shards
ONE = ps.SGD(lr=1.0)


def gradient(values: torch.Tensor, worker: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + worker)
    return values - torch.randn(NUMEL, generator=generator)


def alone(workers: int) -> torch.Tensor:
    values = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = torch.optim.SGD([values], lr=1.0)
    for step in range(STEPS):
        grads = [gradient(values.detach(), worker, step) for worker in range(workers)]
        values.grad = sum(grads[1:], grads[0].clone()) * (1 / workers)
        optimizer.step()
    return values.detach()


def line(directory: Directory) -> str:
    joining = sum(map(len, directory.joining))
    heads = ", ".join(f"server {n} heads {k}" for n, k in sorted(directory.heads().items()))
    leaving = f"; leaving {directory.leaving}" if directory.leaving else ""
    return f"epoch {directory.epoch}: {heads}; {joining} copies under way{leaving}"


def serve(node: ps.Node) -> None:
    """Serve; after some steps server 2 hands its shards to the other servers, and leaves."""
    asked = []

    def drain_once() -> None:
        records = max(shard.state.applied.number for shard in node.server.shards)
        if node.number == 2 and records >= STEPS // 3 and not asked:
            asked.append(True)
            node.drain()

    if node.server is not None:
        node.postoffice.register({}, on_tick=drain_once)
    node.serve()
    print(f"{node.postoffice.node} ends in epoch {node.postoffice.epoch}")


def main() -> None:
    with ps.join(braid.init()) as node:
        table = node.dense("values", torch.zeros(NUMEL), ONE)
        seen: list[Directory] = []
        node.postoffice.register({}, on_directory=seen.append)
        if not node.is_worker:
            serve(node)
            return
        for step in range(STEPS):
            table.push(gradient(table.pull(), node.number, step))
        values = table.pull().clone()
        node.postoffice.wait_until(lambda: 2 not in node.postoffice.directory.servers, 60)
        node.barrier("trained")  # all workers have finished training
        if node.number == 0:
            print(*map(line, (*seen[:2], *seen[-1:])), sep="\n")
        assert torch.equal(values, alone(node.num_workers))
        print(f"values equal one process bit by bit, over {len(seen)} epochs")


if __name__ == "__main__":
    main()
