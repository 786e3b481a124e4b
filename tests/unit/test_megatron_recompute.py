"""Megatron's recomputation whose outputs are freed, too; no ranks are needed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from braid.compat.megatron import tensor_parallel
from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.compat.megatron.tensor_parallel.random import is_checkpointing

SEED, STATE = 3, "model-parallel-rng"


def _step(how: str) -> list[torch.Tensor]:
    """Gradients and random numbers of a step with dropout inside and outside of `fork`."""
    torch.manual_seed(SEED)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(STATE, SEED)
    norm, linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    runs = []

    def function(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        runs.append(is_checkpointing())
        y = functional.dropout(norm(x), 0.5)
        with tracker.fork():
            return functional.dropout(y, 0.5) * factor, x[:, :2]

    hidden = x.sin()
    if how == "plain":
        y, z = function(hidden, 2.0)
    else:
        recompute = tensor_parallel.CheckpointWithoutOutput()
        y, z = recompute.checkpoint(function, hidden, 2.0)
    out = linear(functional.gelu(y)) * z.sum()
    if how == "discard":
        recompute.discard_output_and_register_recompute(out)
        assert y.untyped_storage().size() == z.untyped_storage().size() == 0
    drawn = torch.rand(2)
    out.square().sum().backward()
    assert runs == ([False] if how == "plain" else [True, True])
    assert not is_checkpointing()
    with tracker.fork():
        own = torch.rand(2)
    grads = [x.grad, norm.weight.grad, norm.bias.grad, linear.weight.grad]
    return [out.detach(), y.detach(), *grads, drawn, own, torch.rand(2)]


@pytest.mark.parametrize("how", ["keep", "discard"])
def test_a_function_whose_outputs_are_freed_has_the_gradients_of_one_that_is_kept(how):
    for ours, plain in zip(_step(how), _step("plain"), strict=True):
        assert torch.equal(ours, plain)


def test_outputs_that_share_memory_with_arguments_are_copied():
    x = torch.randn(3, requires_grad=True)
    recompute = tensor_parallel.CheckpointWithoutOutput(fp8=None)
    hidden = x * 1
    y = recompute.checkpoint(lambda t: t.view(3), hidden)
    z = (y * y).sum()
    recompute.discard_output_and_register_recompute(z)
    assert hidden.detach().equal(x.detach())
    z.backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_without_gradients_nothing_is_freed():
    recompute = tensor_parallel.CheckpointWithoutOutput()
    y = recompute.checkpoint(torch.sin, torch.ones(2))
    recompute.discard_output_and_register_recompute(y * 2)
    assert y.tolist() == torch.ones(2).sin().tolist()


def test_wrong_use_of_recomputation_is_named():
    with pytest.raises(UsageError, match="call checkpoint first"):
        tensor_parallel.CheckpointWithoutOutput().discard_output_and_register_recompute(
            torch.ones(1)
        )
    with pytest.raises(UnsupportedError, match="fp8=True is not supported"):
        tensor_parallel.CheckpointWithoutOutput(fp8=True)
