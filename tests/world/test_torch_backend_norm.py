"""torch's SyncBatchNorm over braid.

The module refuses tensors on the CPU, and five of the functions that it is made of exist for GPUs only. So these five are given
here, by their formulas; what they are called by, with its collectives, is torch's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm
from torch_jobs import process_group, run

from support.pool import ProcessPool

EPS = 1e-5
ROWS = ([3, 5], [4, 0], [1, 7])  # of the ranks

# x (N, C), dy (N, C); the others (C,)


def batch_norm_stats(x: torch.Tensor, eps: float) -> Any:
    return x.mean(0), (x.var(0, unbiased=False) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    _x: torch.Tensor,
    means: torch.Tensor,
    invstds: torch.Tensor,
    _running_mean: None,
    _running_var: None,
    _momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> Any:
    shares = (counts / counts.sum())[:, None]
    mean = (shares * means).sum(0)
    variance = (shares * (invstds**-2 - eps + (means - mean) ** 2)).sum(0)
    return mean, (variance + eps).rsqrt()


def batch_norm_elemt(x: Any, weight: Any, bias: Any, mean: Any, invstd: Any, _eps: float) -> Any:
    return (x - mean) * invstd * weight + bias


def batch_norm_backward_reduce(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, *_flags: Any
) -> Any:
    sum_dy, sum_dy_xmu = dy.sum(0), (dy * (x - mean)).sum(0)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy


def batch_norm_backward_elemt(  # noqa: PLR0917 - torch's signature
    dy: Any, x: Any, mean: Any, invstd: Any, weight: Any, sum_dy: Any, sum_dy_xmu: Any, counts: Any
) -> Any:
    n = counts.sum()
    return (dy - sum_dy / n - (x - mean) * invstd**2 * sum_dy_xmu / n) * invstd * weight


KERNELS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, torch.arange(1.0, 7.0, dtype=x.dtype), torch.ones(6, dtype=x.dtype)


def _normalised(rows: list[int]) -> Any:
    x, weight, bias = inputs()
    x = x[: sum(rows)].split(rows)[dist.get_rank()].clone().requires_grad_()
    weight.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        for kernel in KERNELS:
            patch.setattr(torch, kernel.__name__, kernel)
        y = SyncBatchNorm.apply(
            x, weight, bias, None, None, EPS, 0.1, dist.group.WORLD, dist.get_world_size()
        )
        (y**3).sum().backward()
    # a rank without rows has no gradients
    of_x, of_weight = (torch.zeros_like(p) if p.grad is None else p.grad for p in (x, weight))
    dist.all_reduce(of_weight)
    return y.detach(), of_x, of_weight


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_statistics_are_those_of_the_whole_batch(
    pool: ProcessPool, tmp_path: Path, rows: list[int]
) -> None:
    answers = run(pool, tmp_path, 2, _normalised, rows)
    x, weight, bias = inputs()
    x = x[: sum(rows)].requires_grad_()
    weight.requires_grad_()
    y = nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    (y**3).sum().backward()
    ours = [torch.cat([answer[i] for answer in answers]) for i in (0, 1)]
    torch.testing.assert_close([*ours, answers[0][2]], [y.detach(), x.grad, weight.grad])
    torch.testing.assert_close(answers[0][2], answers[1][2], rtol=0, atol=0)


def test_module_refuses_the_cpu_before_it_asks_us(tmp_path: Path) -> None:
    with process_group("braid", 0, 1, str(tmp_path / "store")):
        module = nn.SyncBatchNorm(6, process_group=dist.group.WORLD)
        with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
            module(torch.ones(8, 6))
