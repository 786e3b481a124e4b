"""Horovod's front for torch: every operation, dtype and number of dims with gradients, and what scripts rely on."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from training import said_by

import braid.compat.horovod.torch as hvd
from braid.comm import Group
from braid.compat.horovod import session
from braid.compat.horovod.environment import HorovodEnvironment
from braid.errors import BraidError
from support.seeded import filled

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int32, torch.int64]
DTYPES += [torch.uint8, torch.int8]


@contextlib.contextmanager
def horovod(group: Group, **variables: str) -> Iterator[None]:
    session.start(group, HorovodEnvironment.of({f"HOROVOD_{k}": v for k, v in variables.items()}))
    try:
        yield
    finally:
        hvd.shutdown()


def said(call: Callable[[], object]) -> str:
    return said_by(call, (BraidError, RuntimeError, ValueError, AssertionError))


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


class Checks:
    """What differs from what is expected, with words."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def same(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        if found.dtype != expected.dtype or not torch.equal(found, expected):
            self.wrong.append(f"{what}: {found} instead of {expected}")


# Every operation.


def _values(group: Group) -> list[str]:
    checks = Checks()
    with horovod(group):
        for dtype in DTYPES:
            for num_dims in range(1, 5):
                _values_of(checks, dtype, (4, 3, 2, 2)[:num_dims])
    return checks.wrong


