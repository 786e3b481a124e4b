"""One model cut four ways: by layers, by columns, by rows, and by columns and rows in turn.

braid run -n 2 examples/20_layers_and_slices.py
"""

from __future__ import annotations

import torch
from torch import nn

import braid
from braid.comm.autograd import recv, send
from braid.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear, slicing_of

WIDTH, LAYERS, ROWS = 128, 4, 32
WAYS = {"columns": ["column"], "rows": ["row"], "columns, rows": ["column", "row"]}


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    matrices = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*(nn.Sequential(matrix, nn.Tanh()) for matrix in matrices))


def by_layers(group: braid.Group, model: nn.Sequential, x: torch.Tensor) -> None:
    """Put whole layers on each rank: activations go to the next rank, gradients come back."""
    share = LAYERS // group.size
    for index in range(LAYERS):
        if index // share != group.rank:
            model[index] = nn.Identity()
    if group.rank:
        x = recv(group, torch.empty_like(x, requires_grad=True), group.rank - 1)
    y = model(x)
    last = group.rank == group.size - 1
    (y.square().mean() if last else send(group, y, group.rank + 1).sum()).backward()


def by_slices(group: braid.Group, model: nn.Sequential, x: torch.Tensor, kinds: list[str]) -> None:
    """Put a part of each matrix on each rank: columns or rows, or both in turn."""
    for index, (matrix, _) in enumerate(model):
        if kinds[index % len(kinds)] == "column":  # gathered, unless a row layer follows
            ColumnParallelLinear.shard(matrix, group, gather_output=len(kinds) == 1)
        else:
            RowParallelLinear.shard(matrix, group, input_is_parallel=len(kinds) > 1)
    model(x).square().mean().backward()


def gap(param: nn.Parameter, whole: torch.Tensor, group: braid.Group) -> float:
    """Return the largest difference from the gradient of one process, relative to its maximum."""
    slicing = slicing_of(param)
    part = slicing.part_of(whole, group.rank, group.size) if slicing else whole
    return ((param.grad - part).abs().max() / whole.abs().max()).item()


def main() -> None:
    group = braid.init()
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    whole = new_model()
    whole(x).square().mean().backward()
    grads = {name: param.grad for name, param in whole.named_parameters()}
    for way, kinds in {"layers": [], **WAYS}.items():
        model, before = new_model(), group.statistics()
        by_slices(group, model, x, kinds) if kinds else by_layers(group, model, x)
        sent = {key: count - before[key] for key, count in group.statistics().items()}
        gaps = [gap(param, grads[name], group) for name, param in model.named_parameters()]
        assert max(gaps) <= (1e-6 if kinds else 0)
        if group.rank == 0:
            numbers = sum(param.numel() for param in model.parameters())
            messages, kib = sent["num_operations"], sent["nbytes"] >> 10
            print(f"{way:13}  {numbers} parameters, {messages} messages or collectives, {kib} KiB")
    if group.rank == 0:
        print("gradients equal one process: slices up to rounding, layers bit by bit")


if __name__ == "__main__":
    main()
