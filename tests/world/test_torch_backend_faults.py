"""What goes wrong under torch.distributed over braid is said on every rank: who, what, where."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch_jobs import process_group, run

from braid.comm import Group
from braid.errors import CommError, CommTimeout, MismatchError, PeerLostError, StaleError
from braid.launch import JobSpec, Outcome, QuietConsole, Supervisor
from support.pool import ProcessPool, RankDiedError

TORCH_OFFERS_ALL = hasattr(dist, "set_timeout")  # its own functions, to all backends: since 2.14
SOON = timedelta(seconds=0.3)


def error_of(act: Callable[..., Any], *args: Any, **options: Any) -> tuple[str, str]:
    """Name and text of what `act` raises."""
    try:
        act(*args, **options)
    except (CommError, StaleError) as exc:
        return type(exc).__name__, str(exc)
    return "nothing", ""


def together(act: Callable[..., Any]) -> Any:
    """What `act` gives on a group of its own, which may break; all ranks come and go together."""
    group = dist.new_group()
    result = act(group)
    dist.barrier()
    return result


# Ranks that ask for different things.


def another_operation(rank: int, group: Any) -> None:
    if rank:
        dist.broadcast(torch.ones(2), 0, group=group)
    else:
        dist.all_reduce(torch.ones(2), group=group)


def another_dtype(rank: int, group: Any) -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.int32 if rank else torch.float32), group=group)


def another_shape(rank: int, group: Any) -> None:
    dist.all_gather_into_tensor(torch.empty(2 * (2 + rank)), torch.ones(2 + rank), group=group)


def another_root(rank: int, group: Any) -> None:
    dist.broadcast(torch.ones(2), rank, group=group)


def another_reduction(rank: int, group: Any) -> None:
    op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4), op, group=group)


def another_order(rank: int, group: Any) -> None:
    x, y = torch.ones(2), torch.ones(3)
    for z in (y, x) if rank else (x, y):
        dist.all_reduce(z, group=group)


def another_message(rank: int, group: Any) -> None:
    if rank:
        dist.recv(torch.empty(3), 0, group=group)
    else:
        dist.send(torch.ones(2), 1, group=group)
        dist.barrier(
            group
        )  # a small message is gone when send returns: the error comes at the next meeting


def in_the_background(rank: int, group: Any) -> None:
    dist.all_reduce(torch.ones(2 + rank), group=group, async_op=True).wait()


def in_a_batch(rank: int, group: Any) -> None:
    with c10d._coalescing_manager(group):
        dist.all_reduce(torch.ones(2), group=group)
        dist.all_reduce(torch.ones(2 + rank), group=group)


def _disagree(main: Callable[[int, Any], None]) -> tuple[str, str]:
    return together(lambda group: error_of(main, dist.get_rank(), group))


@pytest.mark.parametrize(
    ("main", "asked"),
    [
        (another_operation, ["all_reduce(float32[2], sum)", "broadcast(float32[2], root=0)"]),
        (another_dtype, ["all_reduce(float32[2], sum)", "all_reduce(int32[2], sum)"]),
        (another_shape, ["all_gather(float32[2])", "all_gather(float32[3])"]),
        (another_root, ["broadcast(float32[2], root=0)", "broadcast(float32[2], root=1)"]),
        (
            another_reduction,
            ["reduce_scatter(float32[4], sum)", "reduce_scatter(float32[4], max)"],
        ),
        (another_order, ["all_reduce(float32[2], sum)", "all_reduce(float32[3], sum)"]),
        (in_the_background, ["all_reduce(float32[2], sum)", "all_reduce(float32[3], sum)"]),
        # small ones of a batch travel together
        (in_a_batch, ["all_reduce(float32[4], sum)", "all_reduce(float32[5], sum)"]),
    ],
    ids=lambda main: getattr(main, "__name__", ""),
)
def test_ranks_that_disagree_raise_the_same_table(
    pool: ProcessPool, tmp_path: Path, main: Callable[[int, Any], None], asked: list[str]
) -> None:
    first, second = run(pool, tmp_path, 2, _disagree, main)
    assert first == second
    name, table = first
    rows = [re.split(r"  +", line.strip())[:2] for line in table.splitlines() if "  at " in line]
    assert (name, rows) == (
        MismatchError.__name__,
        [["rank 0", asked[0]], ["rank 1", asked[1]]],
    )
    assert table.count("test_torch_backend_faults.py") == 2
    assert table.count(f"in {main.__name__}") == 2


def test_receiver_of_another_size_and_sender_raise_the_same(
    pool: ProcessPool, tmp_path: Path
) -> None:
    first, second = run(pool, tmp_path, 2, _disagree, another_message)
    assert first == second
    name, table = first
    assert name == MismatchError.__name__
    assert "message(float32[2])" in table
    assert "message(float32[3])" in table


# Ranks that do not come.


def _all_come() -> None:
    world: Any = dist.group.WORLD
    world.monitored_barrier(SOON * 100)
    world.monitored_barrier(timeout=None, wait_all_ranks=True)


def test_monitored_barrier_lets_everybody_pass(pool: ProcessPool, tmp_path: Path) -> None:
    assert run(pool, tmp_path, 3, _all_come) == [None, None, None]


def _some_do_not_come(absent: list[int], *, wait_all_ranks: bool) -> tuple[str, str]:
    def main(group: Any) -> tuple[str, str]:
        if dist.get_rank() in absent:
            return "", ""
        return error_of(group.monitored_barrier, SOON, wait_all_ranks=wait_all_ranks)

    return together(main)


@pytest.mark.parametrize("wait_all_ranks", [False, True])
@pytest.mark.parametrize("absent", [[2], [1, 2]])
def test_monitored_barrier_names_all_who_do_not_come(
    pool: ProcessPool, tmp_path: Path, absent: list[int], *, wait_all_ranks: bool
) -> None:
    mains = {"absent": absent, "wait_all_ranks": wait_all_ranks}
    errors = run(pool, tmp_path, 3, _some_do_not_come_with, mains)
    for rank in {0, 1, 2}.difference(absent):
        name, text = errors[rank]
        named = {int(n) for n in re.findall(r"^  rank (\d)", text, re.MULTILINE)}
        assert (name, named) == (CommTimeout.__name__, set(absent))


def _some_do_not_come_with(options: dict[str, Any]) -> tuple[str, str]:
    return _some_do_not_come(**options)


def test_torch_before_2_14_offers_its_own_monitored_barrier_to_gloo_only(tmp_path: Path) -> None:
    refusal = pytest.raises(ValueError, match="only implemented for GLOO")
    with (
        process_group("braid", 0, 1, str(tmp_path / "store")),
        nullcontext() if TORCH_OFFERS_ALL else refusal,
    ):
        dist.monitored_barrier()


def _with_another_deadline() -> Any:
    def main(group: Any) -> tuple[str, str]:
        group.set_timeout(SOON)
        if dist.get_rank():
            return "", ""
        return error_of(dist.all_reduce, torch.ones(2), group=group)

    return together(main)


def test_deadline_can_be_set_later(pool: ProcessPool, tmp_path: Path) -> None:
    (name, text), _ = run(pool, tmp_path, 2, _with_another_deadline)
    assert name == CommTimeout.__name__
    assert "within 0.3 s" in text


def _with_a_deadline_of_torch() -> Any:
    def main(group: Any) -> str:
        if not TORCH_OFFERS_ALL:
            with pytest.warns(UserWarning, match="only supported for either nccl or gloo"):
                c10d._set_pg_timeout(SOON, group)
            return ""
        dist.set_timeout(SOON, group)
        return "" if dist.get_rank() else error_of(dist.all_reduce, torch.ones(2), group=group)[1]

    return together(main)


def test_torch_from_2_14_sets_the_deadline_of_any_backend(
    pool: ProcessPool, tmp_path: Path
) -> None:
    text, _ = run(pool, tmp_path, 2, _with_a_deadline_of_torch)
    assert "within 0.3 s" in text or not TORCH_OFFERS_ALL


def _late_in_the_background() -> Any:
    def main(group: Any) -> Any:
        group.set_timeout(SOON)
        if dist.get_rank():
            return None
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        future = work.get_future()
        seen = [error_of(work.wait)[0], error_of(future.wait)[0], type(work.exception()).__name__]
        return seen, work.is_completed(), work.is_success()

    return together(main)


@pytest.mark.held_by_torch
def test_timeouts_reach_works_and_futures(pool: ProcessPool, tmp_path: Path) -> None:
    seen, _ = run(pool, tmp_path, 2, _late_in_the_background)
    assert seen == ([CommTimeout.__name__] * 3, True, False)


# Ranks that leave.


def _ended_in_the_middle(how: str) -> Any:
    end = {"abort": c10d._abort_process_group, "destroy": dist.destroy_process_group}[how]

    def main(group: Any) -> Any:
        if dist.get_rank():
            dist.barrier()  # rank 0 has left by now
            dist.all_reduce(torch.ones(2), group=group)  # what it said before counts
            return error_of(dist.all_reduce, torch.ones(2), group=group)
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        end(group)
        dist.barrier()
        return error_of(work.wait)

    return together(main)


@pytest.mark.parametrize(
    ("how", "ours", "theirs"),
    [
        ("abort", StaleError, "rank 0 abandoned the group: process group '1' was aborted"),
        (
            "destroy",
            StaleError,
            "rank 0 abandoned the group: StaleError: the group was closed while all_reduce",
        ),
    ],
)
def test_group_that_ends_in_the_middle_of_something_says_so(
    pool: ProcessPool, tmp_path: Path, how: str, ours: type, theirs: str
) -> None:
    (name, text), (_, other) = run(pool, tmp_path, 2, _ended_in_the_middle, how)
    assert (name, "all_reduce(float32[2], sum)" in text) == (ours.__name__, True)
    assert theirs in other


def test_everything_is_refused_after_the_end(tmp_path: Path) -> None:
    x, y = torch.ones(2), torch.ones(2)
    with process_group("braid", 0, 1, str(tmp_path / "store")):
        group: Any = dist.new_group([0])
        dist.destroy_process_group(group)
        acts: list[Callable[[], Any]] = [
            lambda: group.allreduce([x]),
            lambda: group.broadcast([x]),
            lambda: group.reduce([x]),
            lambda: group.allgather([[y]], [x]),
            lambda: group.all_gather_into_tensor(y, x),
            lambda: group.reduce_scatter_tensor(y, x),
            lambda: group.all_to_all_single(y, x),
            lambda: group.gather([[y]], [x]),
            lambda: group.scatter([y], [[x]]),
            lambda: group.send([x], 0),
            lambda: group.recv([x], 0),
            lambda: group.recv_anysource([x]),
            group.barrier,
            group.monitored_barrier,
            lambda: group.split_group([0]),
        ]
        said = [error_of(act) for act in acts]
        # torch writes down what happened first, for which it looks the group up
        with pytest.raises(ValueError, match="not initialized") as caught:
            dist.all_reduce(x, group=group)
        said.append((type(caught.value.__context__).__name__, str(caught.value.__context__)))
    assert [name for name, _ in said] == ["StaleError"] * len(said)
    assert all("has been destroyed. Make a new" in text for _, text in said)


def test_group_may_be_ended_twice(tmp_path: Path) -> None:
    with process_group("braid", 0, 1, str(tmp_path / "store")):
        group: Any = dist.new_group([0])
        for end in (group.shutdown, group.abort, group.shutdown):
            end()


# Ranks that die.


def _dies_in_the_middle_of_backward(group: Group, path: str) -> Any:
    with process_group("braid", group.rank, group.size, path):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model = DistributedDataParallel(net, bucket_cap_mb=1e-5)
        if group.rank == 1:
            # the gradients of the last layer are being exchanged by now
            net[0].weight.register_hook(lambda _grad: os.kill(os.getpid(), signal.SIGKILL))
        name, text = error_of(model(torch.ones(2, 4)).sum().backward)
        return name, "rank 1" in text, re.findall(r"while rank (\d) was in (\w+)", text)


@pytest.mark.held_by_torch
def test_rank_killed_in_backward_is_named_by_all_others(pool: ProcessPool, tmp_path: Path) -> None:
    with pytest.raises(RankDiedError) as caught:
        pool.run(3, _dies_in_the_middle_of_backward, str(tmp_path / "store"))
    answers = caught.value.__dict__["answers"]
    assert caught.value.codes == {1: -signal.SIGKILL}
    assert {rank: answers[rank].result for rank in (0, 2)} == {
        rank: (PeerLostError.__name__, True, [(str(rank), "all_reduce")]) for rank in (0, 2)
    }


def _dies_beside_a_work(group: Group, path: str) -> Any:
    with process_group("braid", group.rank, group.size, path):
        dist.barrier()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(torch.ones(2), async_op=True)
        future = work.get_future().then(lambda future: future.value())
        return [error_of(work.wait)[0], error_of(future.wait)[0], type(work.exception()).__name__]


@pytest.mark.held_by_torch
def test_losses_reach_works_and_futures(pool: ProcessPool, tmp_path: Path) -> None:
    with pytest.raises(RankDiedError) as caught:
        pool.run(2, _dies_beside_a_work, str(tmp_path / "store"))
    answers = caught.value.__dict__["answers"]
    assert answers[0].result == [PeerLostError.__name__] * 3


# Jobs of `braid run`.

TRAINING = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def load(step):
    if step == 3 and dist.get_rank() == 1:
        time.sleep(1.4)
    if step == 5 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.ones(2, 4)

dist.init_process_group("braid")
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
for step in range(6):
    x = load(step)
    model(x).sum().backward()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, QuietConsole]:
    """A training of which rank 1 first keeps the other waiting and is then killed."""
    folder = tmp_path_factory.mktemp("job")
    path = folder / "training.py"
    path.write_text(TRAINING)
    console = QuietConsole()
    spec = JobSpec(
        command=(str(path),), num_ranks=2, hang_report_s=0.5, log_dir=str(folder / "run")
    )
    return Supervisor(console).run(spec), console


@pytest.mark.launcher
@pytest.mark.procs
def test_hang_report_says_who_waits_in_ddp_and_who_is_missing(
    job: tuple[Outcome, QuietConsole],
) -> None:
    _, console = job
    reports = [text for text in console.notices if "training.py" in text]
    waiting, missing = (
        [line for line in reports[0].splitlines() if line.strip().startswith(word)]
        for word in ("waiting", "missing")
    )
    assert re.fullmatch(
        r" +waiting +rank 0 +all_reduce#\d+ +float32\[\d+\], \w+ +.*training\.py:\d+ in <module>",
        waiting[0],
    )
    assert re.match(r" +missing +rank 1 .*training\.py:\d+ in load", missing[0])
    assert (len(waiting), len(missing)) == (1, 1)


@pytest.mark.launcher
@pytest.mark.procs
def test_error_block_names_the_rank_that_was_killed(job: tuple[Outcome, QuietConsole]) -> None:
    outcome, _ = job
    assert [end.rank for end in outcome.cause] == [1]
    assert "signal 9" in str(outcome)
    assert outcome.exit_code != 0