def _values_of(checks: Checks, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size, rank = hvd.size(), hvd.rank()
    each = [numbers(r, shape, dtype) for r in range(size)]
    own, what = each[rank], f"{dtype} {shape}"
    total = torch.stack([x.double() for x in each]).sum(0)
    checks.same(f"sum {what}", hvd.allreduce(own, op=hvd.Sum), total.to(dtype))
    if not dtype.is_floating_point:
        average = (total / size).trunc().to(dtype)
        checks.same(f"average {what}", hvd.allreduce(own), average)
    checks.same(f"max {what}", hvd.allreduce(own, op=hvd.Max), torch.stack(each).amax(0))
    checks.same(f"min {what}", hvd.allreduce(own, op=hvd.Min), torch.stack(each).amin(0))
    place = own.clone()
    assert hvd.allreduce_(place, op=hvd.Sum).data_ptr() == place.data_ptr()
    checks.same(f"sum in place {what}", place, total.to(dtype))
    group = hvd.grouped_allreduce([own, own + 1], op=hvd.Sum)
    checks.same(f"grouped {what}", group[1], (total + size).to(dtype))
    turned = own.transpose(0, -1)
    checks.same(
        f"turned {what}", hvd.allreduce(turned, op=hvd.Sum), total.to(dtype).transpose(0, -1)
    )
    for root in range(size):
        checks.same(f"broadcast {what}", hvd.broadcast(own, root), each[root])
    ragged = [numbers(r, (r, *shape[1:]), dtype) for r in range(size)]
    checks.same(f"allgather {what}", hvd.allgather(ragged[rank]), torch.cat(ragged))
    gathered = hvd.grouped_allgather([own, ragged[rank]])
    checks.same(f"grouped allgather {what}", gathered[1], torch.cat(ragged))
    splits = [[(a + b) % 3 for b in range(size)] for a in range(size)]
    sent = [numbers(r, (sum(splits[r]), *shape[1:]), dtype) for r in range(size)]
    found, received = hvd.alltoall(sent[rank], splits=torch.tensor(splits[rank]))
    parts = [torch.split(x, s)[rank] for x, s in zip(sent, splits, strict=True)]
    checks.same(f"alltoall {what}", found, torch.cat(parts))
    assert received.tolist() == [split[rank] for split in splits]
    equal = [numbers(r, (size * 2, *shape[1:]), dtype) for r in range(size)]
    parts = [x[2 * rank : 2 * rank + 2] for x in equal]
    checks.same(f"equal alltoall {what}", hvd.alltoall(equal[rank]), torch.cat(parts))
    rows = [shape[0] // size + (r < shape[0] % size) for r in range(size)]
    share = torch.split(total.to(dtype), rows)[rank]
    checks.same(f"reducescatter {what}", hvd.reducescatter(own, op=hvd.Sum), share)
    shares = hvd.grouped_reducescatter([own, own], op=hvd.Sum)
    checks.same(f"grouped reducescatter {what}", shares[1], share)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_operation_is_right_in_every_dtype_and_one_to_four_dims(procs, size: int):
    assert [wrong for rank in procs(size, _values) for wrong in rank] == []


def _gradients(group: Group) -> list[str]:
    checks = Checks()
    with horovod(group):
        for dtype in FLOATS:
            for num_dims in range(1, 5):
                _gradients_of(checks, dtype, (4, 3, 2, 2)[:num_dims])
        x = torch.ones(2, requires_grad=True)
        assert "is not differentiable" in said(
            lambda: hvd.allreduce(x, op=hvd.Max).sum().backward()
        )
    return checks.wrong


def _gradients_of(checks: Checks, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size, rank, num_dims = hvd.size(), hvd.rank(), len(shape)

    def through(
        call: Callable[[torch.Tensor], torch.Tensor], rows: int = 4, shape=shape
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The gradient of x, when that of the result is each rank's number."""
        x = torch.ones((rows, *shape[1:]), dtype=dtype, requires_grad=True)
        y = call(x)
        y.backward(torch.full_like(y, float(rank + 1)))
        assert x.grad is not None
        return x.grad, [x, y]

    mean = (size + 1) / 2
    full = torch.ones(shape, dtype=dtype)
    grad, _ = through(lambda x: hvd.allreduce(x, op=hvd.Sum))
    checks.same("sum", grad, full * mean * size)
    grad, _ = through(lambda x: hvd.allreduce(x, prescale_factor=2.0, postscale_factor=3.0))
    checks.same("average", grad, full * mean * 6)
    grad, _ = through(lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)[1])
    checks.same("grouped", grad, full * mean * size * 2)
    grad, _ = through(lambda x: hvd.broadcast(x, size - 1))
    checks.same("broadcast", grad, full * mean * (rank == size - 1))
    grad, _ = through(hvd.allgather, rank + 1)
    checks.same("allgather", grad, torch.ones_like(grad) * mean)
    grad, _ = through(lambda x: hvd.grouped_allgather([x, 3 * x])[1], rank + 1)
    checks.same("grouped allgather", grad, torch.ones_like(grad) * mean * 3)
    grad, _ = through(hvd.alltoall, size)
    expected = torch.arange(1.0, size + 1, dtype=dtype)
    expected = expected.view(size, *[1] * (num_dims - 1)).expand_as(grad)
    checks.same("alltoall", grad, expected)
    rows = [4 // size + (r < 4 % size) for r in range(size)]
    owners = torch.repeat_interleave(torch.arange(1.0, size + 1), torch.tensor(rows))
    owners = owners.to(dtype).view(4, *[1] * (num_dims - 1)).expand(shape)
    grad, _ = through(lambda x: hvd.reducescatter(x, op=hvd.Sum))
    checks.same("reducescatter", grad, owners * size)
    grad, _ = through(hvd.reducescatter)
    checks.same("average reducescatter", grad, owners)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_go_back_the_way_that_tensors_came(procs, size: int):
    assert [wrong for rank in procs(size, _gradients) for wrong in rank] == []


def _small_things(group: Group) -> list[str]:
    checks = Checks()
    with horovod(group):
        rank = hvd.rank()
        x = torch.tensor([1.0, 2.0]) + rank
        handle = hvd.allreduce_async(x, name="x", op=hvd.Sum)
        while not hvd.poll(handle):
            pass
        checks.same("poll", hvd.synchronize(handle), torch.tensor([3.0, 5.0]))
        checks.same("name again", hvd.allreduce(x, name="x", op=hvd.Sum), torch.tensor([3.0, 5.0]))
        half = hvd.allreduce(x, compression=hvd.Compression.bf16, op=hvd.Sum)
        checks.same("bf16", half, torch.tensor([3.0, 5.0]))
        checks.same("empty", hvd.allreduce(torch.empty(0)), torch.empty(0))
        checks.same("scalar", hvd.allreduce(torch.tensor(rank + 1.0)), torch.tensor(1.5))
        sparse = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,))
        found = hvd.synchronize(hvd.sparse_allreduce_async(sparse, "s", hvd.Sum))
        checks.same("sparse", found.to_dense(), torch.tensor([1.0, 1.0, 4.0, 0.0]))
        a = torch.tensor([3.0, 0.0]) if rank == 0 else torch.tensor([0.0, 4.0])
        checks.same("adasum", hvd.allreduce(a, op=hvd.Adasum), torch.tensor([3.0, 4.0]))
        assert hvd.broadcast_object({"a": (1, rank)}, 1) == {"a": (1, 1)}
        assert hvd.allgather_object([rank] * rank) == [[], [1]]
        hvd.barrier()
        assert (hvd.is_initialized(), hvd.mpi_built(), hvd.is_homogeneous()) == (True, False, True)
    assert not hvd.is_initialized()
    return checks.wrong


def test_handles_compression_sparse_tensors_and_objects(procs):
    assert [wrong for rank in procs(2, _small_things) for wrong in rank] == []


def _evaluated(group: Group) -> list[str]:
    checks = Checks()
    with horovod(group):
        rank, size = hvd.rank(), hvd.size()
        total = torch.full((2, 3), size * (size + 1) / 2)
        with torch.inference_mode():
            x = torch.full((3, 2), rank + 1.0).t()
            checks.same("new", hvd.allreduce(x, op=hvd.Sum), total)
            for found in hvd.grouped_allreduce([x, x], op=hvd.Sum):
                checks.same("grouped", found, total)
            checks.same("gathered", hvd.allgather(x)[2 * rank : 2 * rank + 2], x)
            checks.same("broadcast", hvd.broadcast(x, size - 1), torch.full((2, 3), float(size)))
            checks.same("in place", hvd.allreduce_(x, op=hvd.Sum), total)
        checks.same("afterwards", hvd.allreduce_(total.clone()), total)
    return checks.wrong


def test_tensors_of_inference_mode_are_reduced_like_others(procs):
    assert [wrong for rank in procs(2, _evaluated) for wrong in rank] == []


def _mistakes(group: Group) -> dict[str, str]:
    with horovod(group):
        rank, x = hvd.rank(), torch.ones(3)
        found = {}

        def both() -> None:
            hvd.allreduce_async(x, name="twice")
            try:
                hvd.allreduce_async(x, name="twice")
            finally:
                hvd.allreduce(x, name="other")

        found["twice"] = said(both)
        found["shape"] = said(lambda: hvd.allreduce(torch.ones(3 + rank)))
        found["dtype"] = said(lambda: hvd.allreduce(x if rank else x.double()))
        found["op"] = said(lambda: hvd.allreduce(x, op=hvd.Sum if rank else hvd.Max))
        found["factor"] = said(lambda: hvd.allreduce(x, prescale_factor=1.0 + rank))
        found["root"] = said(lambda: hvd.broadcast(x, rank, name="root"))
        found["dims"] = said(lambda: hvd.allgather(torch.ones((2,) * (1 + rank))))
        found["scalar"] = said(lambda: hvd.reducescatter(torch.tensor(1.0)))
        found["splits"] = said(lambda: hvd.alltoall(x, splits=[1, 1]))
        found["rows"] = said(lambda: hvd.alltoall(x))
        found["both"] = said(lambda: hvd.allreduce(x, average=True, op=hvd.Sum))
        found["strange root"] = said(lambda: hvd.broadcast(x, 7))
        found["twice waited"] = said(
            lambda: [hvd.synchronize(h) for h in [hvd.allreduce_async(x)] * 2]
        )
        found["no handle"] = said(lambda: hvd.synchronize(5))
        found["average of logic"] = said(lambda: hvd.allreduce(x > 0, name="logic"))
        found["sparse"] = said(lambda: hvd.allreduce(torch.eye(2).to_sparse(), name="sparse"))
        found["expanded"] = said(lambda: hvd.allreduce_(torch.ones(1).expand(3)))
        found["surrogate"] = said(lambda: hvd.allreduce(x, name="\udc80"))
        found["group"] = said(lambda: hvd.grouped_allreduce([x] * (2 + rank), name="g"))
        found["object"] = said(lambda: hvd.broadcast_object(object(), 0))
        found["after"] = str(hvd.allreduce(x, op=hvd.Sum).tolist())
    found["not there"] = said(hvd.rank)
    with pytest.raises(ValueError, match=r"hvd.init\(\)"):  # Horovod's type
        hvd.rank()
    return found


EXPECTED = {
    "twice": "ConfigError: 'allreduce.twice' is already in progress on rank",
    "shape": "HorovodInternalError: ranks disagree on the shape",
    "dtype": "HorovodInternalError: ranks disagree on the dtype",
    "op": "HorovodInternalError: ranks disagree on the reduction",
    "factor": "HorovodInternalError: ranks disagree on the prescale factor",
    "root": "HorovodInternalError: ranks disagree on the root",
    "dims": "HorovodInternalError: ranks disagree on the number of dims",
    "scalar": "HorovodInternalError: 'reducescatter.noname.0' is a scalar",
    "splits": "ConfigError: splits must list the rows for each of 2 ranks",
    "rows": "ConfigError: 3 rows cannot be divided equally among 2 ranks: pass splits",
    "both": "ConfigError: op=",
    "strange root": "ConfigError: root_rank must be one of the ranks [0, 1], got 7",
    "twice waited": "ConfigError: Pending(",
    "no handle": "ConfigError: got 5 instead of a handle",
    "average of logic": "HorovodInternalError: 'allreduce.logic' cannot be reduced: ",
    "sparse": "ConfigError: tensor of shape [2, 2] is a torch.sparse_coo one, which cannot be sent",
    "expanded": "ConfigError: elements of an expanded tensor",
    "surrogate": "ConfigError: name ",
    "group": "HorovodInternalError: ranks disagree on the group of 'allreduce.g.0'",
    "after": "[2.0, 2.0, 2.0]",
    "not there": "NotInitializedError: hvd.init() has not been called",
}


def test_mistakes_are_the_same_error_on_all_ranks_and_nothing_hangs(procs):
    first, second = procs(2, _mistakes)
    for what, words in EXPECTED.items():
        for found in (first, second):
            assert found[what].startswith(words), (what, found[what])
    assert "BRAID_HOROVOD_ALLOW_PICKLE=1" in first["object"]
    assert "rank 0 could not send its object: " in second["object"]


def _leaves(group: Group) -> list[str]:
    with horovod(group):
        if hvd.rank() == 1:
            return []
        calls = [
            lambda: hvd.allreduce(torch.ones(1)),
            lambda: hvd.allgather_async(torch.ones(1)),
            lambda: hvd.broadcast_(torch.ones(1), 0),
            lambda: hvd.alltoall(torch.ones(2)),
            hvd.barrier,
            hvd.join,
            hvd.stop_timeline,
            lambda: hvd.add_process_set([0]),
        ]
        return [said(call) for call in calls]


def test_when_one_rank_has_shut_down_whatever_others_call_fails_as_operations_do(procs):
    for words in procs(2, _leaves)[0]:
        assert words.startswith("HorovodInternalError: ")
        assert "rank 1 has shut down" in words


def _starts_again(group: Group) -> list[Any]:
    found: list[Any] = []
    for _ in range(2):
        with horovod(group):
            handle = hvd.allreduce_async(torch.ones(1), name=f"alone on {hvd.rank()}")
            found.append(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="x").item())
            hvd.barrier()
        found.append(said(lambda handle=handle: hvd.synchronize(handle)).partition(":")[0])
    return found


def test_what_is_in_flight_at_shutdown_fails_and_there_may_be_another_session(procs):
    expected = [2.0, "HorovodInternalError"] * 2
    assert procs(2, _starts_again) == [expected, expected]


def _environments(group: Group, path: str) -> list[Any]:
    size = str((1 + group.rank) << 20)
    timeline = {"TIMELINE": path} if group.rank == 0 else {}
    with horovod(group, FUSION_THRESHOLD=size, CACHE_CAPACITY=size, **timeline):
        found = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        return [found, session.session().environment.fusion_threshold_bytes]


def test_the_first_rank_says_how_all_work(procs, tmp_path):
    path = tmp_path / "timeline.json"
    assert procs(2, _environments, str(path)) == [[2.0, 1 << 20]] * 2
    assert {event["pid"] for event in json.loads(path.read_bytes())["traceEvents"]} == {0, 1}


# Process sets.


def _come_and_go(group: Group) -> list[str]:
    found = []
    with horovod(group):
        for _ in range(3):
            pair = hvd.add_process_set([0, 1])
            number = pair.process_set_id
            assert number is not None
            part = session.session().member(number).engine.group if pair.included() else None
            if part is not None:
                hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair)
            hvd.remove_process_set(pair)
            if part is not None:
                found.append(said(part.barrier).partition(":")[0])
            hvd.barrier()
    return found


