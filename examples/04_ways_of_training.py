"""Five ways of training one model by hand, each compared with one process.

braid run -n 2 examples/04_ways_of_training.py
"""

import torch
from torch import Tensor, tanh

import braid

P, INPUTS, UNITS, STEPS = 2, 8, 16, 5  # P: ranks, shares of a batch, and blocks of hidden units


def output(hidden: Tensor, w: Tensor) -> Tensor:  # w[k]: weights into block k, then out of it
    return sum(h @ block[-UNITS:] for h, block in zip(hidden, w, strict=True))


def gradient(w: Tensor, x: Tensor) -> Tensor:
    w = w.detach().requires_grad_()
    output([tanh(x @ block[:INPUTS]) for block in w], w).square().mean().backward()
    return w.grad


def data(group: braid.Group, w: Tensor, x: Tensor) -> Tensor:  # keeps all weights; one share
    return group.all_reduce(gradient(w, x[group.rank]), "avg")


def sharded(group: braid.Group, w: Tensor, x: Tensor) -> Tensor:  # keeps one block; one share
    return group.reduce_scatter(gradient(group.all_gather(w), x[group.rank]), "avg")


def server(group: braid.Group, w: Tensor, x: Tensor) -> Tensor:  # rank 0 keeps all weights
    pulled = group.broadcast(w.clone() if len(w) else torch.empty(P, *w.shape[1:]))
    return group.reduce(gradient(pulled, x[group.rank]), 0, "avg")[: len(w)]


def tensor(group: braid.Group, w: Tensor, x: Tensor) -> Tensor:  # keeps one block; whole batch
    w = w.detach().requires_grad_()
    for share in x:
        part = output([tanh(share @ w[0, :INPUTS])], w)
        whole = group.all_reduce(part.detach().clone()).requires_grad_()
        whole.square().mean().backward()
        part.backward(whole.grad)
    return w.grad / P


def pipeline(group: braid.Group, w: Tensor, x: Tensor) -> Tensor:  # keeps one layer; whole batch
    w = w.detach().requires_grad_()
    for share in x:
        if group.rank == 0:
            h = torch.stack([tanh(share @ block) for block in w])
            group.send(h.detach(), to=1)
            h.backward(group.recv(torch.empty_like(h), source=1))
        else:
            h = group.recv(torch.empty(P, len(share), UNITS), source=0).requires_grad_()
            output(h, w).square().mean().backward()
            group.send(h.grad, to=0)
    return w.grad / P


group = braid.init()
block = slice(group.rank, group.rank + 1)
kept = {data: slice(None), sharded: block, server: slice(P * (group.rank == 0)), tensor: block}
kept[pipeline] = (slice(None), [slice(INPUTS), slice(INPUTS, None)][group.rank])
start = torch.randn(P, INPUTS + UNITS, UNITS, generator=torch.Generator().manual_seed(0))
batches = torch.randn(STEPS, P, 32, INPUTS, generator=torch.Generator().manual_seed(1))
alone = start
for x in batches:
    alone = alone - 0.1 * sum(gradient(alone, share) for share in x) / P
for way, where in kept.items():
    weights, before = start[where], group.statistics()
    for x in batches:
        weights = weights - 0.1 * way(group, weights, x)
    assert torch.equal(weights, alone[where]), way
    now = group.statistics()
    calls, nbytes = [(now[n] - before[n]) // STEPS for n in ("num_operations", "nbytes")]
    if group.rank == 0:
        print(f"{way.__name__:8} {weights.nbytes} bytes kept; {calls} calls, {nbytes} bytes a step")
if group.rank == 0:
    print("five ways end with the weights of one process, bit by bit")
