"""The trace is what viewers expect: microseconds, tracks that nest, arrows through collectives."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_job import ALL_REDUCE, RecordedRank, build, late_job, train, write_run

from braid.launch.observe import trace
from braid.launch.observe.run_directory import read_run
from braid.launch.observe.timeline import read_timelines


def _written(tmp_path, rings):
    run = read_run(write_run(tmp_path / "run", rings))
    return trace.write_trace(run, tmp_path / "trace.json")


def _by_track(events):
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def _check_format(events):
    assert {event["ph"] for event in events} <= {"M", "X", "i", "s", "t", "f"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for track, members in _by_track(events).items():
        assert track in named
        for a, b in itertools.pairwise(members):
            assert a["ts"] <= b["ts"]
        for index, a in enumerate(members):
            for b in members[index + 1 :]:
                a_end, b_end = (
                    round((a["ts"] + a["dur"]) * 1000),
                    round((b["ts"] + b["dur"]) * 1000),
                )
                assert round(b["ts"] * 1000) >= a_end or b_end <= a_end, (a, b)


def test_a_trace_has_a_process_per_rank_and_microseconds_from_the_first_event(tmp_path):
    path = _written(tmp_path, late_job())
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms"
    assert document["otherData"]["command"] == "braid run -n 2 train.py --lr 0.1"
    events = document["traceEvents"]
    _check_format(events)
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert processes == {"rank 0": 0, "rank 1": 1}
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert tracks == ["phases", "buckets", f"channel 5: {ALL_REDUCE}"]
    (late,) = [
        e for e in events if e["name"] == "forward" and e["pid"] == 1 and e["args"]["seq"] == 4
    ]
    assert (late["ts"], late["dur"], late["cat"]) == (33_000.0, 14_000.0, "compute")


def test_a_collective_carries_channel_bytes_and_call_site():
    (first, *_) = [
        e for e in trace.trace_events(read_timelines(late_job())) if e["name"] == ALL_REDUCE
    ]
    assert first == {
        "ph": "X",
        "name": ALL_REDUCE,
        "cat": "transfer",
        "pid": 0,
        "tid": 3,
        "ts": 6000.0,
        "dur": 1000.0,
        "cname": "thread_state_runnable",
        "args": {"seq": 1, "channel": 5, "bytes": 4000, "called at": "train.py:6 in <module>"},
    }


def test_arrows_lead_through_a_collective_to_the_rank_that_came_last():
    ranks = [RecordedRank(rank, start_ms=start) for rank, start in enumerate((1000, 1007, 1002))]
    for rank in ranks:
        rank.reduce(1, wait_ms=0, transfer_ms=1)
    events = trace.trace_events(read_timelines([rank.ring for rank in ranks]))
    arrows = [e for e in events if e.get("cat") == "flow"]
    assert [(a["ph"], a["id"], a["pid"], a["ts"]) for a in arrows] == [
        ("s", 1, 0, 0.0), ("t", 1, 2, 2000.0), ("f", 1, 1, 7000.0),
    ]  # fmt: skip
    assert [a.get("bp") for a in arrows] == [None, None, "e"]


def test_the_same_number_again_is_another_collective():
    ranks = [RecordedRank(0), RecordedRank(1)]
    for rank in ranks:
        rank.reduce(1, wait_ms=0, transfer_ms=1)
        rank.reduce(1, wait_ms=0, transfer_ms=1)
    events = trace.trace_events(read_timelines([rank.ring for rank in ranks]))
    assert [e["id"] for e in events if e.get("cat") == "flow"] == [1, 1, 2, 2]


def test_a_span_that_did_not_end_is_drawn_to_the_end_and_says_so():
    def dies(rank):
        rank.recorder.span("step", seq=7)
        rank.recorder.instant("killed <soon>")

    def lives(rank):
        train(rank, 1)

    events = list(trace.trace_events(read_timelines(build(dies, lives))))
    _check_format(events)
    (step,) = [e for e in events if e["name"] == "step 7 (unfinished)"]
    assert (step["ts"], step["dur"], step["args"]["unfinished"]) == (
        0.0,
        8000.0,
        "had not ended at the end of the run",
    )
    (instant,) = [e for e in events if e["ph"] == "i"]
    assert (instant["name"], instant["s"], "dur" in instant) == ("killed <soon>", "t", False)


def test_overlapping_buckets_get_tracks_of_their_own():
    def overlapping(rank):
        spans = [rank.recorder.span(f"bucket {b + 1} of 3", seq=b) for b in range(3)]
        for span in spans:
            rank.work(1)
            span.end()

    events = list(trace.trace_events(read_timelines(build(overlapping))))
    _check_format(events)
    titles = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert titles == ["buckets", "buckets (2)", "buckets (3)"]


@given(st.data())
def test_any_recording_gives_tracks_that_nest(data):
    rank = RecordedRank(0, capacity=64)
    open_spans = []
    kinds = ["step", "wait", "forward", "bucket 1 of 2", ALL_REDUCE]
    for _ in range(data.draw(st.integers(0, 20))):
        rank.clock.advance(data.draw(st.integers(0, 1_234_567)))
        if open_spans and data.draw(st.booleans()):
            open_spans.pop(data.draw(st.integers(0, len(open_spans) - 1))).end()
        else:
            kind = data.draw(st.sampled_from(kinds))
            open_spans.append(rank.recorder.span(kind, channel=data.draw(st.integers(0, 1))))
    _check_format(list(trace.trace_events(read_timelines([rank.ring]))))


def test_a_large_trace_is_compressed(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "LARGE", 10)
    path = _written(tmp_path, late_job())
    assert path.name == "trace.json.gz"
    with gzip.open(path) as file:
        _check_format(json.load(file)["traceEvents"])
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".part"] == []


def test_a_run_without_events_gives_an_empty_trace(tmp_path):
    assert json.loads(_written(tmp_path, []).read_text())["traceEvents"] == []


@pytest.mark.proof
def test_eight_full_rings_become_a_trace(tmp_path):
    ranks = [RecordedRank(rank, capacity=32768) for rank in range(8)]
    for rank in ranks:
        train(rank, 4500, wait_ms=1)
    run = read_run(write_run(tmp_path / "run", [rank.ring for rank in ranks]))
    path = trace.write_trace(run, tmp_path / "trace.json")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    assert sum(e["ph"] in "Xi" for e in events) == 8 * 32768
