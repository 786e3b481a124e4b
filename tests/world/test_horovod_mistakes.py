"""Mistakes of one call in Horovod's front: an error where it was made and on the other ranks, and nothing else breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from horovod_jobs import horovod, said
from hypothesis import given
from hypothesis import strategies as st

import braid.compat.horovod.torch as hvd
from braid.comm import Group
from braid.compat.horovod import session
from braid.compat.horovod.fusion import FusedBatch, Result, TensorTableEntry

UNJOINABLE = ["allgather", "alltoall", "broadcast", "reducescatter", "grouped_allgather"]


def whole() -> str:
    """What an operation gives that must work after whatever has happened."""
    return said(lambda: hvd.allreduce(torch.ones(1), op=hvd.Sum).item())


# Joined ranks.


def _unjoinable(kind: str, name: str | None) -> Any:
    x = torch.ones(hvd.size(), 2)
    calls: dict[str, Callable[[], Any]] = {
        "allgather": lambda: hvd.allgather(x[: hvd.rank()], name),
        "alltoall": lambda: hvd.alltoall(x, name=name),
        "broadcast": lambda: hvd.broadcast(x, 0, name),
        "reducescatter": lambda: hvd.reducescatter(x, name),
        "grouped_allgather": lambda: hvd.grouped_allgather([x, x], name),
    }
    return calls[kind]()


def _some_join(group: Group, num_joined: int) -> list[list[str]]:
    found = []
    with horovod(group):
        for kind in UNJOINABLE:
            for name in (None, kind):
                early = hvd.rank() < num_joined
                errors = [] if early else [said(lambda: _unjoinable(kind, name))]  # noqa: B023
                hvd.join()
                found.append([*errors, said(lambda: len(_unjoinable(kind, name)) > 0), whole()])  # noqa: B023
    return found


@pytest.mark.parametrize(("size", "num_joined"), [(2, 1), (3, 1), (3, 2), (4, 1), (4, 3)])
def test_what_cannot_go_on_without_joined_ranks_is_refused_and_works_after_all_have_joined(
    procs, size: int, num_joined: int
):
    for rank, found in enumerate(procs(size, _some_join, num_joined)):
        for errors in found:
            assert errors[-2:] == ["True", f"{float(size)}"]
            assert all("called join()" in error for error in errors[:-2])
            assert len(errors) == (2 if rank < num_joined else 3)


# One rank's mistake.


class Mistake(NamedTuple):
    """A call that is wrong, the right one of the same operation, and the words of the error."""

    wrong: Callable[[], Any]
    right: Callable[[], Any]
    words: str


def _mistakes() -> dict[str, Mistake]:
    size = hvd.size()
    x = torch.ones(size, 2)
    huge = torch.ones(1).expand(1 << 45)
    return {
        "float splits": Mistake(
            lambda: hvd.alltoall(x, splits=torch.empty(size), name="a"),
            lambda: hvd.alltoall(x, splits=torch.ones(size, dtype=torch.int64), name="a"),
            "splits must be whole numbers, one for each rank, got a tensor of torch.float32",
        ),
        "splits of more rows than there are": Mistake(
            lambda: hvd.alltoall(x, splits=[2] * size),
            lambda: hvd.alltoall(x),
            f"add up to the {size} rows of dim 0, got",
        ),
        "splits that no integer of a tensor holds": Mistake(
            lambda: hvd.alltoall(x, splits=[1 << 80] * size),
            lambda: hvd.alltoall(x),
            f"add up to the {size} rows of dim 0, got",
        ),
        "negative splits": Mistake(
            lambda: hvd.alltoall(x, splits=[-1, size + 1] + [0] * (size - 2)),
            lambda: hvd.alltoall(x),
            f"add up to the {size} rows of dim 0, got [-1, {size + 1}",
        ),
        "text": Mistake(
            lambda: hvd.allreduce("x"),  # type: ignore[arg-type]
            lambda: hvd.allreduce(x),
            "operations work on tensors, got str",
        ),
        "a group with a number": Mistake(
            lambda: hvd.grouped_allreduce_async([x, 1, x], name="g").wait(),  # type: ignore[list-item]
            lambda: hvd.grouped_allreduce([x, x, x], name="g"),
            "operations work on tensors, got int",
        ),
        "a factor": Mistake(
            lambda: hvd.allreduce(x, prescale_factor="a"),  # type: ignore[arg-type]
            lambda: hvd.allreduce(x),
            "prescale_factor must be a number, got 'a'",
        ),
        "a reduction": Mistake(
            lambda: hvd.allreduce(x, op=99),  # type: ignore[arg-type]
            lambda: hvd.allreduce(x),
            "op must be Average, Sum, Adasum, Min, Max or Product, got 99",
        ),
        "a root": Mistake(
            lambda: hvd.broadcast_object(1, 99),
            lambda: hvd.broadcast_object(1, 0),
            "root_rank must be one of the ranks",
        ),
        "a process set": Mistake(
            lambda: hvd.add_process_set([0, 99]),
            lambda: hvd.remove_process_set(hvd.add_process_set([0])) is True or None,
            f"ranks of a process set must be below {size}, got [99]",
        ),
        "no numbers": Mistake(
            lambda: hvd.allgather(torch.empty(2, device="meta")),
            lambda: hvd.allgather(x[0]),
            "is on the meta device, so it has no values",
        ),
        "no memory for the result": Mistake(
            lambda: hvd.allgather(huge),
            lambda: hvd.allgather(x[0]),
            "rank 0 has not enough memory for ",
        ),
        "no memory at the caller": Mistake(
            lambda: hvd.allreduce(huge), lambda: hvd.allreduce(x[0]), "can't allocate memory"
        ),
    }


def _one_is_wrong(group: Group) -> list[str]:
    problems = []
    with horovod(group):
        for what, mistake in _mistakes().items():
            is_wrong = hvd.rank() == hvd.size() - 1
            found = [
                said(mistake.wrong if is_wrong else mistake.right),
                said(mistake.wrong),  # on all ranks
                said(lambda: mistake.right() is None),  # noqa: B023
                whole(),
            ]
            right = "False", f"{float(hvd.size())}"
            if not all(mistake.words in text for text in found[:2]) or (*found[2:],) != right:
                problems.append(f"{what}: {found}")
    return problems


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_mistake_of_one_rank_is_the_same_error_on_all_and_the_next_operations_work(
    procs, size: int
):
    assert [text for rank in procs(size, _one_is_wrong) for text in rank] == []


def _retries(group: Group) -> list[Any]:
    """Calls count: rank 0 goes on to its second call of a name before others have made their first."""
    x = torch.full((1,), hvd_rank := float(group.rank))
    with horovod(group):
        found = []
        if hvd_rank == 0:
            found.append(said(lambda: hvd.allreduce(x, op=77, name="x")))  # type: ignore[arg-type]
            handle = hvd.allreduce_async(x, op=hvd.Sum, name="x")
        hvd.barrier()
        if hvd_rank:
            found.append(said(lambda: hvd.allreduce(x, op=hvd.Sum, name="x")))
            handle = hvd.allreduce_async(x, op=hvd.Sum, name="x")
        return [*found, hvd.synchronize(handle).item(), whole()]


def test_a_call_after_a_wrong_one_of_that_name_meets_the_second_call_of_the_others(procs):
    words = "op must be Average, Sum, Adasum, Min, Max or Product, got 77"
    first, *others = procs(3, _retries)
    assert first == [f"ConfigError: {words}", 3.0, "3.0"]
    refused = f"HorovodInternalError: rank 0 cannot carry out 'allreduce.x': {words}"
    assert others == [[refused, 3.0, "3.0"]] * 2


class _Breaks:
    """An operation that raises in the engine's thread."""

    name = "breaks"
    kind = "all_gather"

    def suits(self, batch: FusedBatch) -> bool:
        return batch.request.name.endswith("broken")

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:
        del batch, entries
        raise OverflowError("int too big to convert")


