"""Claims of braid.runtime.diagnose.last_events: open spans are what a rank is inside of."""

from __future__ import annotations

import pytest

from braid.runtime.clock import VirtualClock
from braid.runtime.diagnose.last_events import last_events, last_step
from braid.runtime.events import EventRing, Recorder


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000)


@pytest.fixture
def recorder(clock: VirtualClock) -> Recorder:
    ring = EventRing(bytearray(EventRing.nbytes_for(64)), 64)
    return Recorder(ring, clock)


def test_an_empty_ring_says_nothing(recorder):
    assert (last_events(recorder.ring), last_step(recorder.ring)) == ("", None)


def test_phase_bucket_and_step_are_named(recorder):
    recorder.span("step", seq=213)
    recorder.span("forward").end()
    recorder.span("backward")
    recorder.span("bucket 1 of 2")
    assert last_events(recorder.ring) == "in backward, bucket 1 of 2, at step 213"


def test_a_waiting_collective_is_named_with_number_and_call_site(recorder):
    site = recorder.intern("/home/me/train.py:41 in step")
    recorder.span("all_reduce(float32[4096], sum)", seq=176, site=site)
    recorder.span("wait")
    assert last_events(recorder.ring) == (
        "waiting in all_reduce(float32[4096], sum)#176 called at train.py:41 in step"
    )


def test_a_phase_named_like_the_function_of_the_call_site_is_said_once(recorder):
    recorder.span("backward")
    recorder.span("bucket 1 of 2")
    site = recorder.intern("/home/me/shards.py:75 in backward")
    recorder.span("barrier()", seq=9, site=site)
    assert last_events(recorder.ring) == (
        "in barrier()#9 called at shards.py:75 in backward, bucket 1 of 2"
    )


def test_a_collective_that_is_computing_does_not_wait(recorder):
    recorder.span("step", seq=4)
    recorder.span("barrier()", seq=9)
    recorder.span("wait").end()
    assert last_events(recorder.ring) == "in barrier()#9, at step 4"


def test_between_steps_the_last_one_is_named(recorder, clock):
    recorder.span("step", seq=6).end()
    with recorder.span("step", seq=7):
        clock.advance(10)
    assert last_events(recorder.ring) == "after step 7"


def test_a_span_abandoned_in_an_earlier_step_is_ignored(recorder, clock):
    with recorder.span("step", seq=1):
        recorder.span("data")
        clock.advance(1)
    clock.advance(1)
    recorder.span("step", seq=2)
    recorder.span("forward")
    assert last_events(recorder.ring) == "in forward, at step 2"


def test_a_moment_before_the_spans_were_closed_can_be_asked_for(recorder, clock):
    with recorder.span("step", seq=8), recorder.span("backward"):
        clock.advance(100)
        moment = clock.now_ns()
        clock.advance(100)
    clock.advance(50)
    with recorder.span("step", seq=9):
        clock.advance(1)
    assert last_events(recorder.ring, moment) == "in backward, at step 8"


def test_last_step_is_the_last_begun(recorder, clock):
    recorder.span("step", seq=211).end()
    clock.advance(1)
    recorder.span("step", seq=212)
    assert last_step(recorder.ring) == 212
