"""Stock DistributedDataParallel over braid trains as it does over Gloo."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch_jobs import both, run
from training import said_by

from braid.runtime.rendezvous import wants_portable
from support.pool import ProcessPool

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


# Buckets in shared memory.

shares_memory = pytest.mark.skipif(wants_portable(), reason="BRAID_PORTABLE: nothing is shared")


def in_registered_memory(x: torch.Tensor) -> bool:
    """Whether peers read `x` where it lies."""
    world: Any = dist.group.WORLD
    return world._group.engine.transport.arena.origin(x.data_ptr()) is not None


def _where_gradients_lie(options: dict[str, Any], steps: int) -> Any:
    model = DistributedDataParallel(Model(), gradient_as_bucket_view=True, **options)
    places, seen = [], []
    for _ in range(steps):
        train(model, steps=1)
        grads = [p.grad for p in model.parameters() if p.numel() >= WIDTH * WIDTH]
        places.append([in_registered_memory(grad) for grad in grads])
        seen.append([grad.data_ptr() for grad in grads])
    rebuilt = model._get_ddp_logging_data().get("has_rebuilt_buckets", 0)
    moved = [before != after for before, after in itertools.pairwise(seen)]
    return places, moved, bool(rebuilt)


@shares_memory
def test_buckets_are_registered_anew_after_ddp_has_rebuilt_them(
    pool: ProcessPool, tmp_path: Path
) -> None:
    # the second step begins with new buckets, which are moved when they are reduced for the second time
    away, there = [False, False], [True, True]
    expected = [away, away, there, there], [True, True, False], True
    assert run(pool, tmp_path, 2, _where_gradients_lie, {}, 4) == [expected] * 2


@shares_memory
def test_buckets_that_stay_are_registered_at_the_second_step(
    pool: ProcessPool, tmp_path: Path
) -> None:
    away, there = [False, False], [True, True]
    expected = [away, there, there], [True, False], False
    options = {"find_unused_parameters": True}  # then DDP keeps its first buckets
    assert run(pool, tmp_path, 2, _where_gradients_lie, options, 3) == [expected] * 2


def _without_space(ranks: list[int]) -> Any:
    def statvfs(_path: str) -> Any:
        return SimpleNamespace(f_bavail=3, f_frsize=4096)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if dist.get_rank() in ranks:
            patch.setattr("braid.runtime.transport.arena.os.statvfs", statvfs)
        model = DistributedDataParallel(Model(), gradient_as_bucket_view=True, bucket_cap_mb=0.05)
        parameters = train(model)
    grads = [p.grad for p in model.parameters() if p.numel() >= WIDTH * WIDTH]
    said = [str(w.message) for w in caught if w.category is RuntimeWarning]
    return parameters, said, [in_registered_memory(grad) for grad in grads]


@shares_memory
@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_training_goes_on_without_room_for_buckets(
    pool: ProcessPool, tmp_path: Path, ranks: list[int]
) -> None:
    answers = run(pool, tmp_path, 2, _without_space, ranks)
    usual, _ = run(pool, tmp_path, 2, small_buckets)
    for rank, (parameters, said, registered) in enumerate(answers):
        torch.testing.assert_close(parameters, usual, rtol=0, atol=0)
        assert registered == [rank not in ranks] * 2
        assert len(said) == (rank in ranks)
        assert not any("\n" in text for text in said)
        assert all("/dev/shm has 12,288 bytes free" in text for text in said)


def _joined(by_initial_size: bool) -> list[list[float]]:
    model = DistributedDataParallel(nn.Linear(2, 2, bias=False))
    rank, grads = dist.get_rank(), []
    with model.join(divide_by_initial_world_size=by_initial_size):
        for _ in range(2 + 2 * rank):
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
            grads.append(model.module.weight.grad.flatten().tolist())
            model.zero_grad()
    return grads


@pytest.mark.parametrize("by_initial_size", [True, False])
def test_ranks_join_early_as_over_gloo(pool, tmp_path, by_initial_size):
    ours, wanted = both(pool, tmp_path, 2, _joined, by_initial_size)
    assert ours == wanted


def _stepped_in_backward() -> str:
    with warnings.catch_warnings():  # torch.jit.script is deprecated
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward

    layer = nn.Linear(2, 2, bias=False)
    _apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(layer)
    return said_by(lambda: model(torch.ones(1, 2)).sum().backward(), RuntimeError)


def _waited_in_backward() -> list[float]:
    model = DistributedDataParallel(nn.Linear(2, 2, bias=False))

    def hook(reducer, bucket):
        mean = reducer._run_allreduce_hook(bucket).wait()[0] / dist.get_world_size()
        future = torch.futures.Future()
        future.set_result(mean)
        return future

    model.register_comm_hook(model.reducer, hook)
    model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    return model.module.weight.grad.flatten().tolist()


def test_a_hook_may_wait_in_backward(pool, tmp_path):
    assert run(pool, tmp_path, 2, _waited_in_backward) == [[1.5] * 4] * 2


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch steps on an accelerator")
def test_optimizers_in_backward_need_an_accelerator_as_over_gloo(pool, tmp_path):
    ours, wanted = both(pool, tmp_path, 2, _stepped_in_backward)
    assert ours == wanted