def _broken(group: Group, ranks: tuple[int, ...]) -> list[str]:
    with horovod(group):
        if hvd.rank() in ranks:
            session.session().whole.engine.operations.prefer(_Breaks())
        return [said(lambda: hvd.allgather(torch.ones(1), name="broken")), whole()]


def test_what_raises_in_the_thread_of_all_ranks_is_their_error_and_the_engine_goes_on(procs):
    error = (
        "HorovodInternalError: all_gather of 'allgather.broken' failed: "
        "OverflowError: int too big to convert"
    )
    assert procs(3, _broken, (0, 1, 2)) == [[error, "3.0"]] * 3


def _unwritable(group: Group) -> list[str]:
    with horovod(group):
        hvd.start_timeline("/nowhere/timeline.json")
        return [said(hvd.stop_timeline), whole()]


def test_a_timeline_that_cannot_be_written_is_an_error_on_all_ranks(procs):
    for error, after in procs(2, _unwritable):
        assert "timeline cannot be written to '/nowhere/timeline.json'" in error
        assert after == "2.0"


# Whatever ranks and threads do.

KINDS = ("allreduce", "grouped_allreduce", "allgather", "broadcast", "alltoall", "reducescatter")


class Step(NamedTuple):
    """One operation: its kind, and what is wrong with the call of each rank; "" where it is right."""

    kind: str
    wrong: tuple[str, ...]


