"""Who takes the steps: several threads of one rank, callbacks, requests that another thread starts."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from braid.comm import Group, StepsBy
from braid.comm.algorithms import all_reduce
from braid.errors import CommError, StaleError
from braid.runtime.transport.atomic import fetch_add
from support.worlds import run_threads

NUMEL = 1 << 18  # several chunks: threads get in each other's way if they can


def _waits_for_what_has_ended(group: Group, gate: threading.Event) -> bool:
    with group.coalesce() as first:
        first.all_reduce(torch.ones(2))
    if group.rank == 1:
        first.work.wait()
        came = gate.wait(2)
        group.barrier()
        return came
    while not first.work.done():
        pass
    with group.coalesce() as second:
        second.barrier()
    first.work.wait()  # the other rank comes to the barrier only after this
    gate.set()
    second.work.wait()
    return True


def test_waiting_for_what_has_ended_does_not_wait_for_what_was_started_later():
    assert run_threads(2, _waits_for_what_has_ended, threading.Event()) == [True, True]


def _callback_raises(group: Group) -> float:
    work = group.all_reduce(torch.ones(1), async_op=True)
    called = threading.Event()

    def complain(_work: object) -> None:
        called.set()
        msg = "callback of the program"
        raise ValueError(msg)

    work.add_done_callback(complain)
    called.wait(10)
    x = torch.ones(1)
    group.all_reduce(x, async_op=True).wait(10)
    return x.item()


def test_background_operations_go_on_after_a_callback_that_raises(monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(str(args.exc_value)))
    assert run_threads(2, _callback_raises) == [2.0, 2.0]
    assert seen == ["callback of the program"] * 2


def _callback_waits(group: Group, ready: threading.Event) -> str:
    if group.rank == 1:
        ready.wait(10)
        group.all_reduce(torch.ones(1))
        group.barrier()
        return ""
    said: list[str] = []
    called = threading.Event()

    def reduce_more(_work: object) -> None:
        try:
            group.all_reduce(torch.ones(1), timeout_s=5)
        except StaleError as error:
            said.append(str(error))
        called.set()

    group.all_reduce(torch.ones(1), async_op=True).add_done_callback(reduce_more)
    later = group.barrier(
        async_op=True
    )  # so that the callback's operation would have to wait in line
    ready.set()
    later.wait(10)
    called.wait(10)
    return said[0]


def test_a_callback_that_waits_in_the_progress_thread_is_refused_with_a_reason():
    text, _ = run_threads(2, _callback_waits, threading.Event())
    assert "a callback waits for all_reduce(float32[1], sum), which would block" in text


def _callback_receives(group: Group, ready: threading.Event) -> float:
    if group.rank == 1:
        ready.wait(10)
        group.all_reduce(torch.ones(1))
        group.send(torch.full((3,), 7.0), 0)
        group.barrier()
        return 7.0
    refused = threading.Event()

    def receive(_work: object) -> None:
        with contextlib.suppress(StaleError):
            group.recv(torch.empty(3), 1, timeout_s=5)
            return
        refused.set()

    group.all_reduce(torch.ones(1), async_op=True).add_done_callback(receive)
    ready.set()
    assert refused.wait(10)
    message = group.recv(torch.zeros(3), 1, timeout_s=5)
    group.barrier()
    return message[0].item()


def test_a_receive_that_is_refused_takes_no_message():
    assert run_threads(2, _callback_receives, threading.Event()) == [7.0, 7.0]


def _in_two_threads(group: Group) -> list[float]:
    sums = [0.0, 0.0]

    def reduce(index: int) -> None:
        for _ in range(10):
            x = torch.ones(NUMEL)
            group.all_reduce(x, timeout_s=10)
            sums[index] += x.sum().item() / NUMEL

    threads = [threading.Thread(target=reduce, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def test_two_threads_of_a_rank_may_use_one_group(world):
    assert world(2, _in_two_threads) == [[20.0, 20.0]] * 2


def _another_thread_starts(group: Group, waiting: threading.Event) -> bool:
    first, second = (group.persistent("all_reduce", torch.ones(NUMEL)) for _ in range(2))
    if group.rank == 1:
        waiting.wait(10)
        second.start().wait(5)  # the steps of rank 0 are taken by its thread that waits for `first`
        first.start().wait(10)
        return True
    work = first.start()
    works = []
    thread = threading.Timer(0.1, lambda: (works.append(second.start()), waiting.set()))
    thread.start()
    work.wait(20)
    thread.join()
    works[0].wait(10)
    return True


def test_a_thread_that_waits_takes_the_steps_of_what_another_starts_meanwhile():
    assert run_threads(2, _another_thread_starts, threading.Event()) == [True, True]


THREADS, MESSAGES = 3, 20


def _all_at_once(group: Group) -> bool:
    """Threads make their first sends and receives of several new groups at the same moment."""
    for _ in range(8):
        part = group.split(0)
        start, found = threading.Barrier(THREADS), []

        def talk(tag: int, part: Group = part, start: threading.Barrier = start) -> None:
            start.wait()
            others = [r for r in range(part.size) if r != part.rank]
            for i in range(MESSAGES):
                works = [part.recv(torch.empty(3), r, tag=tag, async_op=True) for r in others]
                for r in others:
                    part.send(torch.full((3,), float(i)), r, tag=tag)
                for work in works:
                    work.wait()
                    found.append(work.result[0].item() == i)  # noqa: B023 - joined below

        threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == THREADS * MESSAGES * (part.size - 1)
        assert all(found)
        group.barrier()
        part.close()
    return True


def test_threads_may_be_the_first_on_a_line_at_the_same_moment():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert run_threads(2, _all_at_once) == [True, True]
    finally:
        sys.setswitchinterval(interval)


def _summed_by_others(group: Group, together: threading.Barrier) -> list[list[float]]:
    """The last rank only says where its tensor lies, and looks into it when the others have done what there is to do."""
    x = group.empty((NUMEL,))
    request = group.persistent("all_reduce", x)
    found = []
    for _ in range(2):
        x.fill_(float(group.rank + 1))
        work = request.start(steps_by=StepsBy.WAITER)
        together.wait(10)
        if group.rank < group.size - 1:
            assert not work.done()  # it is, but for the last rank's word that it knows
        together.wait(10)
        found.append(x.unique().tolist())
        together.wait(10)
        work.wait()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_whoever_is_early_sums_what_a_late_rank_has_only_offered(size):
    total = float(size * (size + 1) // 2)
    found = run_threads(size, _summed_by_others, threading.Barrier(size))
    assert found == [[[total], [total]]] * size


def _counts(group: Group) -> list[int]:
    group.barrier()  # the line is there
    address = group.engine.pages.channel(0).work_counter._address
    group.barrier()
    return [fetch_add(address, 1) for _ in range(1 << 16)]


def test_processes_that_count_at_once_lose_nothing(procs):
    found = procs(2, _counts)
    assert sorted(n for own in found for n in own) == list(range(2 << 16))
    assert all(own == sorted(own) for own in found)


def _comes_when_another_has_given_up(
    group: Group, way: str, gate: threading.Barrier
) -> list[float]:
    """The last rank comes when rank 0 has given the operation up, and its tensor is something else by then."""
    part = group.split(0)
    x = part.empty((NUMEL,)).fill_(1.0)
    if group.rank == 0:
        part.persistent("all_reduce", x).start(steps_by=StepsBy.WAITER)
        if way == "aborts":
            part.abort("tired")
        else:
            part.close()
        x.fill_(7.0)
    gate.wait(10)
    if group.rank:
        with pytest.raises(CommError, match=r"tired|was closed"):
            part.persistent("all_reduce", x).start().wait()
    gate.wait(10)
    return x.unique().tolist()


@pytest.mark.parametrize("way", ["aborts", "closes"])
@pytest.mark.parametrize("size", [2, 3])
def test_tensors_of_whoever_has_given_up_are_left_alone(way, size):
    found = run_threads(size, _comes_when_another_has_given_up, way, threading.Barrier(size))
    assert found == [[7.0], *[[1.0]] * (size - 1)]


def _fails_in_the_middle(group: Group, gate: threading.Barrier) -> tuple[bool, bool]:
    """The steps of rank 0 raise where the other rank may be about to write to its tensor; whether that is there then, and in the end."""
    part = group.split(0)
    x = part.empty((NUMEL,)).fill_(1.0)
    alive = weakref.ref(x.untyped_storage())
    with pytest.raises((ArithmeticError, CommError)):
        part.all_reduce(x, algorithm="registered")
    del x
    gc.collect()
    found = alive() is not None
    gate.wait(10)
    part.close()
    gate.wait(10)
    part.close()
    for _ in range(100):  # a collection does nothing while the other thread collects
        if alive() is None:
            break
        gc.collect()
        time.sleep(0.01)
    return found, alive() is not None


def test_a_tensor_lives_until_nobody_can_write_to_it(monkeypatch):
    def raising(*_args: object) -> None:
        raise ArithmeticError

    monkeypatch.setattr(all_reduce, "combine", raising)
    assert run_threads(2, _fails_in_the_middle, threading.Barrier(2)) == [(True, False)] * 2


def _blocks_in_a_callback(group: Group, way: str) -> str:
    """Rank 0 calls, in the thread that carries out its background work, what the other rank waits for."""
    other, x, y = group.split(0), torch.ones(NUMEL), torch.ones(NUMEL)
    assert other is not None
    if group.rank == 1:
        group.all_reduce(x)
        group.all_reduce(y)
        other.barrier()
        return ""
    said: list[str] = []
    called = threading.Event()

    def call(_work: object) -> None:
        try:
            other.barrier()
        except StaleError as exc:
            said.append(str(exc))
        called.set()

    if way == "behind a block":
        with group.coalesce(steps_by=StepsBy.WAITER) as batch:
            batch.all_reduce(x)
        first = batch.work
    else:
        first = group.all_reduce(x, async_op=True)
    work = group.all_reduce(y, async_op=True)
    work.add_done_callback(call)
    assert called.wait(10)
    first.wait()
    work.wait()
    other.barrier()
    return said[0]


@pytest.mark.parametrize("way", ["behind a block", "alone"])
def test_a_callback_must_not_wait_in_the_thread_that_takes_the_steps(way):
    text, _ = run_threads(2, _blocks_in_a_callback, way)
    assert text.startswith("a callback waits for barrier(), which would block")


def _kept_by_its_callback(group: Group) -> bool:
    x = torch.ones(2)
    with group.coalesce(steps_by=StepsBy.WAITER) as batch:
        batch.all_reduce(x)
    work, ended = batch.work, threading.Event()
    work.add_done_callback(lambda _work: ended.set())
    work.wait()
    assert ended.is_set()
    alive = weakref.ref(work)
    del work, batch
    return alive() is not None


def test_a_callback_that_was_called_keeps_nothing_alive():
    gc.collect()
    gc.disable()
    try:
        assert run_threads(2, _kept_by_its_callback) == [False, False]
    finally:
        gc.enable()


def _starts_again(group: Group) -> list[object]:
    request = group.persistent("all_reduce", group.empty((4,)))
    first = request.start()
    first.wait()
    if group.rank == 1:
        group.context.store.wait(["looked"], 30.0)
        request.start().wait()
        return []
    second, called = request.start(), []
    first.add_done_callback(called.append)
    seen = [first.done(), first.succeeded, called == [first], second.done()]
    first.wait(0.1)
    group.context.store.set("looked", b"")
    second.wait()
    return seen


def test_the_work_of_an_earlier_start_has_ended_whatever_was_started_since():
    assert run_threads(2, _starts_again)[0] == [True, True, True, False]


def _starts_in_callbacks(group: Group) -> list[int]:
    """How many of a chain of starts were left when the first wait ended, and at the end."""
    request = group.persistent("all_reduce", group.empty((4,)))
    left, last = [20], threading.Event()

    def again(_work: object) -> None:
        if not left[0]:
            last.set()
            return
        left[0] -= 1
        request.start().add_done_callback(again)

    first = request.start()
    first.add_done_callback(again)
    first.wait()
    seen = left[0]
    while not last.is_set():
        group.advance()
    group.barrier()
    return [seen, left[0]]


def test_a_wait_ends_with_its_own_start_though_a_callback_starts_the_request_again():
    for seen, left in run_threads(2, _starts_in_callbacks):
        assert seen > 0
        assert left == 0


def _keeps_the_work(group: Group, way: str) -> bool:
    """Whether a Work that has ended keeps the input of its operation."""
    array = np.ones(4096, np.float32)
    alive, x = weakref.ref(array), torch.from_numpy(array)
    if way == "all_gather":
        work = group.all_gather(x, async_op=True)
    elif way == "out":
        work = group.all_reduce(x, out=torch.empty(4096), async_op=True)
    else:  # a copy is made of it
        work = group.reduce_scatter(x.view(64, 64).t(), async_op=True)
    work.wait()
    del x, array
    gc.collect()
    kept = alive() is not None
    group.barrier()
    assert work.succeeded
    return kept


@pytest.mark.parametrize("way", ["all_gather", "out", "copied"])
def test_a_work_that_has_ended_keeps_no_input_alive(way):
    assert run_threads(2, _keeps_the_work, way) == [False, False]


class _Intrusive(list):
    """A list during whose first look another thread starts something."""

    def __len__(self) -> int:
        number = super().__len__()
        act, self.act = getattr(self, "act", None), None
        if act is not None:
            act()
        return number


def _starts_during_the_look(group: Group) -> bool:
    """Whether a wait that is about to begin takes the steps of what is started at that moment."""
    requests = [group.persistent("all_reduce", group.empty((4,))) for _ in range(2)]
    group.barrier()
    if group.rank == 1:
        requests[1].start().wait(10)  # needs steps of rank 0, which waits for the other one
        requests[0].start().wait(10)
        return True
    progress = group.engine.progress
    first, others = requests[0].start(), []
    intrusive = progress._started = _Intrusive(progress._started)
    intrusive.act = lambda: others.append(requests[1].start(steps_by=StepsBy.WAITER))
    ready = progress._watcher(first._operation, None)
    ends = ready()
    first.wait(20)
    others[0].wait(20)
    return ends


def test_what_is_started_while_a_wait_begins_ends_the_wait():
    assert run_threads(2, _starts_during_the_look) == [True, True]


def _large_tensors(group: Group, sent: str, received: str) -> bool:
    """Ranks send large tensors, from memory of either kind into either."""
    rank, size = group.rank, group.size
    after, before = (rank + 1) % size, (rank - 1) % size

    def tensor(numel: int, place: str) -> torch.Tensor:
        return group.empty((numel,)) if place == "shared" else torch.empty(numel)

    def message(numel: int, sender: int) -> torch.Tensor:
        return torch.arange(float(numel)) + sender / 8

    for numel in (70_000, 262_147, 1_000_003):
        x = tensor(numel, sent).copy_(message(numel, rank))
        out = tensor(numel, received).zero_()
        if rank == 0:
            group.recv(out, before)
        group.send(x, after)
        if rank > 0:
            group.recv(out, before)
        assert torch.equal(out, message(numel, before))
        work = group.recv(out.zero_(), before, async_op=True)
        group.send(x, after)
        work.wait()
        assert torch.equal(out, message(numel, before))
        work = group.send(x, after, tag=1, async_op=True)
        group.recv(out.zero_(), before, tag=1)
        work.wait()
        assert torch.equal(out, message(numel, before))
        for root in range(size):
            y = x if rank == root else out.zero_()
            assert torch.equal(group.broadcast(y, root), message(numel, root))
    return True


@pytest.mark.parametrize(
    ("sent", "received"), [("private", "private"), ("private", "shared"), ("shared", "private")]
)
@pytest.mark.parametrize("size", [2, 3])
def test_large_tensors_arrive_whole(world, size, sent, received):
    assert world(size, _large_tensors, sent, received) == [True] * size


def _unasked(group: Group) -> bool:
    """A large message without a receive is kept whole until it is asked for."""
    numel = 300_000
    if group.rank == 0:
        group.send(torch.arange(float(numel)), 1, tag=1)
        group.send(torch.full((numel,), 2.0), 1, tag=2)
        return True
    first = group.recv(torch.empty(numel), 0, tag=2)
    second = group.recv(torch.empty(numel), 0, tag=1)
    return bool(first.eq(2.0).all()) and torch.equal(second, torch.arange(float(numel)))


def test_a_large_message_may_come_before_its_receive(world):
    assert world(2, _unasked) == [True, True]
