"""Every collective with gradients equals, with its first and second derivatives, the same map in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce as fold
from typing import NamedTuple

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from braid.comm import Group, autograd

Tensors = list[torch.Tensor]
WORLDS = (1, 2, 3)
CHECKED_WORLDS = (
    1,
    *(pytest.param(n, marks=pytest.mark.proof) for n in (2, 3)),
)  # many collectives


def _others(group: Group) -> list[int]:
    return [r + 1 for r in range(group.size)]


def _message(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Rank 0 sends to the last rank."""
    last = group.size - 1
    if last and group.rank == 0:
        return autograd.send(group, x, last, tag=3)
    if last and group.rank == last:
        return autograd.recv(group, x, 0, tag=3)
    return x * 2


def _message_reference(xs: Tensors) -> Tensors:
    if len(xs) == 1:
        return [xs[0] * 2]
    return [xs[0].new_empty(0), *[x * 2 for x in xs[1:-1]], xs[0] * 1]


def _first(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.reshape(-1)[:count]


def _exchange_uneven(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Rank r sends s elements to rank s."""
    n, me = group.size, group.rank
    x = _first(x, n * (n - 1) // 2)
    return autograd.all_to_all(group, x, send_sizes=range(n), receive_sizes=[me] * n)


def _exchange_uneven_reference(xs: Tensors) -> Tensors:
    n = len(xs)
    parts = [_first(x, n * (n - 1) // 2).split(list(range(n))) for x in xs]
    return [torch.cat([parts[s][r] for s in range(n)]) for r in range(n)]


def _extreme(xs: Tensors, op: str) -> Tensors:
    """The gradient goes to the lowest rank that holds the extreme."""
    stack = torch.stack(xs)
    holder = stack.argmax(0) if op == "max" else stack.argmin(0)
    y = stack.gather(0, holder[None])[0]
    return [y * 1 for _ in xs]


def _total(xs: Tensors) -> torch.Tensor:
    return fold(torch.add, xs)


class Case(NamedTuple):
    """`apply` on every rank, `reference` on all ranks' inputs."""

    apply: Callable[[Group, torch.Tensor], torch.Tensor]
    reference: Callable[[Tensors], Tensors]


def _sliced(xs: Tensors, y: torch.Tensor, dim: int = 0) -> Tensors:
    return list(y.tensor_split(len(xs), dim))


def _ragged(xs: Tensors) -> Tensors:
    return [x[: r + 1] for r, x in enumerate(xs)]


def _only(root: int, xs: Tensors, y: torch.Tensor, elsewhere: torch.Tensor) -> Tensors:
    return [y if r == root else elsewhere for r in range(len(xs))]


# inputs are (6, 2): 6 rows divide by 1, 2 and 3
CASES = {
    "all_reduce": Case(autograd.all_reduce, lambda xs: [_total(xs)] * len(xs)),
    "all_reduce avg": Case(
        lambda g, x: autograd.all_reduce(g, x, "avg"), lambda xs: [_total(xs) / len(xs)] * len(xs)
    ),
    "all_reduce max": Case(
        lambda g, x: autograd.all_reduce(g, x, "max"), lambda xs: _extreme(xs, "max")
    ),
    "all_reduce min": Case(
        lambda g, x: autograd.all_reduce(g, x, "min"), lambda xs: _extreme(xs, "min")
    ),
    "all_reduce product": Case(
        lambda g, x: autograd.all_reduce(g, x, "product"),
        lambda xs: [torch.stack(xs).prod(0)] * len(xs),
    ),
    "scan": Case(autograd.scan, lambda xs: [_total(xs[: r + 1]) for r in range(len(xs))]),
    "scan exclusive": Case(
        lambda g, x: autograd.scan(g, x, exclusive=True),
        lambda xs: [_total([xs[0] * 0, *xs[:r]]) for r in range(len(xs))],
    ),
    "all_gather": Case(autograd.all_gather, lambda xs: [torch.cat(xs)] * len(xs)),
    "all_gather dim 1": Case(
        lambda g, x: autograd.all_gather(g, x, dim=1), lambda xs: [torch.cat(xs, 1)] * len(xs)
    ),
    "all_gather uneven": Case(
        lambda g, x: autograd.all_gather(g, x[: g.rank + 1], sizes=_others(g)),
        lambda xs: [torch.cat(_ragged(xs))] * len(xs),
    ),
    "reduce_scatter": Case(autograd.reduce_scatter, lambda xs: _sliced(xs, _total(xs))),
    "reduce_scatter avg dim -2": Case(
        lambda g, x: autograd.reduce_scatter(g, x, "avg", dim=-2),
        lambda xs: _sliced(xs, _total(xs) / len(xs)),
    ),
    "reduce_scatter uneven": Case(
        lambda g, x: autograd.reduce_scatter(g, x[: sum(_others(g))], sizes=_others(g)),
        lambda xs: list(
            _total(xs)[: len(xs) * (len(xs) + 1) // 2].split([r + 1 for r in range(len(xs))])
        ),
    ),
    "all_to_all": Case(
        autograd.all_to_all,
        lambda xs: [torch.cat([_sliced(xs, x)[r] for x in xs]) for r in range(len(xs))],
    ),
    "all_to_all uneven": Case(_exchange_uneven, _exchange_uneven_reference),
    "broadcast": Case(
        lambda g, x: autograd.broadcast(g, x, g.size - 1), lambda xs: [xs[-1] * 1] * len(xs)
    ),
    "reduce": Case(
        lambda g, x: autograd.reduce(g, x, g.size - 1),
        lambda xs: _only(len(xs) - 1, xs, _total(xs), xs[0] * 0),
    ),
    "reduce avg": Case(
        lambda g, x: autograd.reduce(g, x, 0, "avg"),
        lambda xs: _only(0, xs, _total(xs) / len(xs), xs[0] * 0),
    ),
    "gather": Case(
        lambda g, x: autograd.gather(g, x, g.size - 1),
        lambda xs: _only(len(xs) - 1, xs, torch.cat(xs), xs[0][:0]),
    ),
    "gather uneven": Case(
        lambda g, x: autograd.gather(g, x[: g.rank + 1], sizes=_others(g)),
        lambda xs: _only(0, xs, torch.cat(_ragged(xs)), xs[0][:0]),
    ),
    "scatter": Case(
        lambda g, x: autograd.scatter(g, x if g.rank == 0 else x[:0], like=x[: 6 // g.size]),
        lambda xs: _sliced(xs, xs[0] * 1),
    ),
    "scatter uneven": Case(
        lambda g, x: autograd.scatter(
            g,
            x[: sum(_others(g))] if g.rank == g.size - 1 else x[:0],
            g.size - 1,
            like=x[: g.rank + 1],
            sizes=_others(g),
        ),
        lambda xs: list(
            xs[-1][: len(xs) * (len(xs) + 1) // 2].split([r + 1 for r in range(len(xs))])
        ),
    ),
    "send and recv": Case(_message, _message_reference),
    "exchange": Case(
        lambda g, x: autograd.exchange(
            g, x, to=(g.rank + 1) % g.size, source=(g.rank - 1) % g.size
        ),
        lambda xs: [xs[r - 1] * 1 for r in range(len(xs))],
    ),
}


def _input(rank: int, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    values = torch.randn(6, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return values.to(dtype).requires_grad_()


def _weight(rank: int, y: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)


def _loss(rank: int, y: torch.Tensor) -> torch.Tensor:
    return (y.sin() * _weight(rank, y)).sum()


def _derivatives(group: Group) -> dict[str, Tensors]:
    """Result, gradient, and gradient of a function of the gradient, of each case."""
    found = {}
    for name, case in CASES.items():
        x = _input(group.rank)
        y = case.apply(group, x)
        (first,) = torch.autograd.grad(_loss(group.rank, y), x, create_graph=True)
        (second,) = torch.autograd.grad(_loss(group.rank + 50, first), x)
        found[name] = [y.detach(), first.detach(), second]
    return found


def _reference(case: Case, size: int) -> list[Tensors]:
    """The same for all ranks, in one process: every gradient is that of the sum of all ranks' losses."""
    xs = [_input(r) for r in range(size)]
    nothing = sum((x * x).sum() * 0 for x in xs)  # a graph also where no input matters
    ys = case.reference(xs)
    total = sum(_loss(r, y) for r, y in enumerate(ys)) + nothing
    firsts = torch.autograd.grad(total, xs, create_graph=True)
    total = sum(_loss(r + 50, first) for r, first in enumerate(firsts)) + nothing
    seconds = torch.autograd.grad(total, xs)
    return [
        [y.detach(), first.detach(), second]
        for y, first, second in zip(ys, firsts, seconds, strict=True)
    ]


@pytest.mark.parametrize("size", WORLDS)
def test_values_and_two_derivatives_equal_one_process(size, world):
    found = world(size, _derivatives)
    for name, case in CASES.items():
        torch.testing.assert_close(
            [of_rank[name] for of_rank in found],
            _reference(case, size),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def _kept(group: Group) -> list[str]:
    """Cases whose graph keeps the input alive."""
    found = []
    for name, case in CASES.items():
        live = autograd.LiveTensors()
        x = live.register(_input(group.rank) * 1)
        y = case.apply(group, x)
        del x
        found += [name] if live.count() else []
        y.sum().backward()
    return found


def test_collectives_do_not_keep_their_input_for_backward(world):
    assert world(2, _kept) == [[], []]


CHECKED = {
    name: CASES[name]
    for name in CASES
    if name not in ("all_gather dim 1", "reduce avg", "gather uneven", "scatter uneven")
}


def _replicated(group: Group, name: str, every_x: torch.Tensor) -> torch.Tensor:
    """The joint map of all ranks' inputs to all ranks' results, the same on all ranks, so that `gradcheck` may run on each.

    The conjugate pairs around the collective make gradients of the replicated input whole.
    """
    x = autograd.identity_forward_all_reduce_backward(group, every_x)[group.rank]
    y = CASES[name].apply(group, torch.cat([x, x * x, x + 1]).view(6, 1)).reshape(1, -1)
    y = torch.cat([y, y.new_zeros(1, 6 * group.size - y.numel())], 1)
    return autograd.all_gather_forward_split_backward(group, y)


def _gradchecks(group: Group) -> None:
    generator = torch.Generator().manual_seed(7)
    n = group.size
    every_x = torch.randn(n, 2, generator=generator, dtype=torch.float64).requires_grad_()
    weights = torch.randn(n, 6 * n, generator=generator, dtype=torch.float64).requires_grad_()
    for name in CHECKED:
        assert gradcheck(lambda x, name=name: _replicated(group, name, x), every_x), name
        assert gradgradcheck(lambda x, name=name: _replicated(group, name, x), every_x, weights)


@pytest.mark.parametrize("size", CHECKED_WORLDS)
def test_finite_differences_agree_with_first_and_second_derivatives(size, world):
    world(size, _gradchecks)
