"""Two products with different splits, and the one collective that is inserted between them.

braid run -n 4 examples/23_redistribution.py
"""

from __future__ import annotations

import torch
from torch import nn

import braid
from braid.comm.redistribute import plan, redistribute
from braid.parallel.tensor_parallel import Shard
from braid.programs.layout import Layout

ROWS, WIDTH = 64, 32


class Model(nn.Module):
    """Z = X W V: rows of X in four parts, then columns of V in four parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Shard(torch.matmul, ((4, 1), (1, 1)))
        self.second = Shard(torch.matmul, ((1, 1), (1, 4)))
        self.w, self.v = (nn.Parameter(numbers(WIDTH, WIDTH, seed)) for seed in (0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [ROWS, WIDTH] to the same shape."""
        return self.second(self.first(x, self.w), self.v)


def numbers(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return small whole numbers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (rows, columns), generator=generator).float()


def main() -> None:
    group = braid.init()
    x = numbers(ROWS, WIDTH, seed=2)
    whole = Model()
    expected = whole(x)
    expected.square().sum().backward()

    model = Model()
    division = braid.parallelize(model, group, inputs=x, gather_outputs=False)
    z = model(x)
    z.square().sum().backward()
    assert torch.equal(z, expected.chunk(4, dim=1)[group.rank])
    assert torch.equal(model.w.grad, whole.w.grad)
    assert torch.equal(model.v.grad, whole.v.grad)

    # the same moves by hand, and plans for others
    mesh = braid.mesh("a=2,b=2", group)
    y = x @ whole.w.detach()
    rows, columns = Layout.parse(mesh.layout, "a,b | -"), Layout.parse(mesh.layout, "- | a,b")
    part = y.chunk(4)[group.rank]
    moved = redistribute(part, rows, columns, mesh.__getitem__, shape=y.shape)
    assert torch.equal(moved, y.chunk(4, dim=1)[group.rank])
    if group.rank == 0:
        print(division.explain())
        for target in ("- | -", "- | a,b", "b | a"):
            print(plan(y.shape, 4, rows, Layout.parse(mesh.layout, target)).explain())
        print("Z, its gradients and the moved tensor equal one process, bit by bit")


if __name__ == "__main__":
    main()
