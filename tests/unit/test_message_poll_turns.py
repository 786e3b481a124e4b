"""Turns at polling: who polls next."""

from __future__ import annotations

import threading

import pytest

from braid.runtime.message.guard import Guard
from braid.runtime.message.vans.poll_turns import PollTurns


@pytest.fixture
def turns():
    guard = Guard()
    turns = PollTurns(guard, lambda: turns.interrupts.append(1))
    turns.interrupts = []
    turns.guard = guard
    with guard:
        yield turns


def test_one_thread_at_a_time_polls(turns):
    assert (turns.begin(), turns.is_taken, turns.begin()) == (True, True, False)
    turns.end(hand_over=False)
    assert (turns.is_taken, turns.begin()) == (False, True)


def test_own_thread_polls_at_once_while_nobody_waits(turns):
    assert [turns.begin_own() for _ in range(3)] == [True] * 3
    assert (turns.is_taken, turns.begin()) == (True, False)


def in_thread(turns, call):
    """The result of a call in another thread, which holds the lock as it must."""
    results = []

    def run():
        with turns.guard:
            results.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def has_polled(turns, own, results) -> bool:
    """Wait until another thread leads, and for its result."""
    while turns._leader != own.ident:
        turns.guard.wait(0.001)
    turns.guard.release()
    own.join()
    turns.guard.acquire()
    return results == [True]


def test_own_thread_polls_after_followers_that_never_led(turns):
    own, results = in_thread(turns, turns.begin_own)
    turns._followers = 1  # its message has come, and it is about to return
    turns.begin()
    while not turns._own:
        turns.guard.wait(0.001)
    turns._leader = turns._followers = 0
    turns._rest.put_off()
    assert has_polled(turns, own, results)


@pytest.mark.parametrize("hand_over", [False, True])
def test_own_thread_polls_after_a_wait_has_ended(turns, hand_over):
    assert turns.begin()
    thread, results = in_thread(turns, turns.begin_own)
    while not turns._own:  # it waits on its alarm
        turns.guard.wait(0.001)
    turns.end(hand_over=hand_over)
    assert has_polled(turns, thread, results)


def test_own_thread_leaves_the_turn_to_one_that_waits(turns):
    assert turns.begin_own()
    thread, _ = in_thread(turns, lambda: (turns.follow(60), turns.begin()))
    while not turns.interrupts:  # it asks for the turn
        turns.guard.wait(0.001)
    own, results = in_thread(turns, turns.begin_own)
    turns._leader = 0
    while turns._leader != thread.ident:
        turns.guard.wait(0.001)
    turns.stop()
    turns.guard.release()
    thread.join()
    own.join()
    turns.guard.acquire()
    assert results == [False]


def test_nobody_begins_after_the_end(turns):
    turns.stop()
    assert (turns.begin(), turns.begin_own()) == (False, False)


def test_waking_ends_a_poll_or_starts_one(turns):
    turns.wake()
    assert (turns._rest._is_rung, turns.interrupts) == (True, [])
    turns.begin()
    turns.wake()
    assert turns.interrupts == []  # the thread that polls is this one
    thread, _ = in_thread(turns, turns.wake)
    turns.guard.release()
    thread.join()
    turns.guard.acquire()
    assert turns.interrupts == [1]
