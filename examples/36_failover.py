"""A server dies during training; the bits of the result do not change.

braid run --servers 3 --workers 2 examples/36_failover.py

Here a server closes its connections and leaves. With `--replicas 1` after `--workers 2`, and the
word `kill` at the end, it kills itself by a signal.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial

import torch

import braid
from braid import ps

NUMEL, STEPS = 1 << 20, 24  # of four shards, 4 MiB
ADAM = partial(torch.optim.AdamW, lr=0.1)


def gradient(values: torch.Tensor, worker: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + worker)
    return values - torch.randn(NUMEL, generator=generator)


def alone(workers: int) -> torch.Tensor:
    values = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = ADAM([values])
    for step in range(STEPS):
        grads = [gradient(values.detach(), worker, step) for worker in range(workers)]
        values.grad = sum(grads[1:], grads[0].clone()) * (1 / workers)
        optimizer.step()
    return values.detach()


def serve(node: ps.Node) -> None:
    """Serve; server 0 dies after half of the steps."""

    def die() -> None:
        records = max(shard.state.applied.number for shard in node.server.shards)
        if records >= STEPS // 2 and not died:
            died.append(True)
            if "kill" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
            node.postoffice.close(0.0)

    died: list[bool] = []
    if node.role == "server" and node.number == 0:
        node.postoffice.register({}, on_tick=die)
    try:
        node.serve()
    except braid.errors.StaleError:
        print(f"server 0 is gone after {STEPS // 2} records, in epoch {node.postoffice.epoch}")
        assert died


def main() -> None:
    with ps.join(braid.init(), options=ps.Options(replicas=1)) as node:
        table = node.dense("values", torch.zeros(NUMEL), ADAM)
        if not node.is_worker:
            serve(node)
            return
        table.pull()  # returns when all nodes have joined
        times = []
        for step in range(STEPS):
            began = time.perf_counter()
            table.push(gradient(table.pull(), node.number, step))
            times.append(time.perf_counter() - began)
        values = table.pull().clone()
        middle, longest = sorted(times)[STEPS // 2], max(times)
        print(f"a step takes {1e3 * middle:.0f} ms, the longest {1e3 * longest:.0f} ms")
        assert torch.equal(values, alone(node.num_workers))
        print(f"values equal one process bit by bit; epoch {node.postoffice.epoch}")


if __name__ == "__main__":
    main()
