"""No interleaving of any collective on two or three ranks deadlocks or reuses memory too early."""

from __future__ import annotations

import pytest
import torch

from braid.comm import move
from braid.comm.all_reduce import all_reduce, direct, two_phase
from braid.comm.channel import Port
from braid.testing.explorer import explore, record

LARGE = 150_000  # floats: three chunks of the staging slots


def _ones(port: Port, numel: int, registered: bool) -> torch.Tensor:
    x = port.transport.arena.empty((numel,)) if registered else torch.empty(numel)
    return x.fill_(1.0)


def _collective(name: str, port: Port, registered: bool):
    ch = port.channel(0)
    ch.digest = 1
    n = port.size
    small, large = _ones(port, 8 * n, registered), _ones(port, LARGE // n * n, registered)
    for x in (small, large, small):
        rows = x.view(n, -1)
        if name == "all_reduce":
            yield from all_reduce(ch, x, "sum")
        elif name == "direct":
            yield from direct(ch, x, "sum", None)
        elif name == "two_phase":
            yield from two_phase(ch, x, "sum", 0.5)
        elif name == "broadcast":
            yield from move.broadcast(ch, x, n - 1)
        elif name == "all_gather":
            yield from move.all_gather(ch, torch.empty(n, x.numel()), x)
        elif name == "reduce_scatter":
            yield from move.reduce_scatter(ch, torch.empty(rows.shape[1]), rows, "sum")
        elif name == "all_to_all":
            yield from move.all_to_all(ch, torch.empty_like(rows), rows)
        elif name == "barrier":
            yield from move.barrier(ch)


NAMES = (
    "all_reduce",
    "direct",
    "two_phase",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("registered", [False, True], ids=["staged", "registered"])
@pytest.mark.parametrize("name", NAMES)
def test_no_interleaving_deadlocks_or_races(name, registered, size):
    found = explore(record(size, lambda port: _collective(name, port, registered)))
    assert (found.deadlocks, found.races) == ([], [])


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_that_follow_each_other_do_not_race(size):
    def everything(port: Port):
        for _ in range(2):
            for name in NAMES:
                yield from _collective(name, port, False)

    found = explore(record(size, everything))
    assert (found.deadlocks, found.races) == ([], [])


@pytest.mark.parametrize("size", [2, 3])
def test_messages_do_not_race(size):
    def ring(port: Port):
        n, me = port.size, port.rank
        after, before = (me + 1) % n, (me - 1) % n
        for numel in (8, LARGE, 8):
            x = torch.ones(numel)
            data = port.channel(port.sending_index(after))
            acks = port.channel(port.acknowledging_index(me))
            data.digest = 1
            send = move.send(data, acks, x, after)
            incoming, own = port.incoming(before), port.channel(port.acknowledging_index(before))
            incoming.digest = 1
            recv = move.recv(incoming, own, torch.empty(numel), before)
            if me == 0:
                yield from recv
                yield from send
            else:
                yield from send
                yield from recv

    found = explore(record(size, ring))
    assert (found.deadlocks, found.races) == ([], [])


def test_a_slot_that_is_reused_too_early_is_found():
    def hasty(port: Port):
        ch = port.channel(0)
        ch.digest = 1
        for _ in range(3):
            ch.stage(torch.ones(8))
            ch.post()  # and does not wait until the others have read
            for peer in ch.others:
                yield from ch.await_step(peer, ch.value - 1)

        yield from move.barrier(ch)

    def reading(port: Port):
        ch = port.channel(0)
        ch.digest = 1
        for _ in range(3):
            ch.stage(torch.ones(8))
            value = ch.post()
            for peer in ch.others:
                yield from ch.await_step(peer, value)
                ch.peek(peer, 8, torch.float32).clone()
        yield from move.barrier(ch)

    found = explore(record(2, lambda port: hasty(port) if port.rank == 0 else reading(port)))
    assert found.races
    assert not explore(record(2, reading)).races


def test_a_result_that_is_used_before_the_others_have_written_it_is_found():
    def careless(port: Port):
        ch = port.channel(0)
        ch.digest = 1
        x = port.transport.arena.empty((1000,)).fill_(1.0)
        ch.offer(x)
        yield from ch.exchange()
        ch.peek(1 - ch.rank, 1000, torch.float32).add_(1.0)
        x.sum()  # no step tells that the other has finished writing
        yield from move.barrier(ch)

    assert explore(record(2, careless)).races


def test_ranks_that_wait_for_each_other_are_found():
    def crossed(port: Port):
        ch = port.channel(0)
        yield from ch.await_step(1 - port.rank, 1)
        ch.post()

    with pytest.raises(AssertionError, match="waiting for each other"):
        record(2, crossed)


def test_a_deadlock_that_depends_on_timing_is_found():
    from braid.testing.explorer import Acquire, Post

    waits_for_both = [Post(0, 1), Acquire(1, 0, 1)]
    never_posts = [Acquire(0, 0, 2)]
    assert explore([waits_for_both, never_posts]).deadlocks == [(1, 0)]