def test_process_sets_that_are_gone_give_their_memory_back(procs):
    assert procs(3, _come_and_go) == [["StaleError"] * 3, ["StaleError"] * 3, []]


def _sets(group: Group) -> list[Any]:
    with horovod(group):
        rank = hvd.rank()
        even = hvd.add_process_set(hvd.ProcessSet([0, 2]))
        last = hvd.add_process_set([2, 1])
        found: list[Any] = [hvd.get_process_set_ids_and_ranks()]
        if even.included():
            found.append(
                hvd.allreduce(torch.tensor(rank + 1.0), op=hvd.Sum, process_set=even).item()
            )
            found.append(hvd.broadcast(torch.tensor(rank), 2, process_set=even).item())
        if last.included():
            x = torch.tensor([rank])
            found.append(hvd.allgather(x, process_set=last).tolist())
            found.append((last.rank(), last.size()))
        else:
            found.append(said(lambda: hvd.allreduce(torch.ones(1), process_set=last)))
        assert hvd.remove_process_set(last)
        assert not hvd.remove_process_set(hvd.global_process_set)
        found.append(hvd.get_process_set_ids_and_ranks())
        again = said(lambda: hvd.add_process_set([0, 2]))
        found.append("exists already: use process set 1" in again)
        found.append(said(lambda: hvd.ProcessSet([1, 1])).partition(",")[0])
        found.append(said(lambda: hvd.add_process_set([rank])).partition(",")[0])
        found.append(said(lambda: hvd.add_process_set([0, 3])))
        found.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
        return found


