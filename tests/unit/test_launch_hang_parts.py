"""Claims of the launcher's parts of hang reports: when to look, when to speak, what is open, what a process does."""

from __future__ import annotations

import mmap
import os
import signal

from hypothesis import given
from hypothesis import strategies as st

from braid.launch.process.hang_state import (
    LATE_NS,
    STACKS_NS,
    AskStacks,
    HangState,
    Look,
    OpenWait,
    ReportHang,
    Resume,
)
from braid.launch.process.open_spans import OpenSpans
from braid.launch.process.process_facts import (
    Sample,
    catches,
    parse_sample,
    process_between,
    sample,
)
from braid.runtime.diagnose.hang_view import Process
from braid.runtime.events import EventRing, Recorder

S = 1_000_000_000
LIMIT = 10 * S
HERE, THERE = 41, 57
STAT = "812 (a) b) R 1 812 812 0 -1 4194304 100 0 7 0 30 12 0 0 20 0 3 0 115 313 390"
STATUS = "Name:\ta) b\nState:\tR (running)\nVmRSS:\t    2224 kB\nVmSwap:\t    64 kB\nSigCgt:\t0000000000000200\n"


def ask(state: HangState, waits: list[OpenWait], now_ns: int) -> list[object]:
    """One turn of the watch at `now_ns`, with the stacks that it asks for; what was told to do, less `Look`."""
    told: list[object] = []
    for instruction in state.tick(now_ns):
        told += state.looked(waits, now_ns) if isinstance(instruction, Look) else [instruction]
    return told


def watch(
    state: HangState, waits: list[OpenWait], until_s: int, *, stuck: bool = True
) -> list[float]:
    """When reports are made, in seconds, if the ranks go on waiting."""
    times = []
    now_ns = 0
    while now_ns < until_s * S:
        now_ns = state.deadline_ns or 0
        present = [wait for wait in waits if wait.t_ns <= now_ns]
        for instruction in ask(state, present, now_ns):
            if isinstance(instruction, ReportHang):
                times.append((now_ns - STACKS_NS) / S)
                state.reported([w.rank for w in present] if stuck else [], now_ns)
    return times


def test_reports_of_one_wait_come_at_growing_distances():
    waits = [OpenWait(0, HERE, seq=9, t_ns=0)]
    assert [round(t) for t in watch(HangState(LIMIT, 0), waits, 200)] == [10, 30, 90]


def test_the_first_collective_of_a_channel_is_given_more_time():
    waits = [OpenWait(0, HERE, seq=1, t_ns=0)]
    assert [round(t) for t in watch(HangState(LIMIT, 0), waits, 40)] == [30]


def test_another_place_is_reported_at_once():
    waits = [OpenWait(0, HERE, seq=9, t_ns=0), OpenWait(1, THERE, seq=9, t_ns=8 * S)]
    assert [round(t) for t in watch(HangState(LIMIT, 0), waits, 25)] == [10, 18]


def test_after_a_false_alarm_stacks_are_asked_for_once_per_limit():
    waits = [OpenWait(0, HERE, seq=9, t_ns=0)]
    times = watch(HangState(LIMIT, 0), waits, 45, stuck=False)
    assert [round(t) for t in times] == [10, 20, 30, 41]


def test_nothing_is_done_while_nobody_waits_or_reports_are_off():
    off = HangState(0, 0)
    assert (off.deadline_ns, off.tick(100 * S), watch(HangState(LIMIT, 0), [], 50)) == (
        None,
        [],
        [],
    )


def test_the_end_of_a_reported_wait_is_told_once():
    state = HangState(LIMIT, 0)
    wait, other = OpenWait(0, HERE, seq=9, t_ns=0), OpenWait(0, THERE, seq=10, t_ns=14 * S)
    watch(state, [wait], 12)
    told = [ask(state, [other], 15 * S), ask(state, [other], 16 * S + STACKS_NS)]
    assert told == [[Resume((wait,))], []]


def test_the_end_of_a_reported_wait_is_told_though_the_run_ends_before_the_next_look():
    state, wait = HangState(LIMIT, 0), OpenWait(0, HERE, seq=9, t_ns=0)
    assert watch(state, [wait], 11)
    assert (state.all_ended_well(), state.all_ended_well()) == ([Resume((wait,))], [])


def test_a_report_waits_a_moment_for_the_answers_of_other_hosts():
    state, wait = HangState(LIMIT, 0), OpenWait(0, HERE, seq=9, t_ns=0)
    assert state.tick(LIMIT) == [Look()]
    assert state.looked([wait], LIMIT) == [AskStacks()]
    now_ns = LIMIT
    found = []
    while not found:
        now_ns = state.deadline_ns
        found = state.tick(now_ns, answered=False)
    assert (found, now_ns - LIMIT) == ([ReportHang()], STACKS_NS + LATE_NS)


def test_a_place_that_was_quiet_starts_anew():
    state = HangState(LIMIT, 0)
    assert [round(t) for t in watch(state, [OpenWait(0, HERE, 9, 0)], 11)] == [10]
    assert ask(state, [], 40 * S) == [Resume((OpenWait(0, HERE, 9, 0),))]
    again = [OpenWait(0, HERE, 9, 50 * S)]
    assert ask(state, again, 60 * S) == [AskStacks()]


@given(st.lists(st.booleans(), max_size=80), st.integers(1, 9))
def test_open_spans_are_found_however_often_the_ring_comes_round(ends, looks_every):
    capacity = 16
    memory = mmap.mmap(-1, EventRing.nbytes_for(capacity))
    ring = EventRing(memory, capacity)
    recorder, spans = Recorder(ring), OpenSpans(memory, ring)
    looked = []
    for number, ended in enumerate(ends):
        span = recorder.span("phase", seq=number)
        if ended:
            span.end()
        if number % looks_every == 0:
            looked.append(([e.seq for e in spans.look()], [e.seq for e in ring.open_spans()]))
    looked.append(([e.seq for e in spans.look()], [e.seq for e in ring.open_spans()]))
    assert [sorted(found) for found, _ in looked] == [sorted(wanted) for _, wanted in looked]


def test_a_process_is_read_whatever_its_name():
    found = parse_sample(STAT, STATUS, "305 7000 12\n")
    assert found == Sample("R", 42, 7, 64 << 10, 2224 << 10, 0x200, 7000)
    assert parse_sample(STAT, STATUS) == found._replace(delayed_ns=0)
    assert (catches(found, signal.SIGUSR1), catches(found, signal.SIGUSR2)) == (True, False)


@given(st.text(), st.text(), st.text())
def test_any_text_of_proc_is_a_sample(stat, status, schedstat):
    assert isinstance(parse_sample(stat, status, schedstat), Sample)
    assert isinstance(parse_sample(STAT, STATUS, schedstat), Sample)


def test_two_looks_make_a_rate():
    ticks = os.sysconf("SC_CLK_TCK")
    before, after = Sample("S", 0, 10), Sample("R", ticks // 2, 30, 4096, 8192, 0, S // 8)
    assert process_between(before, after, S // 2) == Process("R", 1.0, 4096, 8192, 40.0, 0.25)
    assert process_between(Sample(), after, S) == Process("R", None, 4096, 8192, 0.0)
    assert process_between(before, Sample(), S) == Process()


def test_this_process_can_be_looked_at():
    found = sample(os.getpid())
    assert (found.state in {"R", "S"}, found.resident_bytes > 1 << 20) == (True, True)
    assert sample(0) == Sample()
