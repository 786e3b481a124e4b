"""Alarms: a thread that waits until nothing happens."""

from __future__ import annotations

import os
import threading

import pytest

from braid.runtime.alarm import Alarm

LONG_S = 1000.0  # never over in a test


@pytest.fixture(params=["timer", "looks"])
def make(request, monkeypatch):
    """A function that makes an alarm, with and without a timer of the kernel."""
    if request.param == "looks":
        monkeypatch.setattr("braid.runtime.alarm._new_timer", lambda: -1)
    alarms = []

    def make(pause_s):
        alarms.append(Alarm(threading.RLock(), pause_s))
        return alarms[-1]

    yield make
    for alarm in alarms:
        with alarm._lock:
            alarm.close()


def waiter(alarm):
    """A thread that waits until the alarm rings."""

    def run():
        with alarm._lock:
            alarm.wait()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("first", ["wait", "ring"])
def test_a_ring_ends_one_wait(make, first):
    alarm = make(LONG_S)
    if first == "wait":
        thread = waiter(alarm)
    with alarm._lock:
        alarm.ring()
        alarm.ring()
        alarm.put_off()  # takes no ring back
    if first == "ring":
        thread = waiter(alarm)
    thread.join()
    again = waiter(alarm)
    again.join(0.01)
    assert again.is_alive()  # both rings were one
    with alarm._lock:
        alarm.ring()
    again.join()


def test_it_rings_after_a_pause_and_again_after_the_next_event(make):
    alarm = make(0.001)
    for _ in range(3):
        thread = waiter(alarm)
        with alarm._lock:
            alarm.put_off()
        thread.join()


def test_a_pause_that_passed_before_the_wait_counts(make):
    alarm = make(0.001)
    with alarm._lock:
        alarm.put_off()
    threading.Event().wait(0.005)
    waiter(alarm).join()


def test_events_put_off_a_ring(make):
    alarm = make(LONG_S)
    thread = waiter(alarm)
    with alarm._lock:
        alarm.put_off()
    thread.join(0.01)
    assert thread.is_alive()
    with alarm._lock:
        alarm.ring()
    thread.join()


def test_closing_twice_leaves_no_descriptor(make):
    alarm = make(LONG_S)
    timer = alarm._timer
    with alarm._lock:
        alarm.close()
        alarm.close()
        alarm.ring()  # of a thread that is late
    if timer >= 0:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(timer)