def test_process_sets_come_and_go_and_work_beside_each_other(procs):
    zero, one, two = procs(3, _sets)
    before, after = {0: [0, 1, 2], 1: [0, 2], 2: [1, 2]}, {0: [0, 1, 2], 1: [0, 2]}
    tail = [
        after,
        True,
        "ConfigError: ranks of a process set must be different and at least 0",
        "HorovodInternalError: ranks disagree on the text of 'new process set': 0 on rank 0; 1 on rank 1; 2 on rank 2. Submit the same on all ranks",
        "ConfigError: ranks of a process set must be below 3, got [3]",
        3.0,
    ]
    assert zero[:3] == [before, 4.0, 2]
    assert zero[3].startswith("ConfigError: this rank is not in process set 2 (1, 2)")
    assert zero[4:] == tail
    assert one == [before, [1, 2], (0, 2), *tail]
    assert two == [before, 4.0, 2, [1, 2], (1, 2), *tail]


def _subgroup(group: Group) -> list[int]:
    part = group.split(0 if group.rank else None)
    if part is None:
        return []
    with horovod(part):
        found = [hvd.rank(), hvd.join(), *hvd.add_process_set([1]).ranks]
    part.close()
    return found


def test_ranks_are_those_of_the_group_that_it_was_started_with(procs):
    _, one, two = procs(3, _subgroup)
    assert one == [0, one[1], 1]
    assert two == [1, one[1], 1]
    assert one[1] in {0, 1}


