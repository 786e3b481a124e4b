"""Sequences divided over ranks between divided layers: values, gradients, costs, refusals."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from training import said_by

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.tensor_parallel import (
    Slicing,
    column_linear,
    gather_sequence,
    reduce_scatter_sequence,
    scatter_sequence,
    sequence_column_linear,
)


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _block(group: Group, dtype: torch.dtype, dim: int) -> tuple[float, int]:
    """A norm on positions, then a column and a row layer on the whole sequence."""
    x = drawn(12, 12, 8, seed=0, dtype=dtype).requires_grad_()
    scale, up, down = (
        drawn(*shape, seed=seed, dtype=dtype).requires_grad_()
        for seed, shape in enumerate([(8,), (24, 8), (8, 24)], 1)
    )

    def normed(t: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(t, (8,), weight)

    whole = normed(x, scale) @ up.T
    whole = normed((functional.gelu(whole) @ down.T), scale)
    whole.square().mul(torch.arange(8.0)).sum().backward()

    rank, size = group.rank, group.size
    own_x, own_scale = x.detach().clone().requires_grad_(), scale.detach().clone().requires_grad_()
    own_up = Slicing(0).part_of(up.detach(), rank, size).requires_grad_()
    own_down = Slicing(1).part_of(down.detach(), rank, size).requires_grad_()
    before = group.statistics()["num_operations"]
    y = gather_sequence(group, normed(scatter_sequence(group, own_x, dim), own_scale), dim)
    y = functional.gelu(y @ own_up.T) @ own_down.T
    y = normed(reduce_scatter_sequence(group, y, dim), own_scale)
    y = gather_sequence(group, y, dim, partial_grad=False)
    y.square().mul(torch.arange(8.0)).sum().backward()
    count = group.statistics()["num_operations"] - before
    pairs = [
        (y, whole),
        (own_x.grad, x.grad),
        (group.all_reduce(own_scale.grad), scale.grad),
        (own_up.grad, Slicing(0).part_of(up.grad, rank, size)),
        (own_down.grad, Slicing(1).part_of(down.grad, rank, size)),
    ]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs), count


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_layers_on_a_divided_sequence_are_those_of_one_process(world, size, dim, dtype, tolerance):
    for gap, count in world(size, _block, dtype, dim):
        assert gap <= tolerance
        assert count == 6  # gather, reduce_scatter, gather; reduce_scatter and twice gather


def _roundtrip(group: Group) -> bool:
    x = drawn(4, 12, seed=0, dtype=torch.float32)
    own = scatter_sequence(group, x)
    back = gather_sequence(group, own)
    total = reduce_scatter_sequence(group, x) / group.size
    close = torch.allclose(total, own)
    return own.shape == (4, 12 // group.size) and torch.equal(back, x) and close


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gathering_what_was_scattered_gives_the_sequence(world, size):
    assert all(world(size, _roundtrip))


def _column(group: Group, dim: int, dtype: torch.dtype, frozen: bool) -> float:
    """A column layer that gathers the sequence itself."""
    rank, size = group.rank, group.size
    x, weight = drawn(12, 12, 8, seed=0, dtype=dtype), drawn(24, 8, seed=1, dtype=dtype)
    bias, scale = drawn(24, seed=2, dtype=dtype), drawn(12, 12, 24, seed=3, dtype=dtype)
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = functional.linear(*whole)
    (y * scale).sum().backward()
    own_x = Slicing(dim % 3).part_of(x, rank, size).requires_grad_()
    own_weight = Slicing(0).part_of(weight, rank, size).requires_grad_(not frozen)
    own_bias = Slicing(0).part_of(bias, rank, size).requires_grad_()
    own = sequence_column_linear(group, own_x, own_weight, own_bias, dim)
    (own * Slicing(2).part_of(scale, rank, size)).sum().backward()
    pairs = [
        (own, Slicing(2).part_of(y, rank, size)),
        (own_x.grad, Slicing(dim % 3).part_of(whole[0].grad, rank, size)),
        (own_bias.grad, Slicing(0).part_of(whole[2].grad, rank, size)),
    ]
    if frozen:
        assert own_weight.grad is None
    else:
        pairs.append((own_weight.grad, Slicing(0).part_of(whole[1].grad, rank, size)))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize(
    ("dtype", "frozen", "tolerance"),
    [(torch.float32, False, 1e-6), (torch.float64, False, 1e-13), (torch.float64, True, 1e-13)],
)
def test_a_column_layer_gathers_its_sequence(world, size, dim, dtype, frozen, tolerance):
    assert max(world(size, _column, dim, dtype, frozen)) <= tolerance


def _autocast(group: Group) -> list[torch.dtype]:
    weight = torch.ones(4 // group.size, 8, requires_grad=True)
    own = torch.ones(12 // group.size, 1, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = sequence_column_linear(group, own, weight, None, dim=0)
        z = column_linear(group, gather_sequence(group, own, 0), weight, None)
    (y + z).float().sum().backward()
    return [y.dtype, z.dtype, weight.grad.dtype, own.grad.dtype]


def test_layers_with_gradients_of_their_own_know_autocast(world):
    for dtypes in world(2, _autocast):
        assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


def _refused(group: Group) -> list[str]:
    x = torch.ones(2, 5)
    return [
        said_by(lambda: scatter_sequence(group, x), ConfigError),
        said_by(lambda: reduce_scatter_sequence(group, x), ConfigError),
        said_by(lambda: scatter_sequence(group, x, 2), ConfigError),
        said_by(lambda: sequence_column_linear(group, x, x, None, dim=-1), ConfigError),
    ]


def test_sequences_that_cannot_be_divided_are_named(world):
    for scattered, reduced, dim, last in world(2, _refused):
        assert scattered == reduced
        assert "5 positions (dim 1 of shape [2, 5]) cannot be divided over 2 ranks" in scattered
        assert "pad it to 6" in scattered
        assert "no dim 2" in dim
        assert "no positions in dim -1" in last
