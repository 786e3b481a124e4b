"""The black box keeps the last records, knows what is open, and can be read by others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.runtime.clock import VirtualClock
from braid.runtime.events import OPEN, Event, EventRing, NameTable, Recorder


def _recorder(capacity: int = 8) -> tuple[Recorder, VirtualClock, bytearray]:
    memory = bytearray(EventRing.nbytes_for(capacity))
    clock = VirtualClock(1000)
    return Recorder(EventRing(memory, capacity, rank=3), clock), clock, memory


def test_a_span_is_open_until_it_ends():
    recorder, clock, memory = _recorder()
    span = recorder.span("backward", seq=7, nbytes=16)
    clock.advance(500)
    reader = EventRing(memory)
    assert reader.open_spans() == [Event(1000, OPEN, recorder.intern("backward"), 0, 0, 7, 16, 0)]
    assert span.end() == 500
    assert reader.open_spans() == []
    assert reader.tail(1)[0].dur_ns == 500


def test_open_spans_are_listed_outermost_first():
    recorder, clock, memory = _recorder()
    with recorder.span("step"):
        clock.advance(1)
        with recorder.span("forward"):
            clock.advance(1)
        inner = recorder.span("backward")
        reader = EventRing(memory)
        assert [reader.name(e.kind) for e in reader.open_spans()] == ["step", "backward"]
        inner.end()


@given(st.integers(1, 12), st.integers(0, 40))
def test_the_ring_keeps_the_last_records(capacity, count):
    memory = bytearray(EventRing.nbytes_for(capacity))
    recorder = Recorder(EventRing(memory, capacity), VirtualClock(1))
    for seq in range(count):
        recorder.complete("x", 1 + seq, 1, seq=seq)
    kept = [e.seq for e in EventRing(memory).tail()]
    assert kept == list(range(max(0, count - capacity), count))
    assert [e.seq for e in recorder.tail(2)] == kept[-2:]


def test_a_span_that_was_overwritten_is_not_ended_in_anothers_place():
    recorder, clock, _ = _recorder(capacity=2)
    outer = recorder.span("outer")
    for _ in range(2):
        clock.advance(1)
        recorder.instant("inner")
    clock.advance(10)
    assert outer.end() == 12
    assert [e.dur_ns for e in recorder.tail(2)] == [0, 0]


def test_texts_are_stored_once_and_read_by_others():
    memory = memoryview(bytearray(200))
    writer, reader = NameTable(memory), NameTable(memory)
    first = writer.add("all_reduce(float32[4], sum)")
    assert writer.add("all_reduce(float32[4], sum)") == first
    second = writer.add("barrier()")
    assert [reader.lookup(d) for d in (first, second, 0)] == [
        "all_reduce(float32[4], sum)",
        "barrier()",
        "",
    ]


def test_a_full_name_table_still_gives_digests():
    memory = memoryview(bytearray(40))
    writer, reader = NameTable(memory), NameTable(memory)
    known, unknown = writer.add("short"), writer.add("a text that does not fit any more")
    assert reader.lookup(known) == "short"
    assert reader.lookup(unknown) == f"#{unknown:016x}"
    assert writer.lookup(unknown) == "a text that does not fit any more"


def test_a_call_site_is_the_programs_own_line():
    recorder, _, _ = _recorder()
    text = recorder.ring.name(recorder.site())
    assert text.startswith("tests/unit/test_events.py:") or "test_events.py:" in text
    assert text.endswith(" in test_a_call_site_is_the_programs_own_line")


def test_a_listener_hears_every_begin():
    recorder, _, _ = _recorder()
    heard = []
    recorder.listener = lambda kind, seq: heard.append((kind, seq))
    with recorder.span("step", seq=4):
        recorder.instant("note", seq=5)
    assert heard == [("step", 4), ("note", 5)]


def test_the_header_says_who_wrote_it_and_when_its_clock_began():
    recorder, _, memory = _recorder()
    recorder.ring.pid = 4711
    recorder.ring.clock_offset_ns = -250
    reader = EventRing(memory)
    assert (reader.rank, reader.pid, reader.clock_offset_ns) == (3, 4711, -250)


@pytest.mark.parametrize("memory", [b"", b"\0" * 8192, b"x" * 5000])
def test_memory_without_a_ring_is_refused(memory):
    with pytest.raises(ConfigError, match="event ring"):
        EventRing(memory)


def test_a_table_full_of_shapes_still_has_room_for_last_words():
    memory = memoryview(bytearray(1024))
    table = NameTable(memory)
    for number in range(100):
        table.add(f"all_reduce(float32[{number}], sum)")
    said = table.add("the disk is full", last_words=True)
    unsaid = table.add("all_reduce(float32[1000], sum)")
    reader = NameTable(memory)
    assert [reader.lookup(said), reader.lookup(unsaid)] == ["the disk is full", f"#{unsaid:016x}"]
