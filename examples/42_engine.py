"""The engine: local backward passes of three processes, which wait for gradients of their sends.

braid run -n 3 examples/42_engine.py
"""

from __future__ import annotations

import os

import torch

from braid import rpc
from braid.rpc import dist_autograd
from braid.rpc.current import current_agent

NAMES = ("a", "b", "c")
RAN: list[str] = []  # local backward passes of this node, in order
BIAS = torch.ones(3, requires_grad=True)  # a parameter of each node


def record() -> None:
    contexts = current_agent().contexts
    run = contexts._run  # noqa: SLF001 - to record its calls

    def recorded(context: object, source: object, backward: object) -> None:
        edges = [] if source is None else list(context.state.sends)
        RAN.append("roots" if source is None else f"send {edges.index(source)}")
        run(context, source, backward)

    contexts._run = recorded  # noqa: SLF001


def ran() -> list[str]:
    return RAN


def through_c(x: torch.Tensor) -> torch.Tensor:
    """Call c twice, and a once while it waits; runs in b."""
    y = x * x
    first = rpc.rpc_sync("c", shifted, (y,))
    second = rpc.rpc_sync("c", shifted, (y + first,))
    return second * rpc.rpc_sync("a", shifted, (y,))


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + BIAS


def alone(x: torch.Tensor, a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    y = x * x
    second = y + (y + c) + c
    return (second * (y + a)).sum() + x.sum()


def gradient(context: int) -> torch.Tensor | None:
    return dist_autograd.get_gradients(context).get(BIAS)


def compare() -> None:
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)  # sums are exact in any order
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("b", through_c, (x,)).sum() + x.sum()
        dist_autograd.backward(context, [loss])
        of_x = dist_autograd.get_gradients(context)[x]
        of_a, _, of_c = rpc.broadcast(NAMES, gradient, (context,))
    biases = [torch.ones(3, requires_grad=True) for _ in range(2)]
    expected = torch.autograd.grad(alone(x, *biases), [x, *biases])
    assert all(map(torch.equal, [of_x, of_a, of_c], expected))
    for name, order in zip(NAMES, rpc.broadcast(NAMES, ran), strict=True):
        print(f"{name} ran {', '.join(order)}")
    print("gradients equal one process bit by bit")


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(NAMES[rank])
    if rank == 0:
        rpc.broadcast(NAMES, record)
        compare()
    rpc.shutdown()
