"""Collectives as linear maps: each is differentiated by its transpose.

Stack the tensors of all ranks to one vector. Then all_gather, reduce_scatter, send and the like are
matrices of zeros and ones. Backward applies the transposed matrix, which is again a collective. One
`autograd.Function` serves all collectives: it gets the forward function and its *differentiable*
dual, so the gradient of a gradient needs no further code.

    forward                                   backward
    all_reduce(sum)                           all_reduce(sum)
    all_reduce(avg)                           all_reduce(avg)
    all_gather                                reduce_scatter(sum)
    reduce_scatter(sum)                       all_gather
    all_to_all(send sizes, receive sizes)     all_to_all(receive sizes, send sizes)
    broadcast(root)                           reduce(root, sum)
    reduce(root, sum)                         broadcast(root)
    gather(root)                              scatter(root)
    scatter(root)                             gather(root)
    scan(sum)                                 sum over this rank and all later ranks
    send(to)                                  recv(from to)
    recv(source)                              send(to source)
    exchange(to, source)                      exchange(source, to)

    identity                all_reduce(sum)    identity_forward_all_reduce_backward, Megatron's f
    all_reduce(sum)         identity           all_reduce_forward_identity_backward, Megatron's g
    split                   all_gather         split_forward_all_gather_backward
    all_gather              split              all_gather_forward_split_backward

The last four are not transposes. **What a gradient means:** in all other rows it is the gradient of
the *sum of all ranks' losses*. When every rank computes the same loss from a replicated result,
that sum contains the loss n times: divide it by the size of the group, or use the last four, for
which a replicated tensor has one gradient, the same on all ranks.

**Which ranks take part.** Backward is also a collective. In grad mode a result therefore always
requires grad, even if the input does not, and every rank has to call backward through it (`depend`
or `join` connect a result that a rank does not need to one that it needs). Grad mode and
`create_graph` must be the same on all ranks. A gradient that is zero for lack of a path is a zero
with a graph, so that a second backward passes through all ranks as well, provided their inputs
require grad.

**In which order.** torch runs the nodes of one device in exactly the reverse of the order in which
one thread made them (highest sequence number first; a node's successors always have lower
numbers). So ranks that call collectives in one order in forward call their duals in one order in
backward, whatever else their graphs contain.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3, for f and g; the PETSc and Devito
communities call the rest adjoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from braid.comm.autograd.phony import phony

__all__ = ["collective", "linear_map"]

Tensors = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]


class _LinearMap(torch.autograd.Function):
    """Autograd function that calls `run` in forward and `dual` in backward, and saves nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Tensors],
        dual: Callable[..., Gradients],
        edge: torch.Tensor | None,  # noqa: ARG004 - adds an edge to the graph
        *xs: torch.Tensor,
    ) -> Tensors:
        ctx.dual = dual
        return run(*xs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        gradients = ctx.dual(*grads)
        needed = ctx.needs_input_grad[3:]
        return (
            None,
            None,
            None,
            *[g if n else None for g, n in zip(gradients, needed, strict=True)],
        )


def linear_map(
    run: Callable[..., Tensors],
    dual: Callable[..., Gradients],
    *xs: torch.Tensor,
    edge: torch.Tensor | None = None,
) -> Tensors:
    """Apply a linear map to tensors; its backward is the transposed map `dual`.

    Args:
        run: Function that computes the results from `xs`, without autograd; must not return an
            input itself (`detach` it).
        dual: Differentiable function that computes the gradients of `xs` from the gradients of the
            results (None: no gradient); must not keep tensors alive.
        xs: Arguments of the map.
        edge: A phony that requires grad if the results must require grad in any case.
    """
    ys = _LinearMap.apply(run, dual, edge, *xs)  # type: ignore[no-untyped-call]
    return cast("Tensors", ys)


def collective(
    run: Callable[[torch.Tensor], torch.Tensor],
    dual: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
) -> torch.Tensor:
    """Apply the linear map `run`, which moves data between ranks; `dual` computes its gradient.

    Backward calls `dual` on every rank.

    For tensors of integers or bools, which have no gradients, this returns `run(x)`.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return run(x)
    edge = phony(x.device, True)
    (y,) = linear_map(lambda t: (run(t),), lambda g: (dual(g),), x, edge=edge)
    return y
