"""A job with known times, recorded by ranks on virtual clocks, and its directory as a launcher would leave it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from braid.runtime.clock import VirtualClock
from braid.runtime.diagnose.block import SavedCheckpoint, StopReport
from braid.runtime.diagnose.tracebacks import ParsedError
from braid.runtime.diagnose.verdict import RankEnd, judge
from braid.runtime.events import EventRing, Recorder

MS = 1_000_000
CAPACITY = 4096
ALL_REDUCE = "all_reduce(float32[1000], avg)"


class RecordedRank:
    """One rank: its clock, its ring, and the spans that it writes."""

    def __init__(self, rank: int, *, start_ms: int = 1000, capacity: int = CAPACITY) -> None:
        self.clock = VirtualClock(start_ms * MS)
        self.ring = EventRing(bytearray(EventRing.nbytes_for(capacity)), capacity, rank=rank)
        self.recorder = Recorder(self.ring, self.clock)

    def work(self, duration_ms: float) -> None:
        self.clock.advance(round(duration_ms * MS))

    def phase(self, name: str, duration_ms: float, seq: int = 0) -> None:
        with self.recorder.span(name, seq=seq):
            self.work(duration_ms)

    def reduce(self, number: int, *, wait_ms: float, transfer_ms: float, channel: int = 5) -> None:
        site = self.recorder.intern("train.py:6 in <module>")
        span = self.recorder.span(ALL_REDUCE, channel=channel, seq=number, nbytes=4000, site=site)
        if wait_ms:
            self.work(wait_ms)
            duration = round(wait_ms * MS)
            now = self.clock.now_ns()
            self.recorder.complete("wait", now - duration, duration, channel=channel, seq=number)
        self.work(transfer_ms)
        span.end()


def train(
    rank: RecordedRank,
    steps: int,
    *,
    wait_ms: float = 0.0,
    late: Mapping[int, float] | None = None,
    waits: Mapping[int, float] | None = None,
) -> None:
    """Steps of data 1, forward 2 (later by `late[step]`), backward with one bucket: 3 + wait + 1 ms, optimizer 1."""
    for step in range(steps):
        with rank.recorder.span("step", seq=step):
            rank.phase("data", 1, step)
            rank.phase("forward", 2 + (late or {}).get(step, 0.0), step)
            with rank.recorder.span("backward", seq=step):
                rank.work(3)
                with rank.recorder.span("bucket 1 of 1", seq=0, nbytes=4000):
                    waited = (waits or {}).get(step, wait_ms)
                    rank.reduce(2 * step + 1, wait_ms=waited, transfer_ms=1)
            rank.phase("optimizer", 1, step)


def late_job(steps: int = 6, *, late_step: int = 4, by_ms: float = 12.0) -> list[EventRing]:
    """Two ranks; rank 1 is late in forward of one step, for which rank 0 waits."""
    first, second = RecordedRank(0), RecordedRank(1)
    train(first, steps, waits={late_step: by_ms})
    train(second, steps, late={late_step: by_ms})
    return [first.ring, second.ring]


def write_run(
    path: Path,
    rings: list[EventRing],
    *,
    metrics: list[Mapping[str, object]] | None = None,
    logs: Mapping[int, str] | None = None,
    **record: object,
) -> Path:
    """The directory of a run; `record` overrides what `run.json` says."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_bytes(msgspec.json.encode(record_of(len(rings) or 1) | record))
    for ring in rings:
        (path / "events").mkdir(exist_ok=True)
        (path / "events" / f"rank{ring.rank}.ring").write_bytes(bytes(ring._view))
    if metrics is not None:
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    for rank, text in (logs or {}).items():
        (path / f"rank{rank}.log").write_text(text)
    return path


def record_of(num_ranks: int) -> dict[str, object]:
    ends = [RankEnd(rank=rank, pid=811 + rank, exit_code=0) for rank in range(num_ranks)]
    return {
        "braid": "0.1.0",
        "run_id": "21be02e82b7b1b77",
        "command": ["train.py", "--lr", "0.1"],
        "command_kind": "script",
        "num_ranks": num_ranks,
        "started": "2026-11-20T23:57:22+00:00",
        "threads": "1 (cores / ranks = 2 / 2)",
        "outcome": StopReport(verdict=judge(ends), exit_code=0, elapsed_s=3.234, step=5),
    }


def failed_report(
    *, doing: str = "in load <shard>, at step 0", details: tuple[str, ...] = ()
) -> StopReport:
    """Rank 1 was killed, of which rank 0 says so."""
    lost = ParsedError(type="PeerLostError", message="rank 1 was killed", details=details)
    ends = [
        RankEnd(
            rank=0,
            pid=811,
            ended_ns=2,
            exit_code=1,
            error=lost,
            last_events="waiting in all_reduce(float32[1000], avg)#1, at step 0",
        ),
        RankEnd(rank=1, pid=812, ended_ns=1, signal=9, last_events=doing),
    ]
    return StopReport(
        verdict=judge(ends),
        exit_code=137,
        elapsed_s=3.234,
        step=3,
        saved=SavedCheckpoint(2, "run/checkpoints/step-00000002", sha256_ok=True),
        resume="braid run --resume auto -n 2 train.py",
        log_dir="./runs/x",
        has_timeline=True,
    )


def build(*writers: Callable[[RecordedRank], None]) -> list[EventRing]:
    """One rank for each function."""
    ranks = [RecordedRank(number) for number in range(len(writers))]
    for rank, writer in zip(ranks, writers, strict=True):
        writer(rank)
    return [rank.ring for rank in ranks]
