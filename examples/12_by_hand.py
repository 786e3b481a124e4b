"""Half of a model on each rank, with explicit messages; and how long each rank is idle.

braid run -n 2 examples/12_by_hand.py
"""

from __future__ import annotations

import time

import torch
from torch import nn

import braid
from braid.comm.autograd import recv, send

WIDTH, LAYERS, ROWS, STEPS = 256, 8, 512, 5


def new_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def first_half(group: braid.Group, half: nn.Module, x: torch.Tensor) -> float:
    """Forward, send, wait for the gradient, backward; return the seconds of computing."""
    start = time.perf_counter()
    y = half(x)
    forward_s = time.perf_counter() - start
    came: list[float] = []
    y.register_hook(lambda _grad: came.append(time.perf_counter()))
    send(group, y, 1).sum().backward()  # the backward of a send receives the gradient
    return forward_s + time.perf_counter() - came[0]


def second_half(group: braid.Group, half: nn.Module) -> tuple[float, torch.Tensor]:
    """Receive, forward and backward; return the seconds of computing, and the loss."""
    like = torch.empty(ROWS, WIDTH, requires_grad=True)
    x = recv(group, like, 0)  # its backward sends the gradient of x
    start = time.perf_counter()
    loss = half(x).square().mean()
    loss.backward()
    return time.perf_counter() - start, loss.detach()


def main() -> None:
    torch.set_num_threads(1)
    group = braid.init()
    layers = new_layers()
    half = nn.Sequential(*(layers[:4] if group.rank == 0 else layers[4:]))
    busy_s, begin = 0.0, time.perf_counter()
    for step in range(STEPS):
        half.zero_grad()
        if group.rank == 0:
            busy_s += first_half(group, half, batch(step))
        else:
            busy_s += second_half(group, half)[0]
    share = busy_s / (time.perf_counter() - begin)
    shares = group.all_gather(torch.tensor([share])).tolist()
    whole = nn.Sequential(*new_layers())
    whole(batch(STEPS - 1)).square().mean().backward()
    mine = list(whole.parameters())[: len(layers)] if group.rank == 0 else None
    mine = mine or list(whole.parameters())[len(layers) :]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(half.parameters(), mine, strict=True))
    if group.rank == 0:
        print(f"ranks 0 and 1 compute {shares[0]:.0%} and {shares[1]:.0%} of the time")
        print("two halves have the gradients of the whole model, bit by bit")


if __name__ == "__main__":
    main()
