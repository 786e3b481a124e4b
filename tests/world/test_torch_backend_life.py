"""How process groups over braid begin, fail and end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_jobs import process_group, run

from braid.errors import CommTimeout, StaleError
from support.pool import ProcessPool

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
BRAID_RUN = [sys.executable, "-m", "braid", "run", "-n", "2"]

# torch is the only import, so braid must have registered itself
SCRIPT = """
import sys
import torch
assert not any(name.split(".")[0] == "braid" for name in sys.modules), "braid was imported"
import torch.distributed as dist
dist.init_process_group({backend!r})
x = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(x)
assert x.tolist() == [float(sum(range(1, dist.get_world_size() + 1)))] * 3, x
work = dist.all_reduce(x, async_op=True)
{end}
"""


def program(tmp_path: Path, *, backend: str = "braid", end: str = "work.wait()") -> str:
    path = tmp_path / "program.py"
    path.write_text(SCRIPT.format(backend=backend, end=end))
    return str(path)


def outcome(command: list[str], **environment: str) -> tuple[int, str]:
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    return ended.returncode, ended.stderr[-3000:] if ended.returncode else ""


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("backend", "end"),
    [("braid", "work.wait()"), ("cpu:braid,cuda:nccl", "dist.destroy_process_group()")],
)
def test_importing_torch_is_enough(tmp_path: Path, backend: str, end: str) -> None:
    command = [sys.executable, program(tmp_path, backend=backend, end=end)]
    assert outcome(command, **ALONE) == (0, "")


@pytest.mark.launcher
@pytest.mark.parametrize("launcher", [TORCHRUN, BRAID_RUN], ids=["torchrun", "braid run"])
def test_launchers_start_it(tmp_path: Path, launcher: list[str]) -> None:
    end = "work.wait(); dist.destroy_process_group(); dist.init_process_group('braid'); dist.barrier()"
    assert outcome([*launcher, program(tmp_path, end=end)]) == (0, "")


@pytest.mark.launcher
def test_world_of_braid_init_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent("""
        import braid, torch, torch.distributed as dist
        world = braid.init()
        dist.init_process_group("braid")
        assert dist.group.WORLD._shared_world.world is world
        x = torch.ones(3)
        dist.all_reduce(x)
        dist.destroy_process_group()
        world.all_reduce(x)
        braid.shutdown()
        dist.init_process_group("braid")
        assert dist.group.WORLD._shared_world.world is not world
        dist.all_reduce(x)
        assert x.tolist() == [8.0] * 3, x
        """)
    )
    assert outcome([*BRAID_RUN, str(path)]) == (0, "")


@pytest.mark.launcher
def test_torch_spawns_it_over_tcp(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent("""
        import socket, torch, torch.distributed as dist, torch.multiprocessing as mp

        def main(rank, port):
            dist.init_process_group("braid", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
            x = torch.ones(3)
            dist.all_reduce(x)
            assert x.tolist() == [2.0] * 3, x
            dist.destroy_process_group()

        if __name__ == "__main__":
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            mp.spawn(main, (port,), nprocs=2)
        """)
    )
    assert outcome([sys.executable, str(path)]) == (0, "")


def test_explicit_store_and_a_second_time(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    for _ in range(2):
        dist.init_process_group("braid", store=store, rank=0, world_size=1)
        x = torch.ones(2)
        dist.all_reduce(x)
        dist.destroy_process_group()
        assert x.tolist() == [1.0, 1.0]


def test_many_groups_cost_neither_threads_nor_mappings(tmp_path: Path) -> None:
    with process_group("braid", 0, 1, str(tmp_path / "store")):
        before = threading.active_count(), _mappings()
        groups = [dist.new_group([0]) for _ in range(200)]
        x = torch.ones(2)
        for group in groups:
            dist.all_reduce(x, group=group)
        assert (threading.active_count(), _mappings()) == before


def _mappings() -> int:
    return sum("braid" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _subgroups() -> Any:
    rank = dist.get_rank()
    with_local = dist.new_group([0, 2], use_local_synchronization=True)
    if rank != 1:
        dist.barrier(with_local)
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    alone = dist.new_group([2])
    results = []
    for group in (*pairs, alone):
        x = torch.full((2,), float(rank + 1))
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(x, group=group)
        results.append(x.tolist())
    own, _ = dist.new_subgroups(1)
    dist.destroy_process_group(own)
    return results


def test_groups_of_some_ranks_and_of_one(pool: ProcessPool, tmp_path: Path) -> None:
    assert run(pool, tmp_path, 3, _subgroups) == [
        [[3.0, 3.0], [1.0, 1.0], [1.0, 1.0]],
        [[3.0, 3.0], [5.0, 5.0], [2.0, 2.0]],
        [[3.0, 3.0], [5.0, 5.0], [3.0, 3.0]],
    ]


def _future_of_an_ended_group(end: str) -> list[float]:
    group = dist.new_group([0, 1])
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait()
    if end == "destroyed":
        dist.destroy_process_group(group)
    else:
        group.abort()
    return [x.item() for x in work.get_future().wait()]


@pytest.mark.parametrize("end", ["destroyed", "aborted"])
def test_a_work_has_a_future_after_its_group(pool: ProcessPool, tmp_path: Path, end: str) -> None:
    assert run(pool, tmp_path, 2, _future_of_an_ended_group, end) == [[2.0], [2.0]]


def _uses_of_an_ended_group() -> list[str]:
    group = dist.new_group([0, 1])
    group.abort()
    said = []
    for numel in (1, 1 << 18):
        try:
            dist.all_reduce(torch.ones(numel), group=group, async_op=True)
        except StaleError as error:
            said.append(str(error))
    return said


def test_errors_of_an_ended_group_name_what_the_program_knows(
    pool: ProcessPool, tmp_path: Path
) -> None:
    for said in run(pool, tmp_path, 2, _uses_of_an_ended_group):
        assert len(said) == 2
        assert not any("spare_cores" in text for text in said)
        assert all("has been aborted" in text for text in said)


def _alone_in_a_barrier() -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    try:
        dist.barrier(group)
    except CommTimeout as exc:
        dist.barrier()
        return str(exc)
    return "nothing was raised"


def test_timeout_names_who_has_not_come(pool: ProcessPool, tmp_path: Path) -> None:
    text, _ = run(pool, tmp_path, 2, _alone_in_a_barrier)
    assert "within 0.2 s" in text
    assert "rank 1" in text


@pytest.mark.launcher
def test_exception_that_ends_a_rank_is_told_to_the_others(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        rank = int(sys.argv[1])
        dist.init_process_group("braid", f"file://{sys.argv[2]}", rank=rank, world_size=2)
        dist.barrier()
        if rank == 1:
            raise KeyError("no such batch")
        dist.barrier()
        """)
    )
    commands = [[sys.executable, str(path), str(r), str(tmp_path / "store")] for r in range(2)]
    ranks = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    said = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "rank 1 abandoned the group: KeyError: 'no such batch'" in said[0]


def _in_a_forked_child() -> bytes:
    read, write = os.pipe()
    dist.barrier()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
            os.write(write, b"nothing was raised")
        except StaleError:
            os.write(write, b"StaleError")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    answer = os.read(read, 100)
    os.close(read)
    os.close(write)
    return answer


def test_forked_child_may_not_use_the_group(pool: ProcessPool, tmp_path: Path) -> None:
    assert run(pool, tmp_path, 2, _in_a_forked_child) == [b"StaleError"] * 2
