"""Every rank takes part in backward, in the same order, whatever its own graph looks like."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from braid.comm import Group, autograd
from braid.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)


def _one_rank_needs_gradients(group: Group) -> torch.Tensor | None:
    x = torch.full((2,), 1.0 + group.rank, requires_grad=group.rank == 0)
    y = autograd.all_reduce(group, x)
    assert y.requires_grad
    (y * (group.rank + 1)).sum().backward()
    return x.grad


def test_a_rank_without_gradients_takes_part_in_backward(world):
    found = world(3, _one_rank_needs_gradients)
    assert found[0].tolist() == [6.0, 6.0]
    assert found[1:] == [None, None]


def _loss_of_rank_1(group: Group) -> torch.Tensor:
    x = torch.ones(2, requires_grad=True)
    y = autograd.all_gather(group, x)
    mine = y.square().sum() if group.rank == 1 else y.sum() * 0
    mine.backward()
    return x.grad


def test_the_loss_of_one_rank_alone_reaches_all(world):
    assert [g.tolist() for g in world(2, _loss_of_rank_1)] == [[2.0, 2.0], [2.0, 2.0]]


def _calls(group: Group) -> list[str]:
    events = group.context.events
    return [events.ring.name(e.kind) for e in events.tail(64)]


def _independent_branches(group: Group) -> list[str]:
    """Rank 1 makes its loss in another way, with a longer graph behind the first result."""
    x = torch.ones(6, requires_grad=True)
    a = autograd.all_reduce(group, x)
    b = autograd.all_gather(group, x)
    c = autograd.reduce_scatter(group, x, "avg")
    if group.rank == 1:
        loss = c.exp().sum() + b.sum()
        for _ in range(5):
            a = a.sin()
        loss = loss + a.sum()
    else:
        loss = a.sum() + b.sum() + c.sum()
    start = len(_calls(group))
    loss.backward()
    return [name.split("(")[0] for name in _calls(group)[start:] if "(" in name]


def test_backward_calls_the_duals_in_reverse_order_on_every_rank(world):
    expected = ["all_gather", "reduce_scatter", "all_reduce"]
    assert world(2, _independent_branches) == [expected, expected]


def _one_message(group: Group) -> list[float]:
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    if group.rank == 0:
        loss = autograd.join(x.sum() * 0, autograd.send(group, x, 1))
    else:
        loss = autograd.recv(group, x, 0).square().sum()
    loss.backward()
    return x.grad.tolist()


def test_a_joined_token_makes_the_sender_wait_for_the_gradient(world):
    assert world(2, _one_message) == [[6.0, 8.0], [0.0, 0.0]]


def _replicated_loss(group: Group) -> list[float]:
    found = []
    for total, scale in (
        (autograd.all_reduce, 1.0),
        (autograd.all_reduce, 1 / group.size),
        (autograd.all_reduce_forward_identity_backward, 1.0),
    ):
        x = torch.ones((), requires_grad=True)
        (total(group, x) * scale).backward()
        found.append(x.grad.item())
    return found


def test_a_replicated_loss_counts_once_per_rank_unless_the_pair_for_replicas_is_used(world):
    assert world(3, _replicated_loss) == [[3.0, 1.0, 1.0]] * 3


def _mlp(group: Group) -> tuple[torch.Tensor, ...]:
    """Megatron's MLP: columns of the first weight, rows of the second."""
    generator = torch.Generator().manual_seed(5)
    n = group.size
    first = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    second = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    a = first.tensor_split(n)[group.rank].clone().requires_grad_()
    b = second.tensor_split(n, 1)[group.rank].clone().requires_grad_()
    hidden = nn.functional.linear(autograd.identity_forward_all_reduce_backward(group, x), a).tanh()
    y = autograd.all_reduce_forward_identity_backward(group, nn.functional.linear(hidden, b))
    # the result once more through the pair that splits and gathers a replicated tensor
    part = autograd.split_forward_all_gather_backward(group, y.repeat(1, 6), dim=1)
    whole = autograd.all_gather_forward_split_backward(group, part.square(), dim=1)
    whole.sum().backward()
    return x.grad, a.grad, b.grad


