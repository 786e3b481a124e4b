"""Reads the directory of a run, which may be damaged: a run may have been killed, or still go on.

Only `run.json` is required. Any other file that cannot be read is left out with a notice. A damaged
event ring of one rank does not hide the events of all other ranks.
"""

from __future__ import annotations

import re
import shlex
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import msgspec

from braid._version import __version__
from braid.errors import ConfigError
from braid.launch.observe.timeline import RankTimeline, read_timelines
from braid.runtime.diagnose.run_record import RunRecord
from braid.runtime.events import HEADER_BYTES, EventRing
from braid.runtime.metrics import FOLDER, MetricRows, average_rows, read_metrics

__all__ = ["Run", "read_record", "read_run"]

TAIL_LINES = 20
TAIL_BYTES = 16 << 10
TERMINAL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogTail:
    """Last lines of a rank's log.

    Attributes:
        rank: Rank that wrote the log.
        text: Last lines of the log.
        shortened: Whether the log has more lines.
    """

    rank: int
    text: str
    shortened: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """Contents of a run's directory.

    Attributes:
        path: Path of the directory.
        record: Record of the run, from the launcher.
        rings: Event rings of the ranks that have recorded events.
        metrics: Numbers of each step, as averages of the ranks that have logged them.
        rank_metrics: Numbers of each step, by rank.
        about: Header of the metrics, such as model and data; may be empty.
        logs: Last lines of the ranks' logs, by rank.
        notices: Descriptions of files that could not be read.
    """

    path: Path
    record: RunRecord
    rings: tuple[EventRing, ...] = ()
    metrics: tuple[Mapping[str, float], ...] = ()
    rank_metrics: Mapping[int, Sequence[Mapping[str, float]]] = field(default_factory=dict)
    about: Mapping[str, object] = field(default_factory=dict)
    logs: tuple[LogTail, ...] = ()
    notices: tuple[str, ...] = ()

    @cached_property
    def timelines(self) -> tuple[RankTimeline, ...]:
        """Timelines of all ranks on one clock, by rank."""
        outcome = self.record.outcome
        failed = outcome is not None and outcome.status != "finished"
        return read_timelines(self.rings, failed=failed)

    def every_row(self) -> Iterator[Mapping[str, float]]:
        """Yield the rows of all ranks, and their averages."""
        return chain(self.metrics, *self.rank_metrics.values())

    @property
    def command_line(self) -> str:
        """Command line of the run, as a user would type it."""
        kind = {"module": ["-m"], "program": ["--no-python"]}.get(self.record.command_kind, [])
        argv = ["braid", "run", "-n", str(self.record.num_ranks), *kind, *self.record.command]
        return shlex.join(argv)


def read_run(path: Path) -> Run:
    """Read the directory of a run.

    Raises:
        ConfigError: `path` is missing, is not the directory of a run, or is of a newer braid.
    """
    record = read_record(path)
    notices: list[str] = []
    rings = _each(sorted((path / "events").glob("rank*.ring")), _read_ring, notices)
    metrics = _each(sorted(path.glob("*.jsonl")), read_metrics, notices)
    of_ranks = _each(sorted((path / FOLDER).glob("rank*.jsonl")), _read_rank_metrics, notices)
    logs = _each(sorted(path.glob("rank*.log")), _read_tail, notices)
    averages = MetricRows(average_rows(file for _, file in of_ranks), {})
    return Run(
        path=path,
        record=record,
        rings=tuple(sorted(rings, key=lambda ring: ring.rank)),
        metrics=average_rows((*metrics, averages)),
        rank_metrics={rank: file.rows for rank, file in sorted(of_ranks, key=itemgetter(0))},
        about={key: value for file in metrics for key, value in file.about.items()},
        logs=tuple(sorted(logs, key=lambda log: log.rank)),
        notices=tuple(notices),
    )


def read_record(path: Path) -> RunRecord:
    """Read the record of a run.

    Args:
        path: Directory of the run.

    Raises:
        ConfigError: `path` is missing, is not the directory of a run, or is of a newer braid.
    """
    file = path / "run.json"
    try:
        raw = file.read_bytes()
    except FileNotFoundError as exc:
        problem = f"{path} has no run.json" if path.exists() else f"{path} does not exist"
        msg = (
            f"{problem}: give the directory of a run, such as runs/2026-11-20_a3f, which "
            "`braid run` prints when it starts"
        )
        raise ConfigError(msg) from exc
    except OSError as exc:
        msg = f"cannot read {file}: {exc.strerror}; give the directory of a run"
        raise ConfigError(msg) from exc
    if not raw:
        msg = f"{file} is empty: the launcher of the run could not write it"
        raise ConfigError(msg)
    try:
        version = str(msgspec.json.decode(raw, type=dict[str, object]).get("braid", ""))
        if _major_minor(version) > _major_minor(__version__):
            msg = (
                f"{path} is a run of braid {version}, but this is braid {__version__}: update braid"
            )
            raise ConfigError(msg)
        return msgspec.json.decode(raw, type=RunRecord)
    except msgspec.MsgspecError as exc:
        msg = f"{file} is not the record of a run of braid: {exc}"
        raise ConfigError(msg) from exc


def _each(paths: list[Path], read: Callable[[Path], T | None], notices: list[str]) -> list[T]:
    values = []
    for path in paths:
        try:
            value = read(path)
        except OSError as exc:
            notices.append(f"{path.name} is left out: {exc.strerror}")
        except ConfigError as exc:
            notices.append(f"{path.name} is left out: {exc}")
        else:
            if value is not None:
                values.append(value)
    return values


def _read_ring(path: Path) -> EventRing:
    raw = path.read_bytes()
    if len(raw) < HEADER_BYTES:
        msg = f"{len(raw)} bytes are less than the header of an event ring"
        raise ConfigError(msg)
    ring = EventRing(raw)
    nbytes = EventRing.nbytes_for(ring.capacity)
    if len(raw) < nbytes:
        msg = (
            f"{ring.capacity:,} records have {nbytes:,} bytes, but the file only {len(raw):,}: the "
            "file is incomplete"
        )
        raise ConfigError(msg)
    try:
        for event in ring.tail():
            ring.name(event.kind)
            ring.name(event.site)
    except (struct.error, ValueError) as exc:
        msg = f"the table of names after the records is damaged ({exc})"
        raise ConfigError(msg) from exc
    return ring


def _read_rank_metrics(path: Path) -> tuple[int, MetricRows] | None:
    number = path.stem.removeprefix("rank")
    rows = read_metrics(path) if number.isdecimal() else None
    return None if rows is None else (int(number), rows)


def _read_tail(path: Path) -> LogTail | None:
    number = path.stem.removeprefix("rank")
    if not number.isdecimal():
        return None
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [
        TERMINAL_SEQUENCE.sub("", line.rstrip("\r\n").rpartition("\r")[2])
        for line in text.split("\n")
    ]
    while lines and not lines[-1]:
        lines.pop()
    shortened = size > TAIL_BYTES or len(lines) > TAIL_LINES
    return LogTail(rank=int(number), text="\n".join(lines[-TAIL_LINES:]), shortened=shortened)


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
