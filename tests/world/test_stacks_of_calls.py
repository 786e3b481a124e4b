"""Stacks of ranks that take part in calls: their threads change them at any time."""

from __future__ import annotations

import os
import signal
import time

from braid.launch.process import rank_snapshot
from braid.launch.process.black_box import BlackBox
from braid.launch.process.rank_snapshot import RankObserver
from braid.runtime.clock import MonotonicClock
from braid.runtime.events import EventRing, Recorder
from braid.runtime.rendezvous.stack_thread import StackThread


def test_a_rank_that_serves_calls_is_asked_for_stacks_and_gets_no_signal(monkeypatch):
    signals = []
    for name in ("send_signal", "send_signal_to_thread"):
        monkeypatch.setattr(rank_snapshot, name, lambda *args: signals.append(args))
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    box = BlackBox(0, 4096)
    try:
        recorder = Recorder(box.ring)
        observer = RankObserver(0, os.getpid(), box, MonotonicClock())
        with StackThread(0, box.stacks_fd) as thread:
            box.ring.stack_thread, box.ring.stack_pipe = thread.native_id, thread.pipe
            observer.request_stack(alive=True, answers=True)
            assert len(signals) == 1  # no calls, so it gets one
            span = recorder.span("serve(__main__:f, for rank 1)", group=1)
            observer.request_stack(alive=True, answers=True)
            end = time.monotonic() + 20
            while "in test_a_rank_that_serves" not in box.stacks():
                assert time.monotonic() < end
                time.sleep(0.002)
            assert len(signals) == 1
            box.ring.stack_pipe = os.dup(thread.pipe)  # of a thread that does not come to answer
            monkeypatch.setattr(rank_snapshot, "ASK", b"")
            for _ in range(2):
                observer.request_stack(alive=True, answers=True)
            assert len(signals) == 2
            os.close(box.ring.stack_pipe)
            observer.request_stack(alive=True, answers=True)
            assert len(signals) == 3  # the pipe is gone
            span.end()
            recorder.words.release()
    finally:
        box.close()
        signal.signal(signal.SIGUSR1, before)


def test_a_ring_says_whether_its_writer_can_be_asked():
    ring = EventRing(bytearray(EventRing.nbytes_for(16)), 16)
    assert ring.stack_pipe == 0
    ring.stack_pipe = 7
    assert ring.stack_pipe == 7
