"""Histories: which results get gradients, and the messages of a backward.

braid run -n 3 examples/41_histories.py
"""

from __future__ import annotations

import os
from collections import Counter

import torch

from braid import rpc
from braid.rpc import dist_autograd
from braid.rpc.current import current_agent

SENT: Counter[str] = Counter()  # messages of this node, by type
NAMES = ("a", "b", "c")


def count_messages() -> None:
    peers = current_agent().peers
    transmit = peers.transmit

    def counted(to: int, message: object, *args: object, **options: object) -> None:
        SENT[type(message).__name__] += 1
        transmit(to, message, *args, **options)

    peers.transmit = counted


def taken() -> dict[str, int]:
    return {kind: SENT.pop(kind, 0) for kind in ("Gradients", "Acknowledge")}


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def passed_on(x: torch.Tensor) -> torch.Tensor:  # runs in b
    return x * rpc.rpc_sync("c", doubled, (x,))


def program(x: torch.Tensor, unused: int) -> torch.Tensor:
    for _ in range(unused):  # results without an effect on the loss, such as metrics
        rpc.rpc_sync("c", doubled, (x,))
    return rpc.rpc_sync("b", passed_on, (x,)).sum()


def gradients(x: torch.Tensor, unused: int) -> torch.Tensor:
    with dist_autograd.context() as context:
        loss = program(x, unused)
        rpc.broadcast(NAMES, taken)
        dist_autograd.backward(context, [loss])
        grad = dist_autograd.get_gradients(context)[x]
    total = sum(map(Counter, rpc.broadcast(NAMES, taken)), Counter())
    print(f"{unused} unused: {', '.join(f'{n} {kind}' for kind, n in total.items())}")
    return grad


def compare() -> None:
    x = torch.randn(100, requires_grad=True, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad((x * doubled(x)).sum(), [x])
    for unused in (0, 5):
        assert torch.equal(gradients(x, unused), expected)
    print("gradients equal one process bit by bit")


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(NAMES[rank])
    if rank == 0:
        rpc.broadcast(NAMES, count_messages)
        compare()
    rpc.shutdown()
