"""Models train on a parameter server as in one process: modules, embeddings, snapshots."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from training import said_by

from braid import ps
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError

STEPS = 4
MAKE = partial(torch.optim.AdamW, lr=0.05)


def model() -> nn.Sequential:
    """Return a small network with fixed weights; ranks may be threads."""
    linear = partial(nn.utils.skip_init, nn.Linear)
    net = nn.Sequential(linear(6, 8), nn.Tanh(), linear(8, 8), nn.Tanh(), linear(8, 3))
    with torch.no_grad():
        for place, param in enumerate(net.parameters()):
            numbers = torch.arange(param.numel(), dtype=torch.float32).reshape(param.shape)
            param.copy_(torch.sin(numbers * (place + 1)) / 3)
    return net


def batch(worker: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * worker + step)
    return torch.randn(5, 6, generator=generator)


def loss_of(net: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return net(inputs).square().mean()


def alone(workers: int, steps: int = STEPS) -> list[torch.Tensor]:
    net = model()
    optimizer = MAKE(net.parameters())
    for step in range(steps):
        grads = []
        for worker in range(workers):
            net.zero_grad()
            loss_of(net, batch(worker, step)).backward()
            grads.append([param.grad.clone() for param in net.parameters()])
        for param, *own in zip(net.parameters(), *grads, strict=True):
            param.grad = sum(own[1:], own[0].clone()) * (1 / workers)
        optimizer.step()
    return [param.detach().clone() for param in net.parameters()]


def _trains(group: Group, servers: int, where: str, cross_barrier: bool) -> Any:
    with ps.join(group, servers) as node:
        net = ps.ParameterServer(
            model(), node, MAKE, where=where, partition_bytes=128, cross_barrier=cross_barrier
        )
        if not node.is_worker:
            node.serve()
            return None
        for step in range(STEPS):
            loss_of(net, batch(node.number, step)).backward()
            net.step()
        net.wait()
        assert net.num_partitions > 2
        return [param.detach().clone() for param in net.module.parameters()]


@pytest.mark.parametrize("where", ["servers", "workers"])
@pytest.mark.parametrize("cross_barrier", [False, True])
@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (2, 3)])
def test_a_module_trains_with_the_bits_of_one_process(
    world, servers, workers, where, cross_barrier
):
    results = world(1 + servers + workers, _trains, servers, where, cross_barrier)
    for values in results[1 + servers :]:
        assert all(map(torch.equal, values, alone(workers)))


def _accumulates(group: Group) -> Any:
    with ps.join(group, 1) as node:
        net = ps.ParameterServer(model(), node, MAKE)
        if not node.is_worker:
            node.serve()
            return None
        with net.accumulate():
            loss_of(net, batch(0, 0)).backward()
        loss_of(net, batch(1, 0)).backward()
        net.step()
        values = [param.detach().clone() for param in net.module.parameters()]
        loss_of(net, batch(1, 0)).backward()
        return said_by(lambda: loss_of(net, batch(1, 0)).backward(), ConfigError), values


def test_gradients_accumulate_where_that_is_said(world):
    again, values = world(3, _accumulates)[2]
    assert "backward ran twice before step()" in again
    net = model()
    optimizer = MAKE(net.parameters())
    for worker in range(2):
        loss_of(net, batch(worker, 0)).backward()
    optimizer.step()
    assert all(map(torch.equal, values, net.parameters()))


def _rates(group: Group) -> Any:
    with ps.join(group, 1) as node:
        net = ps.ParameterServer(model(), node, partial(torch.optim.SGD, lr=1.0))
        if not node.is_worker:
            node.serve()
            return None
        for step in range(3):
            net.set_lr(0.5**step)
            loss_of(net, batch(0, step)).backward()
            net.step()
        return [param.detach().clone() for param in net.module.parameters()]


def test_learning_rates_change_at_a_clock(world):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.5**step
        optimizer.zero_grad()
        loss_of(net, batch(0, step)).backward()
        optimizer.step()
    for values in world(4, _rates)[2:]:
        assert all(map(torch.equal, values, net.parameters()))


IDS = torch.tensor([[3, 1, 3], [-5, 2**62, 0]])


def _embeds(group: Group, servers: int, prefetch: bool, consistency: ps.Consistency) -> Any:
    with ps.join(group, servers) as node:
        table = node.sparse("words", 4, ps.Adagrad(lr=0.5), consistency, init=ps.Normal(std=1.0))
        if not node.is_worker:
            node.serve()
            return None
        words = ps.Embedding(table)
        for step in range(STEPS):
            ids = IDS + step // 2
            rows = words(ids)
            assert rows.shape == (2, 3, 4)
            (rows * batch(node.number, step)[0, :4]).sum().backward()
            if prefetch:
                words.prefetch(IDS + (step + 1) // 2)
            words.step()
        with torch.no_grad():
            return words(IDS), table.pull(torch.arange(10))


def _embeds_alone(workers: int) -> torch.Tensor:
    storage = ps.storage.SparseStorage(
        4, ps.Normal(std=1.0), ps.Adagrad(lr=0.5), seed=0, table="words"
    )
    for step in range(STEPS):
        ids = (IDS + step // 2).reshape(-1)
        pushes = []
        for worker in range(workers):
            distinct, inverse = torch.unique(ids, return_inverse=True)
            sums = torch.zeros(len(distinct), 4)
            pushes.append(
                (distinct, sums.index_add_(0, inverse, batch(worker, step)[:1, :4].expand(6, 4)))
            )
        storage.apply(storage.merge(pushes, 1 / workers))
    return storage.read((IDS.reshape(-1),))[0].view(2, 3, 4)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (3, 2)])
def test_embeddings_train_alike_on_any_number_of_servers(world, servers, workers, prefetch):
    results = world(1 + servers + workers, _embeds, servers, prefetch, ps.BSP)
    for rows, _ in results[1 + servers :]:
        torch.testing.assert_close(rows, _embeds_alone(workers), rtol=0, atol=0)


def test_stale_embeddings_see_their_own_pushes(world):
    consistency = ps.Consistency(staleness=math.inf)
    ((rows, _),) = world(3, _embeds, 1, True, consistency)[2:]
    assert torch.equal(rows, _embeds_alone(1))


def _begin_at(clock: int, net: ps.ParameterServer) -> None:
    """Begin a step as a worker that replaces a lost one; see `Node.resume`."""
    for partition in net._partitions:
        partition.table.clock = clock
    net.wait()


def _mistakes(group: Group) -> list[str]:
    with ps.join(group, 1) as node:
        table = node.sparse("words", 4, ps.SGD(lr=0.5))
        said = [
            said_by(lambda: node.sparse("none", 0, ps.SGD(lr=0.5)), ConfigError),
            said_by(lambda: node.sparse("none", 1, ps.SGD(lr=0.5), num_shards=0), ConfigError),
            said_by(lambda: node.save("x", 1), ConfigError) if not node.is_worker else "",
            said_by(
                lambda: ps.ParameterServer(nn.Tanh(), node, MAKE),
                ConfigError,
            ),
            said_by(
                lambda: ps.ParameterServer(model(), node, ps.SGD(lr=1.0), where="workers"),
                ConfigError,
            ),
        ]
        sums = ps.ParameterServer(model(), node, MAKE, where="workers", name="sums")
        late = ps.ParameterServer(model(), node, MAKE, where="workers", name="late")
        if not node.is_worker:
            node.serve()
            return said
        said += [
            said_by(lambda: table.pull(torch.ones(3)), ConfigError),
            said_by(lambda: table.push(torch.ones(3).long(), torch.ones(3)), ConfigError),
            said_by(lambda: sums.set_consistency(ps.Consistency(staleness=2)), ConfigError),
            said_by(lambda: _begin_at(3, late), ConfigError),
        ]
        assert table.pull(torch.empty(0, dtype=torch.int64)).shape == (0, 4)
        table.push(torch.empty(0, dtype=torch.int64), torch.empty(0, 4))
        return said


def test_mistakes_with_modules_and_rows_are_named(world):
    server, worker = world(3, _mistakes)[1:]
    assert "the length of a row, must be at least 1" in worker[0]
    assert "got num_shards 0" in worker[1]
    assert "only workers can save snapshots: call serve() on servers" in server[2]
    assert "Tanh has no parameter that requires a gradient" in worker[3]
    assert "workers step with a torch optimizer" in worker[4]
    assert "table 'words' needs int64 ids, got torch.float32" in worker[5]
    assert "of shape [3, 4] for these ids, got torch.float32 of shape [3]" in worker[6]
    assert "where='workers' needs staleness 0" in worker[7]
    assert (
        "this worker would replace one that was lost at step 3, but where='workers' keeps"
        in worker[8]
    )


def _saved(group: Group, servers: int, where: str, restore: bool) -> Any:
    options = ps.Options(restore=where if restore else None)
    with ps.join(group, servers, options) as node:
        net = ps.ParameterServer(model(), node, MAKE)
        rows = node.sparse("words", 4, ps.Adam(lr=0.5))
        if not node.is_worker:
            node.serve()
            return None
        for step in range(2, 4) if restore else range(2):
            loss_of(net, batch(node.number, step)).backward()
            net.step()
            pulled = rows.pull(IDS)
            rows.push(IDS, pulled + 1)
        if not restore:
            node.save(where, 2)
        return [*(param.detach().clone() for param in net.module.parameters()), rows.pull(IDS)]


def test_a_snapshot_is_resumed_on_another_number_of_servers(world, tmp_path):
    where = str(tmp_path / "snapshots")
    world(4, _saved, 1, where, False)
    *values, rows = world(6, _saved, 3, where, True)[4]
    assert all(map(torch.equal, values, alone(2)))
    *_, again = world(4, _saved, 1, where, True)[2]
    assert torch.equal(rows, again)


def _unknown(group: Group, where: str) -> str:
    node = ps.join(group, 1, ps.Options(restore=where))
    said = ""
    if node.role == "server":
        said = said_by(lambda: node.dense("other", torch.ones(3), MAKE), CheckpointError)
    group.barrier()
    node.__exit__(KeyError, None, None)
    return said


def test_a_snapshot_without_the_table_is_refused(world, tmp_path):
    where = str(tmp_path / "snapshots")
    world(4, _saved, 1, where, False)
    assert "does not contain the table 'other', only model.0, words" in world(3, _unknown, where)[1]
