"""A copy of a wrapper is a wrapper of its own: over the same group, or over the default one where it is loaded."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_jobs import run
from training import said_by

from braid.comm import Group
from braid.errors import ConfigError, MismatchError
from braid.parallel.data_parallel import DistributedDataParallel, SyncBatchNorm, accumulate
from support.pool import ProcessPool
from support.seeded import filled


def net() -> nn.Sequential:
    layers = [nn.utils.skip_init(nn.Linear, 3, 4), nn.utils.skip_init(nn.Linear, 4, 2)]
    return filled(nn.Sequential(layers[0], nn.BatchNorm1d(4), layers[1]), 5)


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * rank + step))
    return module(x).square().mean()


def grads(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def step(model: nn.Module, rank: int, number: int) -> list[torch.Tensor]:
    model.zero_grad()
    loss_of(model, rank, number).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(0.1 * param.grad)
    return grads(model)


def expected(size: int, numbers: list[int]) -> list[list[torch.Tensor]]:
    """Gradients of one process that takes these steps."""
    module = net()
    steps = []
    for number in numbers:
        module.zero_grad()
        accumulate(module, [lambda r=r, n=number: loss_of(module, r, n) for r in range(size)])
        steps.append(grads(module))
        with torch.no_grad():
            for param in module.parameters():
                param.sub_(0.1 * param.grad)
    return steps


def same(some: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    pairs = [(a, b) for x, y in zip(some, others, strict=True) for a, b in zip(x, y, strict=True)]
    return all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def _branches(group: Group) -> tuple[Any, Any]:
    model = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=1e-5)
    trunk = [step(model, group.rank, 0)]
    twin = copy.deepcopy(model)
    branch = [*trunk, step(twin, group.rank, 1)]
    trunk.append(step(model, group.rank, 2))
    further = copy.deepcopy(twin)
    del twin
    branch.append(step(further, group.rank, 3))
    trunk.append(step(model, group.rank, 4))
    assert further.process_group is group
    assert further.num_buckets == model.num_buckets > 1
    return trunk, branch


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_copy_and_its_original_train_on_their_own(world, size):
    for trunk, branch in world(size, _branches):
        # batch statistics are those of a shard, so running means differ, but gradients do not
        assert same(trunk, expected(size, [0, 2, 4]))
        assert same(branch, expected(size, [0, 1, 3]))


def _alone(group: Group) -> list[list[torch.Tensor]]:
    model = DistributedDataParallel(net(), process_group=group)
    found = [step(model, group.rank, 0)]
    if group.rank == 0:  # other ranks know nothing of it
        twin = copy.deepcopy(model)
        for _ in range(2):
            assert loss_of(twin, 0, 7).requires_grad
        with twin.no_sync():
            loss_of(twin, 0, 7).backward()
        assert (twin.num_buckets, twin._get_ddp_logging_data()["bucket_sizes"]) == (0, "")
    found.append(step(model, group.rank, 1))
    found.append(step(DistributedDataParallel(model.module, process_group=group), group.rank, 2))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_alone_may_copy_and_use_the_copy(world, size):
    for found in world(size, _alone):
        assert same(found, expected(size, [0, 1, 2]))


def _averaged_weights(group: Group) -> bool:
    model = DistributedDataParallel(net(), process_group=group)
    means = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=False)
    seen = []
    for number in range(3):
        step(model, group.rank, number)
        means.update_parameters(model)
        seen.append([p.detach().clone() for p in model.parameters()])
    mean = seen[0]
    for values in seen[1:]:
        mean = [0.5 * a + 0.5 * b for a, b in zip(mean, values, strict=True)]
    means.requires_grad_(False)
    assert not loss_of(means, group.rank, 0).requires_grad
    return same([list(means.parameters())], [mean])


def test_averaged_weights_of_a_wrapper(world):
    assert world(2, _averaged_weights) == [True] * 2


def _kept(group: Group) -> None:
    model = DistributedDataParallel(
        net(), process_group=group, find_unused_parameters=True, gradient_accumulation_steps=2
    )
    model.epoch = {"number": [3]}
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    model.module[0].weight.requires_grad_(False)
    model.register_comm_hook(None, lambda *_: pytest.fail("is not the copy's"))
    twin = copy.deepcopy({"ema": model})["ema"]
    assert grads(twin) == [None] * 6
    assert [p.requires_grad for p in twin.parameters()] == [False] + [True] * 5
    assert twin.epoch == model.epoch
    assert twin.epoch["number"] is not model.epoch["number"]
    assert twin.find_unused_parameters
    assert twin.state_dict().keys() == model.state_dict().keys()
    local = net()
    local[0].weight.requires_grad_(False)
    loss_of(twin, group.rank, 0).backward()
    loss_of(local, group.rank, 0).backward()
    assert torch.equal(twin.module[2].weight.grad, local[2].weight.grad)  # the first of two
    loss_of(twin, group.rank, 1).backward()
    assert calls == ["forward", "forward"]
    twin.requires_grad_(False)
    loss_of(copy.deepcopy(twin), group.rank, 0)  # nothing to train, and no reason to refuse it


def test_settings_attributes_and_frozen_parameters_are_copied(world):
    world(2, _kept)


def _joined(group: Group) -> bool:
    twin = copy.deepcopy(DistributedDataParallel(net(), process_group=group))
    with twin.join():
        for number in range(1 + group.rank):
            step(twin, group.rank, number)
    values = torch.cat([p.detach().flatten() for p in twin.parameters()])
    return bool((group.all_gather(values).view(group.size, -1) == values).all())


@pytest.mark.parametrize("size", [2, 3])
def test_copies_take_uneven_inputs(world, size):
    assert world(size, _joined) == [True] * size


def _let_go(group: Group) -> str:
    model = DistributedDataParallel(net(), process_group=group)
    step(model, group.rank, 0)
    reducer = weakref.ref(model._reducer)
    twin = copy.deepcopy(model)
    del model
    gc.collect()
    assert reducer() is None
    step(twin, group.rank, 1)
    for number in range(4):
        step(copy.deepcopy(twin), group.rank, number)
        gc.collect()
    before = group.numbers.state()
    for number in range(4):
        step(copy.deepcopy(twin), group.rank, number)
        gc.collect()
    assert group.numbers.state() == before
    return before


@pytest.mark.parametrize("size", [2, 3])
def test_neither_memory_nor_channels_outlive_a_wrapper(world, size):
    assert len(set(world(size, _let_go))) == 1


def _different(group: Group) -> str:
    twin = copy.deepcopy(DistributedDataParallel(net(), process_group=group))
    if group.rank == 1:
        twin.module[2] = nn.utils.skip_init(nn.Linear, 4, 3)
        twin = copy.deepcopy(twin)
    return said_by(lambda: loss_of(twin, group.rank, 0).backward(), MismatchError)


@pytest.mark.parametrize("size", [2, 3])
def test_copies_that_differ_between_ranks_are_refused_when_they_average(procs, size):
    texts = procs(size, _different)
    assert len(set(texts)) == 1
    assert "parameters or their order differ between ranks" in texts[0]
    assert "rank 1  2.bias float32[3]" in texts[0]


def _refused(group: Group) -> None:
    model = DistributedDataParallel(net(), process_group=group)
    texts = []
    handle = model.module[0].weight.register_post_accumulate_grad_hook(
        lambda _: texts.append(said_by(lambda: copy.deepcopy(model), ConfigError))
    )
    loss_of(model, group.rank, 0).backward()
    handle.remove()
    (text,) = texts
    assert "was copied during its backward: copy it between two steps" in text
    assert "use copy.deepcopy(model)" in said_by(lambda: copy.copy(model), ConfigError)
    for save in (lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO())):
        text = said_by(save, ConfigError)
        assert "only a DistributedDataParallel over the default group of torch.distributed" in text
        assert "model.state_dict() or model.module" in text


def test_what_cannot_be_copied_is_refused_with_what_to_do(world):
    world(2, _refused)


def _saved(path: str) -> tuple[Any, Any, bytes]:
    group = torch.distributed.group.WORLD
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(net())
    assert model.process_group is group
    first = step(model, rank, 0)
    torch.save(model, f"{path}/{rank}.pt")
    pickled = pickle.dumps(model)
    del model
    norms = pickle.loads(pickle.dumps(SyncBatchNorm.convert_sync_batchnorm(net()))).train()
    assert norms(torch.ones(3, 3)).shape == (3, 2)
    loaded = torch.load(f"{path}/{rank}.pt", weights_only=False)
    assert loaded.process_group is group
    assert grads(loaded) == [None] * 6
    again = pickle.loads(pickled)
    part = torch.distributed.new_group([0, 1])
    if rank < 2:
        other = DistributedDataParallel(net(), process_group=part)
        assert "default group" in said_by(lambda: pickle.dumps(other), ConfigError)
    return (
        [first, step(loaded, rank, 1), step(loaded, rank, 2)],
        [first, step(again, rank, 3)],
        pickled,
    )


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_loaded_joins_the_default_group(pool: ProcessPool, tmp_path: Path, size: int):
    for loaded, again, pickled in run(pool, tmp_path, size, _saved, str(tmp_path)):
        assert same(loaded, expected(size, [0, 1, 2]))
        assert same(again, expected(size, [0, 3]))
        text = said_by(lambda data=pickled: pickle.loads(data), ConfigError)
        assert "joins the default group of torch.distributed when it is loaded" in text
        assert "init_process_group('braid') first" in text
