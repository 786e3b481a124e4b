"""A hang report speaks of the members of this epoch, and of the processes that have their roles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from braid.launch.process.hang_state import OpenWait
from braid.launch.supervise.hang_monitor import HangMonitor, MemberChanges
from braid.runtime.clock import VirtualClock
from braid.runtime.diagnose.hang_view import RankView, SpanView

S = 1_000_000_000


class Waiting:
    """A rank that has operations of one group under way, with the times of their begins."""

    has_answered = True

    def __init__(self, rank: int, *begins_s: int, ended: str = "") -> None:
        self.rank = rank
        self.alive = not ended
        self._begins_ns = [seconds * S for seconds in begins_s]
        self._ended = ended

    def waits(self) -> list[OpenWait]:
        return [OpenWait(self.rank, 7, 9, begin_ns) for begin_ns in self._begins_ns]

    def view(self) -> RankView:
        spans = [
            SpanView("all_reduce(float32[2], sum)", begin_ns, group=5, channel=1, seq=9)
            for begin_ns in self._begins_ns
        ]
        pid = 100 + self.rank
        return RankView(self.rank, pid, tuple(spans), stack="", ended=self._ended)

    def request_stack(self) -> None:
        """Give none."""


def keep(write: Callable[[], object]) -> None:
    with suppress(OSError):
        write()


def reports(tmp_path, ranks: list[Waiting], changes: MemberChanges, seconds: int) -> list[str]:
    """Return the reports of a run that is watched for some seconds."""
    clock = VirtualClock()
    by_number: dict[int, Any] = {rank.rank: rank for rank in ranks}
    monitor = HangMonitor(
        10.0, by_number, changes,
        clock=clock, log_dir=tmp_path, notice=lambda _: None, keep=keep, hosts=dict,
    )  # fmt: skip
    while (due_ns := monitor.deadline_ns) is not None and due_ns <= seconds * S:
        clock.advance(max(0, due_ns - clock.now_ns()))
        monitor.poll()
    return monitor.reports


def test_an_operation_that_a_loss_has_left_open_is_no_wait(tmp_path):
    ranks = [Waiting(0, 1), Waiting(1), Waiting(2, 1, ended="was killed")]
    assert reports(tmp_path, ranks, MemberChanges(), 60)
    changes = MemberChanges()
    changes.epoch_ns = 2 * S
    assert reports(tmp_path, ranks, changes, 60) == []


def test_a_report_that_cannot_be_written_is_shown_all_the_same(tmp_path):
    ranks = [Waiting(0, 1), Waiting(1)]
    assert reports(tmp_path / "missing", ranks, MemberChanges(), 60)


def test_a_rank_of_an_earlier_epoch_is_not_missing(tmp_path):
    ranks = [Waiting(0, 1, 3), Waiting(1, 1), Waiting(2, 1, ended="was killed")]
    changes = MemberChanges()
    changes.epoch_ns = 2 * S
    report, *_ = reports(tmp_path, ranks, changes, 60)
    assert "missing  rank 1 (pid 101)" in report
    assert "rank 2" not in report


def test_the_process_that_has_the_role_of_a_lost_rank_is_missing_in_its_place(tmp_path):
    ranks = [Waiting(0, 1), Waiting(1, ended="was killed"), Waiting(2)]
    changes = MemberChanges()
    changes.successors[1] = 2
    report, *_ = reports(tmp_path, ranks, changes, 60)
    assert "(pid 102)" in report
    assert "was killed" not in report
