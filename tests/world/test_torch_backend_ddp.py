"""Stock DistributedDataParallel over braid trains as it does over Gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch_jobs import both, run

from braid.rendezvous import wants_portable
from braid.testing.pool import ProcessPool

WIDTH = 160  # 160 x 160 floats are a bucket that is worth moving


class Model(nn.Module):
    """Has a layer that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, *, rare: bool = True) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.second(x))
        if rare:
            x = torch.relu(self.rare(x))
        return self.last(x)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 16, generator=generator)


def train(model: Any, *, steps: int = 4, rare: Callable[[int], bool] = lambda _step: True) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step), rare=rare(step)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def plain() -> Any:
    return train(DistributedDataParallel(Model()))


def small_buckets() -> Any:
    return train(DistributedDataParallel(Model(), bucket_cap_mb=0.05))


def unused_parameters() -> Any:
    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    return train(model, rare=lambda step: (step + dist.get_rank()) % 2 == 0)


def static_graph() -> Any:
    return train(DistributedDataParallel(Model(), static_graph=True))


def bucket_views() -> Any:
    return train(DistributedDataParallel(Model(), gradient_as_bucket_view=True, bucket_cap_mb=0.05))


def no_sync() -> Any:
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch(2 * step)).square().mean().backward()
        model(batch(2 * step + 1)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def half_precision_hook() -> Any:
    model = DistributedDataParallel(Model())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model)


def all_reduce_hook() -> Any:
    model = DistributedDataParallel(Model())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return train(model)


def power_sgd_hook() -> Any:
    model = DistributedDataParallel(Model())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, steps=6)


def checkpointing() -> Any:
    class Checkpointed(Model):
        def forward(self, x: torch.Tensor, *, rare: bool = True) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(
                super().forward, x, rare=rare, use_reentrant=False
            )

    return train(DistributedDataParallel(Checkpointed()))


def uneven_inputs() -> Any:
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Join([model]):
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "main",
    [
        plain,
        small_buckets,
        unused_parameters,
        static_graph,
        bucket_views,
        no_sync,
        all_reduce_hook,
        half_precision_hook,
        checkpointing,
        uneven_inputs,
    ],
    ids=lambda main: main.__name__,
)
def test_stock_ddp_trains_as_over_gloo(
    pool: ProcessPool, tmp_path: Path, main: Callable[[], Any]
) -> None:
    ours, theirs = both(pool, tmp_path, 2, main)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[0], ours[1], rtol=0, atol=0)


def test_power_sgd_waits_inside_of_callbacks(pool: ProcessPool, tmp_path: Path) -> None:
    # not held against Gloo, one of whose threads now and then destroys its own process group after this hook
    ours = run(pool, tmp_path, 2, power_sgd_hook)
    torch.testing.assert_close(ours[0], ours[1], rtol=0, atol=0)
    assert all(bool(torch.isfinite(p).all()) for p in ours[0])


@pytest.mark.skipif(wants_portable(), reason="BRAID_PORTABLE: there is no shared memory")
def test_buckets_of_stock_ddp_lie_in_shared_memory_after_two_steps(
    pool: ProcessPool, tmp_path: Path
) -> None:
    assert run(pool, tmp_path, 2, _shared_gradients) == [[True, True], [True, True]]


def _shared_gradients() -> list[bool]:
    model = DistributedDataParallel(Model(), gradient_as_bucket_view=True)
    train(model, steps=4)
    large = [p.grad for p in model.parameters() if p.numel() >= WIDTH * WIDTH]
    return [grad is not None and grad.is_shared() for grad in large]
