"""Habits of programs written for Horovod that its front must meet."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from horovod_jobs import horovod, said
from torch import nn
from training import Net, assert_same, batch, linear, loss_of, values

import braid.compat.horovod.torch as hvd
from braid.comm import Group

# Gradients of alltoall.


def _rows(size: int, how: str) -> list[list[int]]:
    """Rows by sender, then receiver."""
    ranks = range(size)
    if how == "equal":
        return [[2] * size for _ in ranks]
    if how == "equal, more on later ranks":
        return [[rank + 1] * size for rank in ranks]
    return [[(rank + 2 * other) % 3 for other in ranks] for rank in ranks]


def _sent_back(group: Group, how: str) -> torch.Tensor:
    """The gradient of rows whose results are weighted with the number of their receiver."""
    with horovod(group):
        splits = _rows(group.size, how)[group.rank]
        x = torch.ones(sum(splits), 2, requires_grad=True)
        y = hvd.alltoall(x, None if how.startswith("equal") else torch.tensor(splits))
        y = y[0] if isinstance(y, tuple) else y
        (y * (group.rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad


@pytest.mark.parametrize("how", ["equal", "equal, more on later ranks", "any"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_of_alltoall_go_back_to_the_rows_that_were_sent(procs, size: int, how: str):
    for splits, grad in zip(_rows(size, how), procs(size, _sent_back, how), strict=True):
        weights = torch.arange(1.0, size + 1).repeat_interleave(torch.tensor(splits))
        assert torch.equal(grad, weights[:, None].expand(-1, 2))


# Sparse tensors and gradients.


def _called(group: Group) -> list[Any]:
    with horovod(group):
        rank = hvd.rank()
        t = torch.sparse_coo_tensor([[0, rank]], torch.tensor([2.0, 4.0]), (5,)).coalesce()
        handle = hvd.sparse_allreduce_async(t, op=hvd.Average, name="t")
        dense = (handle().to_dense() * hvd.size()).round().tolist()
        wrong = said(lambda: hvd.sparse_allreduce_async(torch.ones(2), "t", hvd.Sum))
        other = torch.sparse_coo_tensor([[0]], [1.0], (5 + rank,), check_invariants=True)
        shapes = said(hvd.sparse_allreduce_async(other.coalesce(), "s", hvd.Sum))
        return [dense, wrong.partition(",")[0], "shape [5]" in shapes]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_handle_of_a_sparse_reduction_can_be_called(procs, size: int):
    total = [2.0 * size, *[0.0] * 4]
    for rank in range(size):
        total[rank] += 4.0
    refused = "ConfigError: sparse_allreduce_async works on sparse COO tensors"
    for found in procs(size, _called):
        assert found == [total, refused, True]


def _table(group: Group, kind: str, seldom: bool) -> list[Any]:
    """Train an embedding of which each rank uses some rows, or none at all in some steps."""
    with horovod(group):
        table = nn.Embedding(4, 2, sparse=True, _weight=torch.ones(4, 2))
        make = {"adam": torch.optim.SparseAdam, "sgd": torch.optim.SGD}[kind]
        optimizer = make(list(table.parameters()), lr=0.25)
        hvd.DistributedOptimizer(optimizer, named_parameters=table.named_parameters())
        kinds = []
        for step in range(4):
            if not (seldom and (step == 0 or (hvd.rank() + step) % 2)):
                table(torch.tensor([hvd.rank() % 4, step])).sum().backward()
            optimizer.step()
            assert table.weight.grad is not None
            kinds.append(table.weight.grad.is_sparse)
            optimizer.zero_grad()
        return [kinds, table.weight.detach().clone()]


def _table_of_one(size: int, kind: str, seldom: bool) -> torch.Tensor:
    table = nn.Embedding(4, 2, sparse=True, _weight=torch.ones(4, 2))
    make = {"adam": torch.optim.SparseAdam, "sgd": torch.optim.SGD}[kind]
    optimizer = make(list(table.parameters()), lr=0.25)
    for step in range(4):
        table.weight.grad = torch.zeros(4, 2).to_sparse(1)
        for rank in range(size):
            if not (seldom and (step == 0 or (rank + step) % 2)):
                (table(torch.tensor([rank % 4, step])).sum() / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return table.weight.detach()


@pytest.mark.parametrize("seldom", [False, True])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sparse_gradients_stay_sparse_also_on_ranks_that_have_none(
    procs, size: int, kind: str, seldom: bool
):
    expected = _table_of_one(size, kind, seldom)
    for kinds, weights in procs(size, _table, kind, seldom):
        assert all(kinds[seldom and kind == "sgd" :]), kinds  # nobody knows before the first
        assert torch.allclose(weights, expected, atol=1e-6)


def _reduced_as_dense(group: Group) -> tuple[bool, list[list[float]]]:
    with horovod(group):
        table = nn.Embedding(4, 2, sparse=True)
        with torch.no_grad():
            table.weight.fill_(1.0)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.5)
        hvd.DistributedOptimizer(optimizer, table.named_parameters(), sparse_as_dense=True)
        if hvd.rank():
            table(torch.tensor([hvd.rank()])).sum().backward()
        optimizer.step()
        assert table.weight.grad is not None
        return table.weight.grad.is_sparse, table.weight.tolist()


def test_gradients_that_are_reduced_as_dense_ones_become_sparse_again(procs):
    for is_sparse, (first, second, *others) in procs(2, _reduced_as_dense):
        assert is_sparse
        assert second == pytest.approx([0.5, 0.5])
        assert [first, *others] == [[1.0, 1.0]] * 3


# Optimizers.


def _state(group: Group, kind: str) -> list[Any]:
    with horovod(group):
        net = Net()
        net.first.weight.requires_grad_(False)
        if kind == "sgd":
            optimizer: Any = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(net.parameters(), 0.1, amsgrad=True)
        hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
        if hvd.rank() == 0:  # some parameters have state here, the others' ranks have none
            net.second.weight.grad = torch.ones_like(net.second.weight)
            with optimizer.skip_synchronize():
                optimizer.step()
            if kind == "sgd":
                optimizer.state[net.third.weight]["momentum_buffer"] = None
            optimizer.zero_grad()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        loss_of(net(batch(hvd.rank(), 0))).backward()
        optimizer.step()
        state = optimizer.state_dict()["state"]
        return [
            values(net),
            {(key, name): str(v) for key, each in state.items() for name, v in each.items()},
        ]


def _fresh_state(group: Group) -> list[Any]:
    with horovod(group):
        net = Net()
        before = values(net)
        optimizer = torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.5)
        hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        grads = [param.grad is not None and not param.grad.any() for param in net.parameters()]
        states = [{k: v.unique().tolist() for k, v in s.items()} for s in optimizer.state.values()]
        same = all(map(torch.equal, values(net), before))
        return [same, grads, states, optimizer.param_groups[0]["weight_decay"]]


def test_a_fresh_optimizer_gets_the_state_that_it_begins_with(procs):
    count = len(list(Net().parameters()))
    fresh = {"step": [0.0], "exp_avg": [0.0], "exp_avg_sq": [0.0]}
    assert procs(2, _fresh_state) == [[True, [True] * count, [fresh] * count, 0.5]] * 2


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("size", [2, 3])
def test_optimizer_state_of_frozen_parameters_and_none_inside_of_it_arrive(
    procs, size: int, kind: str
):
    (first, state), *others = procs(size, _state, kind)
    for params, same in others:
        assert_same(params, first)
        assert same == state


def _read(group: Group) -> list[Any]:
    with horovod(group):
        found = []
        for op in (hvd.Average, hvd.Adasum):
            net = linear(2, 2)
            optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
            hvd.DistributedOptimizer(optimizer, net.named_parameters(), op=op)
            found.append([optimizer._parameter_names[p] for p in net.parameters()])
            found.append((optimizer.op, optimizer.process_set == hvd.global_process_set))
        net = linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
        found.append((optimizer.backward_passes_per_step, optimizer._parameter_names[net.weight]))
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        told = "optimizer.step() called without optimizer.skip_synchronize()"
        return [*found, [told in str(each.message) for each in caught]]


def test_programs_read_what_the_optimizer_does_and_filter_its_warning(procs):
    names = ["weight", "bias"]
    expected = [names, (hvd.Average, True), names, (hvd.Adasum, True), (2, "noname.0.0"), [True]]
    assert procs(2, _read) == [expected, expected]


# Refused arguments have Horovod's types.


def _refused(group: Group) -> list[list[str]]:
    x = torch.ones(2, 2, requires_grad=True)
    sparse = torch.eye(2).to_sparse()
    with horovod(group):
        calls: list[tuple[Callable[[], Any], type[Exception]]] = [
            (lambda: hvd.reducescatter(x, op=hvd.Adasum), NotImplementedError),
            (lambda: hvd.allreduce(x, op=hvd.Max).sum().backward(), NotImplementedError),
            (lambda: hvd.sparse_allreduce_async(sparse, "s", hvd.Max), NotImplementedError),
            (lambda: hvd.allreduce(x, op=hvd.Sum, average=True), ValueError),
            (lambda: hvd.alltoall(x, splits=[5, 5]), ValueError),
            (lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS([x]), 0), ValueError),
            (
                lambda: hvd.DistributedOptimizer(torch.optim.SGD([x]), [("a", x), ("a", x)]),
                ValueError,
            ),
            (lambda: hvd.allreduce(torch.ones(1 + group.rank)), hvd.HorovodInternalError),
        ]
        return [[said(call), kind.__name__] for call, kind in calls if not _raises(call, kind)]


def _raises(call: Callable[[], Any], kind: type[Exception]) -> bool:
    try:
        call()
    except kind:
        return True
    except (RuntimeError, ValueError):
        return False
    return False


def test_refused_arguments_raise_what_programs_catch(procs):
    assert procs(2, _refused) == [[], []]