def test_a_layer_of_conjugate_pairs_has_the_gradients_of_the_whole_layer(world):
    ((x, a, b),) = world(1, _mlp)
    for size in (2, 3):
        found = world(size, _mlp)
        for rank in range(size):
            torch.testing.assert_close(found[rank][0], x)
        torch.testing.assert_close(torch.cat([grads[1] for grads in found]), a)
        torch.testing.assert_close(torch.cat([grads[2] for grads in found], 1), b)


def _odd_tensors(group: Group) -> None:
    n = group.size
    # not contiguous, and a gradient that is expanded
    base = torch.ones(3, 4, requires_grad=True)
    y = autograd.all_reduce(group, base.t()[::2])
    y.sum().backward()
    assert y.tolist() == [[float(n)] * 3] * 2
    assert base.grad.t().tolist() == [[n, n, n], [0, 0, 0]] * 2
    # without elements
    empty = torch.empty(0, 3, requires_grad=True)
    for call in (autograd.all_reduce, autograd.all_gather, autograd.reduce_scatter):
        (grad,) = torch.autograd.grad(call(group, empty).sum(), empty)
        assert grad.shape == (0, 3)
    # without dims
    point = torch.tensor(2.0, requires_grad=True)
    for call in (autograd.all_reduce, autograd.all_gather, autograd.gather, autograd.broadcast):
        (grad,) = torch.autograd.grad(call(group, point).sum(), point)
        assert grad.shape == ()
    # 16 bits and complex
    for dtype in DTYPES:
        x = torch.ones(2 * n, dtype=dtype, requires_grad=True)
        for call in (autograd.all_reduce, autograd.reduce_scatter, autograd.all_to_all):
            result = call(group, x)
            (grad,) = torch.autograd.grad(result, x, torch.ones_like(result))
            assert grad.dtype == dtype
    short = torch.tensor([1 / 3, 0.1]).add(group.rank).bfloat16()
    for op in ("sum", "avg", "max", "min", "product"):
        whole = autograd.all_reduce(group, short.clone().requires_grad_(), op)
        assert torch.equal(whole.detach(), group.all_reduce(short.clone(), op))
    # integers have no gradient, and need none
    count = torch.arange(n)
    assert not autograd.all_reduce(group, count, "max").requires_grad
    assert autograd.scan(group, count).tolist() == [r * (group.rank + 1) for r in range(n)]
    with torch.no_grad():
        assert not autograd.all_reduce(group, base, "max").requires_grad
    # what comes out may be changed in place
    torch.relu_(autograd.identity_forward_all_reduce_backward(group, base * 1)).sum().backward()


def test_odd_tensors_are_ordinary(world):
    for size in (1, 2, 3):
        world(size, _odd_tensors)


def _tied_maximum(group: Group) -> tuple[list[float], list[float]]:
    x = torch.tensor([5.0, [1.0, float("nan"), 9.0][group.rank]], requires_grad=True)
    y = autograd.all_reduce(group, x, "max")
    y.sum().backward()
    return x.grad.tolist(), y.isnan().tolist()


def test_a_tie_gives_the_gradient_to_the_lowest_rank_and_nan_counts_as_extreme(world):
    found = world(3, _tied_maximum)
    assert [grads for grads, _ in found] == [[3.0, 0.0], [0.0, 3.0], [0.0, 0.0]]
    assert found[0][1] == [False, True]


def _product_with_zeros(group: Group) -> list[float]:
    x = torch.tensor([0.0, 2.0, 3.0]) if group.rank else torch.tensor([5.0, 0.0, 7.0])
    x.requires_grad_()
    autograd.all_reduce(group, x, "product").sum().backward()
    return x.grad.tolist()


def test_a_product_with_zeros_has_exact_gradients(world):
    assert world(2, _product_with_zeros) == [[0.0, 4.0, 6.0], [10.0, 0.0, 14.0]]


