"""Time and error of six consistency models, with slow workers.

braid run --servers 1 --workers 4 examples/35_staleness.py
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from functools import partial
from pathlib import Path

import torch

import braid
from braid import ps

FILE = Path(sys.argv[1]) if len(sys.argv) > 1 else None  # run longer, write the curves there
STEPS, UNIT_S = (80, 0.02) if FILE else (5, 0.002)
D, ROWS, SLOW = 200, 16, 4
WAYS = {
    "BSP": ps.BSP,
    "3 of 4": ps.Consistency(quorum=3),
    "SSP 1": ps.Consistency(staleness=1),
    "SSP 2": ps.Consistency(staleness=2),
    "SSP 4": ps.Consistency(staleness=4),
    "async": ps.Consistency(staleness=math.inf),
}
SGD = partial(torch.optim.SGD, lr=0.25)
TRUTH = torch.randn(D, generator=torch.Generator().manual_seed(0))


def gradient(values: torch.Tensor, worker: int, step: int) -> torch.Tensor:
    """Return the gradient of a linear regression's mean loss over noisy rows."""
    generator = torch.Generator().manual_seed(100 * step + worker)
    x, noise = (torch.randn(ROWS, n, generator=generator) for n in (D, 1))
    return x.T @ (x @ (values - TRUTH) - noise.squeeze()) / ROWS


def seconds(kind: str, worker: int, step: int) -> float:
    """Return the duration of a step: worker 3 is always slow, or any worker now and then."""
    chance = random.Random(1000 * worker + step).random()
    is_slow = worker == 3 if kind == "permanent" else chance < 0.1
    return UNIT_S * (SLOW if is_slow else 1)


def alone(workers: int) -> torch.Tensor:
    values = torch.nn.Parameter(torch.zeros(D))
    optimizer = SGD([values])
    for step in range(STEPS):
        grads = [gradient(values.detach(), worker, step) for worker in range(workers)]
        values.grad = sum(grads[1:], grads[0].clone()) * (1 / workers)
        optimizer.step()
    return values.detach()


def train(node: ps.Node, table: ps.DenseTable, kind: str) -> tuple[list[list[float]], torch.Tensor]:
    """Return time and mean squared error after each step, and the last values."""
    node.barrier(f"before {table.name}")
    began, curve = time.perf_counter(), []
    for step in range(STEPS):
        values = table.pull()
        time.sleep(seconds(kind, node.number, step))  # stands for forward and backward
        table.push(gradient(values, node.number, step))
        error = (values - TRUTH).square().mean().item()
        curve.append([round(time.perf_counter() - began, 4), round(error, 5)])
    values = table.pull().clone()
    node.barrier(f"after {table.name}")
    return curve, values


def main() -> None:
    with ps.join(braid.init()) as node:
        tables = {
            (kind, way): node.dense(f"{kind} {way}", torch.zeros(D), SGD, consistency)
            for kind in ("now and then", "permanent")
            for way, consistency in WAYS.items()
        }
        if not node.is_worker:
            node.serve()
            return
        curves: dict[str, dict[str, list[list[float]]]] = {}
        for (kind, way), table in tables.items():
            curve, values = train(node, table, kind)
            curves.setdefault(kind, {})[way] = curve
            took, error = curve[-1]
            if node.number == 0:
                print(f"slow {kind}, {way}: {1e3 * took / STEPS:.0f} ms a step, error {error:.4f}")
            if way == "BSP":
                assert torch.equal(values, alone(node.num_workers))
        if FILE is not None and node.number == 0:
            command = f"braid run --servers 1 --workers 4 examples/35_staleness.py {FILE}"
            FILE.write_text(json.dumps({"command": command, "unit_s": UNIT_S, "curves": curves}))
        print("bulk synchronous training has the values of one process bit by bit")


if __name__ == "__main__":
    main()