# Joining.


def _joins(group: Group) -> list[Any]:
    with horovod(group):
        found: list[Any] = [
            hvd.allreduce(torch.ones(1), name=f"step{n % 2}").tolist()
            for n in range(hvd.rank() + 1)
        ]
        if hvd.rank() == 2:
            found.append("called join()" in said(lambda: hvd.allgather(torch.ones(1))))
        found.append(hvd.join())
        found.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
        return found


def test_join_lets_ranks_run_out_of_input(procs):
    averages = [1.0], pytest.approx([2 / 3]), pytest.approx([1 / 3])
    zero, one, two = procs(3, _joins)
    assert zero == [*averages[:1], 2, 3.0]
    assert one == [*averages[:2], 2, 3.0]
    assert two == [*averages, True, 2, 3.0]


# The optimizer.


class Net(nn.Module):
    """Small; `unused` gets no gradient on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.skip_init(nn.Linear, 4, 6)
        self.second = nn.utils.skip_init(nn.Linear, 6, 2)
        self.unused = nn.Parameter(torch.empty(2))
        filled(self)

    def forward(self, x: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
        found = self.second(torch.tanh(self.first(x)))
        return found * self.unused if whole else found


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(50 * rank + step))


def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    found: torch.Tensor = net(batch(rank, step), whole=rank != 1).square().mean()
    return found


def _trained(group: Group, kind: str, passes: int) -> list[torch.Tensor]:
    with horovod(group):
        net = Net()
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(hvd.rank() + 1)  # different on each rank until they are broadcast
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        options: dict[str, Any] = {
            "plain": {},
            "sum": {"op": hvd.Sum},
            "predivided": {"gradient_predivide_factor": 4.0},
            "groups": {"num_groups": 2},
            "lists": {"groups": [[net.first.weight, net.second.bias]]},
            "bf16": {"compression": hvd.Compression.bf16},
        }[kind]
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=net.named_parameters(),
            backward_passes_per_step=passes,
            **options,
        )
        for step in range(4):
            optimizer.zero_grad()
            for each in range(passes):
                loss_of(net, hvd.rank(), step * passes + each).backward()
            optimizer.step()
        return [param.detach().clone() for param in net.parameters()]


def _expected(kind: str, size: int, passes: int) -> list[torch.Tensor]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(size):
            for each in range(passes):
                loss = loss_of(net, rank, step * passes + each)
                (loss if kind == "sum" else loss / size).backward()
        if net.unused.grad is None:
            net.unused.grad = torch.zeros(2)
        optimizer.step()
    return [param.detach() for param in net.parameters()]


@pytest.mark.parametrize(
    ("kind", "passes"),
    [
        ("plain", 1),
        ("plain", 2),
        ("sum", 1),
        ("predivided", 1),
        ("groups", 1),
        ("groups", 2),
        ("lists", 1),
        ("bf16", 1),
    ],
)
def test_training_equals_one_process_that_has_all_batches(procs, kind: str, passes: int):
    for size in (1, 3) if kind == "plain" else (2,):
        expected = _expected(kind, size, passes)
        for found in procs(size, _trained, kind, passes):
            for a, b in zip(found, expected, strict=True):
                near = (
                    {"rtol": 0.02, "atol": 0.01} if kind == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
                )
                torch.testing.assert_close(a, b, **near)


def _later(group: Group, kind: str) -> list[torch.Tensor]:
    """Parameters are frozen and unfrozen, the step is called through others."""
    with horovod(group):
        net = Net()
        if kind == "unfrozen":
            net.first.weight.requires_grad_(False)
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        calls: list[int] = []
        inner.register_step_post_hook(lambda *_: calls.append(1))
        before = (
            torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5) if kind == "scheduler" else None
        )
        lists = [[net.first.weight, net.first.bias], [net.second.weight, net.unused]]
        optimizer = hvd.DistributedOptimizer(
            inner, net.named_parameters(), groups=None if kind == "closure" else lists
        )
        hvd.broadcast_optimizer_state(optimizer, 0)
        for step in range(4):
            if step == 2:
                net.first.weight.requires_grad_(kind != "frozen")

            def closure(step=step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, hvd.rank(), step)
                loss.backward()
                return loss

            if kind == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            if before is not None:
                before.step()
        assert len(calls) == 5  # and the step in which the optimizer made its state
        return [param.detach().clone() for param in net.parameters()]


def _expected_later(kind: str) -> list[torch.Tensor]:
    net = Net()
    if kind == "unfrozen":
        net.first.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        if step == 2:
            net.first.weight.requires_grad_(kind != "frozen")
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(net, rank, step) / 2).backward()
        optimizer.step()
        if kind == "scheduler":
            optimizer.param_groups[0]["lr"] *= 0.5
    return [param.detach() for param in net.parameters()]


@pytest.mark.parametrize("kind", ["frozen", "unfrozen", "closure", "scheduler"])
def test_what_changes_around_the_optimizer_changes_no_result(procs, kind: str):
    expected = _expected_later(kind)
    for found in procs(2, _later, kind):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def _optimizer_faces(group: Group) -> dict[str, str]:
    with horovod(group):
        net, found = Net(), {}
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
        )
        loss_of(net, hvd.rank(), 0).backward()
        found["zero"] = said(optimizer.zero_grad)
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        loss_of(net, hvd.rank(), 1).backward()
        found["more"] = said(loss_of(net, hvd.rank(), 1).backward)
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        found["warned"] = str(caught[0].message)
        plain = torch.optim.SGD(net.parameters(), lr=0.1)
        found["names"] = said(lambda: hvd.DistributedOptimizer(plain, [("a", net.unused)]))
        twice = [("a", p) for p in net.parameters()]
        found["twice"] = said(lambda: hvd.DistributedOptimizer(plain, twice))
        found["group"] = said(lambda: optimizer.add_param_group({"params": []}))
        other = Net()
        changes = hvd.DistributedOptimizer(
            torch.optim.SGD(other.parameters(), lr=0.1), op=hvd.Adasum
        )
        found["group of changes"] = said(lambda: changes.add_param_group({"params": []}))
        found["lbfgs"] = said(
            lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(net.parameters()), 0)
        )
        found["copy"] = said(lambda: copy.deepcopy(optimizer))
        names = {"a": torch.ones(1), f"b{hvd.rank()}": torch.ones(1)}
        found["parameters"] = said(lambda: hvd.broadcast_parameters(names, 0))
        torch.ones(1, requires_grad=True).sum().backward()  # autograd forgets the one that failed
        return found


def test_the_optimizer_says_what_is_wrong(procs):
    for rank, found in enumerate(procs(2, _optimizer_faces)):
        assert found["zero"].startswith(
            "AssertionError: zero_grad() was called between backward and step"
        )
        assert "got a gradient in more than 1 backward" in found["more"]
        assert "skip_synchronize" in found["warned"]
        assert "4 of the optimizer's 5 parameters have no name" in found["names"]
        assert "'a' occur more than once" in found["twice"]
        assert "add them before" in found["group"]
        assert "add them before" in found["group of changes"]
        assert "LBFGS does not store its state" in found["lbfgs"]
        assert found["copy"].startswith("ConfigError: this wrapped optimizer cannot be copied")
        assert f"rank {rank} has 'b{rank}'" in found["parameters"]


def _optimizer_state(group: Group, op: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    with horovod(group):
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 / (hvd.rank() + 1))
        if hvd.rank() == 0:  # the others have no state at all
            loss_of(net, 0, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        if op:
            hvd.DistributedOptimizer(optimizer, net.named_parameters(), op=getattr(hvd, op))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        hvd.broadcast_parameters(net.named_parameters(), root_rank=0)
        state = copy.deepcopy(optimizer.state_dict())
        loss_of(net, 0, 1).backward()
        optimizer.step()
        return state, [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("op", ["", "Average", "Adasum"])
def test_optimizers_are_what_the_root_has(procs, op):
    (first, before), (second, after) = procs(2, _optimizer_state, op)
    assert first["param_groups"] == second["param_groups"]
    for key, state in first["state"].items():
        for name, value in state.items():
            assert torch.equal(value, second["state"][key][name])
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)


def _adasum(group: Group) -> list[torch.Tensor]:
    with horovod(group):
        net = Net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), op=hvd.Adasum
        )
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(net, 0, 0).backward()  # the same on all ranks
            optimizer.step()
        return [param.detach().clone() for param in net.parameters()]


def test_adasum_of_equal_changes_is_that_change(procs):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(net, 0, 0).backward()
        optimizer.step()
    for found in procs(2, _adasum):
        for a, b in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach())


def _embedding(group: Group, dense: bool) -> tuple[bool, list[torch.Tensor]]:
    with horovod(group):
        weight = torch.arange(20.0).view(5, 4) / 20
        table = nn.Embedding(5, 4, sparse=True, _weight=weight.clone())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.5),
            table.named_parameters(),
            sparse_as_dense=dense,
        )
        table(torch.tensor([hvd.rank(), 3])).square().sum().backward()
        optimizer.synchronize()
        sparse = table.weight.grad.is_sparse
        with optimizer.skip_synchronize():
            optimizer.step()
        return sparse, [table.weight.detach().clone()]


@pytest.mark.parametrize("dense", [False, True])
def test_sparse_gradients_are_averaged(procs, dense: bool):
    weight = torch.arange(20.0).view(5, 4) / 20
    table = nn.Embedding(5, 4, _weight=weight.clone())
    (sum(table(torch.tensor([r, 3])).square().sum() for r in range(2)) / 2).backward()
    torch.optim.SGD(table.parameters(), lr=0.5).step()
    for sparse, (found,) in procs(2, _embedding, dense):
        assert sparse  # again, where it was reduced as a dense one
        torch.testing.assert_close(found, table.weight.detach())


def _seldom(group: Group) -> list[torch.Tensor]:
    with horovod(group):
        weight = torch.arange(20.0).view(5, 4) / 20
        table = nn.Embedding(5, 4, sparse=True, _weight=weight.clone())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.5), table.named_parameters()
        )
        for step in range(2):
            optimizer.zero_grad()
            if step == 0 or hvd.rank() == 0:
                table(torch.tensor([hvd.rank(), 3])).square().sum().backward()
            optimizer.step()
        return [table.weight.detach().clone()]


def test_a_rank_that_does_not_use_a_table_this_time_adds_nothing_to_its_gradient(procs):
    table = nn.Embedding(5, 4, _weight=torch.arange(20.0).view(5, 4) / 20)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2 - step):
            (table(torch.tensor([rank, 3])).square().sum() / 2).backward()
        optimizer.step()
    for (found,) in procs(2, _seldom):
        torch.testing.assert_close(found, table.weight.detach())


def _normalized(group: Group) -> list[torch.Tensor]:
    with horovod(group):
        norm = hvd.SyncBatchNorm(4)
        return [norm(batch(hvd.rank(), 0)).detach(), norm.running_mean]


def test_batches_are_normalized_over_all_ranks(procs):
    norm = nn.BatchNorm1d(4)
    whole = norm(torch.cat([batch(0, 0), batch(1, 0)])).detach()
    for rank, (found, mean) in enumerate(procs(2, _normalized)):
        torch.testing.assert_close(found, whole[3 * rank : 3 * rank + 3])
        torch.testing.assert_close(mean, norm.running_mean)


@pytest.mark.proof
def test_every_operation_is_right_over_several_hosts(hosts):
    assert [wrong for rank in hosts(4, _values) for wrong in rank] == []
    assert [wrong for rank in hosts(4, _gradients) for wrong in rank] == []


@pytest.mark.proof
def test_training_equals_one_process_over_several_hosts(hosts):
    for found in hosts(4, _trained, "plain", 1):
        for a, b in zip(found, _expected("plain", 4, 1), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