def _refusals(group: Group) -> None:
    x = torch.ones(6, requires_grad=True)
    calls = [
        (lambda: autograd.all_reduce(group, x, "bor"), "bitwise"),
        (lambda: autograd.reduce_scatter(group, x, "max"), "all_reduce(group, x, 'max')"),
        (lambda: autograd.reduce(group, x, 0, "product"), "all_reduce(group, x, 'product')"),
        (lambda: autograd.all_gather(group, x, sizes=[6]), "[6]"),
        (lambda: autograd.all_gather(group, x, sizes=[4, 4]), "has length 6"),
        (lambda: autograd.reduce_scatter(group, x, sizes=[4, 4]), "is 6 long"),
        (lambda: autograd.all_to_all(group, x, send_sizes=[3, 3]), "receive_sizes"),
        (
            lambda: autograd.all_to_all(group, x, send_sizes=[1, 1], receive_sizes=[1, 1]),
            "is 6 long",
        ),
        (lambda: autograd.scatter(group, x if group.rank else None, like=x), "root"),
        (lambda: autograd.split_forward_all_gather_backward(group, x[:3]), "multiple"),
    ]
    for call, words in calls:
        with pytest.raises(ConfigError) as error:
            call()
        assert words in str(error.value)


def test_what_cannot_be_differentiated_is_refused_with_the_way_out(world):
    world(2, _refusals)


def _collectives() -> list[Callable[..., object]]:
    functions = [
        value for name in autograd.__all__ if inspect.isfunction(value := getattr(autograd, name))
    ]
    return [f for f in functions if "group" in inspect.signature(f).parameters]


def _called(function: Callable[..., object], group: object, x: object) -> str:
    """What the caller is told who passes these two and, where there must be more, numbers."""
    left = list(inspect.signature(function).parameters.values())[2:]
    rest = {p.name: x if p.name == "like" else 0 for p in left if p.default is p.empty}
    with pytest.raises(ConfigError) as error:
        function(group, x, **rest)
    return str(error.value)


def _wrong_arguments(group: Group) -> None:
    x = torch.ones(6, requires_grad=True)
    for function in _collectives():
        name = function.__name__
        assert f"got Tensor and Group: swap them, the group comes first: {name}(" in _called(
            function, x, group
        )
        assert "got str and Tensor: pass a group, such as" in _called(function, "world", x)
        assert "got list of float as " in _called(function, group, [1.0, 2.0])
        assert "torch.cat(...) of the parts" in _called(function, group, [x, x])
        assert "torch.from_numpy(...)" in _called(function, group, np.ones(2))
        if "dim" in inspect.signature(function).parameters:
            with pytest.raises(ConfigError, match=r"got dim 1, but x has the shape \[6\]"):
                function(group, x, dim=1)


def test_swapped_and_wrong_arguments_are_told_apart_by_every_collective(world):
    world(1, _wrong_arguments)


def _checkpointed(group: Group) -> tuple[list[str], bool]:
    """Collectives inside of checkpoints, nested, on ranks of which one needs no gradient of the input."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        return autograd.all_reduce(group, x.exp(), "avg").sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return autograd.checkpoint(inner, autograd.all_gather(group, x.cos())).tanh()

    x = torch.linspace(0, 1, 3, dtype=torch.float64).add(group.rank)
    x.requires_grad_(group.rank != 1)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    (outer(x * weight).sum() * (group.rank + 1)).backward()
    expected, weight.grad = weight.grad.clone(), None
    loss = autograd.checkpoint(outer, x * weight).sum() * (group.rank + 1)
    start = len(_calls(group))
    loss.backward()
    names = [name.split("(")[0] for name in _calls(group)[start:] if "(" in name]
    return names, torch.equal(weight.grad, expected)


def test_checkpointed_collectives_are_called_again_in_backward(world):
    again = ["all_gather", "all_reduce", "all_reduce"]  # the outer, as far as tanh; then the inner
    duals = ["all_reduce", "reduce_scatter"]
    for names, same in world(2, _checkpointed):
        assert same
        assert names == [*again, *duals]


def test_every_collective_says_what_its_backward_does_and_costs():
    collectives = _collectives()
    assert len(collectives) == 16
    for function in collectives:
        assert "Backward:" in function.__doc__, function
        assert "Cost:" in function.__doc__, function
