"""Policies of recomputation: the bits of a plain run, and the operators that run a second time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.comm.autograd import MATMULS, CheckpointPolicy, checkpoint, checkpoint_sequential
from braid.errors import ConfigError
from braid.parallel.pipeline import DevicePipeline
from operators import Operators

ADDMM = torch.ops.aten.addmm.default
TANH = torch.ops.aten.tanh.default


class Block(nn.Module):
    """Two linear layers, dropout before, between and after them, and an operator that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(x, 0.2).add_(1)
        x = functional.dropout(torch.tanh(self.up(x)), 0.5)
        return functional.dropout(self.down(x), 0.5).mul(2)


def blocks(count: int = 2) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(count)))


def batch() -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def tanh_only(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE if op is TANH else CheckpointPolicy.MUST_RECOMPUTE


def most(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> bool:
    return op is not torch.ops.aten.mul.Tensor  # an operator changes its result in place


POLICIES = [None, MATMULS, [TANH], tanh_only, most]


def gradients(call: Any) -> tuple[list[torch.Tensor], Counter[Any]]:
    model, x = blocks(), batch().requires_grad_()
    with torch.random.fork_rng(), Operators() as operators:
        torch.manual_seed(2)
        call(model, x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())], operators.counts


@pytest.mark.parametrize(
    ("policy", "addmms", "tanhs"),
    [(None, 8, 4), (MATMULS, 4, 4), ([TANH], 8, 2), (tanh_only, 8, 2), (most, 4, 2)],
)
def test_gradients_have_the_same_bits_and_kept_operators_run_once(policy, addmms, tanhs):
    expected, _ = gradients(lambda model, x: model(x))

    def recomputed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, policy=policy)

    found, counts = gradients(recomputed)
    assert all(map(torch.equal, found, expected))
    assert (counts[ADDMM], counts[TANH]) == (addmms, tanhs)


@pytest.mark.parametrize("recompute", ["always", "except_last"])
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_a_pipeline_has_the_same_bits_and_runs_kept_operators_once(policy, recompute):
    found: list[tuple[list[torch.Tensor], int]] = []
    for chosen in (None, policy):
        with torch.random.fork_rng():
            torch.manual_seed(2)
            pipeline = DevicePipeline(
                blocks(4),
                ["cpu"],  # the counter sees the operators of one thread
                balance=[4],
                num_microbatches=2,
                recompute=recompute,
                recompute_policy=chosen,
            )
            with Operators() as operators:
                pipeline(batch()).square().sum().backward()
        found.append(([p.grad for p in pipeline.parameters()], operators.counts[ADDMM]))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    runs = {"always": 32, "except_last": 24}[recompute]
    assert (found[0][1], found[1][1]) == (runs, 16 if policy in (MATMULS, most) else runs)


def test_segments_of_a_plan_take_a_policy():
    expected, _ = gradients(lambda model, x: model(x))
    found, counts = gradients(lambda model, x: checkpoint_sequential(model, 2, x, policy=MATMULS))
    assert all(map(torch.equal, found, expected))
    assert counts[ADDMM] == 4


@pytest.mark.parametrize("outer", [None, MATMULS])
def test_checkpoints_with_policies_can_be_nested(outer):
    expected, _ = gradients(lambda model, x: model(x))

    def nested(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = checkpoint(block, x, policy=[TANH])
        return x

    found, _ = gradients(lambda model, x: checkpoint(nested, model, x, policy=outer))
    assert all(map(torch.equal, found, expected))


def test_a_second_backward_through_kept_results_is_refused():
    y = checkpoint(blocks()[0], batch().requires_grad_(), policy=MATMULS).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        y.backward()


def test_a_kept_result_that_is_changed_in_place_is_refused():
    y = checkpoint(lambda x: torch.tanh(x).exp_(), batch().requires_grad_(), policy=[TANH])
    with pytest.raises(ConfigError, match="policy of recomputation has saved was changed in place"):
        y.sum().backward()


def offload(_context: Any, _op: Any, *_args: Any, **_kwargs: Any) -> Any:
    return "offload"


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("speed", r"returns one of MUST_SAVE, PREFER_SAVE, MUST_RECOMPUTE, PREFER_RECOMPUTE, or"),
        ([torch.ops.aten.mm], r"torch.ops.aten.mm.default\], got .*: use aten.mm.default"),
        (offload, r"returned 'offload' for aten.*: return one of MUST_SAVE, PREFER_SAVE, MUST_R"),
    ],
)
def test_bad_policies_are_refused_with_the_allowed_ones(policy, text):
    with pytest.raises(ConfigError, match=text):
        checkpoint(blocks()[0], batch(), policy=policy)


def test_a_policy_without_recomputation_is_refused():
    with pytest.raises(ConfigError, match='recompute_policy has no effect with recompute="never"'):
        DevicePipeline(blocks(), ["cpu"], balance=[2], recompute="never", recompute_policy=MATMULS)
