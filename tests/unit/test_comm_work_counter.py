"""Blocks that any member may do."""

import ctypes
import threading

import pytest

from braid.comm.channel.work_counter import WorkCounter
from braid.runtime.transport import atomic


@pytest.fixture(params=["of the runtime", "of this process"])
def either_way(request, monkeypatch):
    if request.param == "of this process":
        monkeypatch.setattr(atomic, "_FETCH_ADD", None)
    elif not atomic.is_atomic_between_processes():
        pytest.skip("no C++ runtime that exports fetch-and-add")


def counter(value: int) -> tuple[ctypes.c_uint32, int]:
    word = ctypes.c_uint32(value)
    return word, ctypes.addressof(word)


@pytest.mark.usefixtures("either_way")
def test_threads_that_add_at_once_lose_nothing():
    word, address = counter(0)
    found: list[list[int]] = [[] for _ in range(4)]

    def add(own: list[int]) -> None:
        own.extend(atomic.fetch_add(address, 1) for _ in range(2000))

    threads = [threading.Thread(target=add, args=(own,)) for own in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(n for own in found for n in own) == list(range(8000))
    assert word.value == 8000


@pytest.mark.usefixtures("either_way")
def test_every_block_is_taken_once_work_after_work_though_the_counter_begins_anew():
    word, address = counter(0)
    members = [WorkCounter(address, 3) for _ in range(3)]
    ahead = atomic.MASK - 8  # the counter passes its end in the second work
    atomic.fetch_add(address, ahead - (1 << 32))
    for member in members:
        member._first = ahead
    for count in (5, 4, 0, 1):
        takers = [member.blocks(count) for member in members]
        taken = []
        while takers:
            for taker in list(takers):
                number = next(taker, None)
                if number is None:
                    takers.remove(taker)
                else:
                    taken.append(number)
        assert sorted(taken) == list(range(count))
    assert word.value == (ahead + 10 + 4 * 3) & atomic.MASK


def test_a_member_that_comes_late_finds_nothing_left():
    _word, address = counter(0)
    early, late = WorkCounter(address, 2), WorkCounter(address, 2)
    assert (list(early.blocks(6)), list(late.blocks(6))) == ([0, 1, 2, 3, 4, 5], [])
    assert (list(late.blocks(2)), list(early.blocks(2))) == ([0, 1], [])
