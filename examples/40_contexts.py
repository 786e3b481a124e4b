"""Contexts: one autograd graph in two processes, joined by sends and receives.

braid run -n 2 examples/40_contexts.py
"""

from __future__ import annotations

import os
import threading

import torch

from braid import rpc
from braid.rpc import dist_autograd
from braid.rpc.current import current_agent

WEIGHT = torch.arange(1.0, 4.0).requires_grad_()  # a parameter of each node
THREADS = 4


def layer(x: torch.Tensor, weight: torch.Tensor = WEIGHT) -> torch.Tensor:
    return torch.tanh(weight * x)


def seams(context: int) -> str:
    """Return the sends and receives of a context in this node."""
    state = current_agent().contexts.get(context).state
    sends = [f"send {number} to node {to}" for number, to in enumerate(state.sends.values())]
    receives = [f"receive {n} from node {to}" for n, to in enumerate(state.receives.values())]
    return ", ".join([*sends, *receives])


def gradient(context: int) -> torch.Tensor:
    return dist_autograd.get_gradients(context)[WEIGHT]


def one_step(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of both weights."""
    with dist_autograd.context() as context:
        hidden = rpc.rpc_sync("there", layer, (layer(x),))
        unused = rpc.rpc_sync("there", layer, (layer(x),))
        if threading.current_thread() is threading.main_thread():
            print(f"here: {seams(context)}")
            print(f"there: {rpc.rpc_sync('there', seams, (context,))}")
        dist_autograd.backward(context, [layer(hidden).sum()])
        del unused  # it gets no gradient, and backward does not wait for one
        return [gradient(context), rpc.rpc_sync("there", gradient, (context,))]


def alone(x: torch.Tensor) -> list[torch.Tensor]:
    here, there = (WEIGHT.detach().clone().requires_grad_() for _ in range(2))
    loss = layer(layer(layer(x, here), there), here).sum()
    return list(torch.autograd.grad(loss, [here, there]))


def compare() -> None:
    inputs = torch.randn(1 + THREADS, 3, generator=torch.Generator().manual_seed(0))
    results = [one_step(inputs[0])]
    threads = [  # contexts of several threads, on the same parameters
        threading.Thread(target=lambda x=x: results.append(one_step(x))) for x in inputs[1:]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [alone(x) for x in inputs]
    assert len(results) == len(expected)
    for grads in results:
        assert any(all(map(torch.equal, grads, reference)) for reference in expected)
    assert WEIGHT.grad is None  # gradients are in the contexts
    print(f"gradients of {len(results)} contexts equal one process bit by bit")


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(("here", "there")[rank])
    if rank == 0:
        compare()
    rpc.shutdown()