class Job(NamedTuple):
    """Steps of two threads, and steps of which each rank does the first few before it joins."""

    size: int
    threads: tuple[tuple[Step, ...], ...]
    last: tuple[Step, ...]
    num_last: tuple[int, ...]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    size = draw(st.integers(2, 4))
    wrong = st.sampled_from(("",) * 8 + ("text", "meta", "sparse", "own"))
    step = st.builds(Step, st.sampled_from(KINDS), st.tuples(*[wrong] * size))
    steps = st.lists(step, max_size=5).map(tuple)
    last = draw(steps)
    counts = draw(st.tuples(*[st.integers(0, len(last))] * size))
    return Job(size, (draw(steps), draw(steps)), last, counts)


def _input(step: Step, rank: int, number: int) -> torch.Tensor:
    rows = {"allgather": rank + 1, "alltoall": sum(_splits(rank)), "reducescatter": hvd.size()}
    return torch.full((rows.get(step.kind, 3), 2), float(10 * number + rank))


def _splits(rank: int) -> list[int]:
    return [(rank + other) % 3 for other in range(hvd.size())]


def _call(step: Step, number: int, name: str) -> torch.Tensor:
    rank = hvd.rank()
    wrong = step.wrong[rank]
    x: Any = _input(step, rank, number)
    if wrong:
        strange = {"text": "x", "meta": x.to("meta"), "sparse": x.to_sparse()}
        x = strange.get(wrong, x)
    own = wrong == "own"
    if step.kind == "allreduce":
        return hvd.allreduce(x, op=77 if own else hvd.Sum, name=name)  # type: ignore[arg-type]
    if step.kind == "grouped_allreduce":
        right = _input(step, rank, number)
        return hvd.grouped_allreduce([right, x], op=77 if own else hvd.Sum, name=name)[1]  # type: ignore[arg-type]
    if step.kind == "allgather":
        return hvd.allgather(x.sum() if own else x, name)
    if step.kind == "broadcast":
        return hvd.broadcast(x, 77 if own else number % hvd.size(), name)
    if step.kind == "alltoall":
        found: torch.Tensor = hvd.alltoall(x, [1 << 70] if own else _splits(rank), name)[0]
        return found
    return hvd.reducescatter(x, name, op=hvd.Adasum if own else hvd.Sum)


def _right(step: Step, number: int, ranks: Sequence[int]) -> torch.Tensor:
    each = [_input(step, rank, number) for rank in ranks]
    me = hvd.rank()
    if "allreduce" in step.kind:
        return torch.stack(each).sum(0)
    if step.kind == "allgather":
        return torch.cat(each)
    if step.kind == "broadcast":
        return each[number % hvd.size()]
    if step.kind == "alltoall":
        return torch.cat([torch.split(x, _splits(rank))[me] for rank, x in enumerate(each)])
    return torch.stack(each).sum(0)[me : me + 1]


def _problem(step: Step, number: int, name: str, ranks: Sequence[int]) -> str:
    """What is wrong with how a step has ended on this rank; empty when nothing is."""
    fails = any(step.wrong[rank] for rank in ranks)
    fails |= len(ranks) < hvd.size() and "allreduce" not in step.kind
    try:
        found = _call(step, number, name)
    except (RuntimeError, ValueError) as error:
        return "" if fails else f"{name} {step}: {type(error).__name__}: {error}"
    if fails:
        return f"{name} {step}: no error"
    right = _right(step, number, ranks)
    return "" if torch.equal(found, right) else f"{name} {step}: {found} instead of {right}"


def _run_job(group: Group, job: Job) -> list[str]:
    problems: list[str] = []
    ranks = range(job.size)

    def run(thread: int) -> None:
        for number, step in enumerate(job.threads[thread]):
            problems.append(_problem(step, number, f"{thread}.{number}", ranks))

    with horovod(group):
        threads = [threading.Thread(target=run, args=(thread,)) for thread in (0, 1)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for number, step in enumerate(job.last[: job.num_last[group.rank]]):
            taking_part = [rank for rank in ranks if job.num_last[rank] > number]
            problems.append(_problem(step, number, f"last.{number}", taking_part))
        hvd.join()
        problems.append("" if whole() == f"{float(job.size)}" else f"at the end: {whole()}")
    return [problem for problem in problems if problem]


@given(job=jobs())
def test_whatever_ranks_and_threads_call_ends_with_the_value_or_an_error_on_all(pool, job: Job):
    assert [problem for rank in pool.run(job.size, _run_job, job) for problem in rank] == []
