"""Groups of some ranks: how torch makes them, over braid alone and beside Gloo."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch_jobs import process_group, run

from braid.comm.torch_backend import BraidProcessGroup
from braid.errors import ConfigError, MismatchError, StaleError
from support.pool import ProcessPool


def summed(group: Any) -> float:
    """The sum of 1, 2, 4, ... for ranks 0, 1, 2, ...: says who is in the group."""
    x = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(x, group=group)
    return x.item()


# split_group


def _split() -> Any:
    world: Any = dist.group.WORLD
    ours = [[0, 1], [2]][dist.get_rank() // 2]
    half = world.split_group(ours)
    again = world.split_group(ours)  # the same members a second time: another group
    named = world.split_group([0, 2], group_name="ends", group_desc="first and last")
    alone = half.split_group([half.size() - 1])
    x = torch.tensor([2.0 ** dist.get_rank()])
    for group in (half, again):
        group.allreduce([x]).wait()
    identity = named and (named.group_name, named.group_desc, named.rank(), named.size())
    return half.group_name, x.item(), identity, alone and alone.rank()


def test_process_group_is_split_by_group_ranks(pool: ProcessPool, tmp_path: Path) -> None:
    ends = "ends", "first and last"
    assert run(pool, tmp_path, 3, _split) == [
        ("0:split:0_1", 6.0, (*ends, 0, 2), None),
        ("0:split:0_1", 6.0, None, 0),
        ("0:split:2", 4.0, (*ends, 1, 2), 0),
    ]


def test_split_off_groups_end_with_their_origin(tmp_path: Path) -> None:
    with process_group("braid", 0, 1, str(tmp_path / "store")):
        world: Any = dist.group.WORLD
        group = world.split_group([0])
        inner = group.split_group([0])
    for ended in (group, inner):
        with pytest.raises(StaleError, match="has been destroyed"):
            ended.allreduce([torch.ones(1)])


def test_splitting_off_strangers_is_refused(tmp_path: Path) -> None:
    with process_group("braid", 0, 1, str(tmp_path / "store")):
        world: Any = dist.group.WORLD
        for ranks in ([], [1], [-1], [0, 0]):
            with pytest.raises(ConfigError, match=r"different and from 0 to 0"):
                world.split_group(ranks)


on_cpus_too = pytest.mark.skipif(
    "accelerator" not in inspect.getsource(dist.split_group),
    reason="torch splits groups with CUDA only before 2.11",
)


@on_cpus_too
def test_torch_itself_does_not_ask_for_splits_without_a_gpu(tmp_path: Path) -> None:
    with process_group("braid", 0, 1, str(tmp_path / "store")):
        with pytest.raises(RuntimeError, match="No device associated with the default pg"):
            dist.split_group(None, [[0]])
        world: Any = dist.group.WORLD
        world.bound_device_id = torch.device("cpu", 0)
        with pytest.raises(RuntimeError, match="does not support splitting"):
            dist.split_group(None, [[0]])


def _split_by_torch() -> Any:
    # a machine whose accelerator is its processor: torch then takes the way that it takes with GPUs
    accelerator = pytest.MonkeyPatch()
    with accelerator.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(
            torch.accelerator, "current_accelerator", lambda **_options: torch.device("cpu")
        )
        world: Any = dist.group.WORLD
        world.bound_device_id = torch.device("cpu", 0)
        group = dist.split_group(None, [[0, 2]])
        if group in (None, dist.GroupMember.NON_GROUP_MEMBER):  # None before torch 2.14
            return None
        return dist.get_process_group_ranks(group), summed(group)


@on_cpus_too
def test_torch_splits_it_where_it_asks(pool: ProcessPool, tmp_path: Path) -> None:
    ends = [0, 2], 5.0
    assert run(pool, tmp_path, 3, _split_by_torch) == [ends, None, ends]


# new_group with use_local_synchronization


def _made_by_members_only() -> Any:
    if dist.get_rank() == 1:
        return []
    sums = []
    for _ in range(3):
        # before 2.14, torch gives the second one the name of the first, which has gone
        group = dist.new_group([0, 2], use_local_synchronization=True)
        sums.append(summed(group))
        dist.destroy_process_group(group)
    return sums


def test_members_alone_make_groups_again_and_again(pool: ProcessPool, tmp_path: Path) -> None:
    ends = [5.0, 5.0, 5.0]
    assert run(pool, tmp_path, 3, _made_by_members_only) == [ends, [], ends]


def _in_another_order() -> Any:
    group = dist.new_group([2, 0, 1], use_local_synchronization=True, sort_ranks=False)
    gathered = [torch.empty(1) for _ in range(3)]
    dist.all_gather(gathered, torch.tensor([float(dist.get_rank())]), group=group)
    return group.rank(), torch.cat(gathered).tolist()


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="torch sorts ranks before 2.11",
)
def test_members_stand_in_the_order_that_was_asked_for(pool: ProcessPool, tmp_path: Path) -> None:
    gathered = [2.0, 0.0, 1.0]
    expected = [(1, gathered), (2, gathered), (0, gathered)]
    assert run(pool, tmp_path, 3, _in_another_order) == expected


# braid beside Gloo


def _beside(backend: str) -> Any:
    everyone = dist.new_group(backend=backend)
    ends = dist.new_group([0, 2], backend=backend)
    sums = [summed(None), summed(everyone)]
    if dist.get_rank() != 1:
        sums.append(summed(ends))
        dist.destroy_process_group(ends)
    sums.append(summed(None))
    names = [dist.get_backend(), dist.get_backend(everyone)]
    return names, isinstance(everyone, BraidProcessGroup), sums


def test_braid_group_beside_a_gloo_world(pool: ProcessPool, tmp_path: Path) -> None:
    ours = run(pool, tmp_path, 3, _beside, "braid", backend="gloo")
    end, middle = [7.0, 7.0, 5.0, 7.0], [7.0, 7.0, 7.0]
    assert ours == [(["gloo", "braid"], True, sums) for sums in (end, middle, end)]


def test_gloo_group_beside_a_braid_world(pool: ProcessPool, tmp_path: Path) -> None:
    ours = run(pool, tmp_path, 3, _beside, "gloo")
    end, middle = [7.0, 7.0, 5.0, 7.0], [7.0, 7.0, 7.0]
    assert ours == [(["braid", "gloo"], False, sums) for sums in (end, middle, end)]


def _mismatch_among_the_last() -> str:
    group = dist.new_group([1, 2], backend="braid")
    if dist.get_rank() == 0:
        return ""
    try:
        dist.all_reduce(torch.ones(dist.get_rank()), group=group)
    except MismatchError as exc:
        return str(exc)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("backend", "ranks"),
    # a braid group of its own knows nobody else, so it counts from 0
    [("braid", ["rank 1", "rank 2"]), ("gloo", ["rank 0", "rank 1"])],
)
def test_errors_count_ranks_in_the_largest_group_of_braid(
    pool: ProcessPool, tmp_path: Path, backend: str, ranks: list[str]
) -> None:
    _, *tables = run(pool, tmp_path, 3, _mismatch_among_the_last, backend=backend)
    assert tables[0] == tables[1]
    lines = [line.split("  ")[1] for line in tables[0].splitlines() if "all_reduce(" in line]
    assert lines == ranks


# What torch asks about groups.


def test_devices_that_are_not_there_have_no_backend(tmp_path: Path) -> None:
    with process_group("braid", 0, 1, str(tmp_path / "store")):
        world: Any = dist.group.WORLD
        assert world._get_backend(torch.device("cpu")) is world
        with pytest.raises(RuntimeError, match="has no backend for device"):
            world._get_backend(torch.device("xpu"))


def test_operations_are_counted(tmp_path: Path) -> None:
    with process_group("braid", 0, 1, str(tmp_path / "store")):
        world: Any = dist.group.WORLD
        before = world._get_sequence_number_for_group()
        dist.barrier()
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        assert world._get_sequence_number_for_group() - before == 2
        assert c10d.get_pg_count() == 1
